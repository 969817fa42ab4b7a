"""Weight syncs of a run: planned once, then the same moves after every update, all engines or none."""

from __future__ import annotations

import time

from moerl.config.schema import TrainConfig
from moerl.controller.group import Role
from moerl.controller.placement import Cluster
from moerl.models import params_of
from moerl.models.tensormap import hf_shapes
from moerl.reshard.plan import Plan, plan
from moerl.reshard.receiver import Connection
from moerl.reshard.sources import cut_layers, layer_of
from moerl.reshard.trace import Trace
from moerl.rollout.group import Rollout
from moerl.rollout.remote import collect

MIB = 2**20


class WeightSync:
    """Brings the actor's weights into all engines. The constructor asks the engines what they load, plans, and connects everybody."""

    def __init__(self, config: TrainConfig, actor: Role, rollout: Rollout, cluster: Cluster):
        self.actor, self.rollout = actor, rollout
        self.received: dict[str, float] = {}  # what the slowest engine says of the last sync
        sync, spec = config.rollout.sync, actor.spec
        arch = spec.arch.main()
        params = params_of(arch)
        layers = cut_layers(params)
        shapes = hf_shapes(p for p in params.values() if layer_of(p) < layers)
        traces = collect({"rollout engine 0": next(iter(rollout.engines.values())).trace.remote(shapes, layers)})["rollout engine 0"]
        self.plan: Plan = plan(
            arch, params, actor.group.layout, traces, cluster.places(actor.group.layout.world), cap=sync.buffer_mib * MIB // 2,
            dtype=spec.dtype, mapped=sync.transport == "auto",
        )
        self._connect(tuple(traces), shapes, sync.checksums, config.cluster.collective_timeout_s)

    def __call__(self, version: int) -> float:
        """Serve the actor's weights as `version` on every engine. Seconds it took.

        RemoteError when somebody fails, with who and why. Then no engine has a version, and none generates until a whole sync succeeds.
        """
        start = time.perf_counter()
        try:
            answers = collect(self.rollout.refs("receive") | self.actor.group.refs("send", self.actor.name))
            self.received = max((answers[name] for name in self.rollout.engines), key=lambda answer: answer["seconds"])
            collect(self.rollout.refs("commit", version))
        except BaseException:
            self.rollout.refs("give_up")
            raise
        return time.perf_counter() - start

    def _connect(self, traces: tuple[Trace, ...], shapes: dict, checksums: bool, timeout_s: float) -> None:
        made, group = self.plan, self.actor.group
        engines = len(self.rollout.engines)
        mine = [[made.rows(worker=e * made.tp + w) for w in range(made.tp)] for e in range(engines)]
        mapped = [{int(s) for p in plans for s in p.source[p.round < 0]} for plans in mine]
        shared = {}
        if any(mapped):
            answers = group.call("share_weights", self.actor.name)
            shared = {rank: answer for rank, answer in enumerate(answers) if any(rank in ranks for ranks in mapped)}
        master = group.call("describe")[0]["master"] if made.rounds else None
        connections = [
            Connection(
                tuple(plans), tuple(range(e * made.tp, (e + 1) * made.tp)), traces, shapes, {r: shared[r] for r in ranks}, master,
                timeout_s, checksums,
            )
            for e, (plans, ranks) in enumerate(zip(mine, mapped))
        ]
        rows = [made.rows(rank=rank) for rank in range(group.layout.world)]
        collect(
            self.rollout.refs("connect", each=connections)
            | group.refs("connect_sync", self.actor.name, master, timeout_s, checksums, per_rank=rows)
        )
