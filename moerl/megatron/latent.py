"""Multi-head latent attention: Megatron-core's, with whole down projections on every rank and the norms' epsilon of the checkpoints."""

from __future__ import annotations

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.models.arch import Arch


def latent_options(arch: Arch) -> dict:
    """Keywords of `MLATransformerConfig`."""
    a, yarn = arch.latent, arch.yarn
    options = dict(q_lora_rank=a.q_rank, kv_lora_rank=a.kv_rank, qk_head_dim=a.nope, qk_pos_emb_head_dim=a.rope, v_head_dim=a.value,
                   rotary_base=arch.rope_theta)
    if yarn is None:
        # The scores' scale is computed from factor and mscale_all_dim also without YaRN.
        return options | dict(rope_type="rope", rotary_scaling_factor=1.0, mscale_all_dim=0.0)
    return options | dict(
        rope_type="yarn", rotary_scaling_factor=yarn.factor, original_max_position_embeddings=yarn.original, beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow, mscale=yarn.mscale, mscale_all_dim=yarn.mscale_all_dim,
    )


class WholeLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank applies to its own part of the sequence: weight and output are whole."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class LatentAttention(MLASelfAttention):
    """Latent attention whose parameters have the same shards with and without Transformer Engine.

    Without it Megatron-core cuts the down projections over tensor-parallel ranks, and the gradient of the rotary key that all heads share
    then misses the other ranks' heads.
    """

    def __init__(self, config, submodules, layer_number, *args, norm_eps: float, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            cut = getattr(self, name, None)
            if cut is not None and type(cut).__name__ == "ColumnParallelLinear":
                outputs = config.q_lora_rank if "_q_" in name else config.kv_lora_rank + config.qk_pos_emb_head_dim
                setattr(self, name, WholeLinear(config, config.hidden_size, outputs))
        # Transformer Engine fuses the norms into the up projections.
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module = getattr(self, name, None)
            if hasattr(module, "eps"):
                module.eps = norm_eps

    def _resolve_qk_norm_config(self, submodules) -> dict:
        """The spec's own modules: left to itself, Megatron-core 0.19 puts a norm before a query projection that has no latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
