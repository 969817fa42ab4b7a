"""What a checkpoint of either format holds: format, step, layout, and every tensor with its shape, dtype and size."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch

from checkpoint_tools.megatron_to_hf import MANIFEST
from moerl.models import torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader
from moerl.models.files import DTYPES


def describe(path: Path, only: str = "", role: str = "") -> str:
    """The listing; `only` leaves tensors without it in their name out, `role` takes one model of a training checkpoint."""
    manifest = json.loads((path / MANIFEST).read_text()) if (path / MANIFEST).is_file() else {}
    if "roles" in manifest:
        return _step(path, manifest, only, role)
    if torch_dist.is_torch_dist(path):
        return _megatron(path, only)
    reader = HFReader(path)
    config = json.loads((path / "config.json").read_text()) if (path / "config.json").is_file() else {}
    quantized = (config.get("quantization_config") or {}).get("quant_method")
    head = [f"{path}: Hugging Face checkpoint, model_type {config.get('model_type')}"]
    if quantized:
        head[0] += f", quantized by {quantized}"
    rows = []
    for name in sorted(reader.files):
        stored = reader.stored(name)
        rows.append((name, tuple(stored.get_shape()), stored.get_dtype(), prod(stored.get_shape()) * DTYPES[stored.get_dtype()].itemsize))
    return _table(head, rows, only)


def _step(path: Path, manifest: dict, only: str, role: str) -> str:
    if role and role not in manifest["roles"]:
        raise ModelError(f"{path}: holds {', '.join(manifest['roles'])}, not {role}")
    gigabytes = sum(manifest["files"].values()) / 1e9
    head = f"{path}: training checkpoint of step {manifest['step']}, {len(manifest['files'])} files, {gigabytes:.3f} GB"
    return "\n\n".join([head, *(_megatron(path / r, only) for r in ([role] if role else manifest["roles"]))])


def _megatron(path: Path, only: str) -> str:
    common = torch.load(path / torch_dist.COMMON, weights_only=False)
    layout = common.get("layout")
    axes = {k: v for k, v in (layout or {}).items() if v not in (None, 1)}
    saved = "converted, of no layout" if layout is None else "saved at " + (" ".join(f"{k}{v}" for k, v in axes.items()) or "one rank")
    head = [f"{path}: Megatron distributed checkpoint, {saved}, {common.get('updates', '?')} optimizer updates"]
    rows = []
    for key, tensor in sorted(torch_dist.read_metadata(path).items()):
        rows.append((key, tensor.shape, str(tensor.dtype).removeprefix("torch."), prod(tensor.shape) * tensor.dtype.itemsize))
    return _table(head, rows, only)


def _table(head: list[str], rows: list[tuple], only: str) -> str:
    shown = [row for row in rows if only in row[0]]
    width = max((len(row[0]) for row in shown), default=0)
    lines = [f"{name:<{width}}  {dtype:<8} {size / 1e6:>12.3f} MB  {list(shape)}" for name, shape, dtype, size in shown]
    kinds: dict[str, list[int]] = {}
    for name, shape, dtype, size in shown:
        kind = kinds.setdefault(dtype, [0, 0, 0])
        kinds[dtype] = [kind[0] + 1, kind[1] + prod(shape), kind[2] + size]
    for dtype, (count, elements, size) in kinds.items():
        head.append(f"{count} tensors {dtype}, {elements:,} elements, {size / 1e9:.3f} GB")
    return "\n".join(head + lines)


if __name__ == "__main__":
    import typer

    from checkpoint_tools.cli import inspect

    typer.run(inspect)
