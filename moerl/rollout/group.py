"""The rollout side on Ray: one vLLM engine per data-parallel replica, prompts shared out among them."""

from __future__ import annotations

import os
import time

import numpy as np
import ray
import torch

from moerl.models import params_of
from moerl.models.arch import Arch
from moerl.models.tensormap import assemble
from moerl.rollout.engine import Completion, RolloutEngine
from moerl.rollout.remote import collect


class EngineActor:
    """`RolloutEngine` in a process of its own, taking weights as the shards of Megatron ranks."""

    def __init__(self, gpus: list[str] | None, options: dict):
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.engine = RolloutEngine(**options)

    def ready(self) -> int:
        return os.getpid()

    def sync(self, arch: Arch, version: int, *ranks: list[tuple[str, torch.Tensor, int, int]]) -> float:
        """Assemble the shards of all ranks into Hugging Face tensors and serve them as `version`. Seconds it took."""
        start = time.perf_counter()
        self.engine.load_weights(assemble(params_of(arch.main()), ranks), version)
        return time.perf_counter() - start

    def generate(self, prompts: list[list[int]], options: dict) -> list[list[Completion]]:
        return self.engine.generate(prompts, **options)

    def digests(self) -> dict[str, str]:
        return self.engine.digests()

    def shutdown(self) -> None:
        self.engine.shutdown()


class Rollout:
    """All engines of a run.

    `places` holds, for each engine, the Ray scheduling options of its actor and the GPU ids its workers use (None on the CPU).
    """

    def __init__(self, places: list[tuple[dict, list[str] | None]], options: dict):
        actor = ray.remote(EngineActor)
        self.engines = {
            f"rollout engine {i}": actor.options(num_cpus=0, **place).remote(gpus, options) for i, (place, gpus) in enumerate(places)
        }

    def wait_ready(self, timeout_s: float) -> None:
        collect({name: e.ready.remote() for name, e in self.engines.items()}, timeout_s)

    def sync(self, arch: Arch, version: int, shards: list[ray.ObjectRef]) -> float:
        """Give every engine the same weights; `shards` has one object a training rank. Seconds of the slowest engine."""
        return max(collect({n: e.sync.remote(arch, version, *shards) for n, e in self.engines.items()}).values())

    def generate(self, prompts: list[list[int]], *, seeds: list[int], **options) -> list[list[Completion]]:
        """Completions of every prompt, in order; the options are those of `RolloutEngine.generate`."""
        parts = np.array_split(np.arange(len(prompts)), len(self.engines))
        refs = {
            name: engine.generate.remote([prompts[i] for i in part], options | {"seeds": [seeds[i] for i in part]})
            for (name, engine), part in zip(self.engines.items(), parts)
            if len(part)
        }
        return [completions for answer in collect(refs).values() for completions in answer]

    def shutdown(self, timeout_s: float = 20) -> None:
        """Let the engines stop their workers, which leave files in shared memory when they are killed; a dead engine is passed over."""
        ray.wait([e.shutdown.remote() for e in self.engines.values()], num_returns=len(self.engines), timeout=timeout_s)
