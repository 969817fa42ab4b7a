"""Compare two checkpoints of either format, element by element, under the Hugging Face names of their tensors."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

import torch

from checkpoint_tools.boxes import cut
from checkpoint_tools.megatron_to_hf import open_checkpoint
from checkpoint_tools.stream import Progress, StreamError
from moerl.models import torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import INDEX
from moerl.models.files import raw
from moerl.models.source import HFSource, Source, open_source
from moerl.models.tensormap import Box, copies_in, hf_shapes, shape_of

SHOWN = 20
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """`count` of the elements of a piece of tensor `name` differ, by at most `largest`."""

    name: str
    count: int
    largest: float


def compare(a: Path, b: Path, *, role: str = "actor", workers: int = 4) -> bool:
    """Print what the checkpoints hold and where they differ; whether they are the same.

    Tensors of one dtype are compared bit for bit; scaled float8 counts as what the other side has. The checksum of a side is over all its
    elements in the order of the tensor map, so it does not depend on format, layout or files.
    """
    one, two = _open(a, role), _open(b, role)
    one, two = _alike(one, two), _alike(two, one)
    same = _same_model(one, two, a, b)
    jobs = [(name, box) for name, param in one.params.items() if name in two.params and not param.tied
            for box in cut(param, param.shape, one.dtype(param).itemsize)]
    sizes = [prod(shape_of(box)) * one.dtype(one.params[name]).itemsize for name, box in jobs]
    differences, digests = {}, (hashlib.sha256(), hashlib.sha256())
    progress, done, total = Progress(sys.stderr), 0, sum(sizes)
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start, (one, two)) as pool:
            for (found, ours, theirs), size in zip(pool.map(_compare, jobs), sizes):
                for difference in found:
                    differences.setdefault(difference.name, []).append(difference)
                digests[0].update(ours)
                digests[1].update(theirs)
                done += size
                progress([done], 0, total)
    except BrokenProcessPool:
        raise StreamError("a worker was killed, as a full memory does it; try with fewer --workers") from None
    same &= _others(one, two)
    shapes = hf_shapes(one.params.values())
    for held, path, digest in ((shapes, a, digests[0]), (hf_shapes(two.params.values()), b, digests[1])):
        print(f"{path}: {len(held)} tensors, {sum(map(prod, held.values()))} elements, sha256 {digest.hexdigest()}")
    for name, parts in list(differences.items())[:SHOWN]:
        count, largest = sum(p.count for p in parts), max(p.largest for p in parts)
        print(f"differs: {name}: {count} of {prod(shapes[name])} elements, by at most {largest:.6g}")
    if len(differences) > SHOWN:
        print(f"... and {len(differences) - SHOWN} more tensors")
    same = same and not differences
    print("the same" if same else "different")
    return same


def _open(path: Path, role: str) -> Source:
    if torch_dist.is_torch_dist(path) or (path / role).is_dir():
        return open_checkpoint(path, role)
    if not (path / INDEX).is_file() and not any(path.glob("*.safetensors")):
        raise ModelError(f"{path}: neither a Hugging Face nor a Megatron checkpoint")
    return open_source(path)


def _alike(one: Source, two: Source) -> Source:
    """`one` with its scaled tensors read as the dtype that `two` has."""
    if isinstance(one, HFSource):
        for name, param in one.params.items():
            if name in two.params and (wanted := two.dtype(two.params[name])) != one.dtype(param) and one.scaled(param):
                return HFSource(one.path, wanted)
    return one


def _same_model(one: Source, two: Source, a: Path, b: Path) -> bool:
    """Whether both hold the same parameters; a difference in dimensions is an error."""
    apart = [f.name for f in fields(one.arch) if getattr(one.arch, f.name) != getattr(two.arch, f.name)]
    if apart := [name for name in apart if name not in ("mtp_layers", "context")]:
        raise ModelError(f"{a} and {b} are different models: {', '.join(apart)} differ")
    same, names = True, [hf_shapes(source.params.values()) for source in (one, two)]
    for left, right, path in ((*names, b), (*names[::-1], a)):
        missing = [name for name in left if name not in right]
        same &= not missing
        for name in missing[:SHOWN]:
            print(f"only in one: {name} is not in {path}")
    return same


def _others(one: Source, two: Source) -> bool:
    """Whether what belongs to no parameter is the same: a value head, second copies of tensors, and those kept as they are."""
    ours, theirs = one.kept(), two.kept()
    apart = sorted(set(one.copies) ^ set(two.copies) | set(ours) ^ set(theirs))
    apart += [n for n in ours if n in theirs and not torch.equal(ours[n], theirs[n])]
    heads = one.head(), two.head()
    if (heads[0] is None) != (heads[1] is None) or heads[0] is not None and not torch.equal(*heads):
        apart.append("the value head")
    apart += [name for source in (one, two) if isinstance(source, HFSource) for name in source.stale_copies()]
    for name in apart[:SHOWN]:
        print(f"differs: {name}, which is no parameter")
    return not apart


def _start(one: Source, two: Source) -> None:
    global SIDES
    SIDES = one, two
    torch.set_num_threads(1)


def _compare(job: tuple[str, Box]) -> tuple[list[Difference], bytes, bytes]:
    name, box = job
    one, two = SIDES
    param = one.params[name]
    ours, theirs = one.read(param, box), two.read(two.params[name], box)
    if ours.dtype == theirs.dtype:
        same = _bits(ours) == _bits(theirs)
    else:
        same = ours.float() == theirs.float()
    found = []
    if not same.all():
        for copy in copies_in(param, box):
            apart = ~same[copy.target]
            if count := int(apart.sum()):
                by = (ours[copy.target].double() - theirs[copy.target].double())[apart].abs()
                found.append(Difference(copy.piece.name, count, float(by.max())))
    return found, _digest(ours), _digest(theirs)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(INTEGERS[values.dtype.itemsize])


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.sha256(raw(values)).digest()


if __name__ == "__main__":
    import typer

    from checkpoint_tools.cli import audit

    typer.run(audit)
