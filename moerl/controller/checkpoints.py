"""Checkpoints of a run: one directory a step, complete when its manifest is there, the last few kept.

    <output>/checkpoints/step_000010/{actor,critic}/   Megatron distributed checkpoints (weights, optimizer, update count, random states)
                                     hf/               the start model's configuration and tokenizer: with them a role can be exported
                                     driver.json       step, data position, what the reference is
                                     manifest.json     every file with its size; written last
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moerl.controller.group import Role
from moerl.models.source import Source, write_beside
from moerl.rollout.remote import RemoteError

STEP = re.compile(r"^step_(\d+)$")
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass
class Pending:
    """A checkpoint whose state is copied, without a manifest yet."""

    step: int
    path: Path


class Saver:
    """Writes the checkpoints of `roles`, at most one at a time; all but the newest `keep` complete ones are deleted.

    With `background`, `save` returns when the ranks have copied their state, and the files are written while the run goes on. The manifest
    follows when all of them are there and someone asks (`poll`, `finish`, the next `save`). As a context manager it leaves nothing half
    done: what is under way at the end is finished, on the way out of an error too, or has no manifest and so does not exist.
    """

    def __init__(self, root: Path, roles: dict[str, Role], start: Source, *, keep: int, background: bool):
        self.root, self.roles, self.start, self.keep, self.background = root, roles, start, keep, background
        self.pending: Pending | None = None
        self.broken = ""  # what one rank said while the others waited for it: nothing more can be asked of them together
        self._times: dict[str, float] = {}

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.finish() if kind is None else self.settle()

    def save(self, step: int, driver: dict) -> None:
        """Begin the checkpoint of `step`. Without `background` its files are written on return, and `finish` adds the manifest.

        Raises RemoteError where the last one failed; then after this one, whose state is newer, had its try.
        """
        try:
            self.finish()
        except RemoteError:
            self._begin(step, driver)
            self.settle()
            raise
        self._begin(step, driver)
        if not self.background:
            with self._blocked():
                self._written(wait=True)

    def poll(self) -> None:
        """Complete the pending checkpoint if its files are written. RemoteError, with step and rank, if they could not be."""
        with self._blocked():
            if self.pending and (seconds := self._written(wait=False)) is not None:
                self._commit(seconds)

    def finish(self) -> None:
        """Wait for the pending checkpoint and complete it."""
        with self._blocked():
            if self.pending:
                self._commit(self._written(wait=True))

    def settle(self) -> None:
        """`finish` on the way out of an error, which stays the one to report."""
        try:
            self.finish()
        except RemoteError as error:
            print(_first_line(error))

    def times(self) -> dict[str, float]:
        """Seconds since the last call: those that the run stood still for checkpoints, and those of a writing that ended meanwhile."""
        found, self._times = self._times, {}
        return found

    def _begin(self, step: int, driver: dict) -> None:
        if self.broken:
            raise RemoteError(self.broken)
        path = self.root / f"step_{step:06d}"
        with self._blocked():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            write_beside(self.start, path / "hf")
            (path / "driver.json").write_text(json.dumps({"step": step, **driver}))
            with self._failures(Pending(step, path), together=True):
                for name, role in self.roles.items():
                    role.start_save(str((path / name).resolve()))
            self.pending = Pending(step, path)

    def _written(self, wait: bool) -> float | None:
        with self._failures(self.pending):
            seconds = [role.written(wait) for role in self.roles.values()]
        return None if None in seconds else max(seconds)

    def _commit(self, seconds: float) -> None:
        with self._failures(self.pending, together=True):
            for role in self.roles.values():
                role.finish_save()
        path, step = self.pending.path, self.pending.step
        files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
        part = path / (MANIFEST + ".partial")
        part.write_text(json.dumps({"step": step, "roles": list(self.roles), "files": files}, indent=1))
        os.replace(part, path / MANIFEST)
        self.pending = None
        if self.background:
            self._times["time/save_background_s"] = seconds
        _prune(self.root, self.keep)

    @contextmanager
    def _failures(self, failed: Pending, together: bool = False) -> Iterator[None]:
        """A failure takes the checkpoint away and names its step. `together`: in a call whose ranks wait for one another."""
        try:
            yield
        except RemoteError as error:
            self.pending = None
            shutil.rmtree(failed.path, ignore_errors=True)
            message = f"the checkpoint of step {failed.step} could not be written: {error}"
            self.broken = message if together else ""
            raise RemoteError(message) from error

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        began, busy = time.perf_counter(), self.pending is not None
        try:
            yield
        finally:
            if busy or self.pending is not None:
                self._times["time/save_blocked_s"] = self._times.get("time/save_blocked_s", 0.0) + time.perf_counter() - began


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _prune(root: Path, keep: int) -> None:
    kept = _complete(root)[-keep:]
    for old in root.glob("step_*"):
        if STEP.match(old.name) and old not in kept:
            # The manifest goes first: a half-deleted checkpoint cannot be taken for whole. One that was never finished has none.
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old)


def step_of(path: Path | None) -> int:
    """The step of a checkpoint's directory, 0 for none."""
    return int(STEP.match(path.name)[1]) if path else 0


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(root)
    return found[-1] if found else None


def read(path: Path, roles: list[str]) -> dict:
    """What the driver saved in a complete checkpoint, after checking that all its files and all `roles` are in it."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name, size in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise CheckpointError(f"{path / name}: {'missing' if found is None else f'{found} bytes'}, the manifest says {size} bytes")
    missing = [name for name in roles if name not in manifest["roles"]]
    if missing:
        raise CheckpointError(f"{path}: holds {', '.join(manifest['roles'])}, not {', '.join(missing)}")
    return json.loads((path / "driver.json").read_text())


def load(path: Path, roles: dict[str, Role]) -> None:
    """Restore the roles from a checkpoint that `read` accepted."""
    for name, role in roles.items():
        role.load(str((path / name).resolve()))


def _complete(root: Path) -> list[Path]:
    found = [p for p in root.glob("step_*") if STEP.match(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=step_of)
