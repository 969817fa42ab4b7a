"""Parameters cut into boxes small enough to hold in memory, and where a box lies in a Hugging Face tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from moerl.models.tensormap import Box, Param, Piece

CHUNK = 2**26  # bytes of a box, at most; the same for all budgets, so that they do not show in the result


def cut(param: Param, shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> Iterator[Box]:
    """Boxes of at most CHUNK bytes that are one run of elements each, in order. Longer cuts are multiples of `multiple` rows.

    `shape` is the parameter's, with or without padding. One whose tensors are stored in another order is a box as a whole.
    """
    if any(piece.order for piece in param.pieces):
        yield tuple(slice(0, n) for n in shape)
    else:
        yield from _cut((), shape, itemsize, multiple)


def _cut(before: Box, rest: tuple[int, ...], itemsize: int, multiple: int) -> Iterator[Box]:
    size = prod(rest) * itemsize
    if size <= CHUNK or not rest:
        yield (*before, *(slice(0, n) for n in rest))
        return
    each = size // rest[0]
    count = max(1, CHUNK // each)
    if count >= multiple:
        count -= count % multiple
    for low in range(0, rest[0], count):
        if each > CHUNK:
            yield from _cut((*before, slice(low, low + 1)), rest[1:], itemsize, multiple)
        else:
            yield (*before, slice(low, min(low + count, rest[0])), *(slice(0, n) for n in rest[1:]))


def in_tensor(piece: Piece, source: Box) -> int:
    """Number of the element of the Hugging Face tensor where the elements `source` of the piece's view, one run of them, begin."""
    inside = sum(s.start * prod(piece.view[d + 1 :]) for d, s in enumerate(source))
    return inside + sum(b.start * prod(piece.shape[d + 1 :]) for d, b in enumerate(piece.box()))


def is_run(shape: tuple[int, ...], box: Box) -> bool:
    """Whether the elements of `box` of an array [shape] lie one after the other."""
    cutting = [d for d, b in enumerate(box) if b.stop - b.start != shape[d]]
    return not cutting or all(b.stop - b.start == 1 for b in box[: cutting[-1]])


def in_float32(param: Param, dtype: torch.dtype) -> bool:
    """Whether a cast leaves the parameter alone: a router's selection bias in float32 is a sum of many small steps."""
    return dtype == torch.float32 and param.name.endswith("expert_bias")
