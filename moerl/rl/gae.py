"""Generalized advantage estimation and whitening, over ragged responses."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, R], of token rewards and values [B, R] (arXiv 1506.02438 eq. 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    t + 1 is the next token inside the mask: tokens outside it (padding, tool output between two turns) are passed over,
    take no discount, are never read, and get 0. The value after the last token is 0: the response ended there.
    """
    inside = mask.bool()
    rewards = torch.where(inside, rewards, 0)
    values = torch.where(inside, values, 0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(inside[:, t], advantage, next_advantage)
        next_value = torch.where(inside[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(inside[:, t], advantage, 0)
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Advantages [B, R] with mean 0 and unbiased variance 1 over the tokens inside the mask, and 0 outside.

    Fewer than two tokens are only centered. `eps` joins the variance, so equal advantages give zeros, not blown-up
    rounding. The sums are taken in float64.
    """
    inside = mask.bool()
    tokens = advantages[inside].double()
    if tokens.numel() == 0:
        return torch.zeros_like(advantages)
    tokens = tokens - tokens.mean()
    if tokens.numel() > 1:
        tokens = tokens / (tokens.var() + eps).sqrt()
    return torch.zeros_like(advantages).masked_scatter(inside, tokens.to(advantages.dtype))
