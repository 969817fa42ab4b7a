"""An output directory that appears whole or not at all, and can be gone on with after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from checkpoint_tools.stream import WRITING, OutFile, Produce, Progress, StreamError, run
from moerl.models.arch import ModelError

PLAN = ".conversion.json"  # what is converted into what; stays in the output, by which a host that comes late knows that all is done
LOCK = ".conversion.lock"
NEED = 2**29  # bytes of buffers that a worker may come to hold
PATIENCE_S = 60


def write(out: Path, files: list[OutFile], produce: Produce, finish: Callable[[Path], None], *, what: dict, memory: int, workers: int,
          share: tuple[int, int]) -> Path:
    """Write `files` into `out` with as many of `workers` as the memory (bytes) allows; `finish` adds the small ones, the last to come.

    Everything happens in `out`.partial, which becomes `out` at the end. `what` tells this conversion from any other: one that is complete
    is left as it is, one that was broken off is gone on with. With share (i, n), n hosts that see the same directory each write a part, and
    host 0 finishes. Raises ModelError where the output cannot be written there, StreamError when a worker cannot go on.
    """
    out = _place(out)
    if memory < NEED:
        raise ModelError(f"--max-memory {memory / 2**20:.0f} MiB: a worker needs {NEED // 2**20} MiB")
    what |= {"files": _digest(files)}
    if _done(out, what):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: exists and is not an empty directory; nothing was changed")
    part = out.with_name(out.name + ".partial")
    try:
        _claim(part, what)
        with open(part / f"{LOCK}.{share[0]}", "w") as lock:
            _hold(lock, part)
            if _done(out, what):  # the last of it came while this host started
                shutil.rmtree(part)
                return out
            _room(part, files)
            run(part, files, produce, max(1, min(workers, memory // NEED)), Progress(sys.stderr), share)
        if share[0] == 0:
            _wait(part, files)
            _finish(part, files, finish)
            os.replace(part, out)
    except OSError as error:
        raise StreamError(f"{error.filename or part}: cannot be written ({error.strerror})") from None
    return out


def _place(out: Path) -> Path:
    """The directory meant, links followed; it must be one that another can be renamed to."""
    out = out.resolve()
    if out == Path.cwd() or os.path.ismount(out):
        raise ModelError(f"{out}: is {'mounted' if os.path.ismount(out) else 'the current directory'}; give a directory inside it")
    return out


def _done(out: Path, what: dict) -> bool:
    return (out / PLAN).is_file() and json.loads((out / PLAN).read_text()) == what


def _claim(part: Path, what: dict) -> None:
    """Make the directory this conversion's, or find that it is. Any number of hosts may do so at once."""
    part.mkdir(parents=True, exist_ok=True)
    strangers = [f.name for f in part.iterdir() if not f.name.startswith(".conversion.")]
    if strangers and not (part / PLAN).is_file():
        raise ModelError(f"{part}: is in the way and not left from a conversion ({strangers[0]}); remove it, or give another output")
    mine = part / f"{PLAN}.{socket.gethostname()}.{os.getpid()}"
    mine.write_text(json.dumps(what))
    try:
        os.link(mine, part / PLAN)
    except FileExistsError:
        if json.loads((part / PLAN).read_text()) != what:
            raise ModelError(f"{part}: is left from another conversion; remove it, or give another output") from None
    finally:
        mine.unlink()


def _hold(lock, part: Path) -> None:
    """Be the only one to write this share. The workers of a run that was killed hold its lock until the disk has what they wrote.

    Two at once would write the same bytes under names of their own: on a file system without locks work is done twice, and nothing breaks.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ModelError(f"{part}: another conversion is writing there") from None
            time.sleep(0.05)
        except OSError:
            return None


def _digest(files: list[OutFile]) -> str:
    return hashlib.sha256(json.dumps([(f.name, f.size, f.counts) for f in files]).encode()).hexdigest()


def _room(part: Path, files: list[OutFile]) -> None:
    need = sum(f.size for f in files)
    for file in part.iterdir():
        try:
            need -= file.stat().st_size
        except FileNotFoundError:
            continue  # another host has just given it its name
    if need > (free := shutil.disk_usage(part).free):
        raise ModelError(f"{part}: {need / 1e9:.2f} GB more are to be written, {free / 1e9:.2f} GB are free")


def _wait(part: Path, files: list[OutFile]) -> None:
    """Until the other hosts' files are there."""
    said = -1
    while missing := [f.name for f in files if not (part / f.name).is_file()]:
        if len(missing) != said:
            print(f"waiting for {len(missing)} files of other hosts, the first {missing[0]}", file=sys.stderr)
        said = len(missing)
        time.sleep(2)
    for file in files:
        if (size := (part / file.name).stat().st_size) != file.size:
            raise StreamError(f"{part / file.name}: {size} bytes, {file.size} were to be written")


def _finish(part: Path, files: list[OutFile], finish: Callable[[Path], None]) -> None:
    """Everything but the files of this conversion goes (what a killed run left half-written), and the small files come."""
    names = {f.name for f in files}
    for left in list(part.iterdir()):
        if left.name not in names and (WRITING in left.name or left.name.startswith(LOCK)):
            left.unlink()
    try:
        finish(part)
    except (SafetensorError, RuntimeError) as error:
        raise StreamError(f"{part}: cannot be finished ({error})") from None
