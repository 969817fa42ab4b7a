"""GLM-4.5, 4.6, 4.7 and GLM-4.5-Air: half-rotary GQA with biases, sigmoid-routed experts in groups, one shared expert.

The prediction layer (`num_nextn_predict_layers`) has DeepSeek-V3's names; GLM-4.6's leaves out the copies of embedding and head.
"""

from __future__ import annotations

from moerl.models.arch import Arch, ModelError
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.fields import full_attention


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("default", None):
        raise ModelError(f"glm4_moe: rope type {kind!r} is not supported (supported: default)")
    for field, wanted in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True),
                          ("sliding_window", None)):
        if hf.get(field, wanted) != wanted:
            raise ModelError(f"glm4_moe: {field} {hf[field]!r} is not supported (supported: {wanted!r})")
    full_attention("glm4_moe", hf)
    if hf.get("quantization_config"):
        raise ModelError("glm4_moe: a quantized checkpoint (quantization_config) is not supported")
    groups = hf.get("n_group") or 1
    return Arch(
        family="glm4_moe", layers=hf["num_hidden_layers"], hidden=hf["hidden_size"], heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"], head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], rope_theta=rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
        rotary_percent=rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 0.5)),
        tied_embeddings=hf.get("tie_word_embeddings", False), ffn=hf["intermediate_size"], qk_norm=hf.get("use_qk_norm", False),
        qkv_bias=hf.get("attention_bias", False), experts=hf.get("n_routed_experts") or hf["num_local_experts"],
        topk=hf["num_experts_per_tok"], expert_ffn=hf["moe_intermediate_size"], expert_bias=True,
        dense_layers=frozenset(range(hf.get("first_k_dense_replace", 0))),
        shared_ffn=hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1),
        expert_groups=groups if groups > 1 else 0, group_topk=hf["topk_group"] if groups > 1 else 0, group_best=2 if groups > 1 else 0,
        routed_scale=hf.get("routed_scaling_factor", 1.0), mtp_layers=hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers", 0)) or 0,
    )
