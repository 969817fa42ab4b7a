"""Messages between all processes of a sync: one process group over training ranks and workers, gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

Message = tuple[int, torch.Tensor]  # the other process, what goes there or comes from there


class Messages:
    """Sends and receives of one round at a time, all in flight together.

    Not torch's default group, which in a worker is vLLM's and in a rank Megatron's. `master` is host:port of process 0, which keeps the store.
    """

    def __init__(self, master: str, process: int, processes: int, device: torch.device, timeout_s: float):
        host, _, port = master.rpartition(":")
        timeout = timedelta(seconds=timeout_s)
        self.device = device
        self.store = dist.TCPStore(host, int(port), processes, process == 0, timeout, wait_for_workers=False)
        if device.type == "cpu":
            self.group = dist.ProcessGroupGloo(self.store, process, processes, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(self.store, process, processes, options)
            # All processes make the communicator together here; later only those that have a message take part.
            self.group.allreduce([torch.zeros(1, device=device)]).wait()

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list:
        """Start the messages of a round; what to wait for. Two processes have at most one message each way in a round."""
        if self.device.type == "cpu":
            return [self.group.recv([t], peer, tag) for peer, t in recvs] + [self.group.send([t], peer, tag) for peer, t in sends]
        self.group._start_coalescing(self.device)
        for peer, t in sends:
            self.group.send([t], peer, tag)
        for peer, t in recvs:
            self.group.recv([t], peer, tag)
        return [self.group._end_coalescing(self.device)]
