"""DeepSeek-V3 and R1, Moonlight (no query latent), Kimi-K2: latent attention, sigmoid routing with a selection bias, shared experts.

An expert is chosen by score plus bias among the groups with the best two experts (`noaux_tc`) and weighted by its score alone. The bias is
loaded, exported and synced; its update rule belongs to pre-training and stays off.

Multi-token prediction (`num_nextn_predict_layers`): the actor holds the extra layers, saves and exports them, and does not run or train
them; an exported checkpoint's copies of embedding and head in them are the trained ones. A running engine is never sent them.
"""

from __future__ import annotations

from moerl.models import mla
from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)

NAME = "deepseek_v3"
CONFIG = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    mla.refuse(hf, NAME, {"topk_method": {"noaux_tc"}, "scoring_func": {"sigmoid"}, "rope_interleave": {True}})
    theta, yarn = mla.rope(hf, NAME)
    latent = mla.latent(hf)
    heads, groups = hf["num_attention_heads"], hf.get("n_group") or 1
    return Arch(
        family=NAME, layers=hf["num_hidden_layers"], hidden=hf["hidden_size"], heads=heads, kv_heads=heads,
        head_dim=latent.nope + latent.rope, vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], rope_theta=theta, yarn=yarn, latent=latent,
        tied_embeddings=hf.get("tie_word_embeddings", False), ffn=hf["intermediate_size"],
        experts=hf.get("n_routed_experts") or hf["num_local_experts"], topk=hf["num_experts_per_tok"],
        expert_ffn=hf["moe_intermediate_size"],
        shared_ffn=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0), norm_topk=hf.get("norm_topk_prob", True),
        routed_scale=hf.get("routed_scaling_factor", 1.0), expert_bias=True, expert_groups=groups if groups > 1 else 0,
        group_topk=hf["topk_group"] if groups > 1 else 0, group_best=2 if groups > 1 else 0,
        dense_layers=frozenset(range(hf.get("first_k_dense_replace", 0))),
        mtp_layers=hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers", 0)) or 0,
    )
