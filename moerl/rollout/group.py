"""The rollout side on Ray: one vLLM engine per data-parallel replica, prompts shared out among them."""

from __future__ import annotations

import os

import numpy as np
import ray

from moerl.reshard.receiver import Connection
from moerl.reshard.trace import Trace
from moerl.rollout.engine import Completion, RolloutEngine
from moerl.rollout.remote import collect

THREADS = 3  # of an engine's actor: one generates, one takes in weights, one is told that the others failed


class EngineActor:
    """`RolloutEngine` in a process of its own. Weights may come while a thread generates."""

    def __init__(self, gpus: list[str] | None, options: dict):
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.engine = RolloutEngine(**options)

    def ready(self) -> int:
        return os.getpid()

    def trace(self, shapes: dict[str, tuple[int, ...]], layers: int) -> list[Trace]:
        return self.engine.trace(shapes, layers)

    def connect(self, connection: Connection) -> None:
        self.engine.connect(connection)

    def receive(self) -> dict[str, float]:
        return self.engine.receive()

    def commit(self, version: int) -> None:
        self.engine.commit(version)

    def give_up(self) -> None:
        self.engine.give_up()

    def sleep(self) -> None:
        self.engine.sleep()

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
        self.engines = {
            f"rollout engine {i}": ray.remote(EngineActor).options(num_cpus=0, max_concurrency=THREADS, **place).remote(gpus, options)
            for i, (place, gpus) in enumerate(places)
        }

    def wait_ready(self, timeout_s: float) -> None:
        collect({name: e.ready.remote() for name, e in self.engines.items()}, timeout_s)

    def refs(self, method: str, *args, each: list | None = None) -> dict[str, ray.ObjectRef]:
        """`method(*args)` on every engine, under way; with `each` its entry for the engine comes first."""
        firsts = [()] * len(self.engines) if each is None else [(one,) for one in each]
        return {name: getattr(e, method).remote(*first, *args) for (name, e), first in zip(self.engines.items(), firsts)}

    def sleep(self) -> None:
        """Let every engine give its GPUs' memory back until the next sync."""
        collect(self.refs("sleep"))

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
