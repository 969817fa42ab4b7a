"""Qwen3 dense (0.6B to 32B): grouped-query attention with per-head query/key norms."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields, expect


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    expect("qwen3", hf, attention_bias=False)
    return Arch(**decoder_fields("qwen3", hf), ffn=hf["intermediate_size"], qk_norm=True)
