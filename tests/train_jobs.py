"""What test ranks do with a model: build, score, train, save, restore."""

from __future__ import annotations

import numpy as np

from moerl.controller.schedule import micro_batches
from moerl.sample import Sample

OPTIMIZER = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad=1.0)


def samples(count: int = 12, vocab: int = 131, seed: int = 0) -> list[Sample]:
    """Ragged random sequences with token-mean weights of the whole batch."""
    rng = np.random.default_rng(seed)
    shape = [(int(rng.integers(2, 7)), int(rng.integers(1, 20))) for _ in range(count)]
    total = sum(r for _, r in shape)
    return [
        Sample(rng.integers(0, vocab, p + r), p, {"weights": np.full(r, 1 / total), "advantages": rng.normal(size=r)}) for p, r in shape
    ]


def plan(rank, layout, batch, max_tokens=64):
    """This rank's micro-batches of the global batch, as the driver would send them."""
    lengths = [len(s.tokens) for s in batch]
    multiple = layout.pp if layout.vpp > 1 else 1
    mine = micro_batches(lengths, layout.dp, max_tokens, align=layout.tp, count_multiple=multiple)[layout.coords(rank).dp]
    return [[batch[i] for i in micro] for micro in mine]


def make(rank, layout, path, *, dtype="float32", train=True, value_head=False, lr=1e-2):
    import torch

    from moerl.megatron import model
    from moerl.megatron.optimizer import Schedule
    from moerl.models import read_arch

    extra = dict(optimizer=OPTIMIZER, schedule=Schedule(lr, kind="linear", total=10)) if train else {}
    made = model.make(read_arch(path), layout, rank, getattr(torch, dtype), value_head=value_head, **extra)
    made.load_weights(path)
    return made


def policy_loss(logp, entropy, fields):
    """A loss that uses both outputs, with a global denominator."""
    loss = -(fields["weights"] * (fields["advantages"] * logp + 0.01 * entropy)).sum()
    return loss, {"loss": loss.detach()}


def critic_loss(values, fields):
    loss = (fields["weights"] * (values - fields["advantages"]) ** 2).sum()
    return loss, {"loss": loss.detach()}


def step(made, batch, rank, layout, max_tokens=64):
    from moerl.megatron import model

    head = model.critic_head(critic_loss) if made.value_head else model.policy_head(made.arch.vocab, 0.7, policy_loss)
    return made.update(plan(rank, layout, batch, max_tokens), head)


def total(results, key="loss"):
    """A statistic of the whole batch: the sum over data-parallel ranks; every tensor-parallel rank of one reports the same number."""
    layout = results[0]["layout"]
    return sum(results[layout.rank_of(dp=d, pp=layout.pp - 1)]["sums"].get(key, 0.0) for d in range(layout.dp))


def train_job(rank, layout, path, steps, value_head=False):
    made = make(rank, layout, path, value_head=value_head)
    out = [step(made, samples(seed=i), rank, layout) for i in range(steps)]
    return [o | {"layout": layout} for o in out]


def save_job(rank, layout, path, steps, directory, value_head=False):
    from moerl.megatron import checkpoint

    made = make(rank, layout, path, value_head=value_head)
    for i in range(steps):
        step(made, samples(seed=i), rank, layout)
    checkpoint.save(made, directory)


def resume_job(rank, layout, path, first, steps, directory, value_head=False):
    from moerl.megatron import checkpoint

    made = make(rank, layout, path, value_head=value_head)
    checkpoint.load(made, directory)
    out = [step(made, samples(seed=i), rank, layout) for i in range(first, first + steps)]
    return [o | {"layout": layout} for o in out]
