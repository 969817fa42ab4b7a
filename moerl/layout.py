"""One parallel layout: its ranks, process groups, pipeline stages and divisibility rules.

Nothing else in the project computes a rank. The order is Megatron-core's "tp-cp-ep-dp-pp", innermost first. The ranks
of one pipeline stage are laid out twice: attention and dense layers over (tp, cp, dp), experts over (etp, ep, edp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
ATTENTION_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")

# kind of group -> (axes the ranks are laid out over, axes that vary inside one group)
_GROUPS = {
    "tp": (ATTENTION_AXES, ("tp",)),
    "cp": (ATTENTION_AXES, ("cp",)),
    "dp": (ATTENTION_AXES, ("dp",)),
    "dp_cp": (ATTENTION_AXES, ("dp", "cp")),
    "pp": (ATTENTION_AXES, ("pp",)),
    "mp": (ATTENTION_AXES, ("tp", "pp")),
    "etp": (EXPERT_AXES, ("etp",)),
    "ep": (EXPERT_AXES, ("ep",)),
    "edp": (EXPERT_AXES, ("edp",)),
    "etp_ep": (EXPERT_AXES, ("etp", "ep")),
    "embedding": (ATTENTION_AXES, ("pp",)),  # only the two ends of each pipeline
}
GROUP_KINDS = tuple(_GROUPS)


# Megatron's own padding of the vocabulary, in rows a rank: tables then fill whole blocks of its gradient buffers, which are 128 long.
VOCAB_MULTIPLE = 128


class LayoutError(ValueError):
    """A layout, or a model under it, breaks a rule; one line for each broken rule."""


class Coords(NamedTuple):
    """Where one rank stands on every axis, attention and expert side."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class ModelDims:
    """The model sizes that layout rules are checked against; a width is 0 where the model has no such part."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of tensor (tp), pipeline (pp; vpp chunks a stage), expert (ep, etp), context (cp), data (dp) parallelism.

    first_stage_layers and last_stage_layers set the decoder layers of the first and last pipeline stage (all its chunks
    together); the other stages share the rest evenly. Building a layout checks nothing: call `check`.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard. LayoutError when etp*ep does not divide the ranks of a stage."""
        if faults := self._expert_faults():
            raise LayoutError(faults[0])
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def sequence_parallel(self) -> bool:
        """Activations outside tensor-parallel layers are split over the sequence whenever tp > 1."""
        return self.tp > 1

    def with_world(self, world: int) -> ParallelLayout:
        """The same layout with dp filled in so that it covers `world` ranks; LayoutError when none does."""
        if faults := self._axis_faults() or self._world_faults(world):
            raise LayoutError(faults[0])
        return replace(self, dp=world // (self.tp * self.cp * self.pp))

    def coords(self, rank: int) -> Coords:
        """Position of a global rank on every axis."""
        self._check_rank(rank)
        return Coords(**self._positions(rank, ATTENTION_AXES), **self._positions(rank, EXPERT_AXES[:-1]))

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank at an attention-side position."""
        return self._rank_at({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def expert_rank_of(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """Global rank at an expert-side position."""
        return self._rank_at({"etp": etp, "ep": ep, "edp": edp, "pp": pp})

    def groups(self, kind: str) -> list[list[int]]:
        """All process groups of one of GROUP_KINDS, members ascending, in the order Megatron-core creates them."""
        axes, inside = self._group_axes(kind)
        positions = (self._positions(rank, axes) for rank in range(self.world))
        leaders = [rank for rank, at in enumerate(positions) if not any(at[axis] for axis in inside)]
        return [self.group_of(kind, rank) for rank in leaders]

    def group_of(self, kind: str, rank: int) -> list[int]:
        """The group of this kind that holds the rank.

        LayoutError when none does: "embedding" is the first and last stage of each pipeline, and leaves out the middle.
        """
        self._check_rank(rank)
        axes, inside = self._group_axes(kind)
        at = self._positions(rank, axes)
        spans = [range(getattr(self, axis)) if axis in inside else (at[axis],) for axis in axes]
        ranks = sorted(self._rank_at(dict(zip(axes, spot))) for spot in product(*spans))
        if kind == "embedding":
            ranks = sorted({ranks[0], ranks[-1]})
            if rank not in ranks:
                raise LayoutError(f"rank {rank} is in no embedding group (middle stage {at['pp']} of pp {self.pp})")
        return ranks

    def _group_axes(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if kind not in _GROUPS:
            raise LayoutError(f"group kind {kind!r} is not one of {', '.join(GROUP_KINDS)}")
        return _GROUPS[kind]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside the world of {self.world} ranks")

    def _positions(self, rank: int, axes: tuple[str, ...]) -> dict[str, int]:
        at: dict[str, int] = {}
        for axis in axes:
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return at

    def _rank_at(self, at: dict[str, int]) -> int:
        rank, stride = 0, 1
        for axis, position in at.items():
            size = getattr(self, axis)
            if not 0 <= position < size:
                raise LayoutError(f"{axis} rank {position} is outside {axis} {size}")
            rank, stride = rank + position * stride, stride * size
        return rank

    # ---- pipeline stages

    def stage_layers(self, layers: int, pp_rank: int, vp: int = 0) -> range:
        """Global indices of the decoder layers in chunk `vp` of stage `pp_rank` of a model of `layers` layers.

        Chunks interleave: the model is vpp consecutive blocks, and each block runs once through all the stages.
        """
        if not (0 <= pp_rank < self.pp and 0 <= vp < self.vpp):
            raise LayoutError(f"stage {pp_rank} chunk {vp} is outside pp {self.pp} vpp {self.vpp}")
        chunks = [size // self.vpp for size in self._stage_sizes(layers)]
        start = vp * sum(chunks) + sum(chunks[:pp_rank])
        return range(start, start + chunks[pp_rank])

    def locate_layer(self, layers: int, layer: int) -> tuple[int, int, int]:
        """(pp rank, chunk, index inside the chunk) of a global decoder layer index."""
        if not 0 <= layer < layers:
            raise LayoutError(f"layer {layer} is outside a model of {layers} layers")
        chunks = [size // self.vpp for size in self._stage_sizes(layers)]
        vp, index = divmod(layer, sum(chunks))
        pp_rank = 0
        while index >= chunks[pp_rank]:
            index -= chunks[pp_rank]
            pp_rank += 1
        return pp_rank, vp, index

    def is_first(self, pp_rank: int, vp: int = 0) -> bool:
        """Whether this chunk holds the embedding."""
        return pp_rank == 0 and vp == 0

    def is_last(self, pp_rank: int, vp: int = 0) -> bool:
        """Whether this chunk holds the output head."""
        return pp_rank == self.pp - 1 and vp == self.vpp - 1

    def _stage_sizes(self, layers: int) -> list[int]:
        """Decoder layers of every stage, all chunks together."""
        if faults := self._layer_faults(layers):
            raise LayoutError("\n".join(faults))
        given, first, last = self._given_stages(), self.first_stage_layers, self.last_stage_layers
        each = (layers - sum(given.values())) // max(1, self.pp - len(given))
        return [first or each, *[each] * (self.pp - 2), last or each][: self.pp]

    # ---- rules

    def padded_vocab(self, vocab: int) -> int:
        """Rows of the embedding and the head: the smallest multiple of VOCAB_MULTIPLE x tp at or above `vocab`."""
        return -(-vocab // (self.tp * VOCAB_MULTIPLE)) * self.tp * VOCAB_MULTIPLE

    def check(self, dims: ModelDims, world: int | None = None) -> None:
        """LayoutError with a line for each rule this layout breaks for the model and, if given, the world size."""
        faults = self._size_faults(dims)
        if not faults:  # the other rules divide by these sizes
            faults = self._world_faults(world, fixed_dp=True) if world is not None else []
            faults += self._expert_faults() + self._split_faults(dims) + self._layer_faults(dims.layers)
        if faults:
            raise LayoutError("\n".join(faults))

    def describe(self) -> str:
        """Short text such as "TP2 PP2 EP2 DP1 (world 4)"; axes other than TP, PP and DP only where above 1."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        shown = [f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1 or axis in ("tp", "pp", "dp")]
        uneven = [f"{name} {size}" for name, size in self._given_stages().items()]
        return f"{' '.join(shown)} ({', '.join([f'world {self.world}', *uneven])})"

    def _given_stages(self) -> dict[str, int]:
        given = {"first_stage_layers": self.first_stage_layers, "last_stage_layers": self.last_stage_layers}
        return {name: size for name, size in given.items() if size is not None}

    def _size_faults(self, dims: ModelDims) -> list[str]:
        least = {"ffn": 0, "experts": 0, "expert_ffn": 0, "shared_expert_ffn": 0}  # a model may have none of these
        dim_sizes = ((name, size, least.get(name, 1)) for name, size in vars(dims).items())
        return self._axis_faults() + [f"{name} {size} is below {low}" for name, size, low in dim_sizes if size < low]

    def _axis_faults(self) -> list[str]:
        return [f"{axis} {getattr(self, axis)} is below 1" for axis in AXES if getattr(self, axis) < 1]

    def _world_faults(self, world: int, fixed_dp: bool = False) -> list[str]:
        model = self.tp * self.cp * self.pp
        if world < 1 or world % model:
            return [f"world {world} is not a multiple of tp {self.tp} * cp {self.cp} * pp {self.pp} = {model}"]
        if fixed_dp and world != self.world:
            return [f"world {world} is not tp {self.tp} * cp {self.cp} * dp {self.dp} * pp {self.pp} = {self.world}"]
        return []

    def _expert_faults(self) -> list[str]:
        stage, shards = self.tp * self.cp * self.dp, self.etp * self.ep
        over, under = f"tp {self.tp} * cp {self.cp} * dp {self.dp} =", f"etp {self.etp} * ep {self.ep} ="
        return _divides(over, stage, under, shards, "expert ranks fold over the ranks of one pipeline stage")

    def _split_faults(self, dims: ModelDims) -> list[str]:
        tp, etp, ep = self.tp, self.etp, self.ep
        over_tp = "are split over tensor-parallel ranks"
        faults = [
            *_divides("heads", dims.heads, "tp", tp, f"attention heads {over_tp}"),
            *_divides("kv_heads", dims.kv_heads, "tp", tp, f"key-value heads {over_tp}"),
            *_divides("ffn", dims.ffn, "tp", tp, f"dense MLP columns {over_tp}"),
            *_divides("shared_expert_ffn", dims.shared_expert_ffn, "tp", tp, f"shared-expert columns {over_tp}"),
            *_divides("expert_ffn", dims.expert_ffn, "etp", etp, "expert columns are split over expert-tensor ranks"),
            *_divides("experts", dims.experts, "ep", ep, "every expert-parallel rank holds the same number of experts"),
        ]
        if ep > 1 and not dims.experts:
            faults.append(f"ep {ep} needs experts, and the model has {dims.experts}")
        return faults

    def _layer_faults(self, layers: int) -> list[str]:
        faults = [f"vpp {self.vpp} needs pp above 1, and pp is 1"] if self.vpp > 1 and self.pp == 1 else []
        if given := self._given_stages():
            return faults + self._uneven_faults(layers, given)
        chunks, why = self.pp * self.vpp, "every pipeline chunk holds the same number of layers"
        return faults + _divides("layers", layers, f"pp {self.pp} * vpp {self.vpp} =", chunks, why)

    def _uneven_faults(self, layers: int, given: dict[str, int]) -> list[str]:
        if self.pp == 1:  # Megatron-core would build only the layers named here
            return [f"{name} {size} needs pp above 1, and pp is 1" for name, size in given.items()]
        if faults := [f"{name} {size} is below 1 (no stage may be empty)" for name, size in given.items() if size < 1]:
            return faults
        why = "every chunk of a stage holds the same number of layers"
        faults = [line for name, size in given.items() for line in _divides(name, size, "vpp", self.vpp, why)]
        rest, stages = layers - sum(given.values()), self.pp - len(given)
        sizes = " + ".join(f"{name} {size}" for name, size in given.items())
        if stages == 0 and rest != 0:
            faults.append(f"{sizes} = {layers - rest} is not layers {layers} (pp {self.pp} has no other stage)")
        elif stages == 0 and self.vpp > 1:
            faults.append(f"{sizes} with pp 2 and vpp {self.vpp}: give only one (Megatron-core divides by zero)")
        elif rest < stages:
            faults.append(f"layers {layers} less {sizes} leaves {rest} for {stages} stages (no stage may be empty)")
        elif stages:
            over, under = f"layers {layers} less {sizes} =", f"{stages} stages * vpp {self.vpp} ="
            faults += _divides(over, rest, under, stages * self.vpp, "the other stages share the rest evenly")
        return faults


def _divides(name: str, size: int, by_name: str, by: int, why: str) -> list[str]:
    return [f"{name} {size} is not divisible by {by_name} {by} ({why})"] if size % by else []
