"""Multi-token prediction layers: their meaning, their way through Megatron and back, and that nothing else feels them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.models import params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader
from moerl.models.tensormap import assemble, copy_again, duplicates, hf_shapes
from tests import train_jobs as jobs
from tests.models import tensors_of, write_deepseek
from tests.models import write_random as write
from tests.test_families_deepseek import V3
from tests.test_families_glm import glm4_moe
from tests.test_parity import LAYOUTS, export_job, logits_job

COPIES = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("mtp")
    kinds = {
        "deepseek": lambda path: write_deepseek(path, 3, mtp=True),
        "two layers": lambda path: write_deepseek(path, 3, mtp=True, num_nextn_predict_layers=2),
        "tied": lambda path: write_deepseek(path, 3, mtp=True, tie_word_embeddings=True),
        "glm": lambda path: write(path, glm4_moe()),
    }

    def get(kind: str):
        if kind not in made:
            made[kind] = kinds[kind](root / kind.replace(" ", "_"))
        return made[kind]

    return get


# ---- the meaning


def predict_job(rank, layout, path, samples):
    """Logits of Megatron-core's prediction layer on the main model's last hidden states, run by hand."""
    from megatron.core import parallel_state

    from moerl.megatron.batch import pack, packed_length

    chunk = jobs.make(rank, layout, path, train=False).chunks[0].eval()
    batch = pack(samples, packed_length(samples, layout.tp), "cpu")
    with torch.no_grad():
        embedded, rotary, *_ = chunk._preprocess(batch.tokens, batch.positions, packed_seq_params=batch.packed)
        inside = dict(attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=batch.packed)
        hidden = chunk.decoder(hidden_states=embedded, **inside)
        hidden, *_ = chunk.mtp.layers[0](
            input_ids=batch.tokens, position_ids=batch.positions, hidden_states=hidden, embedding=chunk.embedding, **inside
        )
        logits, _ = chunk.output_layer(hidden)
    parts = [torch.empty_like(logits) for _ in range(layout.tp)]
    torch.distributed.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[:, 0].numpy()


class Written:
    """DeepSeek-V3 report, equations 21 to 23, on the checkpoint's tensors; the inner layer is transformers' decoder layer."""

    def __init__(self, path, scratch):
        from transformers import AutoModelForCausalLM

        tensors, config = tensors_of(path), json.loads((path / "config.json").read_text())
        self.tensors = {n.removeprefix("model.layers.4."): t for n, t in tensors.items()}
        self.eps = config["rms_norm_eps"]
        # The prediction layer's decoder layer as one more layer of the model.
        save_file(tensors, scratch / "model.safetensors")
        (scratch / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
        self.main, self.longer = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).model for p in (path, scratch))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[f"{name}.weight"]

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> np.ndarray:
        """Logits [t, vocabulary]; the token after the last one is 0, as in Megatron-core."""
        hidden = self.main(torch.tensor(tokens)[None]).last_hidden_state
        following = self.tensors["embed_tokens.weight"][torch.tensor([*tokens[1:], 0])][None]
        x = torch.cat([self.norm(following, "enorm"), self.norm(hidden, "hnorm")], -1) @ self.tensors["eh_proj.weight"].T
        rotary = self.longer.rotary_emb(x, torch.arange(len(tokens))[None])
        x = self.longer.layers[4](x, attention_mask=None, position_embeddings=rotary)
        x = x if torch.is_tensor(x) else x[0]
        return (self.norm(x, "shared_head.norm") @ self.tensors["shared_head.head.weight"].T)[0].numpy()


@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_the_layer_predicts_what_the_equations_say(ranks, tiny, tmp_path, kind):
    samples, written = jobs.samples(5), Written(tiny(kind), tmp_path)
    for name in ("1", "tp2"):
        got, at = ranks.run(LAYOUTS[name], predict_job, str(tiny(kind)), samples)[0], 0
        for sample in samples:
            want = written(list(sample.tokens))
            assert np.abs(want).max() > 0.5 and np.abs(got[at : at + len(want), : want.shape[1]] - want).max() < 2e-4
            at += len(want)


# ---- nobody else feels it


def both_job(rank, layout, path):
    made = jobs.make(rank, layout, path)
    return logits_job(rank, layout, path, [jobs.samples(5)]), jobs.train_job(rank, layout, path, 2), hasattr(made.bare()[-1], "mtp")


@pytest.mark.parametrize("name", ["1", "tp2 pp2 ep2"])
def test_logits_and_steps_are_bit_equal_without_it(ranks, tiny, tmp_path, name):
    with_it = tiny("deepseek")
    without = shutil.copytree(with_it, tmp_path / "without")
    (without / "mtp.safetensors").unlink()
    runs = [ranks.run(LAYOUTS[name], both_job, str(path)) for path in (with_it, without)]
    assert [run[-1][2] for run in runs] == [True, False]
    for (logits, steps, _), (plain, plain_steps, _) in zip(*runs):
        assert all(np.array_equal(a, b) for a, b in zip(logits, plain))
        assert [(s["sums"], s["grad_norm"]) for s in steps] == [(s["sums"], s["grad_norm"]) for s in plain_steps]


def reference_job(rank, layout, path):
    """A role without prediction layers, and what a sync of the actor brings."""
    from moerl.megatron import model

    other = model.make(read_arch(path).main(), layout, rank, torch.float32)
    other.load_weights(path)
    actor = jobs.make(rank, layout, path)
    synced = [s for s in actor.owned_shards() if s.name in actor.tensors()]
    return hasattr(other.bare()[-1], "mtp"), [(s.name, s.tensor.clone(), s.parts, s.index) for s in synced]


def test_other_roles_and_engines_are_without_it(ranks, tiny):
    from moerl.rollout.engine import needed_header

    path, layout = tiny("glm"), LAYOUTS["pp2"]
    answers = ranks.run(layout, reference_job, str(path))
    assert not any(held for held, _ in answers)
    synced = assemble(params_of(read_arch(path).main()), [shards for _, shards in answers])
    assert set(synced) == set(needed_header(str(path))) and not any("layers.4." in name for name in synced)


# ---- through training, checkpoints and export


def step_job(rank, layout, path, seed, saved=None, save_to=None):
    """One step, of a model whose prediction layers come from a checkpoint `saved` by a run, if there is one."""
    from moerl.megatron import checkpoint

    made = jobs.make(rank, layout, path)
    if saved:
        for tensor in [t for chunk in made.bare() if hasattr(chunk, "mtp") for t in chunk.mtp.state_dict().values() if torch.is_tensor(t)]:
            tensor.zero_()
        checkpoint.load(made, saved)
    out = jobs.step(made, jobs.samples(seed=seed), rank, layout) | {"layout": layout}
    if save_to:
        checkpoint.save(made, save_to)
    return out, [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()]


def exported(path, answers) -> dict[str, torch.Tensor]:
    params = params_of(read_arch(path))
    return copy_again(params.values(), assemble(params, [shards for _, shards in answers]), HFReader(path).files)


def check_export(path, tensors: dict[str, torch.Tensor]) -> None:
    """All tensors of the checkpoint once; copies are the trained tensors, the layers' own have not moved."""
    start, copies = tensors_of(path), duplicates(params_of(read_arch(path)).values())
    assert set(tensors) == set(start)
    for copy in set(copies) & set(start):
        assert torch.equal(tensors[copy], tensors[copies[copy]]) and not torch.equal(tensors[copy], start[copy])
    own = [n for n in start if n.startswith(("model.layers.4.", "model.layers.5.")) and n not in copies]
    assert len(own) > 40 and all(torch.equal(tensors[n], start[n]) for n in own)


@pytest.mark.parametrize(("kind", "first", "second"), [
    ("two layers", "tp2 pp2 ep2", "tp2 etp2"), ("glm", "pp2 vpp2", "pp2 uneven"), ("deepseek", "tp2 ep2", "tp2 pp2 ep2"),
])
def test_a_resumed_actor_takes_the_same_step_and_has_the_same_layers(ranks, tiny, tmp_path, kind, first, second):
    path = tiny(kind)
    answers = ranks.run(LAYOUTS[first], step_job, str(path), 0, None, str(tmp_path))
    check_export(path, exported(path, answers))
    resumed = ranks.run(LAYOUTS[second], step_job, str(path), 1, str(tmp_path))
    check_export(path, exported(path, resumed))
    straight = ranks.run(LAYOUTS["1"], jobs.train_job, str(path), 2)[0][1]
    assert jobs.total([out for out, _ in resumed]) == pytest.approx(jobs.total([straight]), rel=1e-4, abs=1e-6)
    assert resumed[0][0]["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["1", "pp2"])
def test_a_tied_table_is_exported_once_and_copied_everywhere(ranks, tiny, name):
    path = tiny("tied")
    assert set(duplicates(params_of(read_arch(path)).values())) == {*COPIES, "lm_head.weight"}
    tensors = exported(path, ranks.run(LAYOUTS[name], step_job, str(path), 0))
    check_export(path, tensors)
    assert all(torch.equal(tensors[copy], tensors["model.embed_tokens.weight"]) for copy in COPIES)


# ---- checkpoints


def test_a_checkpoint_has_all_of_a_layer_or_nothing(tiny, tmp_path):
    path = shutil.copytree(tiny("glm"), tmp_path / "part")
    part = load_file(path / "mtp.safetensors")
    save_file({n: t for n, t in part.items() if n != "model.layers.4.enorm.weight"}, path / "mtp.safetensors")
    with pytest.raises(ModelError, match=r"missing tensor model.layers.4.enorm.weight \(64,\)"):
        HFReader(path).fit(params_of(read_arch(path)))
    (path / "mtp.safetensors").unlink()
    assert read_arch(path).mtp_layers == 0 and read_arch(path / "config.json").mtp_layers == 1
    assert not any("layers.4." in name for name in hf_shapes(HFReader(path).fit(params_of(read_arch(path))).values()))


def test_copies_may_be_left_out_and_have_the_tables_shape(ranks, tiny, tmp_path):
    """As GLM-4.6 leaves them out; what was not there is not written."""
    path = shutil.copytree(tiny("glm"), tmp_path / "bare")
    part = {n: t for n, t in load_file(path / "mtp.safetensors").items() if n not in COPIES}
    save_file(part, path / "mtp.safetensors")
    tensors = copy_again(params_of(read_arch(path)).values(), assemble(
        params_of(read_arch(path)), ranks.run(LAYOUTS["1"], export_job, str(path))), HFReader(path).files)
    before = tensors_of(path)
    assert set(tensors) == set(before) and all(torch.equal(tensors[n], before[n]) for n in before)
    save_file(part | {COPIES[1]: torch.zeros(130, 64)}, path / "mtp.safetensors")
    with pytest.raises(ModelError, match=r"shared_head.head.weight has shape \(130, 64\), expected \(131, 64\)"):
        HFReader(path).fit(params_of(read_arch(path)))


def test_counts_of_the_main_model_and_of_the_layer(tmp_path):
    """DeepSeek-V3: 671.03 B, and 684.49 B with its prediction layer and the layer's copies of embedding and head (2 x 0.93 B)."""
    from moerl.models import listing

    (tmp_path / "config.json").write_text(json.dumps(V3))
    found = listing.count(read_arch(tmp_path))
    assert round(found.total / 1e9, 2) == 671.03
    assert round((found.total + found.prediction + 2 * 129280 * 7168) / 1e9, 2) == 684.49
    assert "more in prediction layers  11,610,068,224 (11.61 B)" in listing.model(tmp_path)


RUN = """
model: {path: PATH/start, dtype: float32}
data: {prompts: "reasoning_gym:chain_sum", size: 16, max_prompt_tokens: 200}
rollout: {layout: {tp: 1}, prompts_per_step: 4, samples_per_prompt: 2, sampling: {max_tokens: 8}, kv_cache_gib: 0.1}
actor: {layout: {tp: 2, ep: 2}, max_tokens_per_rank: 256, optimizer: {lr: 1.0e-2}}
algorithm: {name: grpo, kl_coef: 0.05}
reward: {function: "PATH/rewards.py:digits"}
trainer: {steps: 2, output: PATH/out}
cluster: {device: cpu}
"""
REWARD = '''
def digits(prompt, response, record):
    return sum(c.isdigit() for c in response) / max(1, len(response)) + len(response) / 100
'''


def test_a_run_exports_the_layer(tmp_path):
    """A reference without the layer, two syncs into vLLM, and what the run writes."""
    import os
    import subprocess
    import sys

    from transformers import AutoTokenizer

    from moerl import demo_model
    from moerl.track.metrics import read

    demo_model.main(["--out", str(tmp_path / "tokenizer")])
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), glm4_moe()
    config.head_dim, config.vocab_size = 32, len(tokenizer) + 3
    start = write(tmp_path / "start", config)
    tokenizer.save_pretrained(start)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RUN.replace("PATH", str(tmp_path)))
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "moerl.cli", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    assert all(row["mismatch/max_logp_gap"] < 1e-3 for row in read(tmp_path / "out" / "metrics.jsonl"))
    check_export(start, tensors_of(tmp_path / "out" / "hf"))
