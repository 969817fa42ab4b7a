"""Routing that Megatron-core's own function cannot express (groups scored by any number of experts, sigmoid scores not renormalised) or
gets wrong (a bias in the router's linear layer)."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moerl.models.arch import Arch


def router_for(arch: Arch):
    """A router class (or partial) for the layer's spec, or None where Megatron-core's is the same.

    Megatron-core scores a group by its topk // group_topk best experts, the models by a fixed number: 1 (DeepSeek-V2) or 2 (V3).
    """
    if arch.linear_bias:
        return BiasedRouter
    if not arch.group_best and (arch.norm_topk or not arch.expert_bias):
        return None
    return partial(GroupRouter, groups=arch.expert_groups if arch.group_best else 0, group_topk=arch.group_topk,
                   group_best=arch.group_best, normalize=arch.norm_topk)


class BiasedRouter(TopKRouter):
    """A router whose linear layer has a bias, added in float32.

    Megatron-core gives a bfloat16 bias to Transformer Engine's product with float32 output, which reads it as float32: wrong numbers, and
    memory behind it.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Logits [s, b, experts] in float32 from [s, b, hidden]."""
        return router_gating_linear(input, self.weight, None, torch.float32) + self.bias.float()


class GroupRouter(TopKRouter):
    """Experts chosen by score (plus bias) within the best groups, weighted by their scores. No auxiliary loss, no capacity."""

    def __init__(self, *args, groups: int, group_topk: int, group_best: int, normalize: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups, self.group_topk, self.group_best, self.normalize = groups, group_topk, group_best, normalize

    def _choose(self, scores: Tensor, topk: int, num_groups=None, group_topk=None) -> tuple[Tensor, Tensor]:
        """Scores and numbers [t, topk] of the chosen experts; the arguments are those of Megatron-core's router replay."""
        if self.groups:
            grouped = scores.view(len(scores), self.groups, -1)
            best = grouped.topk(self.group_best, dim=-1).values.sum(-1).topk(self.group_topk, dim=-1).indices
            out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(out[..., None], float("-inf")).flatten(1)
        return scores.topk(topk, dim=-1)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and choices [t, experts] from logits [s, b, experts]."""
        logits = logits.view(-1, logits.shape[-1])
        scores = logits.float().sigmoid() if self.score_function == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        choose = self._choose
        if self.router_replay is not None:
            choose = partial(self.router_replay.get_replay_topk, default_compute_topk=self._choose)
        _, chosen = choose(choice.detach(), self.topk)
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        probs = torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits)
        return probs, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
