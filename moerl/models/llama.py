"""Llama 2 and 3 (1B to 405B), with the stretched rotary frequencies of 3.1 and later."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields, expect


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    expect("llama", hf, attention_bias=False, mlp_bias=False, sliding_window=None)
    return Arch(**decoder_fields("llama", hf, llama3=True), ffn=hf["intermediate_size"])
