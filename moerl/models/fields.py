"""Fields of a Hugging Face `config.json` that decoder families share, in all the spellings that the hub and transformers use.

What would change the model and is not understood is an error that names the field.
"""

from __future__ import annotations

from moerl.models.arch import Llama3Rope, ModelError


def expect(family: str, hf: dict, **values) -> None:
    """Each named field is absent, null or has the one value that is supported."""
    for field, value in values.items():
        if hf.get(field) not in (None, value):
            raise ModelError(f"{family}: {field} {hf[field]!r} is not supported (supported: {value!r})")


def rope(family: str, hf: dict, theta: float = 10000.0, llama3: bool = False) -> dict:
    """`Arch` fields of the rotary embedding. `theta` is the family's default base, `llama3` says that it knows that scaling."""
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    known = ("default", "llama3") if llama3 else ("default",)
    if kind not in known:
        raise ModelError(f"{family}: rope type {kind!r} is not supported (supported: {', '.join(known)})")
    for field in (found, hf):
        expect(family, field, partial_rotary_factor=1.0)
    scaling = None
    if kind == "llama3":
        original = found.get("original_max_position_embeddings") or hf["max_position_embeddings"]
        scaling = Llama3Rope(found["factor"], found["low_freq_factor"], found["high_freq_factor"], original)
    base = found.get("rope_theta") or hf.get("rope_theta") or theta
    return dict(rope_theta=float(base), llama3_rope=scaling)


def full_attention(family: str, hf: dict) -> None:
    """Every layer sees all tokens before it."""
    if set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"{family}: layer_types {sorted(set(hf['layer_types']))} are not supported (supported: full_attention)")


def decoder_fields(family: str, hf: dict, **rope_options) -> dict:
    """`Arch` fields of a pre-norm decoder with rotary attention over the whole context and SwiGLU; `rope_options` go to `rope`."""
    expect(family, hf, hidden_act="silu", use_sliding_window=False)
    if hf.get("quantization_config") is not None:
        raise ModelError(f"{family}: a quantized checkpoint (quantization_config) is not supported")
    full_attention(family, hf)
    heads = hf["num_attention_heads"]
    return dict(
        family=family, layers=hf["num_hidden_layers"], hidden=hf["hidden_size"], heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads, head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], tied_embeddings=bool(hf.get("tie_word_embeddings")),
        **rope(family, hf, **rope_options),
    )


def sparse_fields(hf: dict) -> dict:
    """`Arch` fields of Qwen's mixtures of experts, some of whose layers may be dense."""
    layers, step = hf["num_hidden_layers"], hf.get("decoder_sparse_step") or 1
    dense = set(hf.get("mlp_only_layers") or ()) | {i for i in range(layers) if (i + 1) % step}
    return dict(
        ffn=hf.get("intermediate_size", 0), experts=hf.get("num_local_experts") or hf["num_experts"], topk=hf["num_experts_per_tok"],
        expert_ffn=hf["moe_intermediate_size"], dense_layers=frozenset(dense),
    )
