"""OLMoE (1B-7B): attention with norms over the whole query and key width, softmax-routed experts, not renormalised."""

from __future__ import annotations

from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import decoder_fields, expect


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    expect("olmoe", hf, attention_bias=False, clip_qkv=None, sliding_window=None)
    return Arch(
        **decoder_fields("olmoe", hf), wide_qk_norm=True, experts=hf.get("num_local_experts") or hf["num_experts"],
        topk=hf["num_experts_per_tok"], expert_ffn=hf["intermediate_size"], norm_topk=hf.get("norm_topk_prob", False),
    )
