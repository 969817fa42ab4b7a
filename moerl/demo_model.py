"""The start model of the demo: a seeded one-million-parameter Qwen3-MoE and a tokenizer trained on a task's texts.

python -m moerl.demo_model --out DIR [--seed 0] [--vocab 512] [--task chain_sum] [--options '{"max_terms": 2}']
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.controller.data import reasoning_gym_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
ANSWER = ["<answer>", "</answer>"]  # ordinary tokens: a reward reads them in the decoded text
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_MULTIPLE = 64  # tensor-parallel ranks cut the vocabulary evenly
MIN_VOCAB = 320  # 256 bytes and the tokens above, rounded up
TEXTS = 2000


def build(
    out: Path, seed: int = 0, vocab: int = 512, task: str = "chain_sum", options: dict[str, Any] | None = None
) -> Path:
    """Writes model and tokenizer in Hugging Face format to the folder `out`; the same arguments give the same files.

    Raises ValueError for a `vocab` below 320, DataError for an unknown task or a wrong option.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab is {vocab}: must be {MIN_VOCAB} or more, for every byte and the special tokens")
    entries = reasoning_gym_dataset(task, options or {}, TEXTS, seed=0)  # `seed` changes the weights alone
    texts = [text for entry in entries for text in (entry["question"], str(entry["answer"]))]
    tokenizer = train_tokenizer(texts, vocab // VOCAB_MULTIPLE * VOCAB_MULTIPLE)
    model = start_model(tokenizer, seed)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)  # writes generation_config.json too
    return Path(out)


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens, every digit a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(ANSWER),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ANSWER])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def start_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with random weights: 4 layers, hidden size 128, 8 experts of which 2 are active."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=64,
        intermediate_size=128,  # of dense layers; there are none
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.08,  # near 1/sqrt(hidden size): so small a model learns far faster than from 0.02
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moerl.demo_model", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=512, help="most tokens of the vocabulary")
    parser.add_argument("--task", default="chain_sum", help="reasoning_gym task")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON options of the task")
    given = parser.parse_args(arguments)
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        out = build(given.out, given.seed, given.vocab, given.task, given.options)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
