"""Weights of one rank's model: read from a checkpoint, handed out as shards. The tensor map says what goes where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from moerl.layout import ParallelLayout
from moerl.models.arch import Arch, ModelError
from moerl.models.dist_keys import in_layer
from moerl.models.placement import part
from moerl.models.source import HEAD, open_source
from moerl.models.tensormap import Param

EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc\d)\.(weight|bias)(\d+)$")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter: part `index` of `parts` along its split dimension. Of all ranks that hold it one is the `owner`."""

    name: str
    tensor: Tensor
    parts: int
    index: int
    owner: bool


def _global_name(local: str, layers: range, first_expert: int) -> str:
    """Megatron's local parameter name with the model's own layer and expert numbers."""
    found = in_layer(local)
    if found is None:
        return local
    owner, rest = found
    if owner.startswith("decoder."):
        owner = f"decoder.layers.{layers[int(owner.rpartition('.')[2])]}"
    if expert := EXPERT.match(rest):
        rest = f"mlp.experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif expert := GROUPED_EXPERT.match(rest):
        rest = f"mlp.experts.{first_expert + int(expert[3])}.{expert[1]}.{expert[2]}"
    return f"{owner}.{rest}"


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers: a router's expert bias is a buffer, and is a weight all the same."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not name.startswith("local_tokens_per_expert"):
                yield f"{prefix}.{name}" if prefix else name, buffer


def shards(chunks: list[GPTModel], arch: Arch, layout: ParallelLayout, rank: int, params: dict[str, Param], *,
           value_head: bool = False, detach: bool = True) -> Iterator[Shard]:
    """Every tensor of this rank under its global name. A tensor the map does not know is an error: nothing is left out in silence."""
    at = layout.coords(rank)
    first_expert = at.ep * (arch.experts // layout.ep) if arch.experts else 0
    for vp, chunk in enumerate(chunks):
        layers = layout.stage_layers(arch.layers, at.pp, vp)
        for local, tensor in _tensors(chunk):
            name = _global_name(local, layers, first_expert)
            if value_head and name == HEAD:
                continue
            if name not in params:
                raise ModelError(f"{arch.family}: Megatron tensor {name} {tuple(tensor.shape)} is not in the tensor map")
            _, parts, index, owner = part(params[name], layout, rank)
            yield Shard(name, tensor.detach() if detach else tensor, parts, index, owner)


def mark_parallel(chunks: list[GPTModel], arch: Arch, layout: ParallelLayout, rank: int, params: dict[str, Param], *,
                  value_head: bool = False) -> None:
    """Tell Megatron what each parameter is, as the map knows it.

    Shards: the gradient norm counts every other parameter on one tensor-parallel rank only. Experts: their gradients are summed over the
    expert-data-parallel ranks. Megatron marks them so only when ep > 1, and at ep = 1 with etp < tp would leave the sum out. An expert's
    output bias is whole on its rank (etp is 1), yet no other tensor-parallel rank has the same one: it counts as a shard, and Megatron's
    mark for a sum over tensor-parallel ranks, where other experts stand, is taken off.
    """
    for shard in shards(chunks, arch, layout, rank, params, value_head=value_head, detach=False):
        param = params[shard.name]
        if param.split is not None or param.expert is not None:
            dim = max(0, (param.split or 0) - len(param.shape) + param.rank)
            shard.tensor.tensor_model_parallel, shard.tensor.partition_dim, shard.tensor.partition_stride = True, dim, 1
        if param.expert is not None:
            shard.tensor.allreduce = shard.tensor.sequence_parallel = False


@torch.no_grad()
def load(chunks: list[GPTModel], arch: Arch, layout: ParallelLayout, rank: int, path: str, *, value_head: bool = False) -> None:
    """Fill this rank's shards from the checkpoint at `path`, Hugging Face's or Megatron's, reading only the boxes it owns.

    The value head is left as it is. The checkpoint is checked whole, and its prediction layers are left aside where the chunks have none.
    """
    source = open_source(path, chunks[0].config.params_dtype)
    for shard in shards(chunks, arch, layout, rank, source.params, value_head=value_head):
        param = source.params[shard.name]
        if tuple(shard.tensor.shape) != param.local_shape(shard.parts):
            found, want = tuple(shard.tensor.shape), param.local_shape(shard.parts)
            raise ModelError(f"{shard.name}: Megatron's shard is {found}, the map says {want}")
        shard.tensor.copy_(source.read(param, param.part(shard.parts, shard.index)).reshape(shard.tensor.shape))


def owned_shards(chunks: list[GPTModel], arch: Arch, layout: ParallelLayout, rank: int, params: dict[str, Param]) -> list[Shard]:
    """The shards that this rank contributes to the whole model: over all ranks, every element exactly once."""
    return [s for s in shards(chunks, arch, layout, rank, params) if s.owner and not params[s.name].tied]
