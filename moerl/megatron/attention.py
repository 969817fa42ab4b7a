"""Core attention and norm for machines without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Causal attention over a packed row of sequences: torch's scaled-dot-product kernel, padding only inside the kernel call.

    Same constructor and call as Megatron-core's attention modules, and the same sliding windows and attention sinks (`softmax_offset`,
    this rank's heads) from its configuration. Shapes: query [t, heads, d], key and value [t, groups, d], result
    [t, heads, d]; `packed_seq_params.cu_seqlens_q` [n + 1] marks where each of the n sequences starts.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type: str,
                 softmax_scale: float | None = None, **unused):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine; set cp to 1")
        self.scale = softmax_scale or config.kv_channels**-0.5
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.look_back = config.window_size[0] if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, attn_mask_type=None,
                attention_bias=None, packed_seq_params: PackedSeqParams) -> Tensor:
        row, column, size = _places(packed_seq_params)
        batch = [_unpack(x, row, column, size) for x in (query, key, value)]
        mask = None
        if self.look_back is not None or self.softmax_offset is not None:
            mask = self._mask(query, size[1])
            # The sink is one more key, of zeros: its logit is what the mask adds, its value adds nothing.
            batch[1:] = [torch.nn.functional.pad(x, (0, 0, 0, mask.shape[-1] - size[1])) for x in batch[1:]]
        out = torch.nn.functional.scaled_dot_product_attention(
            *batch, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)[row, column].reshape(query.shape[0], -1)

    def _mask(self, query: Tensor, longest: int) -> Tensor:
        """What is added to the logits: [1, heads, longest, longest (+ 1 with sinks)]."""
        distance = torch.arange(longest, device=query.device)[:, None] - torch.arange(longest, device=query.device)
        hidden = distance < 0 if self.look_back is None else (distance < 0) | (distance > self.look_back)
        mask = query.new_zeros(longest, longest).masked_fill(hidden, float("-inf")).expand(1, query.shape[1], -1, -1)
        if self.softmax_offset is None:
            return mask
        sinks = self.softmax_offset.to(query.dtype).view(1, -1, 1, 1).expand(-1, -1, longest, -1)
        return torch.cat([mask, sinks], dim=-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For Megatron's checkpoints: the sinks are cut along heads."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets)


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
