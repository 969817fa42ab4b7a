"""Proximal policy optimization (arXiv 1707.06347): token rewards, a critic, generalized advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.rl.batch import Rollouts, Settings
from moerl.rl.gae import gae, whiten
from moerl.rl.kl import kl_penalty
from moerl.rl.losses import actor_loss, critic_loss

__all__ = ["NEEDS_CRITIC", "actor_loss", "advantages", "critic_loss", "token_rewards"]

NEEDS_CRITIC = True


def token_rewards(batch: Rollouts, settings: Settings) -> Tensor:
    """Rewards [B, R]: the KL penalty (if it is in the reward) on every token, plus the score on the last one."""
    inside = batch.mask.bool()
    positions = torch.arange(inside.shape[1], device=inside.device)
    last = (inside * positions).argmax(-1, keepdim=True)
    is_last = inside & (positions == last)
    return kl_penalty(batch, settings) + torch.where(is_last, batch.rewards.unsqueeze(-1), 0)


def advantages(batch: Rollouts, settings: Settings) -> tuple[Tensor, Tensor]:
    """GAE advantages (whitened over the batch if settings.whiten) and the critic's target returns, both [B, R].

    Reads gamma, lam, whiten, kl_in and kl_coef of the settings. Raises ValueError without values.
    """
    if batch.values is None:
        raise ValueError("PPO needs a critic: the batch has no values")
    rewards = token_rewards(batch, settings)
    advantage, returns = gae(rewards, batch.values, batch.mask, gamma=settings.gamma, lam=settings.lam)
    return (whiten(advantage, batch.mask) if settings.whiten else advantage), returns
