"""Stands in for CUDA where Megatron-core hard-codes it, so that the same engine trains on gloo and CPU tensors.

The only CPU-specific code of the engine. `install()` is called once in a process, before megatron.core is imported, and does nothing
where CUDA is present.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_installed = False


class _Nothing:
    """A stream or event whose every method does nothing and returns another one; a context manager."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def _on_cpu(value):
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites literal device="cuda" arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs and "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(a) for a in args)
        return func(*args, **(kwargs or {}))


def _replace_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *args: None
    cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *args, **kwargs: 0
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = lambda seed: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name, dtype in (("FloatTensor", torch.float32), ("IntTensor", torch.int32), ("LongTensor", torch.int64)):
        setattr(cuda, name, lambda data, dtype=dtype: torch.tensor(data, dtype=dtype))


def _replace_tensor_methods() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        # The distributed optimizer sorts parameters by this string.
        answer = plain_type(self, *args, **kwargs)
        return f"torch.cuda.{answer.split('.')[-1]}" if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type


def _replace_collectives() -> None:
    """Gathers and scatters of tensors of different lengths, which NCCL has and gloo has not: expert tensor beside expert parallelism."""
    dist = torch.distributed
    plain_gather, plain_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs, tensor, group=None, async_op=False):
        longest = max(len(out) for out in outputs)
        if async_op or all(len(out) == longest for out in outputs):
            return plain_gather(outputs, tensor, group=group, async_op=async_op)
        padded = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        parts = [torch.empty_like(padded) for _ in outputs]
        plain_gather(parts, padded, group=group)
        for out, part in zip(outputs, parts):
            out.copy_(part[: len(out)])

    def reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if async_op or len({len(part) for part in inputs}) == 1:
            return plain_scatter(output, inputs, op=op, group=group, async_op=async_op)
        whole = torch.cat(inputs)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(part) for part in inputs])[dist.get_rank(group)])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _replace_in_megatron() -> None:
    import numpy as np
    from megatron.core.tensor_parallel import random as mrandom
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    mrandom._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mrandom._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # 0.16 takes its own placeholders for Transformer Engine
    real_move = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor, as_numpy=False, record_stream=False):
        # The real one passes CPU tensors through; the all-to-all wants its split sizes as numpy either way.
        if torch.is_tensor(tensor) and tensor.device == CPU:
            return tensor.numpy().astype(np.int64) if as_numpy else tensor
        return real_move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def install() -> None:
    """Prepare this process to run Megatron-core without CUDA. Idempotent."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _replace_cuda()
    _replace_tensor_methods()
    _replace_collectives()
    _CudaMeansCpu().__enter__()
    _replace_in_megatron()
