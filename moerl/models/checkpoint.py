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
from safetensors.torch import save_file

from moerl.models.arch import ModelError, refuse
from moerl.models.files import DTYPES, SafetensorsFile, Stored, spans
from moerl.models.fp8 import dequantize
from moerl.models.mxfp4 import BLOCKS, SCALES, Mxfp4
from moerl.models.tensormap import Copy, Param, duplicates, hf_shapes, partly_used, spelled

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
FLOATS = ("F32", "F16", "BF16")
FREQUENCIES = ".rotary_emb.inv_freq"  # in some checkpoints (Moonlight, Kimi-K2); computed anew by everyone who reads them
NOT_BESIDE = {INDEX, "metadata.json"}  # lists of weights; the latter is of a Megatron checkpoint
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".msgpack", ".h5"}


class BlockScaled:
    """A float8 matrix with one float32 scale a block, read as `dtype`: slicing gives weight * scale of those elements."""

    def __init__(self, weight, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype):
        self.weight, self.scale, self.block, self.dtype = weight, scale, block, dtype

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index) -> torch.Tensor:
        box = spans(self.get_shape(), index)
        return dequantize(self.weight[box], self.scale, self.block, corner=(box[0].start, box[1].start), dtype=self.dtype)


class HFReader:
    """Slices of the tensors of a safetensors checkpoint; only the bytes asked for are read.

    A `weight` in float8 with `weight_scale_inv` beside it (in any file) reads as the float32 product, rounded to `scaled_as`.
    A tensor that is stored as MXFP4 (`_blocks` and `_scales` in its place) reads as its values.
    """

    def __init__(self, path: str | Path, scaled_as: torch.dtype = torch.float32):
        self.path, self.scaled_as = Path(path), scaled_as
        self.files = self._locate()
        self._open: dict[str, SafetensorsFile] = {}

    def _locate(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.is_file():
            try:
                weight_map = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index}: not an index of safetensors files ({type(error).__name__}: {error})") from None
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
            cache[file] = SafetensorsFile(self.path / file)
        return cache[file]

    def stored(self, name: str) -> Stored:
        """A tensor as its file has it."""
        file = self._handle(self.files[name], self._open)
        if name not in file.keys():
            raise ModelError(f"{self.path / INDEX}: tensor {name} is not in {self.files[name]}, where the index has it")
        return file.get_slice(name)

    def _slice(self, name: str):
        if name not in self.files and name + BLOCKS in self.files:
            blocks, scales = self.stored(name + BLOCKS), self.stored(name + SCALES)
            shape = blocks.get_shape()
            if len(shape) != 4 or shape[-1] != 16 or scales.get_shape() != shape[:-1] or {blocks.dtype, scales.dtype} != {"U8"}:
                kinds = f"{blocks.dtype} {shape} and {scales.dtype} {scales.get_shape()}"
                form = "U8 [n, r, c / 32, 16] and U8 [n, r, c / 32]"
                raise ModelError(f"{self.path}: tensors {name}{BLOCKS} and {SCALES} are {kinds}, MXFP4 is {form}")
            return Mxfp4(blocks, scales)
        stored = self.stored(name)
        if not stored.get_dtype().startswith("F8"):
            return stored
        shape, scale_name, block = stored.get_shape(), name + SCALE, self._block
        if scale_name not in self.files:
            raise ModelError(f"{self.path}: tensor {name} is {stored.get_dtype()} without scales ({scale_name} is missing)")
        scale = self.stored(scale_name)[:]
        grid = [-(-n // size) for n, size in zip(shape, block)]
        if len(shape) != 2 or list(scale.shape) != grid:
            raise ModelError(f"{self.path}: tensor {scale_name} has shape {tuple(scale.shape)}, blocks of {block} of {shape} need {grid}")
        return BlockScaled(stored, scale.float(), block, self.scaled_as)

    def dtype(self, name: str) -> torch.dtype:
        """What tensor `name` reads as."""
        return self.scaled_as if self.scaled(name) else DTYPES[self.stored(name).get_dtype()]

    def scaled(self, name: str) -> bool:
        """Whether tensor `name` is stored as numbers and scales."""
        return name not in self.files or self.stored(name).get_dtype().startswith("F8")

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
        return all(name in self.files and self.stored(name).get_dtype() in FLOATS for name in names)

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return tuple(self.quantized.get("weight_block_size") or (128, 128))

    def fit(self, params: Mapping[str, Param], aside: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Param]:
        """The map in this checkpoint's spelling. Raises `ModelError` unless the checkpoint holds exactly its tensors, and those `aside`.

        Further copies of a tensor may be there or not; of those only the shape is looked at.
        """
        params = spelled(params, {*self.files, *self._packed()})
        shapes, used = hf_shapes(params.values()), partly_used(params.values())
        copies = {copy: shapes[own] for copy, own in duplicates(params.values()).items() if copy in self.files}
        lines = self._misfits(shapes | copies | dict(aside or {}))
        for name in sorted(used):
            lines.append(f"tensor {name} {shapes[name]} is there, and {prod(shapes[name]) - used[name]} of its elements under other names")
        self._refuse(lines)
        return params

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ModelError`, one line a tensor, unless the checkpoint holds exactly these tensors (and rotary frequencies)."""
        self._refuse(self._misfits(shapes))

    def _packed(self) -> set[str]:
        """Names of the tensors stored as MXFP4."""
        return {n.removesuffix(BLOCKS) for n in self.files if n.endswith(BLOCKS) and n.removesuffix(BLOCKS) + SCALES in self.files}

    def _misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        packed = self._packed()
        names = set(self.files) | packed
        missing = sorted(set(shapes) - names)
        known = set(shapes) | {n + part for n in packed & set(shapes) for part in (BLOCKS, SCALES)}
        known |= {n + SCALE for n in set(shapes) & set(self.files) if self.stored(n).get_dtype().startswith("F8")}
        extra = sorted(name for name in set(self.files) - known if not name.endswith(FREQUENCIES))
        strays = self._strays()
        lines = [f"missing tensor {n} {shapes[n]}" for n in missing] + [f"unexpected tensor {n} in {self.files[n]}" for n in extra]
        lines += [f"tensor {name} is in {file}, where the index does not have it" for name, file in strays]
        for name in sorted(set(shapes) & names):
            if name in self.files and (kind := self.stored(name).get_dtype()) not in (*FLOATS, "F8_E4M3"):
                lines.append(f"tensor {name} is {kind}; of plain numbers only {', '.join(FLOATS)} are supported, of float8 F8_E4M3")
                continue
            found = tuple(self._slice(name).get_shape())
            if found != tuple(shapes[name]):
                lines.append(f"tensor {name} has shape {found}, expected {tuple(shapes[name])}")
        return lines

    def _strays(self) -> list[tuple[str, str]]:
        """Tensors in files of the checkpoint that its index has elsewhere or not at all."""
        if not (self.path / INDEX).is_file():
            return []
        files = sorted(set(self.files.values()))
        return [(name, file) for file in files for name in self._handle(file, self._open).keys() if self.files.get(name) != file]

    def _refuse(self, lines: list[str]) -> None:
        refuse(f"{self.path}: the checkpoint does not fit its config.json", lines)

    def frequencies(self) -> dict[str, torch.Tensor]:
        """The rotary frequencies that the checkpoint has, as they are."""
        return {name: self.stored(name)[:] for name in self.files if name.endswith(FREQUENCIES)}

    def read(self, copy: Copy, out: torch.Tensor | None = None) -> torch.Tensor:
        """The elements `copy.source` of a piece, at the rank of its view, in `out` if that is given."""
        if out is not None and not self._fill(copy, out):
            out.copy_(self._read(copy))
        return self._read(copy) if out is None else out

    def _fill(self, copy: Copy, out: torch.Tensor) -> bool:
        """Read straight into `out` where the elements lie in the file as they do there; whether they do."""
        piece = copy.piece
        ones = len(piece.view) - len(piece.shape)
        whole = piece.view == (1,) * ones + piece.shape and prod(piece.view) == prod(b.stop - b.start for b in piece.box())
        if not whole or piece.order is not None or piece.name not in self.files or not out.is_contiguous():
            return False
        stored = self.stored(piece.name)
        if DTYPES[stored.dtype] == out.dtype:
            stored.read(copy.source[ones:], out.view(out.shape[ones:]))
        return DTYPES[stored.dtype] == out.dtype

    def _read(self, copy: Copy) -> torch.Tensor:
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


def side_files(path: str | Path) -> list[Path]:
    """Everything in a checkpoint's directory that belongs to the model and is not weights: configuration, tokenizer, code, templates."""
    found = (f for f in sorted(Path(path).iterdir()) if f.is_file() and f.name not in NOT_BESIDE and f.name[0] != ".")
    return [f for f in found if f.suffix not in WEIGHTS]


def copy_side_files(source: str | Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in side_files(source):
        shutil.copyfile(file, out / file.name)  # not its mode: a read-only one could not be changed


def set_config(path: Path, **fields) -> None:
    """Set fields of a checkpoint's configuration, whose weights are no longer quantized, nor of the dtype they were."""
    config = json.loads((path / "config.json").read_text())
    for stale in ("torch_dtype", "dtype", "quantization_config"):
        config.pop(stale, None)
    (path / "config.json").write_text(json.dumps(config | fields, indent=2))


def identity(path: str | Path) -> list:
    """What tells one directory of files from the same one with other contents: names, sizes and times of all its files."""
    found = ((f.name, f.stat()) for f in sorted(Path(path).iterdir()) if f.is_file())
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def fingerprint(path: str | Path) -> str:
    """What tells two checkpoints apart without reading them whole: sizes, headers and the ends of all their files."""
    digest = hashlib.sha256()
    for file in sorted(f for kind in ("*.safetensors", "*.distcp") for f in Path(path).glob(kind)):
        size = file.stat().st_size
        with open(file, "rb") as stream:
            digest.update(f"{file.name} {size}".encode() + stream.read(2**16))
            stream.seek(max(0, size - 2**16))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def shard_name(i: int, count: int) -> str:
    """Name of file `i` of `count` of a checkpoint."""
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def write_index(path: Path, file_of: Mapping[str, str], total: int) -> None:
    """Write which file of a checkpoint has which tensor; `total` is the bytes of all tensors."""
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=1))


def write_hf(out: str | Path, tensors: Mapping[str, torch.Tensor], source: str | Path, *, max_shard_bytes: int = 5 * 10**9,
             dtype: str | None = None, fields: Mapping[str, object] | None = None) -> Path:
    """Write a Hugging Face checkpoint: shards, index, and config, tokenizer and chat template copied from directory `source`.

    With `dtype` the config becomes that of an unquantised checkpoint of that type, with `fields` in it.

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
        file = shard_name(i, len(shards))
        save_file(shard, part / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        write_index(part, weight_map, sum(t.nbytes for t in tensors.values()))
    copy_side_files(source, part)
    if dtype:
        set_config(part, dtype=dtype, **(fields or {}))
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(part, out)
    shutil.rmtree(old, ignore_errors=True)
    return out
