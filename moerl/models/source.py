"""A model's weights on disk, in either format, as boxes of the tensor map's parameters."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from moerl.models import config_of, params_of, read_arch, torch_dist
from moerl.models.arch import Arch, ModelError, refuse
from moerl.models.checkpoint import HFReader, copy_side_files
from moerl.models.dist_keys import places
from moerl.models.files import SafetensorsFile
from moerl.models.tensormap import Box, Param, copies_in, duplicates, shape_of

KEPT = "hf_kept.safetensors"  # beside a Megatron checkpoint's configuration: what the Hugging Face one had and Megatron does not know
HEAD = "output_layer.weight"
SCORE, BIAS = "score.weight", "score.bias"  # a critic's value head in a Hugging Face checkpoint (a token classifier)


class Source(Protocol):
    """A checkpoint that holds exactly the parameters `params`; `config` is the directory with its config.json.

    `copies` are names under which the Hugging Face checkpoint had tensors a second time, `kept` tensors that belong to no parameter.
    """

    arch: Arch
    params: dict[str, Param]
    config: Path
    copies: list[str]

    def head(self) -> torch.Tensor | None:
        """A critic's value head [1, hidden]; then there is no output layer."""

    def dtype(self, param: Param) -> torch.dtype: ...

    def read(self, param: Param, box: Box) -> torch.Tensor:
        """Elements `box` of the parameter's logical array; rows that pad the vocabulary are zeros."""

    def kept(self) -> dict[str, torch.Tensor]: ...

    def as_exported(self) -> bool:
        """Whether it has the form of a checkpoint that is exported after training, the form that an engine takes."""


def open_source(path: str | Path, scaled_as: torch.dtype = torch.bfloat16) -> Source:
    """The checkpoint in directory `path`; ModelError, a line a tensor, unless it fits its config.json."""
    return MegatronSource(Path(path)) if torch_dist.is_torch_dist(Path(path)) else HFSource(Path(path), scaled_as)


class HFSource:
    """A Hugging Face checkpoint. Scaled float8 and MXFP4 are read as `scaled_as`."""

    def __init__(self, path: Path, scaled_as: torch.dtype):
        self.path = self.config = path
        self.arch = read_arch(path)
        self.reader = HFReader(path, scaled_as)
        own, head = params_of(self.arch), {}
        if SCORE in self.reader.files:
            head = {SCORE: (1, self.arch.hidden)} | ({BIAS: (1,)} if BIAS in self.reader.files else {})
            own = {n: p for n, p in own.items() if n != HEAD}
        self.params = self.reader.fit(own, head)
        self.copies = [name for name in duplicates(own.values()) if name in self.reader.files]

    def dtype(self, param: Param) -> torch.dtype:
        found = {self.reader.dtype(piece.name) for piece in param.pieces}
        if len(found) > 1:
            names = ", ".join(piece.name for piece in param.pieces)
            raise ModelError(f"{self.path}: {names} are of different dtypes ({', '.join(sorted(map(str, found)))})")
        return found.pop()

    def read(self, param: Param, box: Box) -> torch.Tensor:
        found, out = copies_in(param, box), None
        if sum(prod(shape_of(c.source)) for c in found) < prod(shape_of(box)):
            out = torch.zeros(shape_of(box), dtype=self.dtype(param))
        elif len(found) > 1:
            out = torch.empty(shape_of(box), dtype=self.dtype(param))
        if out is None:
            return self.reader.read(found[0]).to(self.dtype(param))
        for copy in found:
            self.reader.read(copy, out[copy.target])
        return out

    def kept(self) -> dict[str, torch.Tensor]:
        return self.reader.frequencies()

    def head(self) -> torch.Tensor | None:
        return self.reader.stored(SCORE)[:] if SCORE in self.reader.files else None

    def scaled(self, param: Param) -> bool:
        """Whether the parameter is stored as numbers and scales."""
        return any(self.reader.scaled(piece.name) for piece in param.pieces)

    def stale_copies(self) -> list[str]:
        """Second copies of tensors that are not what the tensors are."""
        stale = []
        for copy, own in duplicates(params_of(self.arch).values()).items():
            if copy in self.copies and own in self.reader.files:
                a, b = self.reader.stored(copy), self.reader.stored(own)
                step = max(1, 2**26 // max(1, prod(a.get_shape()[1:]) * 4))
                rows = range(0, a.get_shape()[0], step)
                if any(not torch.equal(a[low : low + step].float(), b[low : low + step].float()) for low in rows):
                    stale.append(copy)
        return stale

    def as_exported(self) -> bool:
        return self.reader.as_exported(params_of(self.arch.main()), config_of(self.arch))


class MegatronSource:
    """A Megatron distributed checkpoint, converted or of training, with the configuration beside it or in `config`."""

    def __init__(self, path: Path, config: Path | None = None):
        self.path, self.config = path, config or path
        tensors = torch_dist.read_metadata(path)
        arch = read_arch(self.config / "config.json")
        self.arch = arch if any(key.startswith("mtp.") for key in tensors) else arch.main()
        self.value_head = HEAD in tensors and tensors[HEAD].shape == (1, arch.hidden)
        self.params = {n: p for n, p in params_of(self.arch).items() if not (self.value_head and n == HEAD)}
        self.places = places(self.params)
        self._kept, self.copies = _read_kept(self.config)
        self.reader = torch_dist.Reader(path, tensors)
        self._check(tensors)

    def _check(self, tensors: dict[str, torch_dist.Tensor]) -> None:
        wanted = {place.key: (place.shape, self.params[name]) for name, place in self.places.items()}
        known = set(wanted) | ({HEAD} if self.value_head else set())
        lines = [f"missing tensor {key} {shape}" for key, (shape, _) in wanted.items() if key not in tensors]
        lines += [f"unexpected tensor {key} {tensors[key].shape}" for key in tensors
                  if key not in known and not key.startswith("optimizer.")]
        for key, (shape, param) in wanted.items():
            if key in tensors and not _fits(tensors[key].shape, shape, param):
                lines.append(f"tensor {key} has shape {tensors[key].shape}, expected {shape}")
        refuse(f"{self.path}: does not fit {self.config / 'config.json'}", lines)
        self.reader.check()

    def dtype(self, param: Param) -> torch.dtype:
        return self.reader.tensors[self.places[param.name].key].dtype

    def read(self, param: Param, box: Box) -> torch.Tensor:
        place = self.places[param.name]
        if (dim := place.apart(param, box)) is not None:
            parts = ((*box[:dim], slice(i, i + 1), *box[dim + 1 :]) for i in range(box[dim].start, box[dim].stop))
            return torch.cat([self.read(param, part) for part in parts], dim)
        rows = self.reader.tensors[place.key].shape[0]
        if not param.padded or box[0].stop <= rows:
            return self.reader.read(place.key, place.box(param, box)).view(shape_of(box))
        out = torch.zeros(shape_of(box), dtype=self.dtype(param))  # the reader pads more than the writer did
        if box[0].start < rows:
            out[: rows - box[0].start] = self.reader.read(place.key, (slice(box[0].start, rows), *box[1:]))
        return out

    def kept(self) -> dict[str, torch.Tensor]:
        return self._kept

    def as_exported(self) -> bool:
        return False

    def head(self) -> torch.Tensor | None:
        return self.reader.read(HEAD, (slice(0, 1), slice(0, self.arch.hidden))) if self.value_head else None


def write_beside(source: Source, path: Path) -> None:
    """Put into `path`, where a Megatron checkpoint's configuration lies, what belongs to the model and is not in that checkpoint."""
    copy_side_files(source.config, path)
    save_file(source.kept(), path / KEPT, metadata={"copies": json.dumps(source.copies)})


def _read_kept(config: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    if not (config / KEPT).is_file():
        return {}, []
    file = SafetensorsFile(config / KEPT)
    return {name: file.get_slice(name)[:] for name in file.keys()}, json.loads(file.metadata["copies"])


def _fits(found: tuple[int, ...], wanted: tuple[int, ...], param: Param) -> bool:
    """Whether a tensor is the parameter's: of its shape, or with more rows where the vocabulary was padded for another layout."""
    return found[1:] == wanted[1:] and found[0] >= param.shape[0] if param.padded else found == wanted
