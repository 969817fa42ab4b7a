"""An output directory that appears whole or not at all, and can be gone on with after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint_tools.stream import WRITING, OutFile, Produce, Progress, StreamError, run
from moerl.models.arch import ModelError

PLAN, LOCK = "conversion.json", "conversion.lock"
NEED = 2**29  # bytes of buffers that a worker may come to hold
PATIENCE_S = 60


def write(out: Path, files: list[OutFile], produce: Produce, finish: Callable[[Path], None], *, what: dict, memory: int, workers: int,
          share: tuple[int, int]) -> Path:
    """Write `files` into `out` with as many of `workers` as the memory (bytes) allows; `finish` adds the small ones, the last to come.

    Everything happens in `out`.partial, which becomes `out` at the end. `what` tells this conversion from any other.
    With share (i, n), n hosts that see the same directory each write a part, and host 0 finishes.
    Raises ModelError before anything is written, StreamError when a worker cannot go on.
    """
    if memory < NEED:
        raise ModelError(f"--max-memory {memory / 2**20:.0f} MiB: a worker needs {NEED // 2**20} MiB")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: exists and is not an empty directory; nothing was changed")
    part = out.with_name(out.name + ".partial")
    _claim(part, what | {"files": _digest(files)})
    with open(part / f"{LOCK}.{share[0]}", "w") as lock:
        _hold(lock, part)
        _room(part, files)
        run(part, files, produce, max(1, min(workers, memory // NEED)), Progress(sys.stderr), share)
    if share[0] == 0:
        _wait(part, files)
        finish(part)
        for own in (part / PLAN, *part.glob(LOCK + ".*")):
            own.unlink()
        if out.is_dir():
            out.rmdir()
        os.replace(part, out)
    return out


def _claim(part: Path, what: dict) -> None:
    try:
        part.mkdir(parents=True, exist_ok=True)
        if (part / PLAN).is_file():
            if json.loads((part / PLAN).read_text()) != what:
                raise ModelError(f"{part}: is left from another conversion; remove it, or give another output")
            return
        if any(not f.name.startswith(LOCK) for f in part.iterdir()):
            raise ModelError(f"{part}: is in the way and not left from a conversion; remove it, or give another output")
        fresh = part / f"{PLAN}.{os.getpid()}"
        fresh.write_text(json.dumps(what))
        os.replace(fresh, part / PLAN)
    except OSError as error:
        raise ModelError(f"{part}: cannot be written ({error.strerror})") from None


def _hold(lock, part: Path) -> None:
    """Be the only conversion there. The workers of one that was killed hold its lock until the disk has what they wrote."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                raise ModelError(f"{part}: another conversion is writing there") from None
            time.sleep(0.05)


def _digest(files: list[OutFile]) -> str:
    return hashlib.sha256(json.dumps([(f.name, f.size, f.counts) for f in files]).encode()).hexdigest()


def _room(part: Path, files: list[OutFile]) -> None:
    there = {f.name: f.stat().st_size for f in part.iterdir()}
    need = sum(f.size - max(there.get(f.name, 0), there.get(f.name + WRITING, 0)) for f in files)
    if need > (free := shutil.disk_usage(part).free):
        raise ModelError(f"{part}: {need / 1e9:.2f} GB more are to be written, {free / 1e9:.2f} GB are free")


def _wait(part: Path, files: list[OutFile]) -> None:
    """Until the other hosts' files are there."""
    while missing := [f.name for f in files if not (part / f.name).is_file()]:
        print(f"waiting for {len(missing)} files of other hosts, the first {missing[0]}", file=sys.stderr)
        time.sleep(2)
    for file in files:
        if (size := (part / file.name).stat().st_size) != file.size:
            raise StreamError(f"{part / file.name}: {size} bytes, {file.size} were to be written")
