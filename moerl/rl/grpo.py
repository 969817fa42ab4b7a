"""Group relative policy optimization (arXiv 2402.03300) and, without the division by the standard deviation, Dr. GRPO
(arXiv 2503.20783): a response is judged against the other responses to its prompt, so no critic is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.rl.batch import Rollouts, Settings
from moerl.rl.kl import kl_penalty
from moerl.rl.losses import actor_loss

__all__ = ["NEEDS_CRITIC", "actor_loss", "advantages", "group_advantages"]

NEEDS_CRITIC = False


def group_advantages(rewards: Tensor, group: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group std + eps) of rewards and prompt numbers, all [B] (arXiv 2402.03300 sec. 4.1.2).

    The standard deviation is the unbiased one (n - 1, as torch.std). A group of one, or of equal rewards, gets 0. The
    sums are taken in float64: in float32 the mean of equal rewards is off by rounding, which dividing by eps enlarges.
    """
    dtype = torch.result_type(rewards, 0.0)  # whole-number rewards give float advantages
    _, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    centered = rewards.double()
    centered = centered - (_sum_by(index, centered, count) / count)[index]
    if not normalize_std:
        return centered.to(dtype)
    variance = _sum_by(index, centered.square(), count) / (count - 1).clamp(min=1)
    return (centered / (variance.sqrt()[index] + eps)).to(dtype)


def advantages(batch: Rollouts, settings: Settings) -> tuple[Tensor, None]:
    """Group advantages on every token of a response, [B, R], 0 outside the mask; there are no returns.

    Reads normalize_std, kl_in and kl_coef of the settings. With the KL term in the reward instead of the loss, the
    penalty summed over a response joins its score before the group is compared.
    """
    rewards = batch.rewards + kl_penalty(batch, settings).sum(-1)
    advantage = group_advantages(rewards, batch.group, normalize_std=settings.normalize_std)
    return torch.where(batch.mask.bool(), advantage.unsqueeze(-1), 0), None


def _sum_by(index: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=values.dtype).index_add(0, index, values)
