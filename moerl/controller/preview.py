"""The weight sync of a configuration, planned without its GPUs and its weights: `moerl reshard`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from moerl.config.schema import TrainConfig
from moerl.controller.placement import place, roles_of
from moerl.controller.sync import MIB
from moerl.models import config_of, params_of, read_arch
from moerl.models.checkpoint import set_config
from moerl.models.tensormap import hf_shapes
from moerl.reshard import offline
from moerl.reshard.plan import Place, Plan, plan
from moerl.reshard.sources import cut_layers, layer_of


def preview(config: TrainConfig) -> Plan:
    """The plan that a run of `config` on nodes of `cluster.gpus_per_node` GPUs makes; of the model only config.json is read."""
    whole = read_arch(config.model.path)
    arch, placement, each = whole.main(), place(config, whole), config.cluster.gpus_per_node
    params = params_of(arch)
    layers = cut_layers(params)
    shapes = hf_shapes(p for p in params.values() if layer_of(p) < layers)
    rollout, layout = config.rollout, roles_of(config)["actor"]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(config.model.path)
        shutil.copyfile(source / "config.json" if source.is_dir() else source, Path(scratch, "config.json"))
        set_config(Path(scratch), dtype=config.model.dtype, **config_of(whole))
        engine = offline.engine_config(scratch, rollout.layout.tp, rollout.dtype or config.model.dtype, rollout.layout.ep > 1)
        traces = []
        for rank in range(rollout.layout.tp):
            with offline.worker(rank, rollout.layout.tp):
                traces.append(offline.trace_worker(engine, shapes, layers))
    slots = [slot for e in range(placement.engines) for slot in placement.engine_slots(e)]
    spots = Place(*([(slot // each, slot) for slot in some] for some in (range(layout.world), slots)))
    return plan(
        arch, params, layout, traces, spots, cap=rollout.sync.buffer_mib * MIB // 2, dtype=config.model.dtype,
        mapped=rollout.sync.transport == "auto",
    )
