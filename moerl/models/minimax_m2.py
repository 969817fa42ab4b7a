"""MiniMax-M2 and M2.5: partial-rotary GQA with norms over the whole query and key width, sigmoid-routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moerl.models.arch import Arch, ModelError
from moerl.models.decoder import decoder, moe
from moerl.models.fields import full_attention
from moerl.models.tensormap import Param

UNDERSTOOD = {"hidden_act": "silu", "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
              "shared_intermediate_size": 0, "attention_bias": False, "sliding_window": None,
              "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0}
CONFIG = {"scoring_func": "sigmoid", "use_routing_bias": True}


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("default", None):
        raise ModelError(f"minimax_m2: rope type {kind!r} is not supported (supported: default)")
    for field, wanted in UNDERSTOOD.items():
        if hf.get(field, wanted) != wanted:
            raise ModelError(f"minimax_m2: {field} {hf[field]!r} is not supported (supported: {wanted!r})")
    full_attention("minimax_m2", hf)
    if set(hf.get("attn_type_list") or ()) - {1}:
        raise ModelError("minimax_m2: attn_type_list with anything but 1 (full attention) is not supported")
    if (method := (hf.get("quantization_config") or {}).get("quant_method", "fp8")) != "fp8":
        raise ModelError(f"minimax_m2: a checkpoint quantized by {method!r} is not supported")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    rotary = hf["rotary_dim"] / head_dim if "rotary_dim" in hf else hf.get("partial_rotary_factor", 1.0)
    return Arch(
        family="minimax_m2", layers=hf["num_hidden_layers"], hidden=hf["hidden_size"], heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"], head_dim=head_dim, vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", hf.get("rope_theta", 5e6)), rotary_percent=rope.get("partial_rotary_factor", rotary),
        tied_embeddings=hf.get("tie_word_embeddings", False), wide_qk_norm=True,
        experts=hf.get("num_local_experts") or hf["num_experts"], topk=hf["num_experts_per_tok"], expert_ffn=hf["intermediate_size"],
        expert_bias=True,
    )


def params(arch: Arch) -> Iterator[Param]:
    """The family's tensor map: experts are named as Mixtral's (w1 gate, w3 up, w2 down), the router's bias stands beside the gate."""
    return decoder(arch, moe=partial(moe, bias="e_score_correction_bias", parts=("w1", "w3", "w2")), moe_at="block_sparse_moe")
