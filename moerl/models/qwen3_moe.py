"""Qwen3-MoE (30B-A3B, 235B-A22B): GQA with per-head query/key norms, softmax-routed experts."""

from __future__ import annotations

from moerl.models.arch import Arch, ModelError
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)

UNDERSTOOD = {"default", None}


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in UNDERSTOOD:
        raise ModelError(f"qwen3_moe: rope type {kind!r} is not supported (supported: default)")
    if hf.get("use_sliding_window"):
        raise ModelError("qwen3_moe: use_sliding_window is not supported")
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"qwen3_moe: hidden_act {hf['hidden_act']!r} is not supported (supported: silu)")
    if "quantization_config" in hf:
        raise ModelError("qwen3_moe: a quantized checkpoint (quantization_config) is not supported")
    layers, sparse_step = hf["num_hidden_layers"], hf.get("decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or []) | {i for i in range(layers) if (i + 1) % sparse_step}
    return Arch(
        family="qwen3_moe", layers=layers, hidden=hf["hidden_size"], heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"], head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], rope_theta=rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
        context=hf.get("max_position_embeddings", 0), tied_embeddings=hf.get("tie_word_embeddings", False), ffn=hf.get("intermediate_size", 0), qk_norm=True,
        qkv_bias=hf.get("attention_bias", False), experts=hf.get("num_local_experts") or hf["num_experts"], topk=hf["num_experts_per_tok"],
        expert_ffn=hf["moe_intermediate_size"], norm_topk=hf.get("norm_topk_prob", True), dense_layers=frozenset(dense),
    )
