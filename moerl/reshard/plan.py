"""The plan of a weight sync: which rank sends which elements to which worker, when, and on which way. Pure data, computed once.

Every element that a worker needs is delivered exactly once. Elements that one rank holds and the same workers need travel together, in
chunks; the layers of one kind share their chunks. A row of the plan is the delivery of one chunk of one layer to one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np
import torch

from moerl.layout import ParallelLayout
from moerl.models.arch import Arch, ModelError
from moerl.models.tensormap import Param, hf_shapes
from moerl.reshard.links import Link, join
from moerl.reshard.schedule import rounds
from moerl.reshard.sources import Kind, Ranks, Source, kinds, sources
from moerl.reshard.trace import Trace

WHOLE = "whole:"  # before the name of a tensor that a worker's own loader gets whole
CHUNKS = 8  # chunks that fill a buffer: a worker hears several ranks in one round
GPU, NODE, NETWORK = 0, 1, 2  # how far apart two places are


@dataclass(frozen=True)
class Move:
    """Elements of one part of a Megatron parameter that go to one place in a worker's parameter: `link` leads from there to here."""

    target: str
    param: str
    index: int
    link: Link


@dataclass(frozen=True)
class Chunk:
    """What one rank that is `holder` sends at once of a layer of kind `kind`: the same elements to all `workers` (ranks in an engine)."""

    kind: int
    holder: tuple
    nbytes: int
    dtype: str  # on the way: the narrower of both ends'
    moves: dict[int, tuple[Move, ...]]  # by worker, in the order on the way


@dataclass(frozen=True)
class Place:
    """Where the processes are: node and GPU of every rank, and of every worker, engine after engine."""

    ranks: Sequence[tuple[int, int]]
    workers: Sequence[tuple[int, int]]

    def apart(self, rank: int, worker: int) -> int:
        a, b = self.ranks[rank], self.workers[worker]
        return GPU if a == b else NODE if a[0] == b[0] else NETWORK


@dataclass(frozen=True)
class Plan:
    """Rows as columns: chunk, layer, source, target, relayed, round.

    A target is a worker's number over all engines. A source is a rank, or, where `relayed`, a worker of the target's node that got the
    chunk one round earlier. `round` is -1 where the target reads the source's memory itself.
    """

    chunks: tuple[Chunk, ...]
    layers: dict[int, tuple[int, ...]]  # by kind
    chunk: np.ndarray
    layer: np.ndarray
    source: np.ndarray
    target: np.ndarray
    relayed: np.ndarray
    round: np.ndarray
    place: Place
    tp: int
    cap: int
    needed: int  # bytes of all that the workers load, each element once a worker

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of every row."""
        return np.array([c.nbytes for c in self.chunks], dtype=np.int64)[self.chunk]

    @property
    def apart(self) -> np.ndarray:
        """GPU, NODE or NETWORK for every row."""
        ranks, workers = np.array(self.place.ranks), np.array(self.place.workers)
        as_worker, as_rank = (ends[np.minimum(self.source, len(ends) - 1)] for ends in (workers, ranks))
        source = np.where(self.relayed[:, None], as_worker, as_rank)
        target = workers[self.target]
        return np.where((source == target).all(1), GPU, np.where(source[:, 0] == target[:, 0], NODE, NETWORK))

    @property
    def rounds(self) -> int:
        return int(self.round.max(initial=-1)) + 1

    def rows(self, *, rank: int | None = None, worker: int | None = None) -> Plan:
        """The plan with only the rows in which a rank or a worker takes part."""
        if rank is not None:
            own = ~self.relayed & (self.source == rank)
        else:
            own = (self.target == worker) | self.relayed & (self.source == worker)
        columns = {n: getattr(self, n)[own] for n in ("chunk", "layer", "source", "target", "relayed", "round")}
        used, columns["chunk"] = np.unique(columns["chunk"], return_inverse=True)
        chunks = [self.chunks[i] for i in used]
        if worker is not None:
            chunks = [replace(c, moves={w: m for w, m in c.moves.items() if w == worker % self.tp}) for c in chunks]
        return replace(self, chunks=tuple(chunks), **columns)


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def plan(
    arch: Arch, params: Mapping[str, Param], layout: ParallelLayout, traces: Sequence[Trace], place: Place, *, cap: int, dtype: str,
    mapped: bool,
) -> Plan:
    """Plan the way of `params` from a training layout into engines whose workers load what `traces` say, one trace a worker of an engine.

    `cap` bounds the bytes that a process has in a buffer in one round; `dtype` is that of the training weights. With `mapped`, workers
    read the memory of ranks of their node themselves. ModelError where an element that a worker needs is nowhere, or a tensor is what no
    worker loads.
    """
    tp, found = len(traces), kinds(params)
    _check_loaded(found, traces, dtype)
    chunks = [c for i, kind in enumerate(found) for c in _chunks(i, kind, arch, layout, traces, cap // CHUNKS, dtype)]
    columns = _sourced(chunks, found, Ranks(arch, layout), place, tp)
    layers = {i: kind.layers for i, kind in enumerate(found)}
    need = len(place.workers) // tp * sum(_bytes(kind, trace, dtype) * len(kind.layers) for kind in found for trace in traces)
    made = Plan(
        tuple(chunks), layers, **columns, round=np.full(len(columns["chunk"]), -1), place=place, tp=tp, cap=cap, needed=need
    )
    sent = np.flatnonzero(made.relayed | (made.apart == NETWORK)) if mapped else np.arange(len(made.chunk))
    made.round[sent] = rounds(made, sent)
    return made


def _check_loaded(found: Sequence[Kind], traces: Sequence[Trace], dtype: str) -> None:
    for kind in found:
        loaded = {tensor for trace in traces for _, _, tensor, _ in needed(kind, trace, dtype)}
        if left := [tensor for tensor in hf_shapes(kind.params) if tensor not in loaded]:
            raise ModelError(f"{left[0]}: no rollout worker loads it; is `architectures` in config.json that of a causal language model?")


def needed(kind: Kind, trace: Trace, dtype: str) -> list[tuple[str, str, str, Link]]:
    """(parameter, its dtype, tensor, link) of all that a worker loads of the tensors of a kind's example layer."""
    shapes = hf_shapes(kind.params)
    links = [(name, p.dtype, tensor, x) for name, p in trace.params.items() for tensor, x in p.links if tensor in shapes]
    for tensor in trace.whole:
        if tensor in shapes:
            links.append((WHOLE + tensor, dtype, tensor, Link((prod(shapes[tensor]),), 0, (1,), 0, (1,))))
    return links


def _bytes(kind: Kind, trace: Trace, dtype: str) -> int:
    """Bytes that a worker needs of one layer of a kind, in the narrower of both ends' types."""
    kept = {piece.name: _kept(param.name, dtype) for param in kind.params for piece in param.pieces}
    return sum(x.count * min(itemsize(wide), itemsize(kept[tensor])) for _, wide, tensor, x in needed(kind, trace, dtype))


def _chunks(number: int, kind: Kind, arch: Arch, layout: ParallelLayout, traces: Sequence[Trace], most: int, dtype: str) -> list[Chunk]:
    """Chunks of one kind: for every holder, what exactly the same workers need of it, in the order of its parameters."""
    held: dict[str, list[Source]] = {}
    for param in kind.params:
        for tensor, source in sources(param, arch, layout):
            held.setdefault(tensor, []).append(source)
    wanted: dict[tuple, dict[int, Move]] = {}  # the same elements of the same part, by worker
    for worker, trace in enumerate(traces):
        for target, wide, tensor, need in needed(kind, trace, dtype):
            moves = [(s, x) for s in held[tensor] for x in join(need, s.link)]
            if sum(x.count for _, x in moves) != need.count:
                held_by = sum(x.count for _, x in moves)
                raise ModelError(f"{tensor}: {held_by} of the {need.count} elements that {target} needs have a holder")
            for s, x in moves:
                wire = min(wide, _kept(s.param, dtype), key=itemsize)
                key = (s.holder, s.param, s.index, x.right, x.right_strides, x.sizes, wire)
                while worker in wanted.setdefault(key, {}):  # one element in two places
                    key = (*key, 1)
                wanted[key][worker] = Move(target, s.param, s.index, x)
    order = {param.name: i for i, param in enumerate(kind.params)}
    units = sorted(wanted, key=lambda k: (str(k[0]), tuple(wanted[k]), k[6], order[k[1]], k[2:5]))
    found = []
    for (holder, workers, dtype), keys in groupby(units, key=lambda k: (k[0], tuple(wanted[k]), k[6])):
        split = [{w: wanted[key][w] for w in workers} for key in keys]
        found += [Chunk(number, holder, n, dtype, moves) for n, moves in _packed(split, most, itemsize(dtype))]
    return found


def _kept(param: str, dtype: str) -> str:
    """The dtype a rank has a parameter in: Megatron-core keeps a router's bias in float32."""
    return "float32" if param.endswith(".expert_bias") else dtype


def _packed(units: list[dict[int, Move]], most: int, size: int) -> list[tuple[int, dict[int, tuple[Move, ...]]]]:
    """Units of elements of `size` bytes in chunks of at most `most` bytes; one that is larger is cut."""
    pieces = []
    for unit in units:
        cut = {w: m.link.split(max(1, most // size)) for w, m in unit.items()}
        pieces += [{w: replace(m, link=cut[w][i]) for w, m in unit.items()} for i in range(len(cut[min(cut)]))]
    chunks, filled, current = [], 0, []
    for piece in pieces:
        n = piece[min(piece)].link.count * size
        if current and filled + n > most:
            chunks.append((filled, current))
            filled, current = 0, []
        filled, current = filled + n, [*current, piece]
    chunks.append((filled, current))
    return [(n, {w: tuple(p[w] for p in parts) for w in parts[0]}) for n, parts in chunks]


def _sourced(chunks: list[Chunk], found: list[Kind], ranks: Ranks, place: Place, tp: int) -> dict[str, np.ndarray]:
    """A source for every delivery: a holder as near as can be, the least busy one of those; a node hears of a chunk over the network once.

    Deliveries with a choice are made last, so that they even out what the others leave uneven.
    """
    engines = len(place.workers) // tp
    busy = np.zeros((3, len(place.ranks)), dtype=np.int64)
    relays = np.zeros(len(place.workers), dtype=np.int64)
    jobs = [(number, chunk, layer) for number, chunk in enumerate(chunks) for layer in found[chunk.kind].layers]
    holders = {(layer, chunk.holder): ranks.holding(layer, chunk.holder) for _, chunk, layer in jobs}
    jobs.sort(key=lambda job: len(holders[job[2], job[1].holder]))
    rows = []
    for number, chunk, layer in jobs:
        able = holders[layer, chunk.holder]
        nodes: dict[int, list[int]] = {}
        for engine in range(engines):
            for worker in chunk.moves:
                nodes.setdefault(place.workers[engine * tp + worker][0], []).append(engine * tp + worker)
        local = {place.ranks[rank][0] for rank in able}
        for node, targets in nodes.items():
            heard = targets if node in local else [min(targets, key=lambda t: relays[t])]
            for target in heard:
                source = able[0] if len(able) == 1 else min(able, key=lambda s: (d := place.apart(s, target), busy[d, s]))
                busy[place.apart(source, target), source] += chunk.nbytes
                rows.append((number, layer, source, target, False))
            if len(heard) < len(targets):
                relays[heard[0]] += chunk.nbytes
                rows += [(number, layer, heard[0], target, True) for target in targets if target != heard[0]]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return dict(zip(("chunk", "layer", "source", "target"), columns)) | {"relayed": columns[4].astype(bool)}
