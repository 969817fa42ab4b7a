"""gpt-oss (20b, 120b): attention sinks, sliding windows, biases everywhere, YaRN, experts with a clamped gate in fused tensors.

A checkpoint with MXFP4 experts is read as its values; exported checkpoints are not quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moerl.models.arch import Arch, ModelError, Yarn
from moerl.models.decoder import decoder, whole
from moerl.models.tensormap import Param, Piece

UNDERSTOOD = {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702}
YARN = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
LAYER_TYPES = {"sliding_attention", "full_attention"}


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`; a field that would change the model and is not understood is an error."""
    for field, wanted in UNDERSTOOD.items():
        if hf.get(field, wanted) != wanted:
            raise ModelError(f"gpt_oss: {field} {hf[field]!r} is not supported (supported: {wanted!r})")
    if (method := (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")) != "mxfp4":
        raise ModelError(f"gpt_oss: a checkpoint quantized by {method!r} is not supported (supported: mxfp4)")
    layers = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= LAYER_TYPES:
        raise ModelError(f"gpt_oss: layer_types must be {layers} times one of {', '.join(sorted(LAYER_TYPES))}")
    windowed = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return Arch(
        family="gpt_oss", layers=layers, hidden=hf["hidden_size"], heads=hf["num_attention_heads"], kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"], vocab=hf["vocab_size"], norm_eps=hf["rms_norm_eps"], rope_theta=_rope(hf).get("rope_theta", 150000.0),
        yarn=_yarn(_rope(hf)), tied_embeddings=hf.get("tie_word_embeddings", False), qkv_bias=True, linear_bias=True,
        experts=hf.get("num_local_experts") or hf["num_experts"], topk=hf.get("num_experts_per_tok") or hf["experts_per_token"],
        expert_ffn=hf["intermediate_size"], swiglu_limit=hf.get("swiglu_limit", 7.0), sinks=True,
        window=hf["sliding_window"] if windowed else 0, window_layers=windowed,
    )


def _rope(hf: dict) -> dict:
    theta = {"rope_theta": hf["rope_theta"]} if "rope_theta" in hf else {}
    return theta | (hf.get("rope_parameters") or hf.get("rope_scaling") or {})


def _yarn(rope: dict) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ModelError(f"gpt_oss: rope type {kind!r} is not supported (supported: default, yarn)")
    if unknown := sorted(name for name in set(rope) - YARN if rope[name] is not None):
        raise ModelError(f"gpt_oss: rope parameter {unknown[0]} is not supported")
    return Yarn(rope["factor"], rope["original_max_position_embeddings"], rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0,
                truncate=rope.get("truncate", True))


def _moe(arch: Arch, layer: int, name: str, hf: str) -> Iterator[Param]:
    """Router with a bias; experts in tensors [experts, inputs, outputs], gate and up interleaved in the last dimension."""
    count, hidden, ffn = arch.experts, arch.hidden, arch.expert_ffn
    yield whole(f"{name}.router.weight", f"{hf}.router.weight", (count, hidden), layer)
    yield whole(f"{name}.router.bias", f"{hf}.router.bias", (count,), layer)
    gate_up, down = f"{hf}.experts.gate_up_proj", f"{hf}.experts.down_proj"
    for e in range(count):
        param = partial(Param, stage=layer, expert=e)
        fc1, fc2 = f"{name}.experts.{e}.linear_fc1", f"{name}.experts.{e}.linear_fc2"
        first = Piece(gate_up, (count, hidden, 2 * ffn), (2, ffn, hidden), (0, 0, 0), (e, 0, 0), (1, hidden, 2 * ffn), order=(2, 1, 0))
        bias = Piece(f"{gate_up}_bias", (count, 2 * ffn), (2, ffn), (0, 0), (e, 0), (1, 2 * ffn), order=(1, 0))
        second = Piece(down, (count, ffn, hidden), (hidden, ffn), (0, 0), (e, 0, 0), (1, ffn, hidden), order=(1, 0))
        yield param(f"{fc1}.weight", (2, ffn, hidden), 1, (first,), 2)
        yield param(f"{fc1}.bias", (2, ffn), 1, (bias,), 1)
        yield param(f"{fc2}.weight", (hidden, ffn), 1, (second,), 2)
        yield param(f"{fc2}.bias", (hidden,), None, (Piece(f"{down}_bias", (count, hidden), (hidden,), (0,), (e, 0), (1, hidden)),), 1)


params = partial(decoder, moe=_moe)
