"""A plan as one file: columns as arrays, the rest as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moerl.models.arch import ModelError
from moerl.reshard.links import Link
from moerl.reshard.plan import Chunk, Move, Place, Plan

COLUMNS = ("chunk", "layer", "source", "target", "relayed", "round")


def save(plan: Plan, path: Path) -> None:
    rest = {
        "chunks": [
            [c.kind, c.holder, c.nbytes, c.dtype, {w: [[m.target, m.param, m.index, *asdict(m.link).values()] for m in moves]
                                                  for w, moves in c.moves.items()}]
            for c in plan.chunks
        ],
        "layers": plan.layers, "ranks": plan.place.ranks, "workers": plan.place.workers, "tp": plan.tp, "cap": plan.cap,
        "needed": plan.needed,
    }
    with open(path, "wb") as file:
        np.savez_compressed(file, rest=np.frombuffer(json.dumps(rest).encode(), np.uint8), **{n: getattr(plan, n) for n in COLUMNS})


def load(path: Path) -> Plan:
    """ModelError when the file is no plan."""
    try:
        with np.load(path) as arrays:
            columns = {name: arrays[name] for name in COLUMNS}
            rest = json.loads(arrays["rest"].tobytes())
    except (KeyError, ValueError, OSError) as error:
        raise ModelError(f"{path}: not a reshard plan ({error})") from None
    chunks = tuple(
        Chunk(kind, tuple(holder), nbytes, dtype, {int(w): tuple(_move(*m) for m in moves) for w, moves in by_worker.items()})
        for kind, holder, nbytes, dtype, by_worker in rest["chunks"]
    )
    place = Place(*([tuple(spot) for spot in rest[side]] for side in ("ranks", "workers")))
    layers = {int(kind): tuple(numbers) for kind, numbers in rest["layers"].items()}
    return Plan(chunks, layers, **columns, place=place, tp=rest["tp"], cap=rest["cap"], needed=rest["needed"])


def _move(target: str, param: str, index: int, sizes: list, left: int, left_strides: list, right: int, right_strides: list) -> Move:
    return Move(target, param, index, Link(tuple(sizes), left, tuple(left_strides), right, tuple(right_strides)))
