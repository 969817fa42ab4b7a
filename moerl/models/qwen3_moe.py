"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder-480B-A35B): grouped-query attention with per-head query/key norms, softmax-routed experts."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields, expect, sparse_fields


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    expect("qwen3_moe", hf, attention_bias=False, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
    return Arch(
        **decoder_fields("qwen3_moe", hf), **sparse_fields(hf), qk_norm=True, norm_topk=hf.get("norm_topk_prob", False)
    )
