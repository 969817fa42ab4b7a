"""Log-probability and entropy of tokens from vocabulary-parallel logits, without a float32 copy of the whole vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1024


def _chunk_stats(logits: Tensor, target: Tensor, first: int, valid: int, temperature: float, group):
    """Of each row, in float32: log of the normaliser, the target's log-probability, the entropy."""
    scaled = logits.float() / temperature
    if valid < scaled.shape[1]:
        scaled[:, valid:] = float("-inf")  # rows of the vocabulary that exist only for padding carry no probability
    top = scaled.amax(dim=1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    local = target - first
    mine = (local >= 0) & (local < valid)
    picked = scaled.gather(1, local.clamp(0, scaled.shape[1] - 1)[:, None])[:, 0]
    weights = (scaled - top[:, None]).exp()
    finite = scaled.masked_fill(weights == 0, 0.0)
    sums = torch.stack([weights.sum(1), (weights * finite).sum(1), torch.where(mine, picked, torch.zeros_like(picked))])
    dist.all_reduce(sums, group=group)
    norm = top + sums[0].log()
    return norm, sums[2] - norm, norm - sums[1] / sums[0]


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, first, valid, temperature, group):
        logp, entropy, norm = (torch.empty(len(target), dtype=torch.float32, device=logits.device) for _ in range(3))
        for at in range(0, len(target), CHUNK):
            rows = slice(at, at + CHUNK)
            norm[rows], logp[rows], entropy[rows] = _chunk_stats(logits[rows], target[rows], first, valid, temperature, group)
        ctx.save_for_backward(logits, target, norm, entropy)
        ctx.constants = first, valid, temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        logits, target, norm, entropy = ctx.saved_tensors
        first, valid, temperature = ctx.constants
        grad = torch.zeros_like(logits)
        for at in range(0, len(target), CHUNK):
            rows = slice(at, at + CHUNK)
            # d log p(target) / d z = 1[target] - p ;  d H / d z = -p (log p + H)
            log_p = logits[rows, :valid].float() / temperature - norm[rows, None]
            p = log_p.exp()
            piece = -p * (grad_logp[rows, None] + grad_entropy[rows, None] * (log_p + entropy[rows, None]))
            local = target[rows] - first
            mine = ((local >= 0) & (local < valid)).nonzero()[:, 0]
            piece[mine, local[mine]] += grad_logp[rows][mine]
            grad[rows, :valid] = (piece / temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def token_stats(logits: Tensor, target: Tensor, vocab: int, temperature: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log-probability of `target` and entropy of the distribution softmax(logits / temperature), each [t] float32, differentiable.

    logits [t, padded vocabulary / tp] are this rank's columns and stay untouched; target [t] are whole-vocabulary ids; `vocab` is the
    vocabulary without padding; `group` is the tensor-parallel group. Every rank of the group returns the same values. Peak extra memory is
    a few times `CHUNK` rows in float32 and, in backward, one gradient of the logits' own size.
    """
    width = logits.shape[-1]
    first = dist.get_rank(group) * width
    valid = max(0, min(width, vocab - first))
    return _TokenStats.apply(logits, target, first, valid, temperature, group)
