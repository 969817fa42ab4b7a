from __future__ import annotations

import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moerl.controller.schedule import ScheduleError, cost, micro_batches, mini_batches

settings.register_profile("schedule", deadline=None, database=None)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def costs_of(schedule, lengths, attention_length: int = 16384) -> list[list[float]]:
    """[rank][micro-batch] cost."""
    return [[sum(cost(lengths[i], attention_length) for i in batch) for batch in rank] for rank in schedule]


@st.composite
def problems(draw):
    align = draw(st.sampled_from([1, 2, 8, 128]))
    max_tokens = draw(st.integers(align, 20 * align + 30))
    cap = max_tokens // align * align
    top = draw(st.integers(1, cap))  # short samples pack deep, long ones hardly at all
    lengths = draw(st.lists(st.integers(1, top), max_size=60))
    return lengths, draw(st.integers(1, 9)), max_tokens, align, draw(st.integers(1, 4))


@settings(settings.get_profile("schedule"), max_examples=400)
@given(problems(), st.sampled_from([1, 16384]))
@example(([7] * 8, 1, 8, 1, 1), 16384)
@example(([3], 4, 3, 1, 4), 16384)
def test_every_promise_holds(problem, attention_length):
    lengths, dp, max_tokens, align, multiple = problem
    schedule = micro_batches(
        lengths, dp, max_tokens, align=align, count_multiple=multiple, attention_length=attention_length
    )
    assert len(schedule) == dp
    batches = [batch for rank in schedule for batch in rank]
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))

    count = len(schedule[0])
    assert all(len(rank) == count for rank in schedule)
    assert count >= 1 and count % multiple == 0
    assert all(round_up(sum(lengths[i] for i in batch), align) <= max_tokens for batch in batches)
    assert sum(not batch for batch in batches) == max(0, dp * count - len(lengths))

    # Best-fit decreasing leaves at most one bin half full or less, which bounds the count.
    cap = max_tokens // align * align
    enough = 2 * sum(lengths) // cap + 1
    assert count <= max(multiple, round_up(-(-enough // dp), multiple))

    spent = costs_of(schedule, lengths, attention_length)
    everything = [value for rank in spent for value in rank]
    slack = 1e-9 * sum(everything)
    for this, following in zip(zip(*spent), list(zip(*spent))[1:]):
        assert min(this) >= max(following) - slack  # rounds descend, so ranks meet micro-batches of similar cost
    totals = [sum(rank) for rank in spent]
    assert max(totals) - min(totals) <= max(everything) - min(everything) + slack


def test_the_cap_holds_where_total_over_cap_is_not_enough():
    # 56 tokens over a cap of 8 is seven micro-batches on paper, but no two samples of 7 share one.
    assert micro_batches([7] * 8, 1, 8) == [[[i] for i in range(8)]]
    assert sorted(len(batch) for batch in micro_batches([7] * 8, 1, 14)[0]) == [2, 2, 2, 2]
    # Sixteen samples of 30,720 fill fifteen micro-batches of 32,768 exactly on paper.
    assert [len(rank) for rank in micro_batches([30720] * 16, 4, 32768)] == [4, 4, 4, 4]


def test_alignment_counts_against_the_cap():
    assert [len(batch) for batch in micro_batches([5, 5], 1, 10)[0]] == [2]
    assert [len(batch) for batch in micro_batches([5, 5], 1, 15, align=8)[0]] == [1, 1]
    with pytest.raises(ScheduleError) as error:
        micro_batches([5, 9], 1, 15, align=8)
    assert str(error.value) == "sample 1 has length 9, above max_tokens 15 (8 in whole units of align 8)"


def test_fewer_samples_than_ranks_spreads_the_placeholders():
    schedule = micro_batches([10, 20, 30], 5, 64)
    assert schedule == [[[2]], [[1]], [[0]], [[]], [[]]]
    # Twelve micro-batches for seven samples: no rank is left more than one short of another.
    schedule = micro_batches([10] * 7, 3, 64, count_multiple=4)
    assert sorted(sum(bool(batch) for batch in rank) for rank in schedule) == [2, 2, 3]
    assert micro_batches([], 2, 8, count_multiple=2) == [[[], []], [[], []]]


def test_nearly_full_bins_fall_back_to_a_tight_packing():
    # The only packing into two bins of 13 is {8, 5} and {7, 3, 3}; balancing by cost alone would need a third.
    assert micro_batches([8, 7, 5, 3, 3], 1, 13) == [[[0, 2], [1, 3, 4]]]


def test_the_tight_packing_leaves_no_micro_batch_empty():
    # Balancing by cost finds no room in 24 bins, and best fit fills only 23 of them.
    lengths = [50, 49, 48, 48, 48, 47, 45, 43, 42, 41, 41, 38, 37, 35, 33, 31, 31, 26, 26, 26]
    lengths += [25, 23, 23, 21, 21, 18, 18, 18, 16, 15, 15, 13, 13, 12, 12, 12, 10, 10, 6, 1]
    schedule = micro_batches(lengths, 8, 50)
    assert [len(rank) for rank in schedule] == [3] * 8
    assert all(batch for rank in schedule for batch in rank)


def test_the_costliest_of_a_round_goes_to_the_lightest_rank():
    assert micro_batches([10, 6, 5, 1], 2, 10) == [[[0], [3]], [[1], [2]]]


def long_tailed(count: int, seed: int, top: int) -> list[int]:
    draw = random.Random(seed)
    return [min(top, max(1, int(draw.lognormvariate(7.5, 1.0)))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_samples_balance(seed):
    lengths = long_tailed(1024, seed, 16384)
    schedule = micro_batches(lengths, 8, 16384)
    spent = costs_of(schedule, lengths)
    mean = sum(map(sum, spent)) / 8
    assert max(map(sum, spent)) <= 1.02 * mean
    assert sum(max(batches) for batches in zip(*spent)) <= 1.05 * mean  # every round waits for its costliest
    assert len(schedule[0]) <= -(-sum(lengths) // (8 * 16384)) + 1  # one more than the tokens fill, at most
    dealt = [sum(map(sum, costs_of([[range(r, 1024, 8)]], lengths))) for r in range(8)]
    assert max(map(sum, spent)) < max(dealt)  # better than dealing the samples round


def test_attention_length_decides_what_balances():
    lengths = [4096] + [512] * 8
    linear = micro_batches(lengths, 2, 8192, attention_length=10**9)
    assert sorted(len(rank[0]) for rank in linear) == [1, 8]  # 4,096 tokens on each rank
    quadratic = micro_batches(lengths + [512] * 8, 2, 8192, attention_length=1024)
    assert sorted(len(rank[0]) for rank in quadratic) == [1, 16]  # one long sample outweighs twice its tokens


def test_same_input_same_schedule():
    lengths = [random.Random(0).choice([5, 5, 9]) for _ in range(50)] + long_tailed(50, 1, 900)
    assert micro_batches(lengths, 4, 1000) == micro_batches(tuple(lengths), 4, 1000)
    assert micro_batches([4, 4, 4, 4], 2, 8) == [[[0, 2]], [[1, 3]]]  # ties go by index


def test_a_large_batch_takes_under_two_seconds():
    lengths = long_tailed(8192, 0, 8192)
    start = time.perf_counter()
    micro_batches(lengths, 64, 8192)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([4, 9, 12], 2, 8), {}, "sample 1 has length 9, above max_tokens 8"),
        (([4, 0], 2, 8), {}, "sample 1 has length 0, and lengths start at 1"),
        (([4], 0, 8), {}, "dp 0 is below 1"),
        (([4], 1, 0), {}, "max_tokens 0 is below 1"),
        (([4], 1, 8), {"align": 0}, "align 0 is below 1"),
        (([4], 1, 8), {"count_multiple": 0}, "count_multiple 0 is below 1"),
        (([4], 1, 8), {"attention_length": 0}, "attention_length 0 is below 1"),
    ],
)
def test_bad_micro_batch_input(arguments, keywords, message):
    with pytest.raises(ScheduleError) as error:
        micro_batches(*arguments, **keywords)
    assert str(error.value) == message


@settings(settings.get_profile("schedule"))
@given(st.integers(0, 300), st.integers(1, 60), st.none() | st.integers(0, 9))
def test_mini_batches_cover_everything_evenly(count, size, seed):
    batches = mini_batches(count, size, seed=seed)
    assert len(batches) == -(-count // size)
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    assert all(0 < len(batch) <= size for batch in batches)
    if batches:
        assert max(map(len, batches)) - min(map(len, batches)) in (0, 1)
    assert batches == mini_batches(count, size, seed=seed)


def test_mini_batch_order():
    assert mini_batches(10, 4, seed=None) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    first, second = (mini_batches(64, 16, seed=seed) for seed in (1, 2))
    assert first != second and first != mini_batches(64, 16, seed=None)


@pytest.mark.parametrize(("count", "size", "message"), [(-1, 4, "count -1 is below 0"), (4, 0, "size 0 is below 1")])
def test_bad_mini_batch_input(count, size, message):
    with pytest.raises(ScheduleError) as error:
        mini_batches(count, size, seed=0)
    assert str(error.value) == message
