"""What `moerl models` prints: the families, and the dimensions and parameter counts of one model. Needs a config.json, no weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

from moerl.models import FAMILIES, params_of, read_arch
from moerl.models.arch import Arch
from moerl.models.tensormap import Param


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, elements of its checkpoint: `embedding` is the token table and an output layer of its own; `active` are
    those one token meets, all but the experts that it is not routed to. `prediction` layers are in none of these, and their copies of
    embedding and head nowhere."""

    total: int
    embedding: int
    active: int
    prediction: int = 0


def _size(param: Param) -> int:
    return 0 if param.tied else sum(prod(piece.view) for piece in param.pieces)


def count(arch: Arch) -> Counts:
    params = list(params_of(arch.main()).values())
    experts = sum(_size(p) for p in params if p.expert is not None)
    total = sum(map(_size, params))
    embedding = sum(_size(p) for p in params if p.name in ("embedding.word_embeddings.weight", "output_layer.weight"))
    active = total - (experts // arch.experts * (arch.experts - arch.topk) if arch.experts else 0)
    return Counts(total, embedding, active, sum(map(_size, params_of(arch).values())) - total)


def families() -> str:
    """A line a model_type. A family module may name in `NEEDS_TRANSFORMER_ENGINE` what it cannot do without it."""
    rows = [("model_type", "without Transformer Engine", "family")]
    for name, module in sorted(FAMILIES.items()):
        needs = getattr(module, "NEEDS_TRANSFORMER_ENGINE", "")
        rows.append((name, f"no: {needs}" if needs else "yes", module.__doc__.splitlines()[0]))
    return _table(rows)


def model(path: str | Path) -> str:
    """Dimensions and counts of the checkpoint directory or config.json at `path`; a field that is off is left out."""
    arch = read_arch(path)
    found = count(arch)
    rows = [(f.name, _show(getattr(arch, f.name))) for f in fields(arch) if getattr(arch, f.name)]
    counts = {"parameters": found.total, "in embeddings": found.embedding, "active per token": found.active,
              "more in prediction layers": found.prediction}
    rows += [(name, _billions(number)) for name, number in counts.items() if number]
    return _table(rows)


def _show(value) -> str:
    return ", ".join(map(str, sorted(value))) if isinstance(value, frozenset) else str(value)


def _billions(count: int) -> str:
    return f"{count:,} ({count / 1e9:.2f} B)"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
