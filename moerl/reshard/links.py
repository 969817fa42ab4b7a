"""Links: which elements of one memory are which elements of another, as strided boxes.

A memory is a flat array of elements: a Hugging Face tensor, a Megatron shard, a vLLM parameter. A loader that cuts, transposes, interleaves
and copies makes links between two of them; `join` follows two links that share a memory. Both the provenance of vLLM's parameters and the
plan between two layouts are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

import torch


class NotStrided(ValueError):
    """Two boxes whose strides have no common refinement: the elements they share are no union of few strided boxes."""


@dataclass(frozen=True, slots=True)
class Link:
    """Elements `left + sum(i_d * left_strides[d])` of one memory are elements `right + sum(i_d * right_strides[d])` of another.

    i_d runs over `sizes[d]`. Offsets and strides count elements from the start of the memory.
    """

    sizes: tuple[int, ...]
    left: int
    left_strides: tuple[int, ...]
    right: int
    right_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.sizes)

    def flipped(self) -> Link:
        return Link(self.sizes, self.right, self.right_strides, self.left, self.left_strides)

    def split(self, most: int) -> list[Link]:
        """The same elements in links of at most `most` elements, cut along the longest run of whole outer indices. One row may exceed
        it.
        """
        if self.count <= most or not self.sizes:
            return [self]
        rows = max(1, most * self.sizes[0] // self.count)
        if rows == 1 and self.count // self.sizes[0] > most:
            return [piece for i in range(self.sizes[0]) for piece in self._inner(i).split(most)]
        return [self._rows(i, min(rows, self.sizes[0] - i)) for i in range(0, self.sizes[0], rows)]

    def _rows(self, start: int, count: int) -> Link:
        left, right = self.left + start * self.left_strides[0], self.right + start * self.right_strides[0]
        return Link((count, *self.sizes[1:]), left, self.left_strides, right, self.right_strides)

    def _inner(self, index: int) -> Link:
        row = self._rows(index, 1)
        return Link(row.sizes[1:], row.left, row.left_strides[1:], row.right, row.right_strides[1:])


def link(left: torch.Tensor, right: torch.Tensor) -> Link:
    """The link between two views of one shape; only their offsets and strides are looked at."""
    if left.shape != right.shape:
        raise ValueError(f"views of shapes {tuple(left.shape)} and {tuple(right.shape)} are not linked element by element")
    return merged(tuple(left.shape), left.storage_offset(), left.stride(), right.storage_offset(), right.stride())


def merged(sizes: tuple[int, ...], left: int, left_strides: tuple[int, ...], right: int, right_strides: tuple[int, ...]) -> Link:
    """A link with as few dimensions as can be, those with long steps on the right first."""
    dims = sorted(((r, l, n) for n, l, r in zip(sizes, left_strides, right_strides) if n != 1), reverse=True)
    kept: list[tuple[int, int, int]] = []
    for r, l, n in dims:
        if kept and kept[-1][0] == n * r and kept[-1][1] == n * l:
            kept[-1] = (r, l, n * kept[-1][2])
        else:
            kept.append((r, l, n))
    return Link(tuple(n for *_, n in kept), left, tuple(l for _, l, _ in kept), right, tuple(r for r, *_ in kept))


# One digit of an index: `count` values from `start` on, and how far a step of one moves in the other memory.
Digit = tuple[int, int, int]


def join(a: Link, b: Link) -> list[Link]:
    """Links from a's left memory to b's right one by way of the elements that a's right and b's left have in common.

    Both are written in one mixed-radix system whose bases are their steps in the shared memory; there each is a box (or a few), and boxes
    meet digit by digit. NotStrided when the steps do not divide one another.
    """
    flat = _runs(a, b)
    if flat is not None:
        return flat
    bases = sorted({1, *(s for s, n in zip(a.right_strides, a.sizes) if n > 1), *(s for s, n in zip(b.left_strides, b.sizes) if n > 1)})
    if any(high % low for low, high in zip(bases, bases[1:])) or bases[0] < 1:
        raise NotStrided(f"steps {bases} do not divide one another")
    found = []
    for (left, mine), (right, other) in product(_boxes(a.flipped(), bases), _boxes(b, bases)):
        dims = []
        for (start, count, step), (start_b, count_b, step_b) in zip(mine, other):
            low, high = max(start, start_b), min(start + count, start_b + count_b)
            if low >= high:
                break
            left, right = left + (low - start) * step, right + (low - start_b) * step_b
            dims.append((high - low, step, step_b))
        else:
            dims.reverse()
            found.append(merged(tuple(d[0] for d in dims), left, tuple(d[1] for d in dims), right, tuple(d[2] for d in dims)))
    return found


def _runs(a: Link, b: Link) -> list[Link] | None:
    """`join` of two unbroken runs of the shared memory, the most frequent case."""
    if len(a.sizes) != 1 or len(b.sizes) != 1 or a.right_strides[0] != 1 or b.left_strides[0] != 1:
        return None
    low, high = max(a.right, b.left), min(a.right + a.sizes[0], b.left + b.sizes[0])
    if low >= high:
        return []
    left, right = a.left + (low - a.right) * a.left_strides[0], b.right + (low - b.left) * b.right_strides[0]
    return [Link((high - low,), left, a.left_strides, right, b.right_strides)]


def _boxes(link: Link, bases: list[int]) -> list[tuple[int, list[Digit]]]:
    """The left side of `link` as boxes of digits, lowest base first, each with its offset in the right memory."""
    radix = [high // low for low, high in zip(bases, bases[1:])] + [0]  # the highest digit is unbounded
    digits, rest = [], link.left
    for base in reversed(bases):
        digits.append((rest // base, 1, 0))
        rest %= base
    boxes = [(link.right, digits[::-1])]
    dims = sorted(zip(link.left_strides, link.sizes, link.right_strides), reverse=True)
    for base, count, step in dims:
        if count > 1:
            place = bases.index(base)
            boxes = [box for offset, digits in boxes for box in _widen(offset, digits, place, count, step, radix)]
    return boxes


def _widen(offset: int, digits: list[Digit], place: int, count: int, step: int, radix: list[int]) -> list[tuple[int, list[Digit]]]:
    """Let digit `place` run over `count` values; what goes beyond its radix is carried into the next one, in at most three boxes."""
    start, taken, _ = digits[place]
    if taken != 1:
        raise NotStrided("two dimensions step through one digit")
    size = radix[place]
    if not size or start + count <= size:
        return [(offset, [*digits[:place], (start, count, step), *digits[place + 1 :]])]
    found, at = [], 0
    while at < count:  # up to a border, whole digits, the rest
        low = (start + at) % size
        whole = (count - at) // size if low == 0 else 0
        length = whole * size or min(size - low, count - at)
        upper, one, _ = digits[place + 1]
        if one != 1:
            raise NotStrided("a run is carried into a digit that another dimension steps through")
        head = [*digits[:place], (low, size if whole else length, step), (upper + (start + at) // size, 1, 0), *digits[place + 2 :]]
        box = (offset + at * step, head)
        found += _widen(*box, place + 1, whole, size * step, radix) if whole > 1 else [box]
        at += length
    return found


def covered(links: Iterable[Link]) -> int:
    """Elements of the left memory that links reach, if none is reached twice."""
    return sum(link.count for link in links)
