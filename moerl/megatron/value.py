"""The critic's head: one scalar a token, inside the Megatron model, so that its optimizer, schedule and checkpoint are the model's."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Replaces the vocabulary projection of the last stage. Hidden states [s (/tp), b, hidden] -> values [s, b, 1] in float32.

    Starts at zero: before the first update every value is 0, whatever the backbone.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        # Each tensor-parallel rank sees its part of the sequence only, so the weight's gradient is summed over them.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, weight=None, runtime_gather_output=None) -> tuple[Tensor, None]:
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # Every rank computes the same loss from the gathered values: its gradient is split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
