"""Rotary frequencies that Megatron-core cannot be asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moerl.models.arch import Arch


def llama3_frequencies(arch: Arch) -> Tensor:
    """Angle a token [head_dim / 2] of each pair of channels, float32, as Llama 3.1 stretches them ("rope_type": "llama3").

    Megatron's own switch has the factor only; the band limits and the original context are fixed numbers there.
    """
    rope = arch.llama3_rope
    plain = 1.0 / arch.rope_theta ** (torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim)
    turns = rope.original * plain / (2 * math.pi)  # how often a channel turns within the original context
    keep = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain
