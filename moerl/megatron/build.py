"""Build one rank's part of a model: Megatron-core modules for the layers and shards that this rank owns."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from moerl.layout import ParallelLayout
from moerl.megatron.attention import PackedAttention, RMSNorm
from moerl.megatron.latent import LatentAttention, latent_options
from moerl.megatron.prediction import prediction_block
from moerl.megatron.qk_norm import widen_qk_norms
from moerl.megatron.rope import llama3_frequencies
from moerl.megatron.router import router_for
from moerl.megatron.value import ValueHead
from moerl.models.arch import Arch, ModelError


def have_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def _finalize(model, num_tokens=None, **groups) -> None:
    """Megatron's gradient reductions without its division by a token count: the loss already carries its global denominator."""
    finalize_model_grads(model, None, **groups)


def transformer_config(arch: Arch, layout: ParallelLayout, dtype: torch.dtype) -> TransformerConfig:
    engine = have_transformer_engine()
    arch.check(layout)
    moe = {}
    if arch.experts:
        moe = dict(
            num_moe_experts=arch.experts,
            moe_ffn_hidden_size=arch.expert_ffn,
            moe_router_topk=arch.topk,
            # Softmax over the chosen logits equals renormalising the chosen probabilities; without renormalisation softmax comes first.
            moe_router_pre_softmax=not arch.norm_topk,
            moe_router_dtype="fp32",
            # Pre-training's balancing pressure must not leak into the policy gradient: no auxiliary loss, no bias update.
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_enable_expert_bias=arch.expert_bias,
            moe_router_score_function="sigmoid" if arch.expert_bias else "softmax",
            moe_router_bias_update_rate=0.0,
            moe_grouped_gemm=engine,
            moe_shared_expert_gate=arch.shared_expert_gate,
            moe_layer_freq=[int(arch.is_moe(i)) for i in range(arch.layers)],
            moe_router_num_groups=arch.expert_groups or None,
            moe_router_group_topk=arch.group_topk or None,
            moe_router_topk_scaling_factor=arch.routed_scale if arch.routed_scale != 1.0 else None,
            moe_shared_expert_intermediate_size=arch.shared_ffn or None,
        )
    kind, latent = (MLATransformerConfig, latent_options(arch)) if arch.latent else (TransformerConfig, {})
    config = kind(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn or arch.expert_ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=quick_gelu if arch.swiglu_limit else torch.nn.functional.silu,
        activation_func_clamp_value=arch.swiglu_limit or None,
        glu_linear_offset=1.0 if arch.swiglu_limit else 0.0,
        add_bias_linear=arch.linear_bias,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm or arch.latent is not None,
        window_size=(arch.window - 1, 0) if arch.window else None,
        window_attn_skip_freq=[int(i in arch.window_layers) for i in range(arch.layers)] if arch.window else None,
        softmax_type="learnable" if arch.sinks else "vanilla",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Named for dense models too: the default refuses rows of different lengths, experts or not.
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=layout.pp > 1 and layout.vpp == 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine and not arch.linear_bias,
        masked_softmax_fusion=False,
        persist_layer_norm=engine,
        # Fused, YaRN's factor on cosine and sine is left out of packed rows, and latent attention takes both in the activations' dtype.
        apply_rope_fusion=engine and arch.yarn is None and arch.latent is None,
        batch_p2p_comm=torch.cuda.is_available(),
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
        **moe,
        **latent,
    )
    if arch.yarn and not arch.latent:
        # Attributes that Megatron-core's model looks for and its configuration class does not declare.
        for name, value in dict(
            rotary_scaling_factor=arch.yarn.factor, original_max_position_embeddings=arch.yarn.original, beta_fast=arch.yarn.beta_fast,
            beta_slow=arch.yarn.beta_slow, mscale=arch.yarn.mscale, mscale_all_dim=arch.yarn.mscale_all_dim,
            correction_range_round_to_int=arch.yarn.truncate,
        ).items():
            setattr(config, f"yarn_{name}", value)
    return config


def _layer_spec(config: TransformerConfig, arch: Arch, moe: bool) -> ModuleSpec:
    options = dict(num_experts=config.num_moe_experts if moe else None, qk_layernorm=config.qk_layernorm,
                   multi_latent_attention=arch.latent is not None)
    if have_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=config.moe_grouped_gemm, **options)
    else:
        spec = _local_layer_spec(config, options)
    if arch.latent:
        spec.submodules.self_attention.module = LatentAttention
        spec.submodules.self_attention.params["norm_eps"] = arch.latent.norm_eps
    if moe and (router := router_for(arch)):
        mlp = spec.submodules.mlp  # a ModuleSpec, since Megatron-core 0.17 a partial
        (mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]).router = router
    return spec


def _local_layer_spec(config: TransformerConfig, options: dict) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **options)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        names = ("q_layernorm", "kv_layernorm") if config.multi_latent_attention else ("q_layernorm", "k_layernorm")
        for name in names:
            setattr(attention, name, RMSNorm)
    return spec


def _norm() -> type:
    if have_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _layer_specs(config: TransformerConfig, arch: Arch, layers: range) -> list[ModuleSpec]:
    return [_layer_spec(config, arch, arch.is_moe(i)) for i in layers]


def build(arch: Arch, layout: ParallelLayout, rank: int, dtype: torch.dtype, *, value_head: bool = False) -> list[GPTModel]:
    """The model chunks of `rank` (one, or `layout.vpp`), uninitialised: weights come from `weights.load` or a checkpoint.

    With `value_head` the last stage ends in one scalar a token instead of logits (the critic). Prediction layers of `arch` are held by the
    last stage and are no part of the forward pass.
    """
    config = transformer_config(arch, layout, dtype)
    stage = layout.coords(rank).pp
    chunks = []
    for vp in range(layout.vpp):
        vp_stage = vp if layout.vpp > 1 else None
        first, last = layout.is_first(stage, vp), layout.is_last(stage, vp)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=_layer_specs(config, arch, layout.stage_layers(arch.layers, stage, vp)), layer_norm=_norm()
            ),
            vocab_size=layout.padded_vocab(arch.vocab),
            max_sequence_length=2**20,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            # A value head has no use for the table: the critic's embedding is an ordinary first-stage parameter.
            share_embeddings_and_output_weights=arch.tied_embeddings and not value_head,
            position_embedding_type="yarn" if arch.yarn and not arch.latent else "rope",
            rotary_base=arch.rope_theta,
            rotary_percent=arch.rotary_percent,
            vp_stage=vp_stage,
        )
        if arch.llama3_rope:
            chunk.rotary_pos_emb.inv_freq = llama3_frequencies(arch)
        if arch.linear_bias:
            _copy_expert_outputs(chunk)
        if arch.wide_qk_norm:
            widen_qk_norms(chunk)
        if value_head and last:
            chunk.output_layer = ValueHead(config)
        if arch.mtp_layers and last:
            specs = _layer_specs(config, arch, range(arch.layers, arch.layers + arch.mtp_layers))
            chunk.mtp = prediction_block(config, specs, _norm(), have_transformer_engine(), vp_stage)
        chunks.append(chunk.cuda())
    _count_layers(chunks, arch)
    return chunks


def _copy_expert_outputs(chunk: GPTModel) -> None:
    """Megatron's plain experts add their bias in place to what an autograd function returned, which autograd forbids: give them a copy."""
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(lambda layer, inputs, answer: (answer[0].clone(), answer[1]))


def _count_layers(chunks: list[GPTModel], arch: Arch) -> None:
    """Megatron can drop layers in silence when stage sizes are off; the sum over the pipeline must be the whole model."""
    built = torch.tensor(sum(len(c.decoder.layers) for c in chunks), device=torch.cuda.current_device())
    torch.distributed.all_reduce(built, group=parallel_state.get_pipeline_model_parallel_group())
    if built != arch.layers:
        raise ModelError(f"the pipeline holds {int(built)} layers, the model has {arch.layers}")
