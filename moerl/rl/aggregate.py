"""How per-token losses add up to one loss, decided for the global batch before it is split."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def token_weights(mask: Tensor, mode: Aggregation) -> Tensor:
    """Weight of every token of the global batch, [B, R] float32, such that loss = (weights * token_loss).sum().

    The denominators are in the weights, so the sum is the same however the samples are spread over micro-batches and
    data-parallel ranks. With N samples that have at least one token, of n_i tokens each:
    "token-mean": 1 / sum(n_i), every token counts alike (DAPO, arXiv 2503.14476).
    "seq-mean-token-mean": 1 / (n_i N), every response counts alike (GRPO, arXiv 2402.03300 eq. 3).
    "seq-mean-token-sum": 1 / N, no division by the response's length (Dr. GRPO, arXiv 2503.20783, up to a constant).
    Weights sum to 1 in the first two modes, to the mean response length in the third; all are 0 for an empty mask.
    Raises ValueError for another mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss aggregation {mode!r} is unknown: choose one of {', '.join(AGGREGATIONS)}")
    mask = mask.to(torch.float32)
    lengths = mask.sum(-1, keepdim=True)
    samples = (lengths > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return mask / lengths.sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return mask / lengths.clamp(min=1) / samples
    return mask / samples
