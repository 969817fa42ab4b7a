"""The training side of a plan: which ranks hold which elements of which Hugging Face tensor, from the tensor map and the layout alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from moerl.layout import ParallelLayout
from moerl.models.arch import Arch
from moerl.models.tensormap import Param, copies
from moerl.reshard.links import Link, link
from moerl.reshard.names import renumbered

FIRST, LAST = -1, -2  # the parts outside the decoder layers, as layer numbers

# Who holds a part: (expert-parallel rank, expert-tensor rank, tensor rank), None where any does.
Holder = tuple[int | None, int | None, int | None]


def layer_of(param: Param) -> int:
    return {"first": FIRST, "last": LAST}.get(param.stage, param.stage)


@dataclass(frozen=True)
class Source:
    """Elements of a Hugging Face tensor in part `index` of a Megatron parameter: `link` leads from the tensor to that part's memory."""

    param: str
    index: int
    holder: Holder
    link: Link


def sources(param: Param, arch: Arch, layout: ParallelLayout) -> Iterator[tuple[str, Source]]:
    """Every tensor and part of a parameter, in the spelling that is exported."""
    parts = 1 if param.split is None else layout.tp if param.expert is None else layout.etp
    ep = None if param.expert is None else param.expert // (arch.experts // layout.ep)
    for index in range(parts):
        at = None if param.split is None else index
        holder = (None, None, at) if param.expert is None else (ep, at, None)
        local = torch.empty(param.box(parts), device="meta")
        for copy in copies(param, parts, index):
            whole = torch.empty(copy.piece.shape, device="meta")
            view = copy.piece.arrange(whole[copy.piece.box()])[copy.source]
            yield copy.piece.name, Source(param.name, index, holder, link(view, local[copy.target]))


@dataclass(frozen=True)
class Kind:
    """Layers that differ only in their number; `example` is the first of them."""

    example: int
    layers: tuple[int, ...]
    params: tuple[Param, ...]  # the example's


def kinds(params: Mapping[str, Param], *, tied: bool = False) -> list[Kind]:
    """The kinds of layers of a model, and what is outside of them. A `tied` parameter is a second copy, and no source of its own."""
    layers: dict[int, list[Param]] = {}
    for param in params.values():
        if tied or not param.tied:
            layers.setdefault(layer_of(param), []).append(param)
    found: dict[tuple, list[int]] = {}
    for number, own in layers.items():
        found.setdefault(tuple(_signature(p) for p in own), []).append(number)
    return [Kind(numbers[0], tuple(numbers), tuple(layers[numbers[0]])) for numbers in found.values()]


def _signature(param: Param) -> tuple:
    pieces = tuple((renumbered(p.name, 0), p.shape, p.view, p.start, p.corner, p.extent, p.order) for p in param.pieces)
    return renumbered(param.name, 0), param.shape, param.split, param.expert, param.padded, param.rank, pieces


def cut_layers(params: Mapping[str, Param]) -> int:
    """The fewest decoder layers, counted from the first, among which every kind of layer is."""
    return max(kind.example for kind in kinds(params)) + 1


@dataclass(frozen=True)
class Ranks:
    """The ranks of a layout by what they hold."""

    arch: Arch
    layout: ParallelLayout

    @cached_property
    def _coords(self) -> dict[str, np.ndarray]:
        coords = [self.layout.coords(rank) for rank in range(self.layout.world)]
        return {axis: np.array([getattr(c, axis) for c in coords]) for axis in ("pp", "tp", "ep", "etp")}

    def holding(self, layer: int, holder: Holder) -> list[int]:
        """All ranks that hold a part of that layer: replicas of one another."""
        if layer in (FIRST, LAST):
            stage = 0 if layer == FIRST else self.layout.pp - 1
        else:
            stage = self.layout.locate_layer(self.arch.layers, layer)[0]
        chosen = self._coords["pp"] == stage
        for axis, at in zip(("ep", "etp", "tp"), holder):
            if at is not None:
                chosen = chosen & (self._coords[axis] == at)
        return np.flatnonzero(chosen).tolist()
