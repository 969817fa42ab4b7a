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
from pathlib import Path

from moerl.controller.group import Role
from moerl.models.source import Source, write_beside

STEP = re.compile(r"^step_(\d+)$")
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def save(root: Path, step: int, roles: dict[str, Role], driver: dict, keep: int, start: Source) -> Path:
    """Write the checkpoint of `step` of a run from `start`; all but the newest `keep` complete ones are deleted."""
    path = root / f"step_{step:06d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    write_beside(start, path / "hf")
    for name, role in roles.items():
        role.save(str((path / name).resolve()))
    (path / "driver.json").write_text(json.dumps({"step": step, **driver}))
    files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
    part = path / (MANIFEST + ".partial")
    part.write_text(json.dumps({"step": step, "roles": list(roles), "files": files}, indent=1))
    os.replace(part, path / MANIFEST)
    kept = _complete(root)[-keep:]
    for old in root.glob("step_*"):
        if STEP.match(old.name) and old not in kept:
            # The manifest goes first: a half-deleted checkpoint cannot be taken for whole. One that was never finished has none.
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old)
    return path


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
    return sorted(found, key=lambda p: int(STEP.match(p.name)[1]))
