"""What is checked of every `config.json` before a family reads it: types of the fields, and fields that no family here has an answer to."""

from __future__ import annotations

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size",
    "moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "experts_per_token", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace",
    "decoder_sparse_step", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim",
    "sliding_window", "max_position_embeddings", "num_nextn_predict_layers", "num_mtp_layers",
)
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window",
    "rope_interleave", "use_routing_bias",
)
GROUPS = ("rope_scaling", "rope_parameters", "quantization_config")
LISTS = ("layer_types", "mlp_only_layers", "attn_type_list")
# A null there means that the model has no such part, or the default.
MAY_BE_NULL = {
    "num_key_value_heads", "head_dim", "n_shared_experts", "n_group", "topk_group", "q_lora_rank", "sliding_window", "decoder_sparse_step",
    "max_position_embeddings", "num_nextn_predict_layers", "num_mtp_layers", "num_experts", "num_local_experts", "n_routed_experts",
    "shared_intermediate_size", "shared_expert_intermediate_size", "partial_rotary_factor", "rope_theta", "num_experts_per_tok",
    "experts_per_token", *SWITCHES, *GROUPS, *LISTS,
}
# Values with which a field changes nothing; absent and null change nothing either. With any other the model would be another one.
NEUTRAL = {
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "logits_soft_cap": (), "query_pre_attn_scalar": (), "clip_qkv": (),
    "logit_scale": (1.0,), "logits_scaling": (1.0,), "attention_multiplier": (), "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,), "mlp_bias": (False,), "alibi": (False,), "parallel_attn": (False,), "dual_chunk_attention_config": (),
    "index_topk": (), "attention_chunk_size": (), "no_rope_layers": ((),), "router_jitter_noise": (0.0,),
}


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


RULES = (
    (SIZES, lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "must be a whole number, not negative"),
    (NUMBERS, _number, "must be a number"),
    (SWITCHES, lambda v: isinstance(v, bool), "must be true or false"),
    (GROUPS, lambda v: isinstance(v, dict), "must be a group of fields"),
    (LISTS, lambda v: isinstance(v, list), "must be a list"),
)


def problems(hf: dict) -> list[str]:
    """A line for each field of a `config.json` that has a wrong type, or a value that would make it a model not known here."""
    lines = []
    for names, fits, rule in RULES:
        for name in names:
            if name in hf and not (fits(hf[name]) or hf[name] is None and name in MAY_BE_NULL):
                lines.append(f"field {name} is {hf[name]!r}: {rule}")
    for name, values in NEUTRAL.items():
        value = tuple(hf[name]) if isinstance(hf.get(name), list) else hf.get(name)
        if value is not None and value not in values:
            lines.append(f"field {name} {hf[name]!r} is not supported")
    return lines
