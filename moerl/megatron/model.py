"""One role's model on one rank: its chunks, its optimizer if it trains, and the few things the controller asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from moerl.layout import ParallelLayout
from moerl.megatron import step, weights
from moerl.megatron.balance import Balance, Balancer
from moerl.megatron.build import build
from moerl.megatron.optimizer import Schedule, build_optimizer, set_lr, wrap
from moerl.models import params_of
from moerl.models.arch import Arch
from moerl.models.tensormap import Param
from moerl.sample import Sample


@dataclass
class Model:
    arch: Arch
    layout: ParallelLayout
    rank: int
    chunks: list[torch.nn.Module]
    params: dict[str, Param]
    value_head: bool = False
    optimizer: MegatronOptimizer | None = None
    schedule: Schedule | None = None
    updates: int = 0
    balancer: Balancer | None = None

    def load_weights(self, path: str) -> None:
        weights.load(self.bare(), self.arch, self.layout, self.rank, path, value_head=self.value_head)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def owned_shards(self) -> list[weights.Shard]:
        """The shards this rank answers for."""
        return weights.owned_shards(self.bare(), self.arch, self.layout, self.rank, self.params)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights of the main model on this rank, by name, where they lie."""
        own = weights.shards(self.bare(), self.arch, self.layout, self.rank, self.params)
        return {s.name: s.tensor for s in own if not s.name.startswith("mtp.") and not self.params[s.name].tied}

    def logprobs(self, micro_batches: list[list[Sample]], temperature: float) -> list[dict]:
        """Log-probability and entropy of every response token; one dict a micro-batch on the last pipeline stage."""
        head = step.logprob_head(self.arch.vocab, temperature)
        return step.run(self.chunks, micro_batches, head, align=self.layout.tp, train=False)

    def values(self, micro_batches: list[list[Sample]]) -> list[dict]:
        """Value of the state before every response token."""
        return step.run(self.chunks, micro_batches, step.value_head, align=self.layout.tp, train=False)

    def update(self, micro_batches: list[list[Sample]], head: step.Head) -> dict:
        """One optimizer step on the micro-batches. Returns this rank's sums of the head's numbers, the gradient norm and the rate."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.balancer:
            self.balancer.start(micro_batches)
        before = self.balancer.enter if self.balancer else None
        results = step.run(self.chunks, micro_batches, head, align=self.layout.tp, train=True, before=before)
        rate = self.schedule.at(self.updates)
        set_lr(self.optimizer, rate)
        _, grad_norm, _ = self.optimizer.step()
        if self.balancer:
            self.balancer.finish()
        self.updates += 1
        sums = {}
        for result in results:
            for name, value in result.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {"sums": sums, "grad_norm": float(grad_norm), "lr": rate}

    def bare(self) -> list[torch.nn.Module]:
        """The chunks without their gradient buffers: names are the same whether or not the model trains."""
        return [c.module if self.optimizer is not None else c for c in self.chunks]


def make(arch: Arch, layout: ParallelLayout, rank: int, dtype: torch.dtype, *, value_head: bool = False,
         optimizer: dict | None = None, schedule: Schedule | None = None, router: dict | None = None) -> Model:
    """Build a model; with `optimizer` (keywords of `build_optimizer`, without lr) and `schedule` it can be trained, and with `router`
    (those of `Balance`) its experts are kept evenly used meanwhile."""
    chunks = build(arch, layout, rank, dtype, value_head=value_head)
    params = params_of(arch)
    weights.mark_parallel(chunks, arch, layout, rank, params, value_head=value_head)
    if optimizer is None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return Model(arch, layout, rank, chunks, params, value_head)
    balance = Balance(**router or {})
    balancer = Balancer(chunks, balance) if balance else None
    wrapped = wrap(chunks)
    built = build_optimizer(wrapped, lr=schedule.lr, **optimizer)
    return Model(arch, layout, rank, wrapped, params, value_head, built, schedule, balancer=balancer)


def policy_head(vocab: int, temperature: float, loss: Callable) -> step.Head:
    """`loss(logp, entropy, fields) -> (loss, stats)` on the response tokens of a micro-batch, as a head of the schedule."""

    def head(output, batch):
        logp, entropy = step.response_stats(vocab, temperature, output, batch)
        return loss(logp, entropy, batch.fields)

    return head


def critic_head(loss: Callable) -> step.Head:
    """`loss(values, fields) -> (loss, stats)` on the response tokens of a micro-batch."""

    def head(output, batch):
        return loss(output[0, :, 0][batch.at], batch.fields)

    return head
