"""DeepSeek-V3 and R1, Moonlight (no query latent), Kimi-K2: latent attention, sigmoid routing with a selection bias, shared experts.

An expert is chosen by score plus bias among the groups with the best two experts (`noaux_tc`) and weighted by its score alone. The bias is
loaded, exported and synced; its update rule belongs to pre-training and stays off.

Multi-token prediction (`num_nextn_predict_layers`): the extra layers are neither built nor trained. A checkpoint may have all of their
tensors or none. Where it has them, an exported checkpoint has them too, as they were: the copies of embedding and head in them are then
older than the trained ones, which costs a speculative decoder accepted tokens and does not change its output. A running engine is never
sent them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from moerl.models import mla
from moerl.models.arch import Arch
from moerl.models.decoder import decoder as params  # noqa: F401  (the family's tensor map)
from moerl.models.decoder import layer
from moerl.models.tensormap import hf_shapes

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


def carried(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of the multi-token prediction layers."""
    numbers = range(arch.layers, arch.layers + arch.mtp_layers)
    return hf_shapes(chain.from_iterable(layer(arch, i) for i in numbers)) | dict(chain.from_iterable(_mtp(arch, i) for i in numbers))


def _mtp(arch: Arch, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    table, norm = (arch.vocab, arch.hidden), (arch.hidden,)
    shapes = {"embed_tokens": table, "enorm": norm, "hnorm": norm, "eh_proj": (arch.hidden, 2 * arch.hidden), "shared_head.norm": norm,
              "shared_head.head": table}
    for name, shape in shapes.items():
        yield f"model.layers.{i}.{name}.weight", shape
