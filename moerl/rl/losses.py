"""Losses of one micro-batch. Every result is a sum over its tokens, weighted as the global batch decided.

`weights` come from `moerl.rl.aggregate.token_weights`, so losses, gradients and statistics of any split of the batch
add up to the whole batch's, and none is ever averaged again. Log-probabilities are float32 nats, taken at the
temperature that sampled the tokens, and finite everywhere, also where the weight is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.rl.batch import Settings
from moerl.rl.kl import MAX_LOG_RATIO, kl_estimate


def clipped_policy_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negated clipped surrogate of every token (PPO, arXiv 1707.06347 eq. 7; two clip widths: DAPO, arXiv 2503.14476).

    With ratio = exp(logp - old_logp): max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)). Any common shape; the
    loss has that shape, as have the two detached statistics, "clip_fraction" (1 where the clipped branch was taken and
    the gradient is 0) and "ratio". The log-ratio is cut at +-20, so that the ratio stays finite.
    """
    ratio = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    stats = {"clip_fraction": (clipped > unclipped).to(ratio.dtype), "ratio": ratio.detach()}
    return torch.maximum(unclipped, clipped), stats


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error of every value, any common shape; with `clip`, the larger of that and the error after
    values are held within `clip` of the values before the update (as in OpenAI Baselines' PPO2).
    """
    loss = 0.5 * (values - returns).square()
    if clip is None:
        return loss
    held = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (held - returns).square())


def actor_loss(
    logp: Tensor,
    entropy: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    settings: Settings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss on the tokens of one micro-batch (all [tokens]) and its detached weighted sums.

    loss = sum of weights (clipped policy loss - entropy_coef entropy [+ kl_coef KL to the reference]), the last term if
    kl_in is "loss" and there is a reference. Reads clip_low, clip_high, entropy_coef, kl_coef, kl_in and kl_kind.
    Statistics: "policy_loss", "entropy", "clip_fraction", "ratio", "approx_kl" (k3 of KL(old || new)) and, with a
    reference, "kl" (of kind kl_kind). They are means where the weights of the global batch sum to 1.
    """
    policy_loss, stats = clipped_policy_loss(
        logp, old_logp, advantages, clip_low=settings.clip_low, clip_high=settings.clip_high
    )
    token_loss = policy_loss - settings.entropy_coef * entropy
    stats |= {"policy_loss": policy_loss, "entropy": entropy, "approx_kl": kl_estimate(old_logp, logp, "k3")}
    if ref_logp is not None:
        stats["kl"] = kl_estimate(logp, ref_logp, settings.kl_kind)
        if settings.kl_in == "loss":
            token_loss = token_loss + settings.kl_coef * stats["kl"]
    return (weights * token_loss).sum(), _weighted_sums(stats, weights)


def critic_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss on the tokens of one micro-batch (all [tokens]) and its detached weighted sums.

    Reads value_clip of the settings. Statistics: "value_loss", "value" and "value_clip_fraction" (tokens on which the
    clipped error is the larger).
    """
    token_loss = clipped_value_loss(values, old_values, returns, clip=settings.value_clip)
    clipped = token_loss > clipped_value_loss(values, old_values, returns, clip=None)
    stats = {"value_loss": token_loss, "value": values, "value_clip_fraction": clipped.to(values.dtype)}
    return (weights * token_loss).sum(), _weighted_sums(stats, weights)


def sft_loss(logp: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the target tokens, weighted and summed; statistic "sft_loss" is the same, detached."""
    loss = -(weights * logp).sum()
    return loss, {"sft_loss": loss.detach()}


def _weighted_sums(per_token: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    return {name: (weights * value.detach()).sum() for name, value in per_token.items()}
