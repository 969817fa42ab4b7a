"""One process' part in a sync: packs, sends, receives and unpacks what its rows of the plan say, and reads what is mapped.

Two buffers each way: while one round is under way the one before it is unpacked and the next one packed. Both ends of a message go
through the same rows in the same order, so nothing but elements is on the wire (and, if asked for, one checksum a message).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from moerl.reshard.names import renumbered
from moerl.reshard.plan import Chunk, Move, Plan, itemsize
from moerl.reshard.transport import Messages

SUM = 8  # bytes of a checksum

Part = tuple[Chunk, int, int]  # chunk, layer, worker (in an engine) whose moves describe it


@dataclass
class Round:
    """What a process does in one round, by the other process; `relayed` are parts to pass on, with where they were received."""

    sends: dict[int, list[Part]] = field(default_factory=lambda: defaultdict(list))
    relays: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))  # chunk number, layer, bytes
    recvs: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))  # with the chunk's number
    reads: list[tuple[int, Part]] = field(default_factory=list)  # rank, part


def rounds_of(plan: Plan, *, rank: int | None = None, worker: int | None = None) -> dict[int, Round]:
    """A rank's or a worker's rounds, by number. Processes are numbered ranks first, then workers.

    Reads of mapped memory go with the first round that brings something for their layer, so that a layer is complete soon after it is
    begun.
    """
    found: dict[int, Round] = defaultdict(Round)
    ranks = len(plan.place.ranks)
    columns = [getattr(plan, n).tolist() for n in ("chunk", "layer", "source", "target", "relayed", "round")]
    order = np.lexsort((plan.layer, _narrowness(plan), plan.round))
    begun: dict[int, int] = {}
    for i in order.tolist():
        number, layer, source, target, relayed, at = (c[i] for c in columns)
        chunk = plan.chunks[number]
        mine = target == worker
        if at < 0:
            if mine:
                begun.setdefault(layer, -1)
            continue
        step = found[at]
        if mine:
            step.recvs[source + (ranks if relayed else 0)].append((number, (chunk, layer, target % plan.tp)))
            if begun.get(layer, -1) < 0:
                begun[layer] = at
        elif relayed and source == worker:
            step.relays[ranks + target].append((number, layer, chunk.nbytes))
        elif not relayed and source == rank:
            step.sends[ranks + target].append((chunk, layer, target % plan.tp))
    if worker is not None:
        last = max(found, default=0)
        for i in np.lexsort((plan.source, plan.layer)).tolist():
            number, layer, source, target, _, at = (c[i] for c in columns)
            if at < 0 and target == worker:
                when = begun[layer] if begun[layer] >= 0 else last + 1
                found[when].reads.append((source, (plan.chunks[number], layer, target % plan.tp)))
    return dict(sorted(found.items()))


def _narrowness(plan: Plan) -> np.ndarray:
    """Sorts wide elements first, which keeps all of a message aligned."""
    return -np.array([itemsize(c.dtype) for c in plan.chunks] or [0])[plan.chunk]


# What arrived: the parameter's name, offset and strides in it, and the elements, shaped as their box.
Arrived = tuple[str, int, tuple[int, ...], torch.Tensor]
Take = Callable[[list[Arrived]], None]


class Mover:
    """Runs the rounds of one process.

    `memory` are its own parameters, flat, by name; `mapped` those of ranks whose memory it reads. `take` gets what arrives, chunk by chunk.
    """

    def __init__(
        self, rounds: Mapping[int, Round], messages: Messages | None, device: torch.device, *,
        memory: Mapping[str, torch.Tensor] | None = None,
        mapped: Mapping[int, Mapping[str, torch.Tensor]] | None = None, take: Take | None = None, checksums: bool = False,
    ):
        self.rounds, self.messages, self.checksums = rounds, messages, checksums
        self.memory, self.take = memory or {}, take
        self.reads = {number: [_read(mapped[rank], *part) for rank, part in step.reads] for number, step in rounds.items()}
        self.extra = SUM if checksums else 0
        most = [0, 0]
        for step in rounds.values():
            out = sum(_room(_bytes(p) + self.extra) for p in step.sends.values())
            into = sum(_room(_bytes(part for _, part in p) + self.extra) for p in step.recvs.values())
            most = [max(most[0], out), max(most[1], into)]
        self.out, self.into = ([torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2)] for n in most)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() for b in (*self.out, *self.into))

    def run(self) -> None:
        """All rounds. Returns when everything is sent, received and taken."""
        before = None
        for turn, (number, step) in enumerate(self.rounds.items()):
            if before and step.relays:
                before.wait()
            now = self._start(number, step, turn % 2, before)
            if before:
                self._finish(before)
            before = now
        if before:
            self._finish(before)

    def _finish(self, before: Arriving) -> None:
        before.wait()
        self._unpack(before)
        for chunk in self.reads[before.number]:
            self.take(chunk)

    def _start(self, number: int, step: Round, side: int, before: Arriving | None) -> Arriving:
        sends, at = [], 0
        for peer, parts in step.sends.items():
            n = _bytes(parts)
            message = self.out[side][at : at + n + self.extra]
            self._pack(parts, message)
            sends.append((peer, message))
            at += _room(len(message))
        copies: dict[tuple, torch.Tensor] = {}
        for peer, parts in step.relays.items():
            if tuple(parts) not in copies:
                copies[tuple(parts)] = self._passed_on(parts, before)
            sends.append((peer, copies[tuple(parts)]))
        arriving, recvs, at = Arriving(number, sends), [], 0
        for peer, parts in step.recvs.items():
            n = _bytes(part for _, part in parts)
            message = self.into[side][at : at + n + self.extra]
            recvs.append((peer, message))
            arriving.messages.append((peer, parts, message))
            at += _room(len(message))
        if sends or recvs:
            arriving.works = self.messages.exchange(sends, recvs, number)
        return arriving

    def _pack(self, parts: list[Part], message: torch.Tensor) -> None:
        at = 0
        for chunk, layer, worker in parts:
            for move in chunk.moves[worker]:
                source = view(self.memory[renumbered(move.param, layer)], move.link.right, move.link.sizes, move.link.right_strides)
                piece = _typed(message, at, move, chunk)
                piece.copy_(source)
                at += piece.nbytes
        self._seal(message, at)

    def _passed_on(self, parts: list[tuple[int, int, int]], before: Arriving) -> torch.Tensor:
        """What arrived one round ago for others of the node, in their order."""
        where = {}
        for _, got, message in before.messages:
            at = 0
            for number, (chunk, layer, _) in got:
                where[number, layer] = message[at : at + chunk.nbytes]
                at += chunk.nbytes
        pieces = [where[number, layer] for number, layer, _ in parts]
        message = torch.cat([*pieces, pieces[0].new_empty(self.extra)])
        self._seal(message, sum(n for *_, n in parts))
        return message

    def _seal(self, message: torch.Tensor, n: int) -> None:
        if self.checksums:
            message[n:].copy_(_checksum(message[:n]).view(torch.uint8))

    def _unpack(self, arrived: Arriving) -> None:
        for peer, parts, message in arrived.messages:
            n = len(message) - self.extra
            if self.checksums and not torch.equal(message[n:], _checksum(message[:n]).view(torch.uint8)):
                raise RuntimeError(f"a message of {n} bytes from process {peer} arrived with a wrong checksum")
            at = 0
            for _, (chunk, layer, worker) in parts:
                pieces = []
                for move in chunk.moves[worker]:
                    piece = _typed(message, at, move, chunk)
                    pieces.append((renumbered(move.target, layer), move.link.left, move.link.left_strides, piece))
                    at += piece.nbytes
                self.take(pieces)


@dataclass
class Arriving:
    """A round under way: its messages (process, parts, buffer) and what to wait for."""

    number: int
    sends: list[tuple[int, torch.Tensor]]  # kept until they are on their way
    messages: list[tuple[int, list[tuple[int, Part]], torch.Tensor]] = field(default_factory=list)
    works: list = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


def _read(memory: Mapping[str, torch.Tensor], chunk: Chunk, layer: int, worker: int) -> list[Arrived]:
    """A chunk in the memory of the rank that has it. It is looked up once: weights stay where they are."""
    return [
        (
            renumbered(move.target, layer), move.link.left, move.link.left_strides,
            view(memory[renumbered(move.param, layer)], move.link.right, move.link.sizes, move.link.right_strides),
        )
        for move in chunk.moves[worker]
    ]


def view(memory: torch.Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Elements of a flat tensor as a strided box."""
    return memory.as_strided(sizes, strides, memory.storage_offset() + offset)


def _room(n: int) -> int:
    """Bytes that n bytes take in a buffer, where each message begins at an address for elements of any width."""
    return -(-n // 16) * 16


def _bytes(parts) -> int:
    return sum(chunk.nbytes for chunk, *_ in parts)


def _typed(message: torch.Tensor, at: int, move: Move, chunk: Chunk) -> torch.Tensor:
    """The bytes of one move in a message as its elements."""
    dtype = getattr(torch, chunk.dtype)
    return message[at : at + move.link.count * dtype.itemsize].view(dtype).view(move.link.sizes)


def _checksum(data: torch.Tensor) -> torch.Tensor:
    """One 64-bit number for bytes, which their order changes."""
    whole = len(data) // 4 * 4
    words = data[:whole].view(torch.int32).to(torch.int64)
    steps = torch.arange(1, len(words) + 1, device=data.device) % 65521 + 1
    return (words * steps).sum().add(data[whole:].to(torch.int64).sum()).reshape(1)
