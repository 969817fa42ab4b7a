from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from moerl.rollout.engine import (
    SHARED_MEMORY,
    RolloutEngine,
    cpu_binding,
    sample_seed,
    write_safetensors,
)
from tests.models import write_qwen3_moe
from tests.rollout_helpers import GREEDY, PROMPTS, SAMPLING, SERVABLE, VOCAB, outputs, start_engine

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.2.mlp.experts.5.down_proj.weight"


@dataclass
class Fresh:
    """A checkpoint and what an engine just started on it computes with and answers."""

    path: Path
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]
    outputs: list


def observe(engine: RolloutEngine, path: Path) -> Fresh:
    return Fresh(path, load_file(path / "model.safetensors"), engine.digests(), outputs(engine))


def check_logprobs(engine: RolloutEngine, path: Path, options: dict, temperature: float) -> None:
    """Compare the engine's log-probabilities with those transformers gives the same tokens."""
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, samples in zip(PROMPTS, engine.generate(PROMPTS, **options), strict=True):
        for sample in samples:
            tokens = torch.tensor([prompt + sample.token_ids])
            with torch.no_grad():
                logits = model(tokens).logits[0, len(prompt) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-3)
            assert (sample.finish_reason, sample.version) == ("length", engine.version)
            assert len(sample.token_ids) == options["max_tokens"]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    path = write_qwen3_moe(tmp_path_factory.mktemp("second"), seed=2, **SERVABLE)
    engine = start_engine(path)
    try:
        with pytest.raises(RuntimeError, match="no version of the weights"):
            engine.generate(PROMPTS, **GREEDY)
        engine.mark_loaded(1)
        return observe(engine, path)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def started(second: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RolloutEngine, Fresh]]:
    path = write_qwen3_moe(tmp_path_factory.mktemp("first"), seed=1, **SERVABLE)
    engine = start_engine(path)
    engine.mark_loaded(0)
    yield engine, observe(engine, path)
    engine.shutdown()


@pytest.fixture
def first(started: tuple[RolloutEngine, Fresh]) -> Fresh:
    return started[1]


@pytest.fixture
def engine(started: tuple[RolloutEngine, Fresh]) -> RolloutEngine:
    """The one engine of this module, serving the first checkpoint as version 0."""
    engine, first = started
    if engine.version != 0:
        engine.load_weights(first.tensors, 0)
    return engine


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(engine: RolloutEngine, first: Fresh) -> None:
    check_logprobs(engine, first.path, SAMPLING, temperature=0.7)
    check_logprobs(engine, first.path, GREEDY, temperature=1.0)


def test_synced_engine_equals_a_fresh_one_bit_for_bit(engine: RolloutEngine, first: Fresh, second: Fresh) -> None:
    assert first.outputs != second.outputs
    assert not set(first.digests.items()) & {item for item in second.digests.items() if "_scale" not in item[0]}
    for version, fresh in enumerate((second, first, second), start=10):
        assert engine.load_weights(fresh.tensors, version) > 0
        assert engine.version == version
        assert engine.digests() == fresh.digests
        assert outputs(engine) == fresh.outputs  # the long prompt is in the prefix cache: stale keys would show
        assert engine.generate(PROMPTS[:1], **GREEDY)[0][0].version == version


def test_synced_output_layer_follows_a_tied_embedding(tmp_path: Path) -> None:
    old, new = (
        write_qwen3_moe(tmp_path / str(seed), seed=seed, tie_word_embeddings=True, **SERVABLE) for seed in (1, 2)
    )
    tensors = load_file(new / "model.safetensors")
    assert "lm_head.weight" not in tensors
    engine = start_engine(old, tp=1)
    try:
        engine.load_weights(tensors, 1)
        check_logprobs(engine, new, SAMPLING, temperature=0.7)
    finally:
        engine.shutdown()


def test_digests_are_of_the_weights_the_kernels_use(first: Fresh) -> None:
    weight = first.tensors["model.layers.3.self_attn.o_proj.weight"]  # tensor parallelism cuts its inputs
    for rank, shard in enumerate(weight.chunk(2, dim=1)):
        expected = hashlib.sha256(shard.T.contiguous().numpy()).hexdigest()
        assert first.digests[f"tp{rank}.model.layers.3.self_attn.o_proj.weight@kernel"] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q_PROJ: None}, rf"1 missing \({Q_PROJ}\)"),
        ({"model.layers.9.bias": torch.zeros(1)}, r"1 not in the model \(model.layers.9.bias\)"),
        ({EXPERT: torch.zeros(32, 64)}, rf"1 mis-shaped \({EXPERT} \[32, 64\], must be \[64, 32\]\)"),
        ({Q_PROJ: torch.zeros(128, 64, dtype=torch.int8)}, rf"1 of the wrong dtype \({Q_PROJ} I8, must be F32\)"),
        ({Q_PROJ: torch.zeros(1).expand(2**45)}, "weights need .* GiB in /dev/shm, which has"),
        ({Q_PROJ: torch.zeros(2, dtype=torch.complex32)}, f"{Q_PROJ} has dtype torch.complex32"),
    ],
)
def test_unfit_weights_are_refused_and_the_old_ones_serve(
    engine: RolloutEngine, first: Fresh, second: Fresh, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {name: tensor for name, tensor in (second.tensors | change).items() if tensor is not None}
    with pytest.raises((ValueError, OSError), match=message):
        engine.load_weights(tensors, 5)
    assert engine.version == 0
    assert outputs(engine) == first.outputs
    assert not list(SHARED_MEMORY.glob(f"moerl-weights-{os.getpid()}-*"))


@pytest.mark.parametrize("after", [0, 20, 100])
def test_load_failing_half_way_stops_serving_until_loaded_again(
    engine: RolloutEngine, first: Fresh, second: Fresh, after: int
) -> None:
    engine._call(RuntimeError, "fail_next", after)
    with pytest.raises(RuntimeError, match=rf"disk on fire at tensor {after} \(worker 1\)"):
        engine.load_weights(second.tensors, 6)
    assert engine.version is None
    assert not list(SHARED_MEMORY.glob(f"moerl-weights-{os.getpid()}-*"))
    with pytest.raises(RuntimeError, match="weights are incomplete.*load them again"):
        engine.generate(PROMPTS, **GREEDY)
    with pytest.raises(RuntimeError, match="weights are incomplete.*load them again"):
        engine.mark_loaded(6)
    engine.load_weights(first.tensors, 7)
    assert engine.digests() == first.digests
    assert outputs(engine) == first.outputs


def test_samples_depend_on_their_own_seed_only(engine: RolloutEngine) -> None:
    def tokens(prompts: list[list[int]], seeds: list[int], n: int = 2) -> list[list[list[int]]]:
        samples = engine.generate(prompts, **SAMPLING | {"seeds": seeds, "n": n})
        return [[sample.token_ids for sample in row] for row in samples]

    base = tokens(PROMPTS, [1, 2, 3, 4])
    assert tokens(PROMPTS, [1, 2, 3, 4]) == base
    assert tokens(PROMPTS[::-1], [4, 3, 2, 1]) == base[::-1]
    assert tokens(PROMPTS[1:2], [2], n=5)[0][:2] == base[1]
    assert all(row[0] != row[1] for row in base)
    assert all(a != b for a, b in zip(base, tokens(PROMPTS, [5, 6, 7, 8]), strict=True))
    alike = tokens([PROMPTS[0]] * 2, [1, 2])
    assert alike[0][1] != alike[1][0]  # seed 1, sample 1 is not seed 2, sample 0


def test_seeded_samples_survive_more_prompt_tokens_than_one_step_takes(engine: RolloutEngine) -> None:
    prompts = [[i, *PROMPTS[3]] for i in range(50)]
    together = engine.generate(prompts, **SAMPLING | {"n": 1, "seeds": list(range(50))})
    alone = engine.generate(prompts[49:], **SAMPLING | {"n": 1, "seeds": [49]})
    assert together[49][0].token_ids == alone[0][0].token_ids


def test_stop_token_ends_a_completion_and_stays_in_it(engine: RolloutEngine) -> None:
    (full,), = engine.generate(PROMPTS[:1], **GREEDY)
    stop = full.token_ids[3]
    (stopped,), = engine.generate(PROMPTS[:1], **GREEDY | {"stop_token_ids": [stop]})
    length = full.token_ids.index(stop) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == full.token_ids[:length]
    assert stopped.logprobs == full.logprobs[:length]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.001}, "temperature is 0.001, must be 0"),
        ({"seeds": [1]}, "1 seeds for 4 prompts"),
        ({"max_tokens": 100}, r"prompt 3 has 200 tokens, must have 1 to 156 \(max_model_len - max_tokens\)"),
        ({"prompts": [[1], [VOCAB]], "seeds": None}, "prompt 1 has a token id outside 0..130"),
        ({"prompts": [[]], "seeds": None}, "prompt 0 has 0 tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine: RolloutEngine, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**{"prompts": PROMPTS} | SAMPLING | options)


def test_cpu_binding_shares_out_cpus_and_wraps_around() -> None:
    assert cpu_binding(1, [0, 1]) == "0,1"
    assert cpu_binding(2, [0, 1]) == "0|1"
    assert cpu_binding(2, [4, 5, 8, 9, 11]) == "4,5|8,9"
    assert cpu_binding(3, [0, 1]) == "0|1|0"


def test_sample_seeds_differ_and_fit_vllm() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(-10, 100) for sample in range(100)}
    assert len(seeds) == 110 * 100
    assert 0 <= min(seeds) and max(seeds) < 2**63


def test_written_file_reads_back_equal(tmp_path: Path) -> None:
    tensors = {
        "model.layers.10.a": torch.arange(6.0).reshape(2, 3).T,
        "model.layers.2.a": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    write_safetensors(tmp_path / "file.safetensors", tensors)
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_engine_refuses_what_is_not_a_local_checkpoint(tmp_path: Path) -> None:
    options = {"max_model_len": 8, "enforce_eager": True}
    with pytest.raises(ValueError, match="must be a local Hugging Face checkpoint directory"):
        RolloutEngine("Qwen/Qwen3-30B-A3B", device="cpu", **options)
    with pytest.raises(ValueError, match="device is 'tpu'"):
        RolloutEngine(str(tmp_path), device="tpu", **options)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        RolloutEngine(str(tmp_path), device="cpu", **options)


LONG = {"n": 2, "temperature": 0.7, "max_tokens": 40, "stop_token_ids": [], "seeds": [1, 2, 3, 4]}


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep"])
def test_requests_in_flight_when_weights_come(engine: RolloutEngine, second: Fresh, monkeypatch, in_flight: str) -> None:
    """wait: all are finished by the old weights. abort: they end where they are. keep: the new weights finish them."""
    monkeypatch.setattr(engine, "_in_flight", in_flight)
    steps, plain = threading.Semaphore(0), engine._engine.step

    def step():
        steps.release()
        return plain()

    monkeypatch.setattr(engine._engine, "step", step)
    with ThreadPoolExecutor(1) as other:
        running = other.submit(engine.generate, PROMPTS, **LONG)
        for _ in range(5):
            steps.acquire(timeout=60)
        engine.load_weights(second.tensors, 1)
        found = [c for row in running.result(timeout=120) for c in row]
    assert {c.version for c in found} == {0} and engine.version == 1
    ends = {(c.finish_reason, c.last_version) for c in found}
    assert ends == {"wait": {("length", 0)}, "abort": {("abort", 0)}, "keep": {("length", 1)}}[in_flight]
    assert all(len(c.token_ids) == len(c.logprobs) for c in found)
    assert all(0 < len(c.token_ids) < 40 if in_flight == "abort" else len(c.token_ids) == 40 for c in found)
    assert outputs(engine) == second.outputs, "no key or value of the old weights is left"


def test_what_cannot_be_traced_is_loaded_by_vllm(engine: RolloutEngine, second: Fresh) -> None:
    """vLLM's loader computes with experts' down projections: their modules are loaded whole, and the engine is a fresh one all the same."""
    engine._call(RuntimeError, "compute_on_load", True)
    try:
        for version in (1, 2):
            engine.load_weights(second.tensors, version)
            assert outputs(engine) == second.outputs and engine.digests() == second.digests
    finally:
        engine._call(RuntimeError, "compute_on_load", False)
