"""Convert a Megatron distributed checkpoint, or a role of a training checkpoint, into a Hugging Face one, streaming.

Tensors are read from the checkpoint's files at whatever layout wrote them. No model is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from checkpoint_tools.boxes import cut, in_float32, in_tensor, is_run
from checkpoint_tools.output import write
from checkpoint_tools.stream import OutFile
from moerl.models import config_of, fp8, torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import SCALE, copy_side_files, identity, set_config, shard_name, write_index
from moerl.models.files import header, raw
from moerl.models.source import HEAD, MegatronSource
from moerl.models.tensormap import Param, copies_in, duplicates, shape_of

SHARD = 5 * 10**9  # bytes of a file
FILES = 16  # a model of less than so many such files is cut into so many, for workers to share and for a restart to find
LEAST = 10**9  # bytes of a file of those
MANIFEST = "manifest.json"  # of a training checkpoint, written last
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(fp8.BLOCK)}


def open_checkpoint(ckpt: Path, role: str = "actor", hf: Path | None = None) -> MegatronSource:
    """`ckpt` is a distributed checkpoint or a step of a training run; its configuration lies beside it, or in directory `hf`."""
    path = ckpt
    if not torch_dist.is_torch_dist(ckpt):
        if not (ckpt / role).is_dir():
            raise ModelError(f"{ckpt}: neither a Megatron distributed checkpoint nor a training checkpoint with {role}/ in it")
        if not (ckpt / MANIFEST).is_file():
            raise ModelError(f"{ckpt}: {MANIFEST} is missing, so the checkpoint was not written to its end")
        path = ckpt / role
        if not torch_dist.is_torch_dist(path):
            raise ModelError(f"{path}: not a Megatron distributed checkpoint ({torch_dist.METADATA} or {torch_dist.FORMAT} is missing)")
    for config in (hf,) if hf else (path, path.parent / "hf"):
        if (config / "config.json").is_file():
            return MegatronSource(path, config)
    raise ModelError(f"{hf or path}: config.json is missing; name a directory that has the model's with --hf")


@dataclass(frozen=True)
class Written:
    """A tensor of the output."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def convert(ckpt: Path, out: Path, *, memory: int, workers: int, role: str = "actor", hf: Path | None = None, dtype: str | None = None,
            fp8_block: bool = False, share: tuple[int, int] = (0, 1)) -> Path:
    """Write `out`, the Hugging Face checkpoint of a Megatron one (`open_checkpoint`), with configuration and tokenizer.

    `memory` in bytes is what all workers of this host may hold together. Dtypes stay, or become `dtype`; with `fp8_block` the matrices that
    DeepSeek-V3's own checkpoint has in float8 blocks are quantized so. A critic is written with its value head as a token classifier.
    """
    source = open_checkpoint(ckpt, role, hf)
    if fp8_block and not source.arch.latent:
        raise ModelError(f"--fp8-block: not for {source.arch.family}; it is the format of DeepSeek's and Kimi's checkpoints")
    outputs = Outputs(source, getattr(torch, dtype) if dtype else None, fp8_block)
    files = outputs.lay_out()

    def finish(part: Path) -> None:
        copy_side_files(source.config, part)
        fields = config_of(source.arch) | {"dtype": dtype or outputs.common_dtype()}
        if fp8_block:
            fields |= {"quantization_config": QUANTIZATION}
        if source.value_head:
            fields |= {"architectures": [_classifier(part)], "num_labels": 1}
        set_config(part, **fields)
        if len(files) > 1:
            write_index(part, outputs.file_of, sum(t.nbytes for t in outputs.tensors.values()))

    what = {"ckpt": identity(source.path), "hf": identity(source.config), "role": role, "dtype": dtype, "fp8": fp8_block}
    return write(out, files, outputs.produce, finish, what=what, memory=memory, workers=workers, share=share)


def _classifier(part: Path) -> str:
    kind = json.loads((part / "config.json").read_text()).get("architectures") or ["ForCausalLM"]
    return kind[0].replace("ForCausalLM", "ForTokenClassification")


class Outputs:
    """The tensors to write, the file and the byte where each begins, and what is made for each job."""

    def __init__(self, source: MegatronSource, cast: torch.dtype | None, fp8_block: bool):
        self.source, self.cast, self.fp8_block = source, cast, fp8_block
        self.params = {n: p for n, p in source.params.items() if not p.tied}
        self.kept = source.kept()
        self.tensors: dict[str, Written] = {}
        self.copies: dict[str, list[str]] = {}
        for copy, own in duplicates(source.params.values()).items():
            if copy in source.copies:
                self.copies.setdefault(own, []).append(copy)
        self.file_of: dict[str, str] = {}
        self.start: dict[str, int] = {}

    def common_dtype(self) -> str:
        sizes: dict[torch.dtype, int] = {}
        for stored in self.tensors.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + prod(stored.shape)
        plain = {d: n for d, n in sizes.items() if d.itemsize > 1} or sizes
        return str(max(plain, key=plain.get)).removeprefix("torch.")

    def quantized(self, name: str) -> bool:
        """Whether DeepSeek-V3's checkpoint has this matrix in float8: projections, but the one that joins a prediction layer's inputs."""
        return self.fp8_block and name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith("eh_proj.weight")

    def lay_out(self) -> list[OutFile]:
        groups = self._groups()
        total = sum(size for size, *_ in groups)
        limit = min(SHARD, max(LEAST, total // FILES))
        limit = -(-total // -(-total // limit)) if total else 1
        shards, at = [([], [])], 0
        for size, names, jobs in groups:
            if at and at + size / 2 > limit:
                shards.append(([], []))
                at = 0
            shards[-1][0].extend(names)
            shards[-1][1].extend(jobs)
            at += size
        return [self._file(i, len(shards), *shard) for i, shard in enumerate(shards)]

    def _groups(self) -> list[tuple[int, list[str], list]]:
        """Tensors that share parameters, which must be in one file; their bytes, names and jobs."""
        groups: dict[str, tuple[list, list]] = {}
        for param in self.params.values():
            names, jobs = groups.setdefault(param.pieces[0].name, ([], []))
            for piece in param.pieces:
                for name in (piece.name, *self.copies.get(piece.name, ())):
                    if name not in self.tensors:
                        names.extend(self._declare(name, piece.shape, self.cast if self._casts(param) else self.source.dtype(param)))
            rows = fp8.BLOCK[0] if self.fp8_block else 1
            width = max(self.source.dtype(param).itemsize, *(self.tensors[piece.name].dtype.itemsize for piece in param.pieces))
            jobs.extend((param.name, box) for box in cut(param, param.shape, width, rows))
        for name, tensor in self.kept.items():
            groups[name] = (list(self._declare(name, tuple(tensor.shape), tensor.dtype)), [(name, None)])
        if self.source.value_head:
            head = self.cast or self.source.reader.tensors[HEAD].dtype
            names = [*self._declare("score.weight", (1, self.source.arch.hidden), head), *self._declare("score.bias", (1,), head)]
            groups["score"] = (names, [(HEAD, None)])
        return [(sum(self.tensors[n].nbytes for n in names), names, jobs) for names, jobs in groups.values()]

    def _casts(self, param: Param) -> bool:
        return self.cast is not None and not in_float32(param, self.source.dtype(param))

    def _declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
        if not self.quantized(name):
            self.tensors[name] = Written(dtype, shape)
            yield name
            return
        self.tensors[name] = Written(torch.float8_e4m3fn, shape)
        self.tensors[name + SCALE] = Written(torch.float32, tuple(-(-n // size) for n, size in zip(shape, fp8.BLOCK)))
        yield name
        yield name + SCALE

    def _file(self, i: int, count: int, names: list[str], jobs: list) -> OutFile:
        file = shard_name(i, count)
        names = sorted(names, key=lambda n: -self.tensors[n].dtype.itemsize)  # so that every tensor begins at a multiple of its item
        head, starts = header({n: (self.tensors[n].dtype, self.tensors[n].shape) for n in names})
        self.start |= starts
        self.file_of |= dict.fromkeys(names, file)
        counts = [len(head)]
        for name, box in jobs:
            counts.append(sum(self._bytes(copy) for copy in copies_in(self.params[name], box)) if box else 0)
        size = len(head) + sum(self.tensors[n].nbytes for n in names)
        counts[-1] += size - sum(counts)
        return OutFile(file, size, (("", head), *jobs), tuple(counts))

    def _bytes(self, copy) -> int:
        return prod(shape_of(copy.source)) * self.tensors[copy.piece.name].dtype.itemsize * (1 + len(self.copies.get(copy.piece.name, ())))

    def produce(self, job: tuple) -> Iterator[tuple[int, list]]:
        name, box = job
        if not name:
            yield 0, [box]
        elif name == HEAD and box is None:
            dtype = self.tensors["score.weight"].dtype
            yield self.start["score.weight"], [raw(self.source.head().to(dtype))]
            yield self.start["score.bias"], [raw(torch.zeros(1, dtype=dtype))]
        elif box is None:
            yield self.start[name], [raw(self.kept[name])]
        else:
            param = self.params[name]
            values = self.source.read(param, box)
            for copy in copies_in(param, box):
                yield from self._piece(copy, values[copy.target])

    def _piece(self, copy, values: torch.Tensor) -> Iterator[tuple[int, list]]:
        """One piece's elements at their place, in the order the tensor has them."""
        piece, first = copy.piece, 0
        if piece.order is None:
            assert is_run(piece.view, copy.source), f"{piece.name}: {copy.source} of {piece.view} is not one run"
            first = in_tensor(piece, copy.source)
        else:
            stored = torch.empty([b.stop - b.start for b in piece.box()], dtype=values.dtype)
            piece.arrange(stored)[copy.source].copy_(values)
            first, values = in_tensor(piece, tuple(slice(0, n) for n in piece.view)), stored
        for name in (piece.name, *self.copies.get(piece.name, ())):
            kind = self.tensors[name]
            if not self.quantized(name):
                yield self.start[name] + first * kind.dtype.itemsize, [raw(values.to(kind.dtype))]
                continue
            columns = piece.shape[-1]
            numbers, scales = fp8.quantize(values.reshape(-1, columns))
            yield self.start[name] + first, [raw(numbers)]
            row = first // columns // fp8.BLOCK[0]
            yield self.start[name + SCALE] + row * scales.shape[1] * 4, [raw(scales)]


if __name__ == "__main__":
    import typer

    from checkpoint_tools.cli import megatron_to_hf

    typer.run(megatron_to_hf)
