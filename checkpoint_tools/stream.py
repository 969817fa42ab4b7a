"""Write many large files at once from what worker processes make, in bounded memory; go on where a killed run stopped.

A file is laid out before it is written: its size and, for each of its jobs, what to make and where in the file it goes. Finished files have
their names, unfinished ones a name of their writer's own, so that a second run only makes what is not there, and makes the same bytes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

WRITING = ".writing"
PR_SET_PDEATHSIG = 1
AHEAD = 1  # results that may wait for the disk in each worker
WRITE_BACK = 2**25  # bytes after which the kernel is told to begin with the disk, so that little is left to wait for at the end
SYNC_FILE_RANGE_WRITE = 2
KEEP_FREED_MEMORY = {-1: 2**31 - 1, -3: 2**30}  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: fresh pages cost more than the copies


class StreamError(RuntimeError):
    """A worker could not go on; the message is one line."""


@dataclass(frozen=True)
class OutFile:
    """A file of `size` bytes; `jobs` are what `produce` is called with, `counts` the bytes that each of them writes."""

    name: str
    size: int
    jobs: tuple[Any, ...]
    counts: tuple[int, ...]


Pieces = Iterable[tuple[int, list]]  # places in the file, and the buffers to write there one after the other
Produce = Callable[[Any], Pieces]
Watch = Callable[[list[int], int, int], None]  # bytes done by each worker, bytes found done, bytes in all


def run(directory: Path, files: list[OutFile], produce: Produce, workers: int, watch: Watch, share: tuple[int, int] = (0, 1)) -> None:
    """Write those of `files` that are not in `directory` and belong to host `share[0]` of `share[1]`.

    Raises StreamError with the first failure of a worker; the others are ended, and finished files stay.
    """
    mine = files[share[0] :: share[1]]
    left = [f for f in mine if not (directory / f.name).is_file()]
    total, found = sum(f.size for f in mine), sum(f.size for f in mine) - sum(f.size for f in left)
    context = multiprocessing.get_context("fork")  # the plan is shared, not copied
    done, claimed = context.Array("q", workers, lock=False), context.Value("i", 0)
    pipes, processes = {}, []
    for number in range(min(workers, len(left))):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(number, os.getpid(), directory, left, produce, done, claimed, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = number
        processes.append(process)
    try:
        while pipes:
            watch(list(done), found, total)
            for pipe in wait(list(pipes), timeout=0.5):
                number = pipes.pop(pipe)
                _answer(pipe, number, processes[number])
        watch(list(done), found, total)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe, number: int, process) -> None:
    try:
        error = pipe.recv()
    except EOFError:
        process.join()
        how = f"exit code {process.exitcode}; -9 is what a full memory looks like"
        raise StreamError(f"worker {number} ended without a word ({how})") from None
    if error:
        raise StreamError(error)


def _work(number: int, parent: int, directory: Path, files: list[OutFile], produce: Produce, done, claimed, pipe) -> None:
    gc.freeze()  # else every collection looks through the plan, and so copies its pages
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a worker that outlives a killed run would hold up the next one
    if os.getppid() != parent:
        return
    for option, value in KEEP_FREED_MEMORY.items():
        getattr(libc, "mallopt", lambda *_: 0)(option, value)
    import torch

    from moerl.models.files import File

    torch.set_num_threads(1)
    File.once = True
    writer = _Writer(directory, number, done)
    try:
        while True:
            with claimed.get_lock():
                index, claimed.value = claimed.value, claimed.value + 1
            if index >= len(files):
                break
            file = files[index]
            writer.put(("open", file))
            for job, count in zip(file.jobs, file.counts):
                for place, buffers in produce(job):
                    writer.put(("write", place, buffers))
                writer.put(("count", count))
            writer.put(("close", file))
        writer.finish()
        pipe.send(None)
    except BaseException as error:  # whatever it is, the parent says it
        pipe.send(str(error) if isinstance(error, (OSError, ValueError, StreamError)) else f"{type(error).__name__}: {error}")


class _Writer:
    """A thread that writes what it is given, in order, so that reading and converting go on meanwhile."""

    def __init__(self, directory: Path, number: int, done):
        self.directory, self.number, self.done = directory, number, done
        self.waiting: queue.Queue = queue.Queue(maxsize=AHEAD)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def put(self, order: tuple) -> None:
        while self.error is None:
            try:
                return self.waiting.put(order, timeout=0.2)
            except queue.Full:
                continue
        raise self.error

    def finish(self) -> None:
        self.put(("end",))
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _write(self) -> None:
        descriptor, path, fresh = -1, self.directory, 0
        begin = getattr(ctypes.CDLL(None), "sync_file_range", lambda *_: 0)  # Linux has it; a file system may not, which is no harm
        try:
            while True:
                order, *rest = self.waiting.get()
                if order == "open":
                    path = self.directory / f"{rest[0].name}{WRITING}-{socket.gethostname()}-{os.getpid()}"
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                elif order == "write":
                    fresh += _write_all(descriptor, *rest)
                    if fresh >= WRITE_BACK:
                        begin(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)
                        fresh = 0
                elif order == "count":
                    self.done[self.number] += rest[0]
                elif order == "close":
                    os.ftruncate(descriptor, rest[0].size)
                    os.fsync(descriptor)
                    os.close(descriptor)
                    os.replace(path, self.directory / rest[0].name)
                else:
                    return
                del rest
        except OSError as error:
            self.error = StreamError(f"{path}: cannot be written ({error.strerror})")
        except BaseException as error:
            self.error = error


def _write_all(descriptor: int, place: int, buffers: list) -> int:
    """Write the buffers one after the other from `place` on; the number of bytes."""
    first = place
    for buffer in buffers:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], place + done)
        place += len(view)
    return place - first


class Progress:
    """One line that is drawn again: bytes done, rate, time left, and every worker's bytes."""

    def __init__(self, stream, every: float = 1.0):
        self.stream, self.every, self.began, self.last = stream, every, time.monotonic(), 0.0
        self.terminal, self.finished = stream.isatty(), False

    def __call__(self, done: list[int], found: int, total: int) -> None:
        now, made = time.monotonic(), sum(done)
        if self.finished:
            return
        self.finished = finished = made + found >= total
        if not finished and now - self.last < (self.every if self.terminal else 30):
            return
        self.last = now
        rate = made / max(now - self.began, 1e-3)
        left = (total - found - made) / rate if rate else float("inf")
        clock = f"{int(left) // 3600}:{int(left) % 3600 // 60:02}:{int(left) % 60:02}" if left < 1e6 else "?"
        each = " ".join(f"{n / 1e9:.1f}" for n in done)
        text = f"{(made + found) / 1e9:8.2f} of {total / 1e9:.2f} GB  {rate / 1e9:5.2f} GB/s  {clock} left  workers: {each}"
        end = "\n" if finished or not self.terminal else ""
        self.stream.write(f"\r{text}{end}" if self.terminal else text + "\n")
        self.stream.flush()
