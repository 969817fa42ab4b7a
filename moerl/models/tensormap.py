"""The tensor map: which box of which Hugging Face tensor stands where in a Megatron parameter.

A family declares its parameters once as data (`Param` and `Piece`). Loading, export and weight sync read that declaration through
`copies`, the only place where a shard's coordinates are computed, so a wrong map shows in all of them.

A parameter has a *logical* N-D shape chosen so that tensor parallelism cuts it along one dimension (`split`): fused QKV weights are
[groups, (q + 2) * head_dim, hidden] cut along groups, fused gate/up weights [2, ffn, hidden] cut along ffn. Megatron's own local tensor is
the cut array with its leading dimensions merged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from moerl.models.arch import ModelError

Box = tuple[slice, ...]


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(b.stop - b.start for b in box)


def overlap(box: Box, corner: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Box, Box] | None:
    """What `box` and the box of `sizes` at `corner` share: counted from that corner, and from the corner of `box`. None if nothing."""
    common = [(max(b.start, c), min(b.stop, c + n)) for b, c, n in zip(box, corner, sizes)]
    if any(low >= high for low, high in common):
        return None
    inside = tuple(slice(low - c, high - c) for (low, high), c in zip(common, corner))
    return inside, tuple(slice(low - b.start, high - b.start) for (low, high), b in zip(common, box))


@dataclass(frozen=True)
class Piece:
    """A box of one Hugging Face tensor inside a parameter.

    `shape` is the tensor's own. The box begins at `corner` and is `extent` long; left out, it is the whole tensor. `view` are the same
    elements at the parameter's rank, `start` where they begin there. `others` are further spellings of the same elements (same view and
    start): a checkpoint may be read in any of them and is written in this one.
    A tensor that is stored transposed or interleaved has `order`: dimension d of the view is dimension order[d] of the box's elements as
    they are stored.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    start: tuple[int, ...]
    corner: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None
    others: tuple[Piece, ...] = ()
    order: tuple[int, ...] | None = None

    def box(self) -> Box:
        """The elements of the Hugging Face tensor that belong to the piece."""
        extent = self.extent or self.shape
        corner = self.corner or (0,) * len(extent)
        return tuple(slice(c, c + n) for c, n in zip(corner, extent))

    def arrange(self, stored: torch.Tensor) -> torch.Tensor:
        """The box's elements as the view, sharing memory."""
        if self.order is None:
            return stored.view(self.view)
        lengths = dict(zip(self.order, self.view))
        return stored.view([lengths[d] for d in range(len(self.view))]).permute(self.order)


@dataclass(frozen=True)
class Param:
    """One Megatron parameter (or persistent buffer) of the whole model, by its name with global layer and expert numbers.

    `rank` is the number of dimensions Megatron's tensor has; `stage` is the layer number, "first" (embedding) or "last" (final norm, head).
    With `padded` every shard is filled up with zeros to a multiple of that many rows. A `tied` parameter is read but never exported.
    `copied_as` are names under which some checkpoints hold its tensor again: not read, and written anew where they were (`copy_again`).
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    pieces: tuple[Piece, ...]
    rank: int
    stage: int | str
    expert: int | None = None
    padded: int = 0
    tied: bool = False
    copied_as: tuple[str, ...] = ()

    def extent(self, parts: int) -> int:
        """Length of the split dimension on one of `parts` ranks."""
        whole = self.shape[self.split]
        if self.padded:
            return -(-whole // (parts * self.padded)) * self.padded
        if whole % parts:
            raise ModelError(f"{self.name}: dimension {self.split} of {self.shape} is not divisible by {parts}")
        return whole // parts

    def box(self, parts: int) -> tuple[int, ...]:
        """Logical shape of one rank's shard."""
        if self.split is None:
            return self.shape
        return tuple(self.extent(parts) if d == self.split else n for d, n in enumerate(self.shape))

    def part(self, parts: int, index: int) -> Box:
        """Shard `index` of `parts` as elements of the logical array; it reaches beyond its end where the vocabulary is padded."""
        box = [slice(0, n) for n in self.shape]
        if self.split is not None:
            size = self.extent(parts)
            box[self.split] = slice(index * size, (index + 1) * size)
        return tuple(box)

    def local_shape(self, parts: int) -> tuple[int, ...]:
        """Shape of Megatron's tensor on one rank."""
        box = self.box(parts)
        lead = len(box) - self.rank + 1
        return (prod(box[:lead]), *box[lead:])


@dataclass(frozen=True)
class Copy:
    """The elements `source` of `piece` (in its view) are the elements `target` of the shard (in its logical box)."""

    piece: Piece
    source: Box
    target: Box


def copies(param: Param, parts: int, index: int) -> list[Copy]:
    """What shard `index` of `parts` along the parameter's split is made of; elements in no copy are padding (zeros)."""
    return copies_in(param, param.part(parts, index))


def copies_in(param: Param, box: Box) -> list[Copy]:
    """What the elements `box` of the parameter's logical array are made of; targets count from the box's corner."""
    shared = [(piece, overlap(box, piece.start, piece.view)) for piece in param.pieces]
    return [Copy(piece, *found) for piece, found in shared if found]


def hf_shapes(params: Iterable[Param]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of the model."""
    return {p.name: p.shape for param in params if not param.tied for p in param.pieces}


def duplicates(params: Iterable[Param]) -> dict[str, str]:
    """Further names under which a checkpoint may hold a tensor, with the tensor's own."""
    return {copy: param.pieces[0].name for param in params for copy in param.copied_as}


def copy_again(params: Iterable[Param], tensors: dict[str, torch.Tensor], names: Container[str]) -> dict[str, torch.Tensor]:
    """The model's `tensors` and those further copies of them that a checkpoint with tensors `names` holds."""
    return tensors | {copy: tensors[own].clone() for copy, own in duplicates(params).items() if copy in names}


def spelled(params: Mapping[str, Param], names: Container[str]) -> dict[str, Param]:
    """The map in the spelling of a checkpoint that holds tensors `names`; a piece that is there in no spelling keeps its own."""

    def found(piece: Piece) -> Piece:
        return next((p for p in (piece, *piece.others) if p.name in names), piece)

    return {name: replace(param, pieces=tuple(map(found, param.pieces))) for name, param in params.items()}


def partly_used(params: Iterable[Param]) -> dict[str, int]:
    """Hugging Face tensors whose pieces do not add up to all of their elements, with the number of elements that they do add up to."""
    used: dict[str, int] = {}
    params = [p for p in params if not p.tied]
    for piece in (piece for param in params for piece in param.pieces):
        used[piece.name] = used.get(piece.name, 0) + prod(piece.view)
    return {name: used[name] for name, shape in hf_shapes(params).items() if used[name] != prod(shape)}


class Assembler:
    """Puts shards together into whole Hugging Face tensors."""

    def __init__(self, params: Mapping[str, Param]):
        self.params = params
        self.tensors: dict[str, torch.Tensor] = {}
        self.filled: dict[str, int] = {}
        self.taken: set[tuple[str, int]] = set()

    def add(self, name: str, shard: torch.Tensor, parts: int, index: int) -> None:
        """Take one rank's shard of parameter `name` (Megatron's local tensor)."""
        param = self.params[name]
        if param.tied:
            return
        if (name, index) in self.taken:
            raise ModelError(f"{name}: shard {index} of {parts} came twice")
        self.taken.add((name, index))
        if tuple(shard.shape) != param.local_shape(parts):
            raise ModelError(f"{name}: shard {index} of {parts} has shape {tuple(shard.shape)}, the map says {param.local_shape(parts)}")
        box = shard.reshape(param.box(parts))
        for copy in copies(param, parts, index):
            piece = copy.piece
            if piece.name not in self.tensors:
                self.tensors[piece.name] = torch.empty(piece.shape, dtype=shard.dtype)
                self.filled[piece.name] = 0
            source = box[copy.target]
            piece.arrange(self.tensors[piece.name][piece.box()])[copy.source].copy_(source)
            self.filled[piece.name] += source.numel()

    def finish(self) -> dict[str, torch.Tensor]:
        """All tensors; an error naming the first ones that did not get as many elements as they have."""
        wrong = [
            f"{name}: {self.filled.get(name, 0)} of {prod(shape)} elements"
            for name, shape in hf_shapes(self.params.values()).items()
            if self.filled.get(name, 0) != prod(shape)
        ]
        if wrong:
            raise ModelError(f"{len(wrong)} tensors are not covered exactly once: " + "; ".join(wrong[:5]))
        return self.tensors


def assemble(params: Mapping[str, Param], ranks: Iterable[Iterable[tuple[str, torch.Tensor, int, int]]]) -> dict[str, torch.Tensor]:
    """Whole Hugging Face tensors from the shards (name, tensor, parts, index) of all ranks."""
    whole = Assembler(params)
    for shards in ranks:
        for shard in shards:
            whole.add(*shard)
    return whole.finish()
