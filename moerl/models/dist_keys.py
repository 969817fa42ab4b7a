"""Where the parameters of the tensor map stand in a Megatron distributed checkpoint: names and whole shapes, whatever the layout.

Megatron-core names a parameter in a checkpoint by the module that holds it, and modules differ: Transformer Engine fuses a norm into the
projection behind it. Checkpoints here always have the names of Transformer Engine's modules, so that one written on a CPU loads on a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

from moerl.models.tensormap import Box, Param

LAYER = re.compile(r"^(decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.(.+)$")
PREDICTION = re.compile(r"^(mtp\.layers\.\d+)\.mtp_model_layer\.")  # the name since Megatron-core 0.17
EXPERT = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(.+)$")
# Norm -> where Transformer Engine keeps it, in layers that have a parameter of the second name.
FUSED = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight"),
    "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_q_up_proj.weight"),
    "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.weight"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight"),
}
TABLE = "embedding.word_embeddings.weight"
UNFUSED = {fused: norm for norm, (fused, _) in FUSED.items()}


@dataclass(frozen=True)
class Place:
    """A parameter in a distributed checkpoint: all of tensor `key` of `shape`, or entry `entry` of its first dimension (an expert)."""

    key: str
    shape: tuple[int, ...]
    entry: int | None = None

    def apart(self, param: Param, box: Box) -> int | None:
        """The dimension along which to take `box` one by one where it is no box in the tensor: half of a gate and half of its partner."""
        lead = len(box) - param.rank + 1
        sizes = [b.stop - b.start for b in box[:lead]]
        first = next((d for d in range(lead) if sizes[d] > 1), lead)
        return first if sizes[first + 1 :] != list(param.shape[first + 1 : lead]) else None

    def box(self, param: Param, box: Box) -> Box:
        """The elements `box` of the parameter's logical array, which are one run (`apart`) of those dimensions that Megatron merges."""
        lead = len(box) - param.rank + 1
        first, count = 0, 1
        for b, n in zip(box[:lead], param.shape[:lead]):
            first, count = first * n + b.start, count * (b.stop - b.start)
        merged = (slice(first, first + count), *box[lead:])
        return merged if self.entry is None else (slice(self.entry, self.entry + 1), *merged)


def places(params: Mapping[str, Param]) -> dict[str, Place]:
    """The place of every parameter; a tied head's is the table of the first stage."""
    keys = {name: TABLE if p.tied else canonical(EXPERT.sub(r"\1.experts.\3", name), params) for name, p in params.items()}
    experts = Counter(keys.values())
    out = {}
    for name, param in params.items():
        key, shape = keys[name], param.local_shape(1)
        out[name] = Place(key, shape) if param.expert is None else Place(key, (experts[key], *shape), param.expert)
    return out


def in_layer(name: str) -> tuple[str, str] | None:
    """The layer of a module's tensor, and its name in there with norms on their own; None for what is in no layer."""
    match = LAYER.match(PREDICTION.sub(r"\1.transformer_layer.", name))
    return match and (match[1], UNFUSED.get(match[2], match[2]))


def canonical(key: str, params: Container[str]) -> str:
    """The name in checkpoints of what a module, with or without Transformer Engine, calls `key`; `params` are the map's names."""
    if found := in_layer(key):
        layer, norm = found
        fused, holder = FUSED.get(norm, (norm, ""))
        return f"{layer}.{fused if f'{layer}.{holder}' in params else norm}"
    return key
