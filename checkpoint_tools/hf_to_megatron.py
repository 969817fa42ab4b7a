"""Convert a Hugging Face checkpoint into a Megatron distributed checkpoint, streaming.

The tensors are whole ones, cut into chunks, so that the result loads at any layout. No model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from checkpoint_tools import torch_dist
from checkpoint_tools.boxes import Box, cut, in_checkpoint, shape_of
from checkpoint_tools.output import write
from checkpoint_tools.stream import OutFile
from moerl.models import params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader, copy_side_files, fingerprint
from moerl.models.dist_keys import Place, places
from moerl.models.files import DTYPES
from moerl.models.tensormap import Param, copies_in, duplicates

FILES = 16  # a small checkpoint is cut into so many, for workers to share and for a restart to find
FILE = 2**31  # bytes of a file of a large one
KEPT = "hf."  # before the names of tensors that are kept as they are and that Megatron does not know


class Source:
    """A Hugging Face checkpoint as boxes of the map's parameters, each in the dtype it will be written in."""

    def __init__(self, path: Path, dtype: str | None):
        self.path, self.cast = path, getattr(torch, dtype) if dtype else None
        self.reader = HFReader(path, scaled_as=self.cast or torch.bfloat16)
        self.params = {n: p for n, p in self.reader.fit(params_of(read_arch(path))).items() if not p.tied}

    def dtype(self, param: Param) -> torch.dtype:
        """What the parameter is stored as; scaled float8 and MXFP4 count as bfloat16, and a cast leaves router biases in float32 alone."""
        found = {self.reader.dtype(piece.name) for piece in param.pieces}
        if len(found) > 1:
            raise ModelError(f"{self.path}: {', '.join(p.name for p in param.pieces)} are of different dtypes ({', '.join(found)})")
        own = DTYPES.get(found.pop(), torch.bfloat16)
        return self.cast if self.cast and not (param.name.endswith("expert_bias") and own == torch.float32) else own

    def read(self, param: Param, box: Box) -> torch.Tensor:
        """The elements `box` of the parameter's logical array; rows that pad the vocabulary are zeros."""
        found, out = copies_in(param, box), None
        if sum(prod(shape_of(c.source)) for c in found) < prod(shape_of(box)):
            out = torch.zeros(shape_of(box), dtype=self.dtype(param))
        elif len(found) > 1:
            out = torch.empty(shape_of(box), dtype=self.dtype(param))
        for copy in found:
            values = self.reader.read(copy)
            if out is None:
                return values.to(self.dtype(param))
            out[copy.target] = values
        return out


def convert(hf: Path, out: Path, *, memory: int, workers: int, dtype: str | None = None, share: tuple[int, int] = (0, 1)) -> Path:
    """Write `out`, a Megatron checkpoint of the model in directory `hf`, with configuration and tokenizer beside it.

    `memory` in bytes is what all workers of this host may hold together. Dtypes stay; float8 blocks and MXFP4 are written as values in
    bfloat16; `dtype` casts. See `output.write` for `share` and for what happens to a run that was killed.
    """
    source = Source(hf, dtype)
    where = places(source.params)
    files, tensors = lay_out(source, where)
    copies = [name for name in duplicates(params_of(read_arch(hf)).values()) if name in source.reader.files]
    common = {"updates": 0, "layout": None, "hf_copies": copies}

    def produce(job: tuple) -> Iterator[tuple[int, list]]:
        name, box, place = job
        values = source.reader.frequencies()[name] if box is None else source.read(source.params[name], box)
        before, after = torch_dist.archive(values.dtype, tuple(values.shape) if box is None else in_box(source, where, name, box))
        yield place, [before, values.contiguous().reshape(-1).view(torch.uint8).numpy(), after]

    def finish(part: Path) -> None:
        copy_side_files(hf, part)
        torch_dist.write_metadata(part, tensors, common)

    what = {"hf": fingerprint(hf), "dtype": dtype}
    return write(out, files, produce, finish, what=what, memory=memory, workers=workers, share=share)


def in_box(source: Source, where: dict[str, Place], name: str, box: Box) -> tuple[int, ...]:
    return in_checkpoint(source.params[name], where[name], box)[1]


def lay_out(source: Source, where: dict[str, Place]) -> tuple[list[OutFile], dict[str, torch_dist.Tensor]]:
    """The files to write, and the tensors with the chunks that will lie in them."""
    jobs = []
    for name, param in source.params.items():
        for box in cut(param, param.box(1), source.dtype(param).itemsize):
            jobs.append((name, box, where[name].key, *in_checkpoint(param, where[name], box), source.dtype(param)))
    for name, values in source.reader.frequencies().items():
        jobs.append((name, None, KEPT + name, (0,) * values.dim(), tuple(values.shape), values.dtype))
    sizes = [sum(map(len, torch_dist.archive(dtype, sizes))) + prod(sizes) * dtype.itemsize for *_, sizes, dtype in jobs]
    limit = min(FILE, max(1, sum(sizes) // FILES))
    files, chunks, at = [[]], {}, 0
    for (name, box, key, corner, shape, dtype), length in zip(jobs, sizes):
        if at >= limit:
            files.append([])
            at = 0
        files[-1].append(((name, box, at), length))
        chunks.setdefault(key, []).append(torch_dist.Chunk(key, corner, shape, f"__{len(files) - 1}_0.distcp", at, length))
        at += length
    shapes = {place.key: (place.shape, source.dtype(source.params[name])) for name, place in where.items()}
    shapes |= {KEPT + name: (tuple(v.shape), v.dtype) for name, v in source.reader.frequencies().items()}
    tensors = {key: torch_dist.Tensor(shapes[key][1], shapes[key][0], tuple(found)) for key, found in chunks.items()}
    out = []
    for i, entries in enumerate(files):
        counts = tuple(n for _, n in entries)
        out.append(OutFile(f"__{i}_0.distcp", sum(counts), tuple(job for job, _ in entries), counts))
    return out, tensors
