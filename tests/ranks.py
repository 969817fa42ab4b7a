"""A pool of processes that play the ranks of a Megatron world, over gloo or one GPU each; they import once and serve every layout."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback

TIMEOUT_S = 180
THREADS = 400  # of a process, above which the pool is started anew


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _die_with_parent() -> None:
    """A pool must not outlive a killed test run."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(rank: int, pipe, device: str) -> None:
    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    _die_with_parent()
    from moerl.megatron import parallel

    while (job := pipe.recv()) is not None:
        layout, master, function, args = job
        try:
            parallel.start(layout, rank, master, device, seed=1, timeout_s=TIMEOUT_S)
            answer = (True, function(rank, layout, *args))
            parallel.stop()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Ranks:
    def __init__(self, device: str = "cpu"):
        self.device = device
        self.context = multiprocessing.get_context("spawn")
        self.workers: list = []

    def _grow(self, size: int) -> None:
        while len(self.workers) < size:
            ours, theirs = self.context.Pipe()
            # Not a daemon: saving a checkpoint starts processes of its own.
            process = self.context.Process(target=_serve, args=(len(self.workers), theirs, self.device))
            process.start()
            self.workers.append((process, ours))

    def _renew(self) -> None:
        """Start afresh where a world too many left its threads: what trained a model keeps its process groups alive (its gradient hooks and
        parameters refer to each other through C++), and a group's threads of gloo's wake up a hundred times a second."""
        if any(len(os.listdir(f"/proc/{process.pid}/task")) > THREADS for process, _ in self.workers):
            self.close()

    def run(self, layout, function, *args) -> list:
        """`function(rank, layout, *args)` on every rank of `layout`; the answers by rank. One failing rank fails the call."""
        self._renew()
        self._grow(layout.world)
        master = f"127.0.0.1:{free_port()}"
        world = self.workers[: layout.world]
        for _, pipe in world:
            pipe.send((layout, master, function, args))
        answers: dict[int, object] = {}
        by_pipe = {pipe: rank for rank, (_, pipe) in enumerate(world)}
        while len(answers) < layout.world:
            ready = multiprocessing.connection.wait([p for p, r in by_pipe.items() if r not in answers], timeout=TIMEOUT_S)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(set(range(layout.world)) - set(answers))} did not answer")
            for pipe in ready:
                rank = by_pipe[pipe]
                good, answer = pipe.recv()
                if not good:
                    self.close()
                    raise AssertionError(f"rank {rank} of {layout.describe()}:\n{answer}")
                answers[rank] = answer
        return [answers[r] for r in range(layout.world)]

    def close(self) -> None:
        for process, pipe in self.workers:
            if process.is_alive():
                pipe.send(None)
        for process, _ in self.workers:
            # Saving starts helper processes, which end with a rank that ends by itself and outlive one that is killed.
            process.join(5)
            process.kill()
        self.workers = []
