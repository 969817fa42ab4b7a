"""Estimators of KL(policy || reference) from the sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moerl.rl.batch import Rollouts, Settings

KLKind = Literal["k1", "k2", "k3"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: past it only the size of an overflow would change


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate, same shape as `logp`, of KL(p || ref) for tokens sampled from p (Schulman, "Approximating KL
    divergence", 2020). With r = ref_logp - logp:

    "k1": -r. Unbiased, of either sign. Its gradient as a loss is zero on average: it belongs in the reward.
    "k2": r^2 / 2. Biased value, low variance; its on-policy gradient is the KL's.
    "k3": exp(r) - 1 - r. Unbiased, never negative. r is cut at 20 here, and the gradient is 0 past it, so that one
        token the reference finds far likelier does not turn the loss into inf.
    Raises ValueError for another kind.
    """
    log_ratio = ref_logp - logp
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"KL estimator {kind!r} is unknown: choose one of {', '.join(KL_KINDS)}")


def kl_penalty(batch: Rollouts, settings: Settings) -> Tensor:
    """Token rewards [B, R] that keep the policy near the reference: -kl_coef (old_logp - ref_logp) inside the mask.

    Zeros when the KL term is in the loss or there is no reference.
    """
    if settings.kl_in != "reward" or batch.ref_logp is None:
        return torch.zeros_like(batch.old_logp)
    penalty = -settings.kl_coef * kl_estimate(batch.old_logp, batch.ref_logp, "k1")
    return torch.where(batch.mask.bool(), penalty, 0)
