"""Boxes of arrays that lie in files, read into memory of the process's own, and the safetensors format on top of that.

Not through a memory mapping: its pages count as the process's as long as the kernel has room, so that nobody could promise a limit.
"""

from __future__ import annotations

import json
import os
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import _TYPES

from moerl.models.arch import ModelError
from moerl.models.tensormap import Box

DTYPES = _TYPES | {"F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # what may be written
SHORTEST_RUN = 512  # bytes; where a box's runs of elements are shorter, whole rows are read and cut
OPEN_FILES = 64  # a checkpoint may have thousands of files, a process may often have 1024 open
ROWS_AT_ONCE = 2**24  # bytes of whole rows in memory while columns are cut out of them


def raw(values: torch.Tensor) -> np.ndarray:
    """The elements' bytes in their order, without a copy where they lie so in this host's memory."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def spans(shape: list[int], index) -> Box:
    """Slices from first to last element for an index of slices, of which there may be fewer than dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    ranges = [range(n)[i] for n, i in zip(shape, (*index, *[slice(None)] * len(shape)))]
    return tuple(slice(r.start, r.stop) for r in ranges)


class File:
    """A file to read from, open while it is one of the last used. A read past its end is a ModelError.

    With `once` (of all files of a process) the kernel may forget what was read: a conversion would push everything else out of its cache.
    """

    once = False
    opened: dict[File, int] = {}  # descriptors, the last used last

    def __init__(self, path: Path):
        self.path = path

    @property
    def descriptor(self) -> int:
        found = File.opened.pop(self, None)
        if found is None:
            try:
                found = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"{self.path}: cannot be read ({error.strerror})") from None
            while len(File.opened) >= OPEN_FILES:
                os.close(File.opened.pop(next(iter(File.opened))))
        File.opened[self] = found
        return found

    def fill(self, view: memoryview, start: int) -> None:
        """Read the bytes from `start` on into the memory `view`."""
        descriptor, done = self.descriptor, 0
        while done < len(view):
            try:
                got = os.preadv(descriptor, [view[done:]], start + done)
            except OSError as error:
                raise ModelError(f"{self.path}: cannot be read ({error.strerror})") from None
            if got == 0:
                raise ModelError(f"{self.path}: ends at byte {start + done}, {len(view) - done} more were to be read")
            done += got
        if self.once:
            os.posix_fadvise(descriptor, start, done, os.POSIX_FADV_DONTNEED)

    def box(self, start: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Elements `box` of an array [shape] whose elements begin at byte `start`, in the tensor `out` if there is one."""
        sizes = [b.stop - b.start for b in box]
        out = torch.empty(sizes, dtype=dtype) if out is None else out
        # From the last dimension that is cut on, elements of one index lie together.
        cut = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
        run = prod(sizes[cut:]) * dtype.itemsize
        if out.is_contiguous() and (prod(sizes[:cut]) <= 1 or run >= SHORTEST_RUN):
            view = memoryview(raw(out))
            tail = sum(b.start * prod(shape[d + 1 :]) for d, b in enumerate(box) if d >= cut)
            for i, index in enumerate(product(*(range(b.start, b.stop) for b in box[:cut]))):
                first = tail + sum(k * prod(shape[d + 1 :]) for d, k in enumerate(index))
                self.fill(view[i * run : (i + 1) * run], start + first * dtype.itemsize)
            return out
        row = prod(shape[1:])
        step = max(1, ROWS_AT_ONCE // (row * dtype.itemsize))
        for low in range(0, sizes[0], step):
            high = min(low + step, sizes[0])
            rows = torch.empty(high - low, *shape[1:], dtype=dtype)
            self.fill(memoryview(raw(rows)), start + (box[0].start + low) * row * dtype.itemsize)
            out[low:high] = rows[(slice(None), *box[1:])]
        return out


class Stored:
    """A tensor in a safetensors file; indexed by slices it is read."""

    def __init__(self, file: File, start: int, dtype: str, shape: list[int]):
        self.file, self.start, self.dtype, self.shape = file, start, dtype, shape

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index) -> torch.Tensor:
        return self.read(index)

    def read(self, index, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.file.box(self.start, DTYPES[self.dtype], tuple(self.shape), spans(self.shape, index), out)


class SafetensorsFile:
    """The header of a safetensors file, checked against the file's length, and its tensors."""

    def __init__(self, path: Path):
        self.file = File(path)
        size = os.fstat(self.file.descriptor).st_size
        try:
            length = int.from_bytes(os.pread(self.file.descriptor, 8, 0), "little")
            if length > size - 8:
                raise ValueError(f"its header would end at byte {length + 8} of {size}")
            self.entries = json.loads(os.pread(self.file.descriptor, length, 8))
            self.metadata = self.entries.pop("__metadata__", {})
            self.begin = 8 + length
            for name, entry in self.entries.items():
                self._check(name, entry, size - self.begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from None

    def _check(self, name: str, entry: dict, size: int) -> None:
        (first, last), dtype, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}, which is not known here")
        if not 0 <= first <= last:
            raise ValueError(f"tensor {name} lies from byte {first} to {last}")
        if last > size:
            raise ValueError(f"tensor {name} ends at byte {last} of {size}: the file is cut short")
        if last - first != prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"tensor {name} has {last - first} bytes, {shape} of {dtype} are {prod(shape) * DTYPES[dtype].itemsize}")

    def keys(self):
        return self.entries.keys()

    def get_slice(self, name: str) -> Stored:
        entry = self.entries[name]
        return Stored(self.file, self.begin + entry["data_offsets"][0], entry["dtype"], entry["shape"])


def header(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file of these tensors, in their order, and the byte of the file where each begins."""
    entries, starts, end = {"__metadata__": {"format": "pt"}}, {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], size = end, prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + start for name, start in starts.items()}
