"""DeepSeek-V2 and V2-Lite: latent attention (no query latent in Lite), softmax routing, shared experts, dense first layers.

V2 limits routing to the groups with the best single expert (`group_limited_greedy`), Lite does not (`greedy`); chosen probabilities are
scaled, never renormalised.
"""

from __future__ import annotations

from moerl.models import mla
from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)

NAME = "deepseek_v2"


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    mla.refuse(hf, NAME, {
        "topk_method": {"greedy", "group_limited_greedy"}, "scoring_func": {"softmax"}, "norm_topk_prob": {False}, "mlp_bias": {False},
    })
    grouped = hf.get("topk_method", "greedy") == "group_limited_greedy"
    theta, yarn = mla.rope(hf, NAME)
    latent = mla.latent(hf)
    heads = hf["num_attention_heads"]
    return Arch(
        family=NAME, layers=hf["num_hidden_layers"], hidden=hf["hidden_size"], heads=heads, kv_heads=heads,
        head_dim=latent.nope + latent.rope, vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], rope_theta=theta, yarn=yarn, latent=latent,
        tied_embeddings=hf.get("tie_word_embeddings", False), ffn=hf["intermediate_size"],
        experts=hf.get("n_routed_experts") or hf["num_experts"], topk=hf["num_experts_per_tok"], expert_ffn=hf["moe_intermediate_size"],
        shared_ffn=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0), norm_topk=False,
        routed_scale=hf.get("routed_scaling_factor", 1.0), expert_groups=hf["n_group"] if grouped else 0,
        group_topk=hf["topk_group"] if grouped else 0, group_best=1 if grouped else 0,
        dense_layers=frozenset(range(hf.get("first_k_dense_replace", 0))),
    )
