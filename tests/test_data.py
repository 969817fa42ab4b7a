from __future__ import annotations

import json
import logging

import pyarrow
import pytest
import torch
from pyarrow import parquet

from moerl import demo_model
from moerl.config.schema import DataConfig
from moerl.controller.data import DataError, Prompt, PromptStream, answers, load_prompts, reasoning_gym_dataset

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
GYM = "reasoning_gym:chain_sum"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return demo_model.build(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Prompts


def test_reasoning_gym_prompts(tokenizer):
    config = DataConfig(prompts=GYM, options=ONE_DIGIT, size=50)
    prompts = load_prompts(config, tokenizer, seed=3)
    assert [p.index for p in prompts] == list(range(50))
    for prompt in prompts:
        entry = prompt.record["entry"]
        assert prompt.record["task"] == "chain_sum" and prompt.record["answer"] == entry["answer"]
        assert prompt.text == f"<|user|>{entry['question']}<|end|><|assistant|>"
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        dataset = reasoning_gym_dataset("chain_sum", ONE_DIGIT, 50, 3)
        assert dataset.score_answer(entry["answer"], entry) == 1.0
    assert prompts == load_prompts(config, tokenizer, seed=3)
    assert [p.text for p in prompts] != [p.text for p in load_prompts(config, tokenizer, seed=4)]


def test_files_and_chat_messages(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "2 + 2 ="}]
    rows = [{"prompt": "1 + 1 =", "answer": 2, "level": 1}, {"prompt": "1 + 2 =", "answer": 3, "level": 2}]
    config = DataConfig(prompts=jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": messages, "answer": 4}]), system="add")
    from_jsonl = load_prompts(config, tokenizer, seed=0)
    assert [p.text for p in from_jsonl] == [
        "<|system|>add<|end|><|user|>1 + 1 =<|end|><|assistant|>",
        "<|system|>add<|end|><|user|>1 + 2 =<|end|><|assistant|>",
        "<|system|>own<|end|><|user|>2 + 2 =<|end|><|assistant|>",  # messages bring their own system message
    ]
    assert from_jsonl[1].record == rows[1]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_parquet = load_prompts(config.model_copy(update={"prompts": str(tmp_path / "a.parquet")}), tokenizer, seed=0)
    assert from_parquet == from_jsonl[:2]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), tmp_path / "b.parquet")
    from_parquet = load_prompts(config.model_copy(update={"prompts": str(tmp_path / "b.parquet")}), tokenizer, seed=0)
    assert from_parquet[0].text == from_jsonl[2].text


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, caplog):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "1" * 50}, {"prompt": "22"}])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(DataConfig(prompts=path, max_prompt_tokens=5), tokenizer, seed=0)
    assert [p.index for p in prompts] == [0, 2] and "dropped 1 of 3 prompts longer than 5 tokens" in caplog.text
    with pytest.raises(DataError, match="all 3 prompts .* than data.max_prompt_tokens 3; the shortest has 4"):
        load_prompts(DataConfig(prompts=path, max_prompt_tokens=3), tokenizer, seed=0)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("none.jsonl", None, "there is no such file"),
        ("a.csv", "prompt\n1\n", "must end in .jsonl or .parquet, or be reasoning_gym:<task>"),
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": \n', "a.jsonl, line 2: Expecting value"),
        ("a.jsonl", "[1]\n", "line 1: must be a JSON object"),
        ("a.jsonl", '{"question": "1", "answer": "2"}\n', r"row 0: no column 'prompt' \(present: question, answer\)"),
        ("a.jsonl", "\n\n", "the file holds no rows"),
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": 7}\n', "row 1 .*: a prompt must be a text or a list of messages"),
        ("a.jsonl", '{"prompt": [{"role": "owl", "content": "1"}]}\n', "row 0 .*template refuses it: unknown role owl"),
        ("a.parquet", "no parquet", "not a Parquet file"),
    ],
)
def test_wrong_files(tmp_path, tokenizer, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_prompts(DataConfig(prompts=str(tmp_path / name)), tokenizer, seed=0)


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("chain_sums", {}, "unknown reasoning_gym task 'chain_sums'; nearest: .*chain_sum"),
        ("chain_sum", {"min_term": 2}, "chain_sum has no option 'min_term'; nearest: min_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, "reasoning_gym task chain_sum with options"),
        ("chain_sum", {"seed": 1}, "data.options may not set seed: data.size and trainer.seed do"),
    ],
)
def test_wrong_tasks(tokenizer, task, options, message):
    with pytest.raises(DataError, match=message):
        load_prompts(DataConfig(prompts=f"reasoning_gym:{task}", options=options, size=5), tokenizer, seed=0)


def test_tokenizer_without_a_chat_template(tokenizer):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="has no chat template"):
        load_prompts(DataConfig(prompts=GYM, size=1), bare, seed=0)
    with pytest.raises(DataError, match="has no end token"):
        answers([], DataConfig(prompts=GYM), bare)


# Answers


def test_answers_of_a_task(tokenizer):
    config = DataConfig(prompts=GYM, options=ONE_DIGIT, size=20)
    prompts = load_prompts(config, tokenizer, seed=0)
    for prompt, ids in zip(prompts, answers(prompts, config, tokenizer), strict=True):
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"<answer>{prompt.record['answer']}</answer>"


def test_answers_of_a_file(tmp_path, tokenizer):
    rows = [{"prompt": "1 + 1 =", "answer": 2, "sum": "two"}, {"prompt": "1 + 2 =", "sum": "three"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    config = DataConfig(prompts=path, answer_column="sum")
    prompts = load_prompts(config, tokenizer, seed=0)
    assert tokenizer.batch_decode(answers(prompts, config, tokenizer)) == ["two<|end|>", "three<|end|>"]
    with pytest.raises(DataError, match=r"row 1 of .* has no answer: column answer \(present: prompt, sum\)"):
        answers(prompts, config.model_copy(update={"answer_column": "answer"}), tokenizer)


# Stream

PROMPTS = [Prompt(i, str(i), [i], {}) for i in range(10)]


def indices(batch):
    return [p.index for p in batch]


def test_every_epoch_uses_each_prompt_once():
    stream = PromptStream(PROMPTS, seed=1, shuffle=True)
    drawn = [i for _ in range(10) for i in indices(stream.next(7))]  # 7 epochs, batches across their borders
    epochs = [drawn[i : i + 10] for i in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7  # a new order each epoch
    assert indices(PromptStream(PROMPTS, seed=1, shuffle=True).next(70)) == drawn
    assert indices(PromptStream(PROMPTS, seed=2, shuffle=True).next(70)) != drawn
    assert indices(PromptStream(PROMPTS, seed=1, shuffle=False).next(23)) == [*range(10), *range(10), 0, 1, 2]


@pytest.mark.parametrize("taken", [0, 3, 10, 27])
def test_restore_goes_on_exactly(taken):
    stream = PromptStream(PROMPTS, seed=1, shuffle=True)
    stream.next(taken)
    state = json.loads(json.dumps(stream.state()))
    other = PromptStream(PROMPTS, seed=1, shuffle=True)
    other.next(5)
    other.restore(state)
    assert indices(other.next(33)) == indices(stream.next(33))


def test_a_state_of_other_prompts_is_refused():
    state = PromptStream(PROMPTS, seed=1, shuffle=True).state()
    with pytest.raises(DataError, match="the saved position belongs to prompts with prompts 10, this run has 9"):
        PromptStream(PROMPTS[:9], seed=1, shuffle=True).restore(state)
    with pytest.raises(DataError, match="with seed 1, this run has 2"):
        PromptStream(PROMPTS, seed=2, shuffle=True).restore(state)
    with pytest.raises(DataError, match="there are no prompts"):
        PromptStream([], seed=1, shuffle=True)


# Demo model


def test_tokenizer_round_trips_its_task(tokenizer):
    for entry in reasoning_gym_dataset("chain_sum", {"max_digits": 6}, 200, seed=9):
        for text in (entry["question"], entry["answer"], f"<answer>{entry['answer']}</answer>"):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text
    text = "  any text: é 日本 \n\t x1234 "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens(tokenizer):
    assert tokenizer.tokenize("a 1234-56") == ["a", "Ġ", "1", "2", "3", "4", "-", "5", "6"]
    assert tokenizer.tokenize("<answer>-4</answer>") == ["<answer>", "-", "4", "</answer>"]
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>" and len(tokenizer) <= 512
    assert tokenizer.decode(tokenizer.encode("<|user|>1<|end|>"), skip_special_tokens=True) == "1"


def test_a_one_digit_sum_is_short(tokenizer):
    prompts = load_prompts(DataConfig(prompts=GYM, options=ONE_DIGIT, size=100), tokenizer, seed=0)
    assert max(len(p.token_ids) for p in prompts) <= 24


def test_model_loads_and_runs(model_dir, tokenizer):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    config = model.config
    assert config.vocab_size % 64 == 0 and 0 <= config.vocab_size - len(tokenizer) < 64
    assert (config.hidden_size, config.num_hidden_layers) == (128, 4)
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert not config.tie_word_embeddings and config.norm_topk_prob and config.rope_parameters["rope_theta"] == 10000.0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert GenerationConfig.from_pretrained(model_dir).eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("<|user|>1 + 1 =<|end|><|assistant|>")])).logits
    assert logits.shape[-1] == config.vocab_size and logits.isfinite().all()


def test_checkpoint_names_one_tensor_an_expert(model_dir):
    from safetensors import safe_open

    with safe_open(model_dir / "model.safetensors", "pt") as file:
        experts = [name for name in file.keys() if ".mlp.experts." in name]
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in experts and len(experts) == 4 * 8 * 3


def test_the_seed_decides_the_weights_alone(model_dir, tmp_path):
    state = torch.get_rng_state()
    same, other = demo_model.build(tmp_path / "same"), demo_model.build(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (same / name).read_bytes() == (model_dir / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (model_dir / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_command_line(tmp_path, capsys):
    options = ["--task", "word_sorting", "--options", '{"max_words": 4}']
    demo_model.main(["--out", str(tmp_path), "--vocab", "400", *options])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(tokenizer) == 384  # the largest multiple of 64 within 400: this task has words enough to fill it
    for entry in reasoning_gym_dataset("word_sorting", {}, 50, seed=1):
        assert tokenizer.decode(tokenizer.encode(entry["question"])) == entry["question"]
    cases = ((["--vocab", "300"], "must be 320 or more"), (["--task", "chain_sums"], "unknown reasoning_gym task"))
    for wrong, message in cases:
        with pytest.raises(SystemExit):
            demo_model.main(["--out", str(tmp_path), *wrong])
        assert message in capsys.readouterr().err
