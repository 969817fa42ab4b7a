"""float8 blocks of 128 x 128 to bfloat16 on one thread: ours beside Megatron-Bridge's function, bit for bit, in one process.

    python benchmarks/convert_fp8.py OUT.json [--megatron-bridge PYTHON]

PYTHON is the interpreter of an environment that has it; only the one file with its function is loaded. Both sides get the setting of malloc
that the workers of a conversion have (freed memory is kept): fresh pages cost more than the arithmetic.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from checkpoint_tools.stream import KEEP_FREED_MEMORY  # noqa: E402
from moerl.models import fp8  # noqa: E402

SHAPES = ((2048, 7168), (7168, 2048), (24576, 1536))  # an expert's two, and the attention's largest
FUNCTION = "megatron/bridge/models/conversion/quantization_utils.py"


def measure(python: str | None, runs: int = 5) -> dict:
    """Seconds for 10^9 float8 numbers by shape, ours and (of interpreter `python`'s environment) Megatron-Bridge's."""
    torch.set_num_threads(1)
    for option, value in KEEP_FREED_MEMORY.items():
        ctypes.CDLL(None).mallopt(option, value)
    peer = _function(python) if python else None
    out = {"equal": {}, "seconds_per_GB": {}}
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        scale = torch.rand([n // 128 for n in shape], generator=generator) * 1e-3 + 1e-4
        weight = (torch.randn(shape, generator=generator) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        sides = {"moerl": lambda: fp8.dequantize(weight, scale, dtype=torch.bfloat16)}
        if peer:
            sides["megatron-bridge"] = lambda: peer.dequantize_fp8_blockwise(weight, scale)
            codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).view(torch.float8_e4m3fn)
            out["equal"][str(shape)] = {"weights": _same(weight, scale, peer), "all 256 codes": _same(codes, scale, peer)}
        seconds: dict[str, list] = {side: [] for side in sides}
        for run in range(runs + 1):
            for side, call in sides.items():
                began = time.perf_counter()
                call()
                if run:
                    seconds[side].append((time.perf_counter() - began) / weight.numel() * 1e9)
        for side, found in seconds.items():
            row = {"min": round(min(found), 3), "median": round(statistics.median(found), 3)}
            out["seconds_per_GB"].setdefault(side, {})[str(shape)] = row
            print(f"float8 {shape}: {side}: {row['min']} / {row['median']} s/GB", flush=True)
    return out


def _same(weight: torch.Tensor, scale: torch.Tensor, peer: ModuleType) -> bool:
    """Whether both give the same bits; of a NaN only that it is one."""
    ours, theirs = fp8.dequantize(weight, scale, dtype=torch.bfloat16), peer.dequantize_fp8_blockwise(weight, scale)
    nan = ours.isnan()
    return torch.equal(nan, theirs.isnan()) and torch.equal(ours.view(torch.int16)[~nan], theirs.view(torch.int16)[~nan])


def _function(python: str) -> ModuleType:
    """The one file that has the function, which needs nothing but torch."""
    code = "import sys; print(*sys.path, sep='\\n')"
    path = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    file = next(Path(p) / FUNCTION for p in path if p and (Path(p) / FUNCTION).is_file())
    spec = importlib.util.spec_from_file_location("quantization_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    from convert import conditions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megatron-bridge", metavar="PYTHON")
    given = parser.parse_args()
    given.out.write_text(json.dumps(conditions() | measure(given.megatron_bridge), indent=1))
