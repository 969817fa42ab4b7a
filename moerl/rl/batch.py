"""What an algorithm reads: one batch of rollouts on the driver, and the settings it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass
class Rollouts:
    """B sampled responses, right-padded to R tokens.

    mask: [B, R], 1 on the tokens the policy sampled, 0 on padding and on tool output inside a response.
    rewards: [B], one score a response.
    old_logp, ref_logp: [B, R], log-probabilities (nats) of the sampled tokens under the policy that starts this update
        and under the reference policy.
    values: [B, R], the critic's value of the state in which token t was chosen, that is, before token t is appended.
    group: [B] int, responses with equal numbers answer the same prompt.
    Raises ValueError when a tensor's shape does not follow from the mask's. What lies outside the mask is never read.
    """

    mask: Tensor
    rewards: Tensor
    old_logp: Tensor
    group: Tensor
    ref_logp: Tensor | None = None
    values: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.mask.shape)
        if len(shape) != 2:
            raise ValueError(f"mask has shape {shape}: it must be [responses, tokens]")
        for name, want in (("rewards", shape[:1]), ("group", shape[:1]), ("old_logp", shape), ("ref_logp", shape),
                           ("values", shape)):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != want:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {want} to match the mask")


class Settings(Protocol):
    """The attributes that the algorithms read; any object that has them will do."""

    gamma: float  # discount a token
    lam: float  # GAE lambda
    whiten: bool  # PPO: advantages to mean 0, std 1 over the batch's tokens
    normalize_std: bool  # GRPO: divide by the group's standard deviation
    clip_low: float  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    value_clip: float | None
    entropy_coef: float
    kl_coef: float
    kl_in: Literal["reward", "loss"]
    kl_kind: Literal["k1", "k2", "k3"]  # the estimator in the loss and in the reported KL
