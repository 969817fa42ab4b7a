"""Megatron's weights in vLLM: after every sync the running engine is a fresh engine on the exported checkpoint."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from moerl.config.schema import TrainConfig
from moerl.controller.run import Processes, plan
from moerl.rollout.remote import RemoteError
from moerl.sample import Sample
from tests.rollout_helpers import PROMPTS, start_engine

GREEDY = dict(n=1, temperature=0.0, max_tokens=12, stop_token_ids=[])
SAMPLED = dict(n=2, temperature=0.8, max_tokens=12, stop_token_ids=[])


def config(path, output, **changes) -> TrainConfig:
    """A run's configuration; `changes` replace groups' keys."""
    base = (
        {
            "model": {"path": str(path), "dtype": "float32"},
            "data": {"prompts": "reasoning_gym:chain_sum", "max_prompt_tokens": 240},
            "rollout": {"layout": {"tp": 2}, "samples_per_prompt": 2, "sampling": {"max_tokens": 16}, "kv_cache_gib": 0.0625},
            "actor": {"layout": {"tp": 2, "pp": 2, "ep": 2}, "max_tokens_per_rank": 512, "optimizer": {"lr": 0.05}},
            "reward": {"function": "reasoning_gym"},
            "algorithm": {"name": "grpo"},
            "trainer": {"steps": 1, "output": str(output)},
            "cluster": {"device": "cpu"},
        }
    )
    return TrainConfig.model_validate(base | {group: base[group] | keys for group, keys in changes.items()})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    from transformers import AutoTokenizer

    from moerl import demo_model
    from tests.models import write_qwen3_moe

    path = tmp_path_factory.mktemp("sync")
    demo_model.main(["--out", str(path / "tokenizer")])
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    model = write_qwen3_moe(path / "model", head_dim=32, vocab_size=len(tokenizer) + 3)
    tokenizer.save_pretrained(model)
    return model


def observed(generate) -> tuple:
    """Greedy and sampled tokens with their log-probabilities."""
    greedy = generate(PROMPTS, seeds=[0] * len(PROMPTS), **GREEDY)
    sampled = generate(PROMPTS, seeds=[5, 6, 7, 8], **SAMPLED)
    return tuple((tuple(c.token_ids), tuple(c.logprobs)) for answers in greedy + sampled for c in answers)


def move(processes, vocab: int, seed: int) -> None:
    """One large supervised step, so that every tensor changes."""
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(0, vocab, 30), 2, {"weights": np.full(28, 1 / 448, dtype=np.float32)}) for _ in range(16)]
    processes.roles["actor"].update("update_sft", samples)


def test_running_engine_equals_a_fresh_one_sync_after_sync(start, tmp_path):
    """Two versions from training, then vLLM's and Megatron's log-probs, parameters and outputs compared for each."""
    import ray

    planned = plan(config(start, tmp_path))
    processes = Processes(planned)
    try:
        actor, engine = processes.roles["actor"], next(iter(processes.rollout.engines.values()))
        seen, exported = {}, {}
        for version in (1, 2):
            move(processes, planned.arch.vocab, version)
            processes.sync(version)
            seen[version] = observed(processes.rollout.generate), ray.get(engine.digests.remote())
            exported[version] = processes.export(tmp_path / f"v{version}", "float32")
            assert_same_logprobs(processes, actor)
        assert seen[1] != seen[2]
        processes.sync(3)
        assert (observed(processes.rollout.generate), ray.get(engine.digests.remote())) == seen[2], "the same weights again"
    finally:
        processes.shutdown()
    for version, path in exported.items():
        fresh = start_engine(path)
        fresh.mark_loaded(version)
        assert (observed(fresh.generate), fresh.digests()) == seen[version]
        fresh.shutdown()


APART = {"layout": {"dp": 2}, "colocated": False, "sync": {"transport": "messages", "checksums": True, "buffer_mib": 1}}


def test_two_engines_apart_get_messages_and_a_lost_rank_leaves_no_version(start, tmp_path):
    """Engines with slots of their own hear of everything by messages; both are then a fresh engine. A rank dies: nobody serves."""
    import ray

    changes = dict(rollout=APART, actor={"layout": {"pp": 2, "ep": 2, "dp": 2}}, cluster={"collective_timeout_s": 60})
    planned = plan(config(start, tmp_path, **changes))
    assert planned.placement.slots == 6 and "slots 4-5" in planned.placement.describe()
    processes = Processes(planned)
    try:
        made = processes.sync.plan
        assert made.rounds > 2 and (made.round >= 0).all()
        for version in (1, 2):
            move(processes, planned.arch.vocab, version)
            processes.sync(version)
        assert processes.sync.received["buffer_bytes"] <= 2 * 2**20
        both = [ray.get(engine.digests.remote()) for engine in processes.rollout.engines.values()]
        assert both[0] == both[1]
        one = next(iter(processes.rollout.engines.values()))
        seen = observed(lambda prompts, **options: ray.get(one.generate.remote(prompts, options)))
        export = processes.export(tmp_path / "v2", "float32")
        os.kill(processes.roles["actor"].group.call("describe")[1]["pid"], signal.SIGKILL)
        with pytest.raises(RemoteError, match="actor rank 1 died"):
            processes.sync(3)
        with pytest.raises(RemoteError, match="the weights are incomplete"):
            processes.rollout.generate(PROMPTS, seeds=[0] * len(PROMPTS), **GREEDY)
    finally:
        processes.shutdown()
    fresh = start_engine(export, tp=1)
    fresh.mark_loaded(2)
    assert (observed(fresh.generate), fresh.digests()) == (seen, both[0])
    fresh.shutdown()


def assert_same_logprobs(processes, actor) -> None:
    """vLLM's log-probs of what it sampled, at the sampling temperature, are Megatron's."""
    completions = processes.rollout.generate(PROMPTS, seeds=[1, 2, 3, 4], **SAMPLED)
    pairs = [(prompt, c) for prompt, answers in zip(PROMPTS, completions) for c in answers]
    logp, _ = actor.logprobs([Sample(np.array([*p, *c.token_ids]), len(p)) for p, c in pairs], SAMPLED["temperature"])
    for found, (_, c) in zip(logp, pairs):
        np.testing.assert_allclose(found, c.logprobs, atol=1e-3)
