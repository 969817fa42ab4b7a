"""Query and key norms over the whole width of a layer, before it is split into heads."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WideRMSNorm(torch.nn.Module):
    """RMSNorm over all `heads` of a layer, of which this rank holds a part.

    The mean square is that of the whole width: the sum of squares is added up over tensor-parallel ranks, forward and backward, since
    each rank goes on with its own heads only. The weight is a shard: its gradient is whole on its rank.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.width, self.eps = heads * head_dim, eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // parallel_state.get_tensor_model_parallel_world_size(), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, local heads, head_dim] -> the same shape."""
        flat = x.flatten(-2).float()
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True)))
        normed = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For Megatron's checkpoints: the weight is a shard."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets)


def widen_qk_norms(chunk: GPTModel) -> None:
    """Give every layer of `chunk` wide norms. Not through the layer spec: Megatron's switch for query/key norms makes it add up
    their gradients over tensor-parallel ranks by name, which is right for replicated weights and wrong for these shards.
    """
    config = chunk.config
    for layer in chunk.decoder.layers:
        for name, heads in (("q_layernorm", config.num_attention_heads), ("k_layernorm", config.num_query_groups)):
            norm = WideRMSNorm(heads, config.kv_channels, config.layernorm_epsilon, config.params_dtype)
            setattr(layer.self_attention, name, norm)
