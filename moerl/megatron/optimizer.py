"""Gradients and updates: Megatron's DDP buffers and distributed optimizer around the chunks of one model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


@dataclass(frozen=True)
class Schedule:
    """Learning rate by optimizer step: linear warm-up to `lr`, then constant, or linear or cosine decay to `min_lr` at `total` steps."""

    lr: float
    min_lr: float = 0.0
    kind: str = "constant"
    warmup: int = 0
    total: int = 0

    def at(self, step: int) -> float:
        """Rate of optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        share = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * share


def wrap(chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Give the chunks gradient buffers, reduced over data-parallel ranks as plain sums: the loss carries the global denominator."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, check_for_nan_in_grad=True
    )
    return [DistributedDataParallel(c.config, config, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]


def build_optimizer(chunks: list[DistributedDataParallel], *, lr: float, betas: tuple[float, float], eps: float,
                    weight_decay: float, clip_grad: float) -> MegatronOptimizer:
    dtype = chunks[0].config.params_dtype
    config = OptimizerConfig(
        optimizer="adam", lr=lr, adam_beta1=betas[0], adam_beta2=betas[1], adam_eps=eps, weight_decay=weight_decay,
        clip_grad=clip_grad, bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for part in _parts(optimizer):
        part.get_parameter_state_dp_zero = _with_bucket_padding(part, part.get_parameter_state_dp_zero)
        if not any(group["params"] for group in part.param_groups):
            part.state_dict = _state_without_params(part, _parts(optimizer)[0])
    return optimizer


def _state_without_params(part, other):
    """`state_dict` of the experts' optimizer on a pipeline stage that has none.

    Megatron-core looks for the one step count that torch's Adam keeps with every parameter; here it is that of the stage's `other` ones.
    """

    def state():
        step = other.state_dict()["optimizer"]["param_groups"][0].get("step")
        groups = [{k: v for k, v in group.items() if k != "params"} | {"step": step} for group in part.param_groups]
        return {"optimizer": {"param_groups": groups}}

    return state


def _with_bucket_padding(part, gather):
    """Megatron-core's gathered state, on its way to a checkpoint, with every bucket at its place in the buffer.

    It comes as buckets end to end without their padding and is then read at the parameters' places in the padded buffer. A table that two
    pipeline stages share has a bucket of its own, so the state of all parameters behind it would be saved shifted.
    """

    def gathered(*args, **kwargs):
        state = gather(*args, **kwargs)
        for i, buffer in enumerate(part.buffers if state is not None else ()):
            for tensors in state[i].values():
                for key, flat in [(k, t) for k, t in tensors.items() if torch.is_tensor(t)]:
                    tensors[key], at = flat.new_zeros(buffer.numel), 0
                    for bucket in buffer.buckets:
                        tensors[key][bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[at : at + bucket.numel_unpadded]
                        at += bucket.numel_unpadded
        return state

    return gathered


def set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def restore(optimizer: MegatronOptimizer, state: dict) -> None:
    """Load a checkpoint's optimizer state.

    Adam's step count travels with the parameter groups. Megatron-core, written for fused optimizers that keep it there, stumbles over the
    count that torch's Adam keeps beside every parameter's moments, and hands all parameters the same counter tensor, which would then
    advance once for each of them: the counters are set aside while moments load, and every parameter gets its own back.
    """
    parts = _parts(optimizer)
    for part in parts:
        part._set_main_param_and_optimizer_states = _setting_steps_aside(part, part._set_main_param_and_optimizer_states)
    try:
        optimizer.load_state_dict(state)
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _setting_steps_aside(part, load):
    def load_one(model_param, tensors):
        group, order = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        count = state.pop("step", None)
        load(model_param, tensors)
        if count is not None:
            state["step"] = count.clone() if torch.is_tensor(count) else count

    return load_one


def init_states(optimizer: MegatronOptimizer) -> None:
    """Allocate Adam's moments before a restore: torch's Adam makes them at its first step, and loading needs them there."""
    for part in _parts(optimizer):
        part._init_optimizer_states_with_dummy_values()
