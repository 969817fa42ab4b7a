"""Mixtral (8x7B, 8x22B): every layer a mixture of large experts, two a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moerl.models.arch import Arch
from moerl.models.decoder import decoder
from moerl.models.fields import decoder_fields, expect
from moerl.models.tensormap import Param, Piece

# The hub's names for what transformers calls by the same names in all mixtures.
HUB = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def arch(hf: dict) -> Arch:
    """Dimensions from a `config.json`."""
    # Null is no window; a window is a number of tokens.
    expect("mixtral", hf, sliding_window=None, attention_bias=False)
    return Arch(
        **decoder_fields("mixtral", hf, theta=1e6), experts=hf.get("num_local_experts") or hf["num_experts"],
        topk=hf["num_experts_per_tok"], expert_ffn=hf["intermediate_size"],
    )


def params(arch: Arch) -> Iterator[Param]:
    """The family's tensor map: written in the hub's spelling, read in either."""
    for param in decoder(arch):
        yield replace(param, pieces=tuple(map(_hub, param.pieces)))


def _hub(piece: Piece) -> Piece:
    if ".mlp." not in piece.name:
        return piece
    short = piece.name
    for ours, theirs in HUB.items():
        short = short.replace(ours, theirs)
    others = [replace(piece, name=name, others=()) for name in dict.fromkeys((short, piece.name))]
    return replace(piece, name=short.replace(".mlp.", ".block_sparse_moe."), others=(*others, *piece.others))
