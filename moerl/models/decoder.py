"""Parts of the tensor map that decoder families share. Names on the left are Megatron-core's, on the right transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from moerl.layout import VOCAB_MULTIPLE
from moerl.models.arch import Arch
from moerl.models.tensormap import Param, Piece


def whole(name: str, hf: str, shape: tuple[int, ...], stage: int | str, split: int | None = None, **more) -> Param:
    """A parameter that is one Hugging Face tensor."""
    piece = Piece(hf, shape, shape, (0,) * len(shape))
    return Param(name, shape, split, (piece,), len(shape), stage, **more)


def fused_qkv(name: str, hf: str, arch: Arch, layer: int, tail: tuple[int, ...]) -> Param:
    """Query, key and value projections, interleaved by key/value group; `tail` is (hidden,) for weights, () for biases."""
    groups, d = arch.kv_heads, arch.head_dim
    q = arch.heads // groups * d
    kind = "weight" if tail else "bias"
    zeros = (0,) * len(tail)
    pieces = (
        Piece(f"{hf}.q_proj.{kind}", (groups * q, *tail), (groups, q, *tail), (0, 0, *zeros)),
        Piece(f"{hf}.k_proj.{kind}", (groups * d, *tail), (groups, d, *tail), (0, q, *zeros)),
        Piece(f"{hf}.v_proj.{kind}", (groups * d, *tail), (groups, d, *tail), (0, q + d, *zeros)),
    )
    return Param(f"{name}.{kind}", (groups, q + 2 * d, *tail), 0, pieces, 1 + len(tail), layer)


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(name: str, hf: str, hidden: int, ffn: int, layer: int, expert: int | None = None, *,
              parts: tuple[str, str, str] = GATE_UP_DOWN) -> Iterator[Param]:
    """SwiGLU: fc1 holds gate above up, fc2 is the down projection; `parts` are their names in the checkpoint."""
    pieces = tuple(Piece(f"{hf}.{part}.weight", (ffn, hidden), (1, ffn, hidden), (i, 0, 0)) for i, part in enumerate(parts[:2]))
    yield Param(f"{name}.linear_fc1.weight", (2, ffn, hidden), 1, pieces, 2, layer, expert=expert)
    yield whole(f"{name}.linear_fc2.weight", f"{hf}.{parts[2]}.weight", (hidden, ffn), layer, split=1, expert=expert)


def latent_attention(arch: Arch, layer: int, name: str, hf: str) -> Iterator[Param]:
    """Multi-head latent attention. Down projections are whole on every rank, up projections are cut along heads."""
    a, heads, hidden = arch.latent, arch.heads, arch.hidden
    query = (heads * (a.nope + a.rope),)
    if a.q_rank is None:
        yield whole(f"{name}.linear_q_proj.weight", f"{hf}.q_proj.weight", (*query, hidden), layer, split=0)
    else:
        yield whole(f"{name}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight", (a.q_rank, hidden), layer)
        yield whole(f"{name}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight", (a.q_rank,), layer)
        yield whole(f"{name}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", (*query, a.q_rank), layer, split=0)
    yield whole(f"{name}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", (a.kv_rank + a.rope, hidden), layer)
    yield whole(f"{name}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight", (a.kv_rank,), layer)
    yield whole(f"{name}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", (heads * (a.nope + a.value), a.kv_rank), layer, split=0)
    yield whole(f"{name}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * a.value), layer, split=1)


def fused_experts(param: Param, hf: str, arch: Arch) -> Param:
    """Let a parameter of one expert be read as well from tensors of all experts, as transformers keeps them in memory.

    Those are gate_up_proj [experts, 2 * ffn, hidden] with gate above up, and down_proj [experts, hidden, ffn].
    """
    e, ffn, hidden = param.expert, arch.expert_ffn, arch.hidden
    pieces = []
    for i, piece in enumerate(param.pieces):
        if len(param.pieces) == 2:
            name, shape, corner, extent = "gate_up_proj", (arch.experts, 2 * ffn, hidden), (e, i * ffn, 0), (1, ffn, hidden)
        else:
            name, shape, corner, extent = "down_proj", (arch.experts, hidden, ffn), (e, 0, 0), (1, hidden, ffn)
        pieces.append(replace(piece, others=(Piece(f"{hf}.{name}", shape, piece.view, piece.start, corner, extent),)))
    return replace(param, pieces=tuple(pieces))


def attention(arch: Arch, layer: int, name: str, hf: str) -> Iterator[Param]:
    if arch.latent:
        yield from latent_attention(arch, layer, name, hf)
        return
    yield fused_qkv(f"{name}.linear_qkv", hf, arch, layer, (arch.hidden,))
    if arch.qkv_bias:
        yield fused_qkv(f"{name}.linear_qkv", hf, arch, layer, ())
    if arch.qk_norm:
        yield whole(f"{name}.q_layernorm.weight", f"{hf}.q_norm.weight", (arch.head_dim,), layer)
        yield whole(f"{name}.k_layernorm.weight", f"{hf}.k_norm.weight", (arch.head_dim,), layer)
    if arch.wide_qk_norm:
        yield whole(f"{name}.q_layernorm.weight", f"{hf}.q_norm.weight", (arch.heads * arch.head_dim,), layer, split=0)
        yield whole(f"{name}.k_layernorm.weight", f"{hf}.k_norm.weight", (arch.kv_heads * arch.head_dim,), layer, split=0)
    yield whole(f"{name}.linear_proj.weight", f"{hf}.o_proj.weight", (arch.hidden, arch.heads * arch.head_dim), layer, split=1)
    if arch.linear_bias:
        yield whole(f"{name}.linear_proj.bias", f"{hf}.o_proj.bias", (arch.hidden,), layer)
    if arch.sinks:
        yield whole(f"{name}.core_attention.softmax_offset", f"{hf}.sinks", (arch.heads,), layer, split=0)


def moe(arch: Arch, layer: int, name: str, hf: str, *, bias: str = "gate.e_score_correction_bias",
        parts: tuple[str, str, str] = GATE_UP_DOWN) -> Iterator[Param]:
    """Router, experts and shared expert; `bias` and `parts` are the checkpoint's names of the router's bias and an expert's matrices."""
    yield whole(f"{name}.router.weight", f"{hf}.gate.weight", (arch.experts, arch.hidden), layer)
    if arch.expert_bias:
        # A buffer in Megatron-core, not a parameter: it still is part of the model.
        yield whole(f"{name}.router.expert_bias", f"{hf}.{bias}", (arch.experts,), layer)
    for e in range(arch.experts):
        for param in gated_mlp(f"{name}.experts.{e}", f"{hf}.experts.{e}", arch.hidden, arch.expert_ffn, layer, expert=e, parts=parts):
            yield fused_experts(param, f"{hf}.experts", arch)
    if arch.shared_ffn:
        shared = "shared_expert" if arch.shared_expert_gate else "shared_experts"
        yield from gated_mlp(f"{name}.shared_experts", f"{hf}.{shared}", arch.hidden, arch.shared_ffn, layer)
    if arch.shared_expert_gate:
        yield whole(f"{name}.shared_experts.gate_weight", f"{hf}.shared_expert_gate.weight", (1, arch.hidden), layer)


MoeMap = Callable[[Arch, int, str, str], Iterator[Param]]


def layer(arch: Arch, i: int, *, moe: MoeMap = moe, moe_at: str = "mlp") -> Iterator[Param]:
    """One pre-norm decoder layer; `moe` maps a mixture of experts, which the checkpoint calls `moe_at`."""
    name, hf = f"decoder.layers.{i}", f"model.layers.{i}"
    yield whole(f"{name}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (arch.hidden,), i)
    yield from attention(arch, i, f"{name}.self_attention", f"{hf}.self_attn")
    yield whole(f"{name}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (arch.hidden,), i)
    if arch.is_moe(i):
        yield from moe(arch, i, f"{name}.mlp", f"{hf}.{moe_at}")
    else:
        yield from gated_mlp(f"{name}.mlp", f"{hf}.mlp", arch.hidden, arch.ffn, i)


def prediction(arch: Arch, k: int, inner: Iterator[Param]) -> Iterator[Param]:
    """Multi-token prediction layer `k` (DeepSeek-V3 report, section 2.2): norms, projection and the decoder layer `inner`.

    eh_proj takes [norm of the next token's embedding; norm of the hidden state], in this order in the released checkpoints (vLLM's
    deepseek_mtp and glm4_moe_mtp read them so) and in Megatron-core; the report's equation 21 writes the halves the other way round.
    Megatron-core cuts its rows over tensor-parallel ranks and gathers its output. Embedding and head are the main model's.
    """
    name, hf = f"mtp.layers.{k}", f"model.layers.{arch.layers + k}"
    for norm in ("enorm", "hnorm"):
        yield whole(f"{name}.{norm}.weight", f"{hf}.{norm}.weight", (arch.hidden,), "last")
    yield whole(f"{name}.eh_proj.weight", f"{hf}.eh_proj.weight", (arch.hidden, 2 * arch.hidden), "last", split=0)
    for param in inner:
        part = param.name.removeprefix(f"decoder.layers.{arch.layers + k}.")
        yield replace(param, name=f"{name}.transformer_layer.{part}", stage="last")
    yield whole(f"{name}.final_layernorm.weight", f"{hf}.shared_head.norm.weight", (arch.hidden,), "last")


def decoder(arch: Arch, *, moe: MoeMap = moe, moe_at: str = "mlp") -> Iterator[Param]:
    """All parameters of a pre-norm decoder with rotary attention and SwiGLU or mixture-of-experts layers.

    `moe` maps a mixture-of-experts layer, which the checkpoint calls `moe_at`.
    """
    table = (arch.vocab, arch.hidden)
    extra = [f"model.layers.{i}" for i in range(arch.layers, arch.layers + arch.mtp_layers)]
    yield whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", table, "first", split=0, padded=VOCAB_MULTIPLE,
                copied_as=tuple(f"{hf}.embed_tokens.weight" for hf in extra))
    for i in range(arch.layers):
        yield from layer(arch, i, moe=moe, moe_at=moe_at)
    yield whole("decoder.final_layernorm.weight", "model.norm.weight", (arch.hidden,), "last")
    head, copies = ("model.embed_tokens.weight", ["lm_head.weight"]) if arch.tied_embeddings else ("lm_head.weight", [])
    yield whole("output_layer.weight", head, table, "last", split=0, padded=VOCAB_MULTIPLE, tied=arch.tied_embeddings,
                copied_as=(*copies, *(f"{hf}.shared_head.head.weight" for hf in extra)))
    for k in range(arch.mtp_layers):
        yield from prediction(arch, k, layer(arch, arch.layers + k, moe=moe, moe_at=moe_at))
