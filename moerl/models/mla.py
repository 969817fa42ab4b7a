"""What families with multi-head latent attention read from a `config.json` in the same way."""

from __future__ import annotations

from moerl.models.arch import Latent, ModelError, Yarn
from moerl.models.fields import full_attention

YARN_FIELDS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
               "mscale_all_dim"}


def latent(hf: dict) -> Latent:
    """Dimensions of latent attention. Norms inside it keep epsilon 1e-6 whatever `rms_norm_eps` is, as in transformers."""
    return Latent(
        q_rank=hf["q_lora_rank"], kv_rank=hf["kv_lora_rank"], nope=hf["qk_nope_head_dim"], rope=hf["qk_rope_head_dim"],
        value=hf["v_head_dim"],
    )


def rope(hf: dict, family: str) -> tuple[float, Yarn | None]:
    """Base of the rotary frequencies and their scaling; a field whose effect is not known here is an error."""
    found = {k: v for k, v in (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).items() if v is not None}
    theta = found.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ModelError(f"{family}: rope type {kind!r} is not supported (supported: default, yarn)")
    if unknown := sorted(set(found) - YARN_FIELDS):
        raise ModelError(f"{family}: rope fields {', '.join(unknown)} are not supported with type yarn")
    scale, whole = found.get("mscale"), found.get("mscale_all_dim")
    if whole and not scale:
        raise ModelError(f"{family}: rope field mscale_all_dim without mscale is not supported")
    return theta, Yarn(
        factor=found["factor"], original=found["original_max_position_embeddings"], beta_fast=found.get("beta_fast") or 32.0,
        beta_slow=found.get("beta_slow") or 1.0,
        # Without both, cosine and sine are scaled by 0.1 ln(factor) + 1 and attention scores by nothing.
        mscale=scale if whole else 1.0, mscale_all_dim=whole or 0.0,
    )


def refuse(hf: dict, family: str, allowed: dict[str, set]) -> None:
    """ModelError for fields outside the values that this implementation has; `allowed` names the family's own, absent fields are fine."""
    common = {"hidden_act": {"silu"}, "attention_bias": {False}, "moe_layer_freq": {1}, "sliding_window": {None}}
    full_attention(family, hf)
    for field, values in (common | allowed).items():
        if field in hf and hf[field] not in list(values):
            supported = ", ".join(sorted(map(str, values)))
            raise ModelError(f"{family}: {field} {hf[field]!r} is not supported (supported: {supported})")
    if hf.get("num_key_value_heads") not in (None, hf["num_attention_heads"]):
        raise ModelError(f"{family}: num_key_value_heads {hf['num_key_value_heads']} differs from num_attention_heads")
    if quantization := hf.get("quantization_config"):
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        if method != "fp8" or not block:
            raise ModelError(f"{family}: quantization_config {method!r} with weight_block_size {block} is not supported (only fp8 blocks)")
