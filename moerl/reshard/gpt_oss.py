"""gpt-oss in a reload: what vLLM's model copies straight into parameters, past the loaders that a layerwise reload listens to.

Those are the fused experts and the attention sinks. Parameters are empty during a reload, so such copies would be lost and the old values
go on serving without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def fill(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Put experts and sinks into the model, which is being reloaded, and hand on all other tensors. A layer's tensors come together."""
    experts: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        module, _, last = name.rpartition(".")
        if last == "sinks":
            _fill(model.get_submodule(module.replace(".self_attn", ".attn")), {"sinks": _share(tensor, 0)})
        elif last in EXPERTS:
            experts[last] = tensor
            if len(experts) == len(EXPERTS):
                _fill(model.get_submodule(f"{module}.routed_experts"), _shard(experts))
                experts = {}
        else:
            yield name, tensor


def _share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return tensor.chunk(get_tensor_model_parallel_world_size(), dim)[get_tensor_model_parallel_rank()]


def _shard(experts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This worker's part of a layer's experts under vLLM's names. Weights [E, in, out] become [E, out, in], gate and up interleaved."""
    from vllm.distributed import get_tensor_model_parallel_rank

    bias = experts["down_proj_bias"]  # added once, before the workers' outputs are summed
    return {
        "w13_weight": _share(experts["gate_up_proj"], 2).transpose(1, 2),
        "w13_bias": _share(experts["gate_up_proj_bias"], 1),
        "w2_weight": _share(experts["down_proj"], 1).transpose(1, 2),
        "w2_bias": bias if get_tensor_model_parallel_rank() == 0 else bias.new_zeros(bias.shape),
    }


def _fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give a module all of its tensors as it loads them, and end its reload: processed, and copied to where the kernels read."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    info = layerwise.get_layerwise_info(module)
    materialize_layer(module, info)
    for name, tensor in tensors.items():
        getattr(module, name).data.copy_(tensor)
    layerwise._layerwise_process(module, info)
