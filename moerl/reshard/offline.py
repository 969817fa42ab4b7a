"""vLLM's model of one worker of a layout, built in any process: for tracing without the engine's processes, and for its proof."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from moerl.reshard.trace import Trace, trace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def fresh(config: VllmConfig, layers: int | None = None) -> VllmConfig:
    """A copy of a running engine's configuration for a second model, with its first `layers` decoder layers only."""
    config = copy.copy(config)
    config.compilation_config, config.model_config = copy.copy(config.compilation_config), copy.deepcopy(config.model_config)
    for registry in ("static_forward_context", "static_all_moe_layers"):  # the running model's layers, by name
        if hasattr(config.compilation_config, registry):
            setattr(config.compilation_config, registry, type(getattr(config.compilation_config, registry))())
    if layers is not None:
        for part in {id(c): c for c in (config.model_config.hf_config, config.model_config.hf_text_config)}.values():
            part.num_hidden_layers = layers
    return config


def make(config: VllmConfig, device: str) -> torch.nn.Module:
    """vLLM's model for this process's place in its parallel groups; no weight is loaded and no kernel chosen.

    vLLM shares rotary tables among all models of a process: this one gets its own, since others could not compute with tables of meta.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype


    class IntegersOnCPU(TorchFunctionMode):
        """Tables of experts are computed while a model is built, which meta tensors cannot do; only weights need to be without elements."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            dtype = kwargs.get("dtype")
            if dtype is not None and "device" not in kwargs and not dtype.is_floating_point and func in FACTORIES:
                kwargs = kwargs | {"device": "cpu"}
            return func(*args, **kwargs)

    tables, rotary_embedding._ROPE_DICT = rotary_embedding._ROPE_DICT, {}
    FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor}
    with torch.device(device), set_default_torch_dtype(config.model_config.dtype), set_current_vllm_config(config), IntegersOnCPU():
        try:
            return initialize_model(config)
        finally:
            rotary_embedding._ROPE_DICT = tables


def trace_worker(config: VllmConfig, shapes: dict[str, tuple[int, ...]], layers: int) -> Trace:
    """What this worker loads of a model with only the first `layers` layers, whose tensors are `shapes`."""
    return trace(make(fresh(config, layers), "meta"), shapes, config.model_config.dtype)


@contextmanager
def worker(rank: int, tp: int) -> Iterator[None]:
    """Let vLLM's layers believe that this process is worker `rank` of `tp`; no process group is made, so nothing can be computed."""
    from vllm.distributed import parallel_state

    def group(size: int, at: int) -> SimpleNamespace:
        ranks = list(range(size))
        return SimpleNamespace(
            world_size=size, rank_in_group=at, rank=at, local_rank=at, ranks=ranks, first_rank=0, last_rank=size - 1, is_first_rank=at == 0,
            is_last_rank=at == size - 1, device_group=SimpleNamespace(size=lambda: size, rank=lambda: at), cpu_group=None,
            unique_name="traced", device_communicator=None,
            use_device_communicator=False, next_rank=(at + 1) % size, prev_rank=(at - 1) % size,
        )

    one, all_ = group(1, 0), group(tp, rank)
    fakes = dict(_WORLD=all_, _TP=all_, _EP=all_, _DP=one, _PP=one, _DCP=one, _PCP=one, _ETP=one)
    before = {name: getattr(parallel_state, name) for name in fakes if hasattr(parallel_state, name)}
    for name in before:
        setattr(parallel_state, name, fakes[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


def engine_config(model: str, tp: int, dtype: str, expert_parallel: bool = False) -> VllmConfig:
    """The configuration of an engine of `tp` workers, without starting one; `model` needs no weights."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # what a command prints is its own
    from vllm import EngineArgs

    return EngineArgs(
        model=model, skip_tokenizer_init=True, dtype=dtype, tensor_parallel_size=tp, distributed_executor_backend="mp", enforce_eager=True,
        enable_expert_parallel=expert_parallel, max_model_len=64, kv_cache_memory_bytes=2**26,
    ).create_engine_config()
