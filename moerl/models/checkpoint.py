"""Hugging Face checkpoints on disk: read boxes of tensors, write whole ones. Nothing here knows a family."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moerl.models.arch import ModelError
from moerl.models.mxfp4 import BLOCKS, SCALES, Mxfp4
from moerl.models.tensormap import Copy, Param, hf_shapes, partly_used, spelled

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
FLOATS = ("F32", "F16", "BF16")
FREQUENCIES = ".rotary_emb.inv_freq"  # in some checkpoints (Moonlight, Kimi-K2); computed anew by everyone who reads them
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")


class BlockScaled:
    """A float8 matrix with one float32 scale a block, read as float32: slicing gives weight * scale of those elements."""

    def __init__(self, weight, scale: torch.Tensor, block: tuple[int, int]):
        self.weight, self.scale, self.block = weight, scale, block

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        spans = [range(n)[i] for n, i in zip(self.get_shape(), (*index, slice(None), slice(None)))]
        rows, columns = (torch.tensor(span) // size for span, size in zip(spans, self.block))
        box = self.weight[tuple(slice(s.start, s.stop) for s in spans)]
        return box.float() * self.scale[rows[:, None], columns]


class HFReader:
    """Slices of the tensors of a safetensors checkpoint; only the bytes asked for are read.

    A `weight` in float8 with `weight_scale_inv` beside it (in any file) reads as the float32 product.
    A tensor that is stored as MXFP4 (`_blocks` and `_scales` in its place) reads as its values.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = self._locate()
        self._open: dict[str, safe_open] = {}

    def _locate(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            gone = sorted({f for f in weight_map.values() if not (self.path / f).is_file()})
            if gone:
                raise ModelError(f"{index}: names files that do not exist: {', '.join(gone)}")
            return weight_map
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self.path}: no safetensors file there")
        where: dict[str, str] = {}
        for file in files:
            for name in self._handle(file.name, {}).keys():
                if name in where:
                    raise ModelError(f"{self.path}: tensor {name} is in both {where[name]} and {file.name}")
                where[name] = file.name
        return where

    def _handle(self, file: str, cache: dict):
        if file not in cache:
            try:
                cache[file] = safe_open(self.path / file, framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{self.path / file}: not a readable safetensors file ({error})") from None
        return cache[file]

    def _stored(self, name: str):
        return self._handle(self.files[name], self._open).get_slice(name)

    def _slice(self, name: str):
        if name not in self.files and name + BLOCKS in self.files:
            return Mxfp4(self._stored(name + BLOCKS), self._stored(name + SCALES))
        stored = self._stored(name)
        if not stored.get_dtype().startswith("F8"):
            return stored
        shape, scale_name, block = stored.get_shape(), name + SCALE, self._block
        if scale_name not in self.files:
            raise ModelError(f"{self.path}: tensor {name} is {stored.get_dtype()} without scales ({scale_name} is missing)")
        scale = self._stored(scale_name)[:]
        grid = [-(-n // size) for n, size in zip(shape, block)]
        if len(shape) != 2 or list(scale.shape) != grid:
            raise ModelError(f"{self.path}: tensor {scale_name} has shape {tuple(scale.shape)}, blocks of {block} of {shape} need {grid}")
        return BlockScaled(stored, scale.float(), block)

    @cached_property
    def quantized(self) -> dict:
        """`quantization_config` of the checkpoint, empty where it has none."""
        return json.loads((self.path / "config.json").read_text()).get("quantization_config") or {}

    def as_exported(self, params: Mapping[str, Param], fields: Mapping[str, object]) -> bool:
        """Whether config.json and tensors have an exported checkpoint's form: unquantised, in the map's own spelling, with `fields`."""
        config = json.loads((self.path / "config.json").read_text())
        if self.quantized or any(config.get(name) != value for name, value in fields.items()):
            return False
        names = hf_shapes(params.values())
        return all(name in self.files and self._stored(name).get_dtype() in FLOATS for name in names)

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return tuple(self.quantized.get("weight_block_size") or (128, 128))

    def fit(self, params: Mapping[str, Param], carried: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Param]:
        """The map in this checkpoint's spelling. Raises `ModelError` unless the checkpoint holds exactly its tensors (`check`)."""
        params = spelled(params, {*self.files, *self._packed()})
        shapes, used = hf_shapes(params.values()), partly_used(params.values())
        lines = self._misfits(shapes, carried or {}, {p.copied_as for p in params.values()})
        for name in sorted(used):
            lines.append(f"tensor {name} {shapes[name]} is there, and {prod(shapes[name]) - used[name]} of its elements under other names")
        self._refuse(lines)
        return params

    def check(self, shapes: Mapping[str, tuple[int, ...]], carried: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Raise `ModelError`, one line a tensor, unless the checkpoint holds exactly these tensors, and all or none of `carried`."""
        self._refuse(self._misfits(shapes, carried or {}, set()))

    def _packed(self) -> set[str]:
        """Names of the tensors stored as MXFP4."""
        return {n.removesuffix(BLOCKS) for n in self.files if n.endswith(BLOCKS) and n.removesuffix(BLOCKS) + SCALES in self.files}

    def _misfits(self, shapes: Mapping[str, tuple[int, ...]], carried: Mapping[str, tuple[int, ...]], aside: set[str | None]) -> list[str]:
        shapes, packed = {**shapes, **self._present(carried)}, self._packed()
        names = set(self.files) | packed
        missing = sorted(set(shapes) - names)
        known = set(shapes) | aside | {n + part for n in packed & set(shapes) for part in (BLOCKS, SCALES)}
        known |= {n + SCALE for n in set(shapes) & set(self.files) if self._stored(n).get_dtype().startswith("F8")}
        extra = sorted(name for name in set(self.files) - known if not name.endswith(FREQUENCIES))
        lines = [f"missing tensor {n} {shapes[n]}" for n in missing] + [f"unexpected tensor {n} in {self.files[n]}" for n in extra]
        for name in sorted(set(shapes) & names):
            found = tuple(self._slice(name).get_shape())
            if found != tuple(shapes[name]):
                lines.append(f"tensor {name} has shape {found}, expected {tuple(shapes[name])}")
        return lines

    def _refuse(self, lines: list[str]) -> None:
        if lines:
            more = f"\n... and {len(lines) - 10} more" if len(lines) > 10 else ""
            raise ModelError(f"{self.path}: the checkpoint does not fit its config.json\n" + "\n".join(lines[:10]) + more)

    def _present(self, carried: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        return carried if any(name in self.files for name in carried) else {}

    def carried(self, names: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, torch.Tensor]:
        """Rotary frequencies and those of the tensors `names` that the checkpoint has, as they are; scaled float8 ones as `dtype`."""
        found = {name: self._slice(name) for name in [*self._present(names), *(n for n in self.files if n.endswith(FREQUENCIES))]}
        return {name: box[:].to(getattr(torch, dtype)) if isinstance(box, BlockScaled) else box[:] for name, box in found.items()}

    def read(self, copy: Copy) -> torch.Tensor:
        """The elements `copy.source` of a piece, at the rank of its view."""
        piece = copy.piece
        stored = self._slice(piece.name)
        if piece.order is not None:
            return piece.arrange(stored[piece.box()].contiguous())[copy.source]
        view, source, box = piece.view, copy.source, piece.box()
        # Leading dimensions of one element may stand in the view or in the tensor alone.
        while len(view) > len(box) and view[0] == 1:
            view, source = view[1:], source[1:]
        before = ()
        while len(box) > len(view) and box[0].stop - box[0].start == 1:
            before, box = (*before, box[0]), box[1:]
        if view == tuple(b.stop - b.start for b in box):
            found = stored[(*before, *(slice(b.start + s.start, b.start + s.stop) for b, s in zip(box, source)))]
        else:
            # The view splits the box's first dimension: read the rows that hold the source, then cut it out of them.
            step = prod(view[1 : len(view) - len(box) + 1])
            first, last = source[0].start, source[0].stop
            rows = stored[(*before, slice(box[0].start + first * step, box[0].start + last * step), *box[1:])]
            found = rows.reshape(last - first, *view[1:])[(slice(None), *source[1:])]
        return found.reshape(tuple(s.stop - s.start for s in copy.source))


def fingerprint(path: str | Path) -> str:
    """What tells two checkpoints apart without reading them whole: sizes, headers and the ends of all their files."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        with open(file, "rb") as stream:
            digest.update(f"{file.name} {size}".encode() + stream.read(2**16))
            stream.seek(max(0, size - 2**16))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def write_side_files(out: str | Path, source: str | Path, *, dtype: str | None = None, fields: Mapping[str, object] | None = None) -> None:
    """Copy config, tokenizer and chat template of the checkpoint `source` into the directory `out`.

    With `dtype` the config becomes that of an unquantised checkpoint of that type, with `fields` in it.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    for file in SIDE_FILES:
        if (Path(source) / file).is_file():
            shutil.copy(Path(source) / file, Path(out) / file)
    if dtype:
        config = json.loads((Path(out) / "config.json").read_text())
        for stale in ("torch_dtype", "quantization_config"):
            config.pop(stale, None)
        (Path(out) / "config.json").write_text(json.dumps(config | {"dtype": dtype} | dict(fields or {}), indent=2))


def write_hf(out: str | Path, tensors: Mapping[str, torch.Tensor], side_files: str | Path, *,
             max_shard_bytes: int = 5 * 10**9, dtype: str | None = None, fields: Mapping[str, object] | None = None) -> Path:
    """Write a Hugging Face checkpoint: shards, index, and the files of `write_side_files`.

    Everything is written beside `out` and moved there at the end, so a half-written checkpoint is never taken for whole.
    """
    out = Path(out)
    part = out.with_name(out.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > max_shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file(shard, part / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        (part / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    write_side_files(part, side_files, dtype=dtype, fields=fields)
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(part, out)
    shutil.rmtree(old, ignore_errors=True)
    return out
