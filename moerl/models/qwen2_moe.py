"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): softmax-routed experts beside a shared expert with a sigmoid gate of its own."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields, sparse_fields


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    return Arch(
        **decoder_fields("qwen2_moe", hf), **sparse_fields(hf), qkv_bias=hf.get("qkv_bias", True),
        norm_topk=hf.get("norm_topk_prob", False), shared_ffn=hf["shared_expert_intermediate_size"], shared_expert_gate=True,
    )
