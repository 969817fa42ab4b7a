"""Messages between all processes of a sync: process groups over training ranks and workers, gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moerl.reshard.plan import Place

Message = tuple[int, torch.Tensor]  # the other process, what goes there or comes from there


def meetings(place: Place) -> list[list[int]]:
    """Groups of processes (ranks first, then workers) so that any two on different GPUs meet in one, and no two of a group share a GPU.

    NCCL takes one process a GPU into a communicator. Two GPUs differ in some bit of their numbers: for each bit and value the ranks whose
    GPU has that value meet the workers whose GPU has the other one. Workers among themselves, who pass chunks on, are a group, too.
    """
    spots = [*place.ranks, *place.workers]
    if len(set(spots)) == len(spots):
        return [list(range(len(spots)))]
    numbers = {spot: i for i, spot in enumerate(sorted(set(spots)))}
    ranks, at = len(place.ranks), [numbers[spot] for spot in spots]
    groups = [list(range(ranks, len(spots)))]
    for bit in range(max(1, (len(numbers) - 1).bit_length())):
        for value in (0, 1):
            groups.append([i for i, n in enumerate(at) if (n >> bit & 1) == (value if i < ranks else 1 - value)])
    return [group for group in groups if len(group) > 1]


class Messages:
    """Sends and receives of one round at a time, all in flight together.

    Not torch's default group, which in a worker is vLLM's and in a rank Megatron's. `master` is host:port of process 0, which keeps the
    store. On GPUs two processes that share one cannot exchange messages: they map memory.
    """

    def __init__(self, master: str, process: int, place: Place, device: torch.device, timeout_s: float):
        host, _, port = master.rpartition(":")
        timeout, everyone = timedelta(seconds=timeout_s), len(place.ranks) + len(place.workers)
        self.device, self.process = device, process
        store = dist.TCPStore(host, int(port), everyone, process == 0, timeout, wait_for_workers=False)
        self.members = [list(range(everyone))] if device.type == "cpu" else meetings(place)
        self.groups = {}
        for number, members in enumerate(self.members):
            if process not in members:
                continue
            prefixed, me = dist.PrefixStore(str(number), store), members.index(process)
            if device.type == "cpu":
                self.groups[number] = dist.ProcessGroupGloo(prefixed, me, len(members), timeout)
                continue
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.groups[number] = dist.ProcessGroupNCCL(prefixed, me, len(members), options)
            # All members make the communicator together here; later only those that have a message take part.
            self.groups[number].allreduce([torch.zeros(1, device=device)]).wait()
        self.store = store

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list:
        """Start the messages of a round; what to wait for. Two processes have at most one message each way in a round."""
        works = []
        for number, group in self.groups.items():
            members = self.members[number]
            out = [(members.index(peer), t) for peer, t in sends if self._meet(peer) == number]
            into = [(members.index(peer), t) for peer, t in recvs if self._meet(peer) == number]
            if self.device.type == "cpu":
                works += [group.recv([t], peer, tag) for peer, t in into] + [group.send([t], peer, tag) for peer, t in out]
            elif out or into:
                group._start_coalescing(self.device)
                for peer, t in out:
                    group.send([t], peer, tag)
                for peer, t in into:
                    group.recv([t], peer, tag)
                works.append(group._end_coalescing(self.device))
        return works

    def _meet(self, peer: int) -> int:
        return next(number for number in self.groups if peer in self.members[number])
