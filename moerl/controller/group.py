"""The training side on Ray, as the driver sees it: a `WorkerGroup` of ranks and the `Role`s (models) that live on it."""

from __future__ import annotations

import numpy as np
import ray

from moerl.controller.schedule import micro_batches
from moerl.controller.worker import MegatronWorker, ModelSpec
from moerl.layout import ParallelLayout
from moerl.rollout.remote import collect
from moerl.sample import Sample


class WorkerGroup:
    """The ranks of one layout, one Ray actor each. `places` holds the scheduling options of every rank's actor."""

    def __init__(self, name: str, layout: ParallelLayout, places: list[dict], device: str):
        self.name, self.layout = name, layout
        actor = ray.remote(MegatronWorker)
        self.workers = [
            actor.options(num_cpus=0, **place).remote(rank, layout, device) for rank, place in zip(range(layout.world), places)
        ]

    def start(self, seed: int, timeout_s: float, collective_timeout_s: float) -> list[dict]:
        """Bring the ranks up and let them find each other. Returns every rank's description."""
        where = self.call("describe", timeout_s=timeout_s)
        self.call("start", where[0]["master"], seed, collective_timeout_s, timeout_s=timeout_s)
        return where

    def call(self, method: str, *args, per_dp: list | None = None, timeout_s: float | None = None) -> list:
        """`method(*args)` on every rank; results by rank. With `per_dp` its entry for the rank's data-parallel index comes first."""
        return list(collect(self.refs(method, *args, per_dp=per_dp), timeout_s).values())

    def refs(self, method: str, *args, per_dp: list | None = None, per_rank: list | None = None) -> dict[str, ray.ObjectRef]:
        """`method(*args)` on every rank, under way; with `per_dp` or `per_rank` their entry for the rank comes first."""
        shared = None if per_dp is None else [ray.put(part) for part in per_dp]
        refs = {}
        for rank, worker in enumerate(self.workers):
            first = () if shared is None else (shared[self.layout.coords(rank).dp],)
            first = first if per_rank is None else (per_rank[rank],)
            refs[f"{self.name} rank {rank}"] = getattr(worker, method).remote(*first, *args)
        return refs

    def speakers(self) -> list[int]:
        """The rank that answers for each data-parallel index: last pipeline stage, first tensor- and context-parallel rank."""
        return [self.layout.rank_of(dp=d, pp=self.layout.pp - 1) for d in range(self.layout.dp)]


class Role:
    """A model of the run (actor, critic, reference) spread over a worker group. Batches are lists of samples, answers in their order."""

    def __init__(self, group: WorkerGroup, name: str, spec: ModelSpec, max_tokens: int):
        self.group, self.name, self.spec, self.max_tokens = group, name, spec, max_tokens
        group.call("build", name, spec)

    def logprobs(self, samples: list[Sample], temperature: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probability and entropy of every response token."""
        logp, entropy = self._score(samples, ("logp", "entropy"), "logprobs", self.name, temperature)
        return logp, entropy

    def values(self, samples: list[Sample]) -> list[np.ndarray]:
        return self._score(samples, ("values",), "values", self.name)[0]

    def update(self, method: str, samples: list[Sample], *args) -> dict[str, float]:
        """One optimizer step. The numbers are weighted sums over all ranks, divided by the sum of the weights: means of the batch."""
        _, results = self._run(samples, method, *args)
        answers = [results[rank] for rank in self.group.speakers()]
        keys = dict.fromkeys(key for a in answers for key in a["sums"])  # a rank without samples has none
        weight = sum(float(s.fields["weights"].sum()) for s in samples) or 1.0
        means = {key: sum(a["sums"].get(key, 0.0) for a in answers) / weight for key in keys}
        return means | {"grad_norm": answers[0]["grad_norm"], "lr": answers[0]["lr"]}

    def shards(self) -> list[list[tuple]]:
        """All weights of this role by rank, prediction layers too."""
        return self.group.call("shards", self.name)

    def start_save(self, path: str) -> None:
        """Begin to write a checkpoint. When the call returns the state is copied: the next update does not touch what is written."""
        self.group.call("start_save", self.name, path)

    def written(self, wait: bool = False) -> float | None:
        """Seconds in which the slowest rank wrote its files, None while some are not written. A rank that could not is a RemoteError."""
        seconds = self.group.call("written", self.name, wait)
        return None if None in seconds else max(seconds)

    def finish_save(self) -> None:
        """Complete a checkpoint whose files are written."""
        self.group.call("finish_save", self.name)

    def load(self, path: str) -> None:
        self.group.call("load", self.name, path)

    def _run(self, samples: list[Sample], method: str, *args) -> tuple[list[list[list[int]]], list]:
        """Schedule the samples and call `method` with its micro-batches on every rank: the schedule, and the results by rank."""
        layout = self.group.layout
        plan = micro_batches(
            [len(s.tokens) for s in samples], layout.dp, self.max_tokens, align=layout.tp,
            count_multiple=layout.pp if layout.vpp > 1 else 1,
        )
        return plan, self.group.call(method, *args, per_dp=[[[samples[i] for i in micro] for micro in part] for part in plan])

    def _score(self, samples: list[Sample], keys: tuple[str, ...], method: str, *args) -> list[list[np.ndarray]]:
        plan, results = self._run([Sample(s.tokens, s.prompt) for s in samples], method, *args)
        answers = [[None] * len(samples) for _ in keys]
        for rank, part in zip(self.group.speakers(), plan):
            for micro, result in zip(part, results[rank]):
                if not micro:
                    continue
                ends = np.cumsum(result["responses"])[:-1]
                for answer, key in zip(answers, keys):
                    for index, piece in zip(micro, np.split(result[key].numpy(), ends)):
                        answer[index] = piece
        return answers
