"""Which sample goes to which data-parallel rank and micro-batch: pure functions of lengths, decided once on the driver.

Ranks receive the schedule and never negotiate it. A count agreed between ranks at run time can differ, and then hang.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Sequence

Bin = list[int]  # the samples of one micro-batch, as indices into the lengths


class ScheduleError(ValueError):
    """No schedule exists for these samples and limits."""


def cost(length: int, attention_length: int = 16384) -> float:
    """Work of one sample in token units: length + length^2 / attention_length.

    attention_length is the sample length (tokens) at which attention, quadratic in length, costs as much as all the
    layers linear in it. Counting forward FLOPs a token and layer under a causal mask, it is about 17k for Qwen3-30B-A3B
    (2 * 69M linear, 2 * 4096 * length attention), 30k for DeepSeek-V3, and 12 * hidden for a plain dense Transformer.
    """
    return length + length * length / attention_length


def micro_batches(
    lengths: Sequence[int],
    dp: int,
    max_tokens: int,
    *,
    align: int = 1,
    count_multiple: int = 1,
    attention_length: int = 16384,
) -> list[list[Bin]]:
    """Split samples over `dp` ranks and packed micro-batches: result[dp rank][micro-batch] is a list of sample indices.

    Every sample appears once. Every rank gets the same number of micro-batches: at least 1, and a multiple of
    `count_multiple` (the interleaved pipeline schedule needs pp). The tokens of a micro-batch, rounded up to `align`,
    never exceed `max_tokens`; where each sample is padded by itself (context parallelism), pass padded lengths. A
    micro-batch is empty only when there are fewer samples than micro-batches, and the engine then runs a placeholder.

    Micro-batches at the same place on different ranks have similar `cost` (expert parallelism couples them), in
    descending order of it, and rank totals differ by no more than the costliest and cheapest micro-batch do.
    """
    _positive(dp=dp, max_tokens=max_tokens, align=align)
    _positive(count_multiple=count_multiple, attention_length=attention_length)
    cap = max_tokens // align * align
    for index, length in enumerate(lengths):
        if length < 1:
            raise ScheduleError(f"sample {index} has length {length}, and lengths start at 1")
        if length > cap:
            rounded = f" ({cap} in whole units of align {align})" if cap != max_tokens else ""
            raise ScheduleError(f"sample {index} has length {length}, above max_tokens {max_tokens}{rounded}")
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    costs = [cost(length, attention_length) for length in lengths]
    tight = _best_fit(lengths, longest_first, cap)
    count = dp * count_multiple * max(1, -(-len(tight) // (dp * count_multiple)))
    bins = _balanced(lengths, costs, longest_first, cap, count)
    if bins is None:
        bins = _fill_empty(tight + [[] for _ in range(count - len(tight))], costs)
    return _deal(bins, costs, dp)


def mini_batches(count: int, size: int, *, seed: int | None) -> list[list[int]]:
    """Split range(count) into ceil(count / size) mini-batches of near-equal size, one optimizer step each.

    The order is shuffled by `seed`; None keeps it. Answers to one prompt may part: advantages are settled before the split.
    """
    _positive(size=size)
    if count < 0:
        raise ScheduleError(f"count {count} is below 0")
    order = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(order)
    batches = -(-count // size)
    edges = [i * count // batches for i in range(batches + 1)] if batches else [0]
    return [order[low:high] for low, high in zip(edges, edges[1:])]


def _best_fit(lengths: Sequence[int], longest_first: list[int], cap: int) -> list[Bin]:
    """Best-fit decreasing bin packing: few bins, at most one of them half full or less."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index in longest_first:
        at = bisect_left(room, (lengths[index], -1))
        if at < len(room):
            free, target = room.pop(at)
        else:
            free, target = cap, len(bins)
            bins.append([])
        bins[target].append(index)
        insort(room, (free - lengths[index], target))
    return bins


def _balanced(
    lengths: Sequence[int], costs: list[float], longest_first: list[int], cap: int, count: int
) -> list[Bin] | None:
    """Longest-processing-time packing: each sample to the cheapest bin, or to the roomiest when that one is full.

    Returns None when a sample fits in no bin, which happens where the bins are nearly full. Source: R. L. Graham,
    "Bounds on multiprocessing timing anomalies", 1969.
    """
    bins: list[Bin] = [[] for _ in range(count)]
    spent, tokens = [0.0] * count, [0] * count
    by_cost = [(0.0, target) for target in range(count)]
    by_tokens = [(0, target) for target in range(count)]
    for index in longest_first:
        target = _lightest(by_cost, spent)
        if tokens[target] + lengths[index] > cap:
            target = _lightest(by_tokens, tokens)
            if tokens[target] + lengths[index] > cap:
                return None
        bins[target].append(index)
        spent[target] += costs[index]
        tokens[target] += lengths[index]
        heapq.heappush(by_cost, (spent[target], target))
        heapq.heappush(by_tokens, (tokens[target], target))
    return bins


def _lightest(heap: list[tuple[float, int]], load: Sequence[float]) -> int:
    """The bin of least load, lowest index on ties; entries that a later load replaced are dropped."""
    while heap[0][0] != load[heap[0][1]]:
        heapq.heappop(heap)
    return heap[0][1]


def _fill_empty(bins: list[Bin], costs: list[float]) -> list[Bin]:
    """Split the costliest bins of several samples until no bin is empty, or every bin holds one sample."""
    donors = [(-sum(costs[index] for index in samples), at) for at, samples in enumerate(bins) if len(samples) > 1]
    heapq.heapify(donors)
    for empty in (at for at, samples in enumerate(bins) if not samples):
        if not donors:
            break
        _, donor = heapq.heappop(donors)
        bins[empty], bins[donor] = bins[donor][1::2], bins[donor][::2]
        for at in (empty, donor):
            if len(bins[at]) > 1:
                heapq.heappush(donors, (-sum(costs[index] for index in bins[at]), at))
    return bins


def _deal(bins: list[Bin], costs: list[float], dp: int) -> list[list[Bin]]:
    """Deal bins to ranks in rounds of `dp`, costliest round first; in a round the costliest goes to the lightest rank.

    Balancing rank totals before packing evens the totals a few percent more on long-tailed lengths, but makes the
    costliest micro-batch of a round dearer, and expert-parallel ranks wait for that one in every round.
    """
    spent = [sum(costs[index] for index in samples) for samples in bins]
    order = sorted(range(len(bins)), key=lambda at: (-spent[at], at))
    ranks: list[list[Bin]] = [[] for _ in range(dp)]
    totals = [0.0] * dp
    for start in range(0, len(order), dp):
        lightest_first = sorted(range(dp), key=lambda rank: (totals[rank], rank))
        for rank, at in zip(lightest_first, order[start : start + dp]):
            ranks[rank].append(sorted(bins[at]))
            totals[rank] += spent[at]
    return ranks


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"{name} {size} is below 1")
