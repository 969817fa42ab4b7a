"""Convert a Hugging Face checkpoint into a Megatron distributed checkpoint, streaming.

The tensors are whole ones, cut into chunks, so that the result loads at any layout. No model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from checkpoint_tools.boxes import cut, in_float32
from checkpoint_tools.output import write
from checkpoint_tools.stream import OutFile
from moerl.models import torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import identity
from moerl.models.dist_keys import places
from moerl.models.files import raw
from moerl.models.source import HFSource, write_beside
from moerl.models.tensormap import Box, Param, shape_of

FILES = 16  # a small checkpoint is cut into so many, for workers to share and for a restart to find
FILE = 2**31  # bytes of a file of a large one


def convert(hf: Path, out: Path, *, memory: int, workers: int, dtype: str | None = None, share: tuple[int, int] = (0, 1)) -> Path:
    """Write `out`, a Megatron checkpoint of the model in directory `hf`, with configuration and tokenizer beside it.

    `memory` in bytes is what all workers of this host may hold together. Dtypes stay; float8 blocks and MXFP4 are written as values in
    bfloat16; `dtype` casts. See `output.write` for `share` and for what happens to a run that was killed.
    """
    cast = getattr(torch, dtype) if dtype else None
    source = HFSource(hf, cast or torch.bfloat16)
    tensors = Tensors(source, cast)
    files, written = lay_out(tensors)

    def produce(job: tuple) -> Iterator[tuple[int, list]]:
        name, box, start = job
        values, sizes = tensors.chunk(name, box)
        before, after = torch_dist.archive(values.dtype, sizes)
        yield start, [before, raw(values), after]

    def finish(part: Path) -> None:
        write_beside(source, part)
        torch_dist.write_metadata(part, written, {"updates": 0, "layout": None})

    what = {"hf": identity(hf), "dtype": dtype}
    return write(out, files, produce, finish, what=what, memory=memory, workers=workers, share=share)


class Tensors:
    """The tensors to write: a model's parameters in their places; `cast` is their dtype, None their own."""

    def __init__(self, source: HFSource, cast: torch.dtype | None):
        self.source, self.cast = source, cast
        self.params = {n: p for n, p in source.params.items() if not p.tied}
        self.places = places(self.params)

    def dtype(self, param: Param) -> torch.dtype:
        return self.source.dtype(param) if self.cast is None or in_float32(param, self.source.dtype(param)) else self.cast

    def chunk(self, name: str, box: Box) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The elements of a chunk, and its sizes in the tensor."""
        param = self.params[name]
        return self.source.read(param, box).to(self.dtype(param)), shape_of(self.places[name].box(param, box))

    def chunks(self) -> Iterator[tuple[str, Box, str, tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Parameter, box, tensor, corner, sizes and dtype of every chunk."""
        for name, param in self.params.items():
            place, dtype = self.places[name], self.dtype(param)
            for box in cut(param, param.box(1), max(dtype.itemsize, self.source.dtype(param).itemsize)):
                inside = place.box(param, box)
                yield name, box, place.key, tuple(b.start for b in inside), shape_of(inside), dtype


def lay_out(tensors: Tensors) -> tuple[list[OutFile], dict[str, torch_dist.Tensor]]:
    """The files to write, and the tensors with the chunks that will lie in them."""
    found = list(tensors.chunks())
    lengths = [sum(map(len, torch_dist.archive(dtype, sizes))) + prod(sizes) * dtype.itemsize for *_, sizes, dtype in found]
    limit = min(FILE, max(1, sum(lengths) // FILES))
    files, chunks, dtypes, at = [[]], {}, {}, 0
    for (name, box, key, corner, sizes, dtype), length in zip(found, lengths):
        if at >= limit:
            files.append([])
            at = 0
        files[-1].append(((name, box, at), length))
        chunks.setdefault(key, []).append(torch_dist.Chunk(key, corner, sizes, f"__{len(files) - 1}_0.distcp", at, length))
        if dtypes.setdefault(key, dtype) != dtype:
            kinds = f"{dtypes[key]}, {dtype}"
            raise ModelError(f"{tensors.source.path}: the parts of {key} are of different dtypes ({kinds}); --dtype makes them one")
        at += length
    shapes = {p.key: p.shape for p in tensors.places.values()}
    written = {key: torch_dist.Tensor(dtypes[key], shapes[key], tuple(parts)) for key, parts in chunks.items()}
    out = []
    for i, entries in enumerate(files):
        counts = tuple(n for _, n in entries)
        out.append(OutFile(f"__{i}_0.distcp", sum(counts), tuple(job for job, _ in entries), counts))
    return out, written


if __name__ == "__main__":
    import typer

    from checkpoint_tools.cli import hf_to_megatron

    typer.run(hf_to_megatron)
