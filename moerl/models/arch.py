"""What a decoder is made of, free of any framework: one description from which models, tensor maps and counts are built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moerl.layout import LayoutError, ModelDims, ParallelLayout


class ModelError(ValueError):
    """A checkpoint or model configuration that cannot be used; the message is one line a file or tensor."""


def refuse(what: str, lines: list[str]) -> None:
    """Raise ModelError with the first lines under `what`, if there are any."""
    if lines:
        more = [f"... and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise ModelError("\n".join([what, *lines[:10], *more]))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of the query (None: not compressed) and key/value latents, widths of one head's parts.

    A head's query and key are `nope` elements without and `rope` elements with rotary position, its value has `value` elements.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary positions (Peng et al. 2023); `original` is the context length before scaling.

    Cosine and sine are scaled by m(mscale) / m(mscale_all_dim), latent attention's scores by m(mscale_all_dim)^2, with
    m(s) = 0.1 s ln(factor) + 1 (1 for factors up to 1). `truncate` rounds the first and last scaled dimension to whole numbers.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Rope:
    """Frequencies of Llama 3.1: wavelengths above `original / low` tokens are stretched by `factor`, those below `original / high` kept."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Arch:
    """Dimensions and switches of a decoder-only transformer. Widths are in elements of one token, `context` in tokens (0: not stated)."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    context: int = 0
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
    # Experts are chosen from `group_topk` of `expert_groups` groups, each scored by its `group_best` best experts (0: topk // group_topk).
    expert_groups: int = 0
    group_topk: int = 0
    group_best: int = 0
    routed_scale: float = 1.0
    shared_ffn: int = 0
    latent: Latent | None = None
    yarn: Yarn | None = None
    mtp_layers: int = 0  # multi-token prediction layers, behind the last decoder layer
    rotary_percent: float = 1.0  # the first part of every head that is rotated
    wide_qk_norm: bool = False  # one norm over all query heads and one over all key heads, before they are split
    linear_bias: bool = False  # every linear layer has one, router and experts too
    swiglu_limit: float = 0.0  # (up + 1) * gate * sigmoid(1.702 gate) with both clamped, instead of up * silu(gate)
    window: int = 0  # `window_layers` look back at so many tokens, their own counted
    window_layers: frozenset[int] = frozenset()
    sinks: bool = False  # one learned logit a head that takes part in the softmax and has no value
    shared_expert_gate: bool = False
    llama3_rope: Llama3Rope | None = None

    def main(self) -> Arch:
        """The model without its prediction layers: what samples, scores and trains."""
        return replace(self, mtp_layers=0)

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def dims(self) -> ModelDims:
        return ModelDims(
            layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, vocab=self.vocab,
            ffn=self.ffn, experts=self.experts, expert_ffn=self.expert_ffn,
            shared_expert_ffn=self.shared_ffn,
        )

    def check(self, layout: ParallelLayout) -> None:
        """LayoutError with a line for each rule that the layout breaks for this model."""
        layout.check(self.dims())
        if self.linear_bias and self.experts and layout.etp > 1:
            raise LayoutError(f"etp {layout.etp}: {self.family}: Megatron-core has expert biases only with expert tensor parallelism "
                              "(etp) 1; use ep instead")
