"""Links between memories, and the tracing of loaders that make them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.reshard.links import Link, NotStrided, join, link, merged
from moerl.reshard.trace import trace


def pairs(x: Link) -> dict[int, int]:
    """Left element -> right element, one by one."""
    found = {}
    grid = torch.cartesian_prod(*map(torch.arange, x.sizes)).reshape(-1, len(x.sizes)).tolist() if x.sizes else [[]]
    for at in grid:
        found[x.left + sum(i * s for i, s in zip(at, x.left_strides))] = x.right + sum(i * s for i, s in zip(at, x.right_strides))
    assert len(found) == x.count
    return found


@st.composite
def views(draw):
    """A view of a [4, 6, 8] memory such as loaders take: cut, split, transposed."""
    memory = torch.empty(4, 6, 8, device="meta")
    if draw(st.booleans()):
        memory = memory.unflatten(2, (-1, 2))  # gate and up interleaved
    for dim in range(memory.dim()):
        n = memory.shape[dim]
        start = draw(st.integers(0, n - 1))
        memory = memory.narrow(dim, start, draw(st.integers(1, n - start)))
    return memory.permute(draw(st.permutations(range(memory.dim()))))


@settings(max_examples=300, deadline=None)
@given(views(), views())
def test_join_is_composition_element_by_element(a, b):
    one = link(torch.empty(a.shape, device="meta"), a)
    two = link(b, torch.empty(b.shape, device="meta"))
    back = {m: left for left, m in pairs(one).items()}
    want = {back[m]: right for m, right in pairs(two).items() if m in back}
    found: dict[int, int] = {}
    for x in join(one, two):
        assert not found.keys() & pairs(x).keys(), "an element twice"
        found |= pairs(x)
    assert found == want


@settings(max_examples=100, deadline=None)
@given(views(), st.integers(1, 40))
def test_a_split_link_is_the_same_elements_in_small_pieces(a, most):
    whole = link(torch.empty(a.shape, device="meta"), a)
    found: dict[int, int] = {}
    for x in whole.split(most):
        assert x.count <= most
        found |= pairs(x)
    assert found == pairs(whole)


def test_runs_across_rows_that_do_not_begin_at_one():
    part = Link((10,), 0, (1,), 3, (1,))  # elements 3 to 12 of rows of 5
    column = merged((4, 2), 1, (5, 1), 0, (2, 1))  # columns 1 and 2 of four rows
    assert {k: v for x in join(part, column) for k, v in pairs(x).items()} == {3: 2, 4: 3, 8: 4, 9: 5}


def test_steps_without_a_common_measure_are_refused():
    with pytest.raises(NotStrided, match=r"steps \[1, 4, 6\] do not divide"):
        join(merged((2, 4), 0, (4, 1), 0, (6, 1)), merged((3, 2), 0, (4, 1), 0, (2, 1)))


class Toy(torch.nn.Module):
    """A model whose loader is `load(params, tensors)`."""

    def __init__(self, load, **shapes):
        super().__init__()
        self.load, self.inner = load, torch.nn.Module()
        for name, shape in shapes.items():
            self.inner.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device="meta")))

    def load_weights(self, weights):
        self.load(dict(self.inner.named_parameters()), dict(weights))


def traced(load, tensors, **shapes):
    return trace(Toy(load, **shapes), tensors, torch.float32)


def test_copies_of_copies_are_followed_to_the_tensors():
    def load(p, t):
        both = torch.cat([t["a"].t().contiguous(), t["b"].to(torch.bfloat16).float()], 1)
        p["w"].data[:, 1:].copy_(both[:, 2:])

    (loaded,) = traced(load, {"a": (3, 2), "b": (2, 4)}, w=(2, 6)).params.values()
    found = {name: {k: v for n, x in loaded.links if n == name for k, v in pairs(x).items()} for name in "ab"}
    assert found == {"a": {1: 4, 7: 5}, "b": {2: 0, 3: 1, 4: 2, 5: 3, 8: 4, 9: 5, 10: 6, 11: 7}}
    assert not loaded.full


@pytest.mark.parametrize(
    "load, why",
    [
        (lambda p, t: p["w"].data.copy_(t["a"] * 2), "aten.mul.Tensor on the way"),
        (lambda p, t: p["w"].data.copy_(t["a"][:1].expand(2, 3)), "elements are repeated"),
        (lambda p, t: p["w"].data.copy_(t["a"]).mul_(2), "aten.mul_.Tensor on the way"),
        (lambda p, t: p["w"].data.copy_(t["a"]).narrow(0, 0, 1).fill_(1), "filled with a number"),
        (lambda p, t: p["w"].data.copy_(t["a"]).narrow(0, 0, 1).zero_(), "filled with a number"),
    ],
)
def test_what_is_not_a_move_is_loaded_whole_with_the_reason(load, why):
    found = traced(load, {"a": (2, 3)}, w=(2, 3))
    assert not found.params and list(found.whole) == ["a"] and why in found.whole["a"] and "inner.w" in found.whole["a"]


def test_zeros_before_and_beside_are_no_elements():
    def load(p, t):
        p["w"].data.zero_()
        p["w"].data[:2].copy_(t["a"])
        p["w"].data[2:].fill_(0)
        p["v"].data.copy_(t["b"].zero_())  # a bias that another worker adds

    found = traced(load, {"a": (2, 3), "b": (3,)}, w=(4, 3), v=(3,))
    assert not found.whole and [x for _, x in found.params["inner.w"].links] == [Link((6,), 0, (1,), 0, (1,))]
    assert found.params["inner.v"].links == []


def test_a_parameter_that_no_tensor_reaches_is_named():
    with pytest.raises(ValueError, match="no tensor reaches the parameters inner.v"):
        traced(lambda p, t: p["w"].data.copy_(t["a"]), {"a": (2,)}, w=(2,), v=(2,))
