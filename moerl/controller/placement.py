"""Which role runs where: roles of one layout share processes, every group of processes shares the same machines and GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moerl.config.schema import RunConfig, TrainConfig
from moerl.layout import LayoutError, ParallelLayout
from moerl.models.arch import Arch, ModelError
from moerl.reshard.plan import Place
from moerl.rl import ALGORITHMS


class ClusterError(RuntimeError):
    """The Ray cluster cannot hold the run; the message names what is needed and what is there."""


@dataclass(frozen=True)
class Placement:
    """`groups` are (role names, layout), one set of processes each; `engines` vLLM engines of `engine_tp` workers; `slots` places.

    Slot i holds rank i of every group and one rollout worker; a slot is one GPU, or one process' share of a CPU machine.
    """

    groups: list[tuple[list[str], ParallelLayout]]
    engines: int
    engine_tp: int
    device: str
    colocated: bool = True

    @property
    def training(self) -> int:
        """Slots of the largest training layout."""
        return max(layout.world for _, layout in self.groups)

    @property
    def slots(self) -> int:
        workers = self.engines * self.engine_tp
        return max(self.training, workers) if self.colocated else self.training + workers

    def engine_slots(self, engine: int) -> range:
        """The slots of an engine's workers."""
        first = (0 if self.colocated else self.training) + engine * self.engine_tp
        return range(first, first + self.engine_tp)

    def describe(self) -> str:
        lines = [f"{', '.join(roles)}: {layout.describe()}, slots 0-{layout.world - 1}" for roles, layout in self.groups]
        if self.engines:
            first, last = self.engine_slots(0)[0], self.engine_slots(self.engines - 1)[-1]
            lines.append(f"rollout: {self.engines} vLLM engine{'s' * (self.engines > 1)} TP{self.engine_tp}, slots {first}-{last}")
        return "\n".join([*lines, f"{self.slots} slots ({'one GPU each' if self.device == 'cuda' else 'CPU processes'})"])


def resolve_device(device: str) -> str:
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def roles_of(config: RunConfig) -> dict[str, ParallelLayout]:
    """The roles this run needs and their layouts; a role without one of its own has the actor's."""
    layouts = {"actor": config.actor.layout}
    if isinstance(config, TrainConfig):
        if ALGORITHMS[config.algorithm.name].NEEDS_CRITIC:
            layouts["critic"] = config.critic.layout or config.actor.layout
        if config.algorithm.kl_coef > 0:
            layouts["reference"] = config.reference.layout or config.actor.layout
    return {role: layout.resolve() for role, layout in layouts.items()}


def place(config: RunConfig, arch: Arch) -> Placement:
    """The placement of a run; every rule of every layout is checked here, before any process starts."""
    groups: dict[ParallelLayout, list[str]] = {}
    for role, layout in roles_of(config).items():
        try:
            arch.check(layout)
        except LayoutError as error:
            raise LayoutError("\n".join(f"{role}.layout: {line}" for line in str(error).splitlines())) from None
        if layout.cp > 1:
            raise LayoutError(f"{role}.layout: cp {layout.cp} is not supported yet: cp must be 1")
        _check_longest(config, arch, role, layout.tp)
        groups.setdefault(layout, []).append(role)
    _check_router(config, arch)
    engines, tp = 0, 1
    if isinstance(config, TrainConfig):
        engines, tp = config.rollout.layout.dp, config.rollout.layout.tp
        _check_rollout(arch, tp, config.rollout.layout.ep)
    placement = Placement(
        [(roles, layout) for layout, roles in groups.items()], engines, tp, resolve_device(config.cluster.device),
        not engines or config.rollout.colocated,
    )
    if placement.device == "cuda" and placement.colocated and engines * tp > placement.training:
        most = placement.training
        raise LayoutError(f"rollout.layout: {engines} engines x tp {tp} need more GPUs than the {most} of the largest training layout")
    if engines:
        _check_sync(config, placement)
    return placement


def _check_sync(config: TrainConfig, placement: Placement) -> None:
    r = config.rollout
    if r.sleep and placement.device != "cuda":
        raise LayoutError("rollout.sleep needs GPUs: vLLM's CPU backend cannot give its memory back")
    if r.sync.transport == "messages" and placement.device == "cuda" and placement.colocated:
        raise LayoutError("rollout.sync.transport messages: NCCL takes no two processes of one GPU; with rollout.colocated it must be auto")


def _check_router(config: RunConfig, arch: Arch) -> None:
    for name, value in config.actor.router.model_dump().items():
        if value and not arch.experts:
            raise ModelError(f"actor.router.{name} {value:g}: {arch.family} has no experts")
        if value and name == "bias_update_rate" and not arch.expert_bias:
            raise ModelError(f"actor.router.{name} {value:g}: the routers of {arch.family} have no selection bias")


def _check_rollout(arch: Arch, tp: int, ep: int) -> None:
    """vLLM's rules of tensor and expert parallelism."""
    if ep > 1 and (not arch.experts or arch.experts % ep):
        raise LayoutError(f"rollout.layout: experts {arch.experts} are not divisible by ep {ep}")
    experts = ("experts", arch.experts) if ep > 1 else ("expert width", arch.expert_ffn)
    for what, number in (("attention heads", arch.heads), experts, ("MLP width", arch.ffn)):
        if number % tp:
            raise LayoutError(f"rollout.layout: {what} {number} {'are' if what.endswith('s') else 'is'} not divisible by tp {tp}")
    if arch.kv_heads % tp and tp % arch.kv_heads:
        raise LayoutError(f"rollout.layout: neither of key/value heads {arch.kv_heads} and tp {tp} divides the other")


def max_tokens(config: RunConfig, role: str) -> int:
    """Packed tokens of a micro-batch of the role; the actor's where it has no number of its own."""
    return getattr(config, role).max_tokens_per_rank or config.actor.max_tokens_per_rank


def _check_longest(config: RunConfig, arch: Arch, role: str, tp: int) -> None:
    """The longest sample there can be must fit a micro-batch and the model: better refused now than after a night."""
    if not isinstance(config, TrainConfig):
        return
    longest, cap = config.data.max_prompt_tokens + config.rollout.sampling.max_tokens, max_tokens(config, role)
    what = f"the longest sample {longest} (data.max_prompt_tokens + rollout.sampling.max_tokens)"
    if longest > cap // tp * tp:
        whole = f" ({cap // tp * tp} in whole units of tp {tp})" if cap % tp else ""
        raise LayoutError(f"{role}.max_tokens_per_rank {cap}{whole} is below {what}")
    if arch.context and longest > arch.context:
        raise LayoutError(f"the model's context of {arch.context} tokens is below {what}")


def check_tokenizer(tokenizer, arch: Arch, path: str) -> None:
    if len(tokenizer) > arch.vocab:
        raise ModelError(f"{path}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary is {arch.vocab}")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end token (eos)")


class Cluster:
    """A running Ray with one placement group of the run's slots, slots of one node next to each other."""

    def __init__(self, placement: Placement, address: str | None, timeout_s: float):
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        self.placement = placement
        gpu = placement.device == "cuda"
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        local = dict(num_cpus=placement.slots, include_dashboard=False) if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        bundle = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
        self.group = placement_group([bundle] * placement.slots, strategy="PACK")
        have, kind = ray.cluster_resources(), "GPU" if gpu else "CPU"
        hopeless = address == "local" and have.get(kind, 0) < placement.slots
        if hopeless or not self.group.wait(timeout_s):
            raise ClusterError(
                f"the run needs {placement.slots} {kind}s, the Ray cluster offers {have.get(kind, 0):g} "
                + ("" if hopeless else f" (waited {timeout_s:.0f} s)")
            )
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        self.bundles = sorted(range(placement.slots), key=lambda i: (nodes[i], i))
        self.nodes = [nodes[i] for i in self.bundles]
        self._share = 1 / (len(placement.groups) + 1) if gpu else 0

    def rank_options(self, slot: int) -> dict:
        return {"num_gpus": self._share, "scheduling_strategy": self._strategy(slot)}

    def engine_options(self, engine: int) -> dict:
        """Options of the actor of one engine; its workers must be on one node, since vLLM starts them as local processes."""
        slots = self.placement.engine_slots(engine)
        if len({self.nodes[s] for s in slots}) > 1:
            raise ClusterError(f"rollout engine {engine}: its {len(slots)} workers do not fit on one node; lower rollout.layout.tp")
        return {"num_gpus": 0, "scheduling_strategy": self._strategy(slots[0])}

    def places(self, ranks: int) -> Place:
        """Node and slot (a GPU, or a share of a CPU) of the first `ranks` training ranks and of every engine's workers."""
        nodes = {node: i for i, node in enumerate(dict.fromkeys(self.nodes))}
        workers = [slot for engine in range(self.placement.engines) for slot in self.placement.engine_slots(engine)]
        return Place(*([(nodes[self.nodes[slot]], slot) for slot in slots] for slots in (range(ranks), workers)))

    def gpus(self, slots: range) -> list[str] | None:
        """The ids of the slots' GPUs on their node; None on CPUs."""
        import ray

        if self.placement.device != "cuda":
            return None

        @ray.remote(num_cpus=0, num_gpus=self._share, max_retries=0)
        def ids() -> list[str]:
            return [str(gpu) for gpu in ray.get_gpu_ids()]

        answers = ray.get([ids.options(scheduling_strategy=self._strategy(slot)).remote() for slot in slots])
        return [gpu for answer in answers for gpu in answer]

    def _strategy(self, slot: int):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[slot])

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
