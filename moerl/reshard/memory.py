"""Memory of one process read by another one of its node: CUDA IPC for GPUs, shared memory for CPUs.

A handle is made a storage, not a tensor: a rank keeps its weights in few storages, and opening a handle costs time and address space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shared:
    """Handles of storages, and of every tensor its storage, dtype, offset in elements and length."""

    handles: tuple
    tensors: dict[str, tuple[int, str, int, int]]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a contiguous tensor in one dimension, sharing memory."""
    return tensor.detach().view(-1)


def share(tensors: Mapping[str, torch.Tensor]) -> Shared:
    """Open the memory of contiguous tensors to other processes of the node. CPU storages move into shared memory, all views with them."""
    storages, places = {}, {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        at = storages.setdefault(storage._cdata, (len(storages), storage))[0]
        places[name] = (at, str(tensor.dtype).removeprefix("torch."), tensor.storage_offset(), tensor.numel())
    return Shared(tuple(_handle(storage) for _, storage in storages.values()), places)


def opened(shared: Shared, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The named tensors of another process, flat. They stay open for as long as they are kept."""
    names = list(names)
    used = {shared.tensors[name][0] for name in names}
    storages = {at: _open(shared.handles[at]) for at in used}
    found = {}
    for name in names:
        at, dtype, offset, count = shared.tensors[name]
        whole = torch.empty(0, dtype=getattr(torch, dtype), device=storages[at].device).set_(storages[at])
        found[name] = whole[offset : offset + count]
    return found


def _handle(storage: torch.UntypedStorage) -> tuple:
    if storage.device.type == "cpu":
        return "cpu", storage._share_filename_cpu_()
    from torch.multiprocessing.reductions import reduce_tensor

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    build, args = reduce_tensor(whole)
    return "cuda", str(torch.cuda.get_device_properties(storage.device).uuid), build, args


def _open(handle: tuple) -> torch.UntypedStorage:
    if handle[0] == "cpu":
        return torch.UntypedStorage._new_shared_filename_cpu(*handle[1])
    _, uuid, build, args = handle
    args = list(args)
    args[6] = next(  # a process numbers the GPUs it sees by itself
        (i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid), None
    )
    if args[6] is None:
        raise RuntimeError(f"GPU {uuid} of a training rank is not visible to this worker, which is to read its memory")
    return build(*args).untyped_storage()
