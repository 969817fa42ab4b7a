"""Core attention and norm for machines without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Causal attention over a packed row of sequences: torch's scaled-dot-product kernel, padding only inside the kernel call.

    Same constructor and call as Megatron-core's attention modules. Shapes: query [t, heads, d], key and value [t, groups, d], result
    [t, heads, d]; `packed_seq_params.cu_seqlens_q` [n + 1] marks where each of the n sequences starts.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type: str,
                 softmax_scale: float | None = None, **unused):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine; set cp to 1")
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, attn_mask_type=None,
                attention_bias=None, packed_seq_params: PackedSeqParams) -> Tensor:
        row, column, size = _places(packed_seq_params)
        batch = [_unpack(x, row, column, size) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *batch, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)[row, column].reshape(query.shape[0], -1)


def _places(packed: PackedSeqParams) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Sequence number and position of every packed token, and (sequences, longest)."""
    starts = packed.cu_seqlens_q.long()
    lengths = starts[1:] - starts[:-1]
    row = torch.repeat_interleave(lengths)
    column = torch.arange(int(starts[-1]), device=row.device) - starts[:-1][row]
    return row, column, (len(lengths), int(packed.max_seqlen_q))


def _unpack(x: Tensor, row: Tensor, column: Tensor, size: tuple[int, int]) -> Tensor:
    """[t, heads, d] -> [sequences, heads, longest, d]. A causal kernel never looks at the zeros on the right."""
    out = x.new_zeros(*size, *x.shape[1:])
    return out.index_put((row, column), x).transpose(1, 2)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor; its weight asks for a gradient all-reduce over tensor-parallel ranks.

    Under sequence parallelism every rank normalises its own part of the sequence, so each holds a partial gradient of the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
