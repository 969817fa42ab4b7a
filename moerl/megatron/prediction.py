"""Multi-token prediction layers: held by the actor's last stage, loaded, exported, saved and restored, and not run."""

from __future__ import annotations

from copy import copy

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def prediction_block(config: TransformerConfig, layers: list[ModuleSpec], norm: type, engine: bool,
                     vp_stage: int | None) -> MultiTokenPredictionBlock:
    """Megatron-core's block around decoder layers of these specs, its parameters without gradients.

    The model's own configuration stays without prediction layers: with them Megatron-core moves the final norm, changes its output and asks
    for labels. Without gradients the buffers, the optimizer and the gradient norm leave the block's parameters out.
    """
    config = copy(config)
    config.mtp_num_layers = len(layers)
    specs = [get_mtp_layer_spec(layer, engine) for layer in layers]
    for spec in specs:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = norm
    groups = ProcessGroupCollection.use_mpu_process_groups()  # left to itself, the block knows too few of them for experts
    block = MultiTokenPredictionBlock(config, MultiTokenPredictionBlockSubmodules(specs), vp_stage=vp_stage, pg_collection=groups)
    return block.requires_grad_(False)
