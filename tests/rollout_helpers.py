"""Engines of a tiny model for the rollout tests, and a receiver that can be told to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moerl.reshard.receiver import WeightReceiver
from moerl.rollout.engine import Completion, RolloutEngine

VOCAB = 131  # of `write_qwen3_moe`; odd, so the last worker pads its share
SERVABLE = {"head_dim": 32}  # the least of vLLM's CPU attention
PROMPTS = [[5, 6, 7], [100, 3], [11] * 9, [(7 * i) % 128 for i in range(200)]]  # the last fills a cache block
SAMPLING: dict[str, Any] = {"n": 2, "temperature": 0.7, "max_tokens": 12, "stop_token_ids": [], "seeds": [1, 2, 3, 4]}
GREEDY: dict[str, Any] = {"n": 1, "temperature": 0.0, "max_tokens": 12, "stop_token_ids": [], "seeds": None}


def start_engine(model: Path, tp: int = 2, **options) -> RolloutEngine:
    """An fp32 engine of CPU workers with a small cache."""
    return FaultyEngine(
        str(model), tp=tp, dtype="float32", max_model_len=256, device="cpu", kv_cache_gib=0.0625, enforce_eager=True, **options
    )


def outputs(engine: RolloutEngine) -> list[list[tuple[list[int], list[float]]]]:
    """Tokens and log-probabilities of greedy decoding and of sampling, to compare between engines bit for bit."""
    completions: list[list[Completion]] = engine.generate(PROMPTS, **GREEDY) + engine.generate(PROMPTS, **SAMPLING)
    return [[(sample.token_ids, sample.logprobs) for sample in samples] for samples in completions]


class FaultyReceiver(WeightReceiver):
    """A receiver whose next reload, once `fail_next` was called, breaks off on worker 1 after some tensors."""

    def fail_next(self, after: int) -> None:
        self.fail_after = after

    def compute_on_load(self, on: bool) -> None:
        """Let the model's loader multiply some tensors by one, which no tracing can follow."""
        model = type(self.get_model())
        if on:
            plain = self.plain = model.load_weights
            model.load_weights = lambda model, weights: plain(model, ((n, w * 1 if "down_proj" in n else w) for n, w in weights))
        else:
            model.load_weights = self.plain

    def group_experts(self) -> None:
        """Tell every router that its experts are one group, which is what they are where a model has no groups.

        vLLM's CPU router knows sigmoid scores with groups only.
        """
        for module in self.get_model().modules():
            if hasattr(router := getattr(module, "router", None), "use_grouped_topk"):
                router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    def moerl_read_weights(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        fail_after = vars(self).pop("fail_after", None)
        for count, item in enumerate(super().moerl_read_weights(path)):
            if count == fail_after and self.rank == 1:
                raise OSError(f"disk on fire at tensor {count}")
            yield item


class FaultyEngine(RolloutEngine):
    worker_extension = f"{FaultyReceiver.__module__}.{FaultyReceiver.__name__}"
