"""Megatron's distributed checkpoint format (torch_dist), read and written file by file without Megatron.

A checkpoint is a directory: `*.distcp` files hold chunks of tensors end to end, each a small archive as `torch.save` writes it;
`.metadata` says which chunk of which tensor lies where. All sizes follow from shapes, so a whole directory can be laid out before a byte
of it is written. What Megatron stores as pickled objects (random states) is left aside.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch

from moerl.models.arch import ModelError
from moerl.models.files import File
from moerl.models.tensormap import Box, overlap

METADATA = ".metadata"
FORMAT = "metadata.json"
FORMAT_TEXT = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
COMMON = "common.pt"
ALIGNMENT = 64  # of a chunk's elements inside its archive, as torch.save has it
END = struct.Struct("<4s4H2LH")
ENTRY = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True)
class Chunk:
    """A box of tensor `key`: its corner and sizes, and the archive at `start` of `file`, `length` bytes long."""

    key: str
    corner: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_torch_dist(path: Path) -> bool:
    return (path / METADATA).is_file() and (path / FORMAT).is_file()


# --- writing


class _Storage:
    def __init__(self, dtype: torch.dtype, count: int):
        self.dtype, self.count = dtype, count


class _Tensor:
    """Pickles as torch pickles a contiguous tensor that has its storage for itself."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape

    def __reduce__(self):
        stride = tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))
        storage = _Storage(self.dtype, prod(self.shape))
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, found):
        if isinstance(found, _Storage):
            kind = torch.storage._dtype_to_storage_type_map()[found.dtype]
            return "storage", getattr(torch, kind), "0", "cpu", found.count
        return None


@cache
def archive(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What stands before and after the elements of a contiguous tensor in the archive that `torch.load` reads.

    The checksum of the elements is left out, as `torch.serialization.set_crc32_options(False)` leaves it: torch does not look at it.
    """
    size = prod(shape) * dtype.itemsize
    if size >= 2**32 - 2**16:
        raise ValueError(f"a chunk of {size} bytes does not fit one archive; split it")
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(_Tensor(dtype, shape))
    entries = {"data.pkl": pickled.getvalue(), ".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode(),
               "byteorder": b"little", "data/0": None, "version": b"3\n"}
    parts, directory, at = [b""], b"", 0
    for name, content in entries.items():
        path = f"archive/{name}".encode()
        count, checksum = (size, 0) if content is None else (len(content), zlib.crc32(content))
        fill = -(at + LOCAL.size + len(path) + 4) % ALIGNMENT
        extra = struct.pack("<2sH", b"FB", fill) + b"Z" * fill
        parts[-1] += LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, checksum, count, count, len(path), len(extra)) + path + extra
        directory += ENTRY.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, checksum, count, count, len(path), 0, 0, 0, 0, 0, at) + path
        at += LOCAL.size + len(path) + len(extra) + count
        if content is None:
            parts.append(b"")
        else:
            parts[-1] += content
    parts[-1] += directory + END.pack(b"PK\5\6", 0, 0, len(entries), len(entries), len(directory), at, 0)
    return parts[0], parts[1]


def write_metadata(directory: Path, tensors: dict[str, Tensor], common: dict) -> None:
    """The files that make a directory of chunks a checkpoint; `.metadata` is the last."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described, stored = {}, {}
    for key, tensor in tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(c.corner), torch.Size(c.sizes)) for c in tensor.chunks]
        described[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), boxes)
        for chunk in tensor.chunks:
            stored[MetadataIndex(key, torch.Size(chunk.corner))] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    (directory / FORMAT).write_text(FORMAT_TEXT)
    torch.save(common, directory / COMMON)
    part = directory / (METADATA + ".partial")
    part.write_bytes(pickle.dumps(Metadata(state_dict_metadata=described, storage_data=stored)))
    os.replace(part, directory / METADATA)


# --- reading


def read_metadata(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their key, without Megatron's pickled objects."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex

    try:
        found = FileSystemReader(str(path)).read_metadata()
    except Exception as error:  # unpickling damaged bytes may raise anything
        why = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path / METADATA}: not readable as the metadata of a distributed checkpoint ({why})") from None
    out = {}
    for key, tensor in found.state_dict_metadata.items():
        if not hasattr(tensor, "chunks"):
            continue
        chunks = []
        for box in tensor.chunks:
            info = found.storage_data.get(MetadataIndex(key, box.offsets))
            if info is None:
                raise ModelError(f"{path / METADATA}: tensor {key} has no bytes for its chunk at {tuple(box.offsets)}")
            chunks.append(Chunk(key, tuple(box.offsets), tuple(box.sizes), info.relative_path, info.offset, info.length))
        out[key] = Tensor(tensor.properties.dtype, tuple(tensor.size), tuple(chunks))
    return out


class Reader:
    """Boxes of a checkpoint's tensors, put together from the chunks that they meet."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        self.path, self.tensors = path, tensors
        self._open: dict[str, File] = {}

    def check(self) -> None:
        """Raise ModelError unless every chunk lies inside its file."""
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            size = (self.path / file).stat().st_size if (self.path / file).is_file() else None
            if size is None or size < end:
                state = "missing" if size is None else f"{size} bytes long"
                raise ModelError(f"{self.path / file}: {state}, its tensors end at byte {end}")

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The elements `box` of tensor `key`; ModelError where chunks do not cover them."""
        tensor = self.tensors[key]
        out = torch.empty([b.stop - b.start for b in box], dtype=tensor.dtype)
        filled = 0
        for chunk in tensor.chunks:
            if found := overlap(box, chunk.corner, chunk.sizes):
                inside, target = found
                start = chunk.start + self._elements(chunk, tensor.dtype)
                filled += self._file(chunk.file).box(start, tensor.dtype, chunk.sizes, inside, out[target]).numel()
        if filled != out.numel():
            raise ModelError(f"{self.path}: tensor {key} has {filled} of the {out.numel()} elements of {[(b.start, b.stop) for b in box]}")
        return out

    def _file(self, file: str) -> File:
        if file not in self._open:
            self._open[file] = File(self.path / file)
        return self._open[file]

    def _elements(self, chunk: Chunk, dtype: torch.dtype) -> int:
        """Where in its archive a chunk's elements begin: looked up in the archive's directory, which stands at its end."""
        descriptor, name = self._file(chunk.file).descriptor, f"{self.path / chunk.file}: chunk of {chunk.key}"
        base = max(0, chunk.length - 4096)
        tail = os.pread(descriptor, chunk.length - base, chunk.start + base)
        at = tail.rfind(b"PK\5\6")
        if at < 0:
            raise ModelError(f"{name} is not an archive as torch.save writes it")
        size, offset = END.unpack_from(tail, at)[5:7]
        directory = tail[offset - base :][:size] if offset >= base else os.pread(descriptor, size, chunk.start + offset)
        place = 0
        while place < len(directory):
            fields = ENTRY.unpack_from(directory, place)
            path = directory[place + ENTRY.size : place + ENTRY.size + fields[10]]
            if path.endswith(b"/data/0"):
                if fields[9] == 2**32 - 1:
                    raise ModelError(f"{name} is of more than 4 GiB, which is not supported; save at a larger tensor-parallel size")
                if fields[9] != prod(chunk.sizes) * dtype.itemsize:
                    raise ModelError(f"{name} holds {fields[9]} bytes, {chunk.sizes} of {dtype} are {prod(chunk.sizes) * dtype.itemsize}")
                local = LOCAL.unpack(os.pread(descriptor, LOCAL.size, chunk.start + fields[16]))
                return fields[16] + LOCAL.size + local[9] + local[10]
            place += ENTRY.size + fields[10] + fields[11] + fields[12]
        raise ModelError(f"{name} has no elements in its archive")

