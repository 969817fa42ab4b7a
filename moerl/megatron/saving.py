"""A save that goes on beside training: the state is copied before it starts, one thread of the rank writes the copy.

Megatron-core has the stages (`dist_checkpointing.save(async_sharded_save=True)`): a plan that the ranks agree on, files that each rank
writes alone, and metadata that the ranks put together at the end. It writes the files in forked processes, which a process with CUDA,
threads and open connections had better not have; here a thread calls the function that such a process runs. Only the first and the last
stage talk to other ranks, and both run where the rank is called, so they never meet the messages of a training step.
"""

from __future__ import annotations

import queue
import threading
import time

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


class Saving:
    """A checkpoint that is being written. The constructor returns when this rank's part of it is copied into host memory.

    The copy is what the rank writes (its weights, and 12 bytes a parameter where it writes optimizer state); a file's share of it is
    given back when the file is written.
    """

    def __init__(self, request: AsyncRequest):
        self.request, self.seconds, self.error, self.finished = request, 0.0, None, False
        # Nothing is to be written on a rank whose tensors are all copies of another's.
        _, self.buckets, self.results = request.async_fn_args or (0, [], None)
        _copy(self.buckets)
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def written(self, wait: bool) -> float | None:
        """Seconds that this rank's files took, None while they are not written. Raises what kept them from being written."""
        if wait:
            self.thread.join()
        if self.thread.is_alive():
            return None
        if self.error is not None:
            raise self.error
        return self.seconds

    def finish(self) -> None:
        """Complete the checkpoint: all ranks call it. Raises on all of them where the files of one could not be written."""
        self.thread.join()
        if not self.finished:
            for last in self.request.finalize_fns:
                last()
            self.finished = True

    def _run(self) -> None:
        began = time.perf_counter()
        answers: dict | Exception = {}
        try:
            for i, bucket in enumerate(self.buckets):
                answers[i] = _write(i, bucket, self.request.async_fn.args[0])
        except Exception as error:
            answers = self.error = error
        if self.results is not None:
            self.results.put(answers)
        self.seconds = time.perf_counter() - began


def _copy(buckets: list) -> None:
    """Put into every bucket copies of its tensors, one after another, so that none is held twice. On a GPU the copies are pinned."""
    for _, _, (_, tensors) in buckets:
        for i, (item, tensor) in enumerate(tensors):
            tensors[i] = item, tensor.to("cpu", non_blocking=True, copy=True)
    torch.cuda.synchronize()


def _write(number: int, bucket: tuple, transforms: list) -> list:
    """Write one file; what Megatron-core says of it for the metadata."""
    file, _, (_, tensors) = bucket
    answer, running = queue.SimpleQueue(), queue.Queue()
    running.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answer, running, use_fsync=True)
    tensors.clear()
    _, found = answer.get()
    if isinstance(found, Exception):
        raise OSError(f"{file}: not written ({found})") from found
    return found
