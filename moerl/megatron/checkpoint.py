"""Training state of the models of a rank in Megatron's distributed checkpoint format (torch_dist)."""

from __future__ import annotations

import inspect
import queue
import random
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async

from moerl.megatron.model import Model
from moerl.megatron.optimizer import init_states, restore
from moerl.megatron.saving import Saving
from moerl.models.dist_keys import canonical
from moerl.models.tensormap import Param

EXTRA = re.compile(r"_extra_state\d*$")  # Transformer Engine's slots for FP8 scales in every layer, one an expert
# Optimizer state is stored a model parameter at a time, under names that do not depend on how many optimizers were chained:
# it loads at another layout.
# A layer has names of its own, also where all layers are alike.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "non_homogeneous_layers": True}


def _model_state(model: Model) -> dict:
    state = {}
    for i, chunk in enumerate(model.bare()):
        key = f"model{i}" if len(model.chunks) > 1 else "model"
        state[key] = _named_alike(chunk.sharded_state_dict(metadata=dict(METADATA)), model.params)
    return state


def _named_alike(state: dict, params: dict[str, Param]) -> dict:
    """The state under the names that it has with Transformer Engine, and without that library's (here empty) FP8 scales."""
    kept = {name: item for name, item in state.items() if not EXTRA.search(name)}
    for item in kept.values():
        item.key = canonical(item.key, params)
    return kept


def _rng_state() -> dict:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _rng_object(state: dict | None) -> ShardedObject:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("rng", state, (world,), (rank,), replica_id=0)


def _state(model: Model, loading: bool) -> dict:
    state = _model_state(model)
    if model.optimizer is not None:
        state["optimizer"] = model.optimizer.sharded_state_dict(state, is_loading=loading, metadata=dict(METADATA))
    return state


def start_save(model: Model, path: str) -> Saving:
    """Begin to write weights, optimizer, update count and every rank's random state of one model into directory `path`.

    All ranks call it. It returns when the state is copied, so that training may go on, and `Saving` tells the rest.
    """
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    common = {"updates": model.updates, "layout": asdict(model.layout)}
    # Megatron hands results over through a manager process, which takes seconds to start on every rank; the writer here is a thread.
    filesystem_async._results_queue = queue.SimpleQueue()
    state = _state(model, loading=False) | common | {"rng": _rng_object(_rng_state())}
    # Since 0.17 a package of another maker is the default for what is asynchronous.
    own = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
    return Saving(dist_checkpointing.save(state, path, validate_access_integrity=True, async_sharded_save=True, **own))


def save(model: Model, path: str) -> None:
    """`start_save` and its end: the checkpoint is complete when the call returns. All ranks call it."""
    start_save(model, path).finish()


def load(model: Model, path: str) -> None:
    """Restore what `save` wrote; afterwards the next step is the one the saved run would have taken.

    Weights and optimizer load at any layout. Random states belong to ranks, so they are restored only at the layout that saved them.
    """
    common = dist_checkpointing.load_common_state_dict(path)
    same_layout = common["layout"] == asdict(model.layout)
    if model.optimizer is not None:
        init_states(model.optimizer)
    template = _state(model, loading=True) | ({"rng": _rng_object(None)} if same_layout else {})
    state = dist_checkpointing.load(template, path)
    for i, chunk in enumerate(model.bare()):
        _load_chunk(chunk, state[f"model{i}" if len(model.chunks) > 1 else "model"])
    if model.optimizer is not None:
        restore(model.optimizer, state["optimizer"])
    model.updates = common["updates"]
    if same_layout:
        _restore_rng(state["rng"])


def _load_chunk(chunk: torch.nn.Module, state: dict) -> None:
    answer = chunk.load_state_dict(state, strict=False)
    wrong = [k for k in (*answer.missing_keys, *answer.unexpected_keys) if not EXTRA.search(k)]
    if wrong:
        raise ValueError(f"checkpoint does not fit the model: {len(wrong)} tensors, first {wrong[0]}")
