"""Process groups of one rank: torch.distributed and Megatron's parallel state, laid out as `ParallelLayout` says."""

from __future__ import annotations

import datetime
import random

import numpy as np
import torch
import torch.distributed as dist

from moerl.layout import ParallelLayout


def start(layout: ParallelLayout, rank: int, master: str, device: str, *, seed: int, timeout_s: float = 600) -> None:
    """Join the world of `layout.world` ranks at `master` ("host:port") and build every process group.

    `seed` fixes the random state of every rank; tensor-parallel and expert ranks get their own streams from it, as Megatron defines them.
    """
    if device == "cpu":
        from moerl.megatron import cpu

        cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"tcp://{master}", world_size=layout.world, rank=rank,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Leave the world; the process may start another one."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
