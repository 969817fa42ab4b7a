"""The rounds of a plan: no process ever has more than a buffer's bytes on the way in one round, and all are busy in all of them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moerl.reshard.plan import Plan

GOLDEN = (5**0.5 - 1) / 2


def rounds(plan: Plan, sent: np.ndarray) -> np.ndarray:
    """The round of each of the rows `sent`; a relayed row comes one round after the one that it relays.

    Workers start at layers spread evenly over the model (multiples of the golden ratio), and at different holders of a layer, so that
    they ask all ranks at all times; each goes on layer by layer. A row takes the first round in which its source and its targets have room.
    """
    nbytes = plan.nbytes
    direct = sent[~plan.relayed[sent]]
    followers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i in sent[plan.relayed[sent]].tolist():
        followers[int(plan.chunk[i]), int(plan.layer[i]), int(plan.source[i])].append(i)
    order = _order(plan, direct)
    out, into = defaultdict(lambda: defaultdict(int)), defaultdict(lambda: defaultdict(int))
    free_out, free_in = defaultdict(int), defaultdict(int)  # rounds before these are full
    found = np.full(len(plan.chunk), -1)
    chunk, layer, source, target = (getattr(plan, n).tolist() for n in ("chunk", "layer", "source", "target"))
    sizes, cap = nbytes.tolist(), plan.cap
    for i in order.tolist():
        n, s, t = sizes[i], source[i], target[i]
        after = followers.get((chunk[i], layer[i], t), ())
        sending, taking = out[s], into[t]
        at = max(free_out[s], free_in[t])
        while sending[at] + n > cap and sending[at] or taking[at] + n > cap and taking[at] or any(
            into[target[f]][at + 1] + n > cap for f in after
        ):
            at += 1
        sending[at] += n
        taking[at] += n
        found[i] = at
        for f in after:
            into[target[f]][at + 1] += n
            found[f] = at + 1
        while sending[free_out[s]] + n > cap:
            free_out[s] += 1
        while taking[free_in[t]] + n > cap:
            free_in[t] += 1
    return found[sent]


def _order(plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Rows in the order in which they look for a round: every worker's own sequence, all of them side by side."""
    target, layer, source = plan.target[rows], plan.layer[rows], plan.source[rows]
    last = int(layer.max(initial=0)) + 1
    depth = np.where(layer == -1, 0, np.where(layer == -2, last + 1, layer + 1)) / (last + 2)
    turn = (depth + target * GOLDEN) % 1.0
    ranks = len(plan.place.ranks)
    near = np.lexsort(((source + target * 7) % ranks, turn, target))
    ahead = np.empty(len(rows))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(target[near])) + 1])
    ahead[near] = np.arange(len(rows)) - np.repeat(starts, np.diff([*starts, len(rows)]))
    return rows[np.lexsort((target, ahead))]
