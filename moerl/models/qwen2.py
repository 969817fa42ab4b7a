"""Qwen2 and Qwen2.5 dense (0.5B to 72B): biases on query, key and value."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    return Arch(**decoder_fields("qwen2", hf), ffn=hf["intermediate_size"], qkv_bias=True)
