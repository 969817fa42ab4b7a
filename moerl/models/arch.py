"""What a decoder is made of, free of any framework: one description from which models, tensor maps and counts are built."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.layout import ModelDims


class ModelError(ValueError):
    """A checkpoint or model configuration that cannot be used; the message is one line a file or tensor."""


@dataclass(frozen=True)
class Llama3Rope:
    """Frequencies of Llama 3.1: wavelengths above `original / low` tokens are stretched by `factor`, those below `original / high` are kept."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Arch:
    """Dimensions and switches of a decoder-only transformer. Widths are in elements of one token."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool = False
    ffn: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    norm_topk: bool = True
    expert_bias: bool = False
    dense_layers: frozenset[int] = frozenset()
    shared_expert_ffn: int = 0
    shared_expert_gate: bool = False
    llama3_rope: Llama3Rope | None = None

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def dims(self) -> ModelDims:
        return ModelDims(
            layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, vocab=self.vocab,
            ffn=self.ffn, experts=self.experts, expert_ffn=self.expert_ffn, shared_expert_ffn=self.shared_expert_ffn,
        )
