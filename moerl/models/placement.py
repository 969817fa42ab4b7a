"""Which parts of which parameters every rank holds, from the tensor map and the layout alone: no process, no Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moerl.layout import ParallelLayout
from moerl.models.arch import Arch, ModelError
from moerl.models.tensormap import Param


class Held(NamedTuple):
    """Part `index` of `parts` of a parameter along its split dimension. Of all ranks that hold it one is the `owner`."""

    param: Param
    parts: int
    index: int
    owner: bool


def part(param: Param, layout: ParallelLayout, rank: int) -> Held:
    """The part of `param` that `rank` holds, if it is one of the ranks that hold any."""
    at = layout.coords(rank)
    if param.expert is not None:
        parts, index, replica = layout.etp, at.etp, at.edp
    else:
        parts, index, replica = layout.tp, at.tp, at.dp + at.cp
    if param.split is None:
        return Held(param, 1, 0, replica == 0 and index == 0)
    return Held(param, parts, index, replica == 0)


def held(params: Mapping[str, Param], arch: Arch, layout: ParallelLayout, rank: int) -> Iterator[Held]:
    """What `rank` holds of the model: layers by pipeline stage, experts by expert-parallel rank, parts by tensor-parallel rank.

    A tied output layer is a parameter of its own only where the last stage is not the first.
    """
    at = layout.coords(rank)
    each = arch.experts // layout.ep
    for param in params.values():
        if param.tied and layout.pp == 1 or param.expert is not None and param.expert // each != at.ep:
            continue
        if _stage(param, arch, layout) == at.pp:
            yield part(param, layout, rank)


def _stage(param: Param, arch: Arch, layout: ParallelLayout) -> int:
    if isinstance(param.stage, int):
        return layout.locate_layer(arch.layers, param.stage)[0]
    if param.stage not in ("first", "last"):
        raise ModelError(f"{param.name}: stage {param.stage!r} is neither a layer nor first or last")
    return 0 if param.stage == "first" else layout.pp - 1
