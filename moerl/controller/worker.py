"""One Megatron rank as a Ray actor: holds the models of the roles that share its layout and does what the driver says."""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import dataclass

import torch

from moerl.layout import ParallelLayout
from moerl.models.arch import Arch
from moerl.reshard.memory import Shared, flat, share
from moerl.reshard.move import Mover, rounds_of
from moerl.reshard.plan import Plan
from moerl.reshard.transport import Messages
from moerl.rl import ALGORITHMS
from moerl.rl.losses import sft_loss
from moerl.sample import Sample


@dataclass(frozen=True)
class ModelSpec:
    """How to build a role's model: `optimizer` and `schedule` (keyword arguments) only where it trains."""

    arch: Arch
    path: str
    dtype: str
    value_head: bool = False
    optimizer: dict | None = None
    schedule: dict | None = None
    router: dict | None = None


class MegatronWorker:
    def __init__(self, rank: int, layout: ParallelLayout, device: str):
        self.rank, self.layout, self.device = rank, layout, device
        self.models: dict = {}
        self.saves: dict = {}
        self.shared: dict[str, torch.Tensor] = {}
        if device == "cpu":
            torch.set_num_threads(1)

    def describe(self) -> dict:
        """Where this rank runs, and a free port on it for the rendezvous."""
        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        import ray

        return {"master": f"{ray.util.get_node_ip_address()}:{port}", "pid": os.getpid()}

    def start(self, master: str, seed: int, timeout_s: float) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(0)
        from moerl.megatron import parallel

        parallel.start(self.layout, self.rank, master, self.device, seed=seed, timeout_s=timeout_s)

    def build(self, role: str, spec: ModelSpec) -> None:
        from moerl.megatron import model
        from moerl.megatron.optimizer import Schedule

        self.models[role] = model.make(
            spec.arch, self.layout, self.rank, getattr(torch, spec.dtype), value_head=spec.value_head,
            optimizer=spec.optimizer, schedule=Schedule(**spec.schedule) if spec.schedule else None, router=spec.router,
        )
        self.models[role].load_weights(spec.path)
        # Saving collects garbage over and over; what lives as long as the process need not be looked at each time.
        gc.collect()
        gc.freeze()

    def logprobs(self, micro_batches: list[list[Sample]], role: str, temperature: float) -> list[dict]:
        return self.models[role].logprobs(micro_batches, temperature)

    def values(self, micro_batches: list[list[Sample]], role: str) -> list[dict]:
        return self.models[role].values(micro_batches)

    def update_actor(self, micro_batches: list[list[Sample]], settings, temperature: float) -> dict:
        from moerl.megatron.model import policy_head

        def loss(logp, entropy, f):
            return ALGORITHMS[settings.name].actor_loss(
                logp, entropy, f["old_logp"], f.get("ref_logp"), f["advantages"], f["weights"], settings
            )

        actor = self.models["actor"]
        return actor.update(micro_batches, policy_head(actor.arch.vocab, temperature, loss))

    def update_critic(self, micro_batches: list[list[Sample]], settings) -> dict:
        from moerl.megatron.model import critic_head

        def loss(values, f):
            return ALGORITHMS[settings.name].critic_loss(values, f["values"], f["returns"], f["weights"], settings)

        return self.models["critic"].update(micro_batches, critic_head(loss))

    def update_sft(self, micro_batches: list[list[Sample]]) -> dict:
        from moerl.megatron.model import policy_head

        actor = self.models["actor"]
        head = policy_head(actor.arch.vocab, 1.0, lambda logp, entropy, f: sft_loss(logp, f["weights"]))
        return actor.update(micro_batches, head)

    def shards(self, role: str) -> list[tuple[str, torch.Tensor, int, int]]:
        """The parts of the role's weights that this rank answers for: (name, tensor, parts, index)."""
        return [(s.name, s.tensor.cpu(), s.parts, s.index) for s in self.models[role].owned_shards()]

    def share_weights(self, role: str) -> Shared:
        """Open the memory of the role's weights to the rollout workers of this node."""
        self.shared = self.models[role].tensors()
        return share(self.shared)

    def connect_sync(self, plan: Plan, role: str, master: str | None, timeout_s: float, checksums: bool) -> None:
        """Get ready for the syncs of a plan, of which `plan` has this rank's rows. Waits for all ranks and workers that have messages."""
        device = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        messages = None
        if master:
            messages = Messages(master, self.rank, plan.place, device, timeout_s)
        rounds = rounds_of(plan, rank=self.rank)
        self.mover = Mover(rounds, messages, device, checksums=checksums)

    def send(self, role: str) -> None:
        """This rank's part in one sync. RuntimeError where weights have left the memory that workers read."""
        tensors = self.models[role].tensors()
        moved = [name for name, t in self.shared.items() if t.data_ptr() != tensors[name].data_ptr()]
        if moved:
            raise RuntimeError(f"the memory of {moved[0]} is not the one that rollout workers read")
        if self.device == "cuda":
            torch.cuda.synchronize()  # workers read what the last update wrote
        self.mover.memory = {name: flat(t) for name, t in tensors.items()}
        self.mover.run()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def start_save(self, role: str, path: str) -> None:
        """Copy the role's state; a thread writes it while other methods run. What an earlier save still writes is waited for."""
        from moerl.megatron import checkpoint

        if earlier := self.saves.pop(role, None):
            earlier.thread.join()
        self.saves[role] = checkpoint.start_save(self.models[role], path)

    def written(self, role: str, wait: bool) -> float | None:
        return self.saves[role].written(wait)

    def finish_save(self, role: str) -> None:
        self.saves[role].finish()

    def load(self, role: str, path: str) -> None:
        from moerl.megatron import checkpoint

        checkpoint.load(self.models[role], path)
