"""Checkpoint conversion beside `cp` and beside other converters: same machine, same model, in turn within each round.

    python benchmarks/convert.py --work DIR --out benchmarks/results/convert.json \\
        --megatron-bridge PYTHON --mbridge PYTHON [--models NAME ...] [--rounds 3] [--memory 1GiB 8GiB]

PYTHON is the interpreter of an environment that has the converter (Megatron-Bridge also wants Transformer Engine to be importable, so its
libraries of CUDA on LD_LIBRARY_PATH); one that is not given is left out with a line. What stands in for a GPU in them: `convert_peers.py`.

Each step begins with its source out of the page cache and nothing waiting to be written, and ends when its output is on the disk
(fdatasync). Ours and `cp` read one checkpoint and write another. The other converters keep the whole model in memory, so their way from
Megatron's side to Hugging Face's begins with the model there, and reads nothing. Ours is timed within a fresh process, from the call of
`convert` to its return; `command_s` is the whole process, with Python's start and imports. Peaks are VmHWM of the processes (of a forked
worker it includes the parent's pages, shared). GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import convert_models  # noqa: E402

ONE = """
import sys, time
from pathlib import Path
from checkpoint_tools.cli import size
import checkpoint_tools.{module} as tool
began = time.perf_counter()
tool.convert(Path({source!r}), Path({out!r}), memory=size({memory!r}), workers={workers}, **{options})
print(time.perf_counter() - began)
"""


def weights(path: Path) -> list[Path]:
    return sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".distcp"))


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in weights(path))


def cold(path: Path) -> None:
    """Nothing is waiting to be written, and no page of the files is cached (what the host below a virtual machine caches stays)."""
    os.sync()
    for file in weights(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def copy(source: Path, out: Path) -> dict:
    """`cp` of a checkpoint's weights."""
    out.mkdir()
    cold(source)
    began, used = time.perf_counter(), _cpu()
    subprocess.run(["cp", *map(str, weights(source)), str(out)], check=True)
    for file in weights(out):
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    return {"seconds": seconds, "cpu_s": _cpu() - used}


def _cpu() -> float:
    """Processor seconds of all ended children, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Peaks(threading.Thread):
    """The largest VmHWM seen of a process, and of any of its children."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.own, self.worker, self.over = pid, 0, 0, False
        self.start()

    def run(self) -> None:
        while not self.over:
            self.own = max(self.own, _high(self.pid))
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                    self.worker = max(self.worker, _high(int(child)))
            time.sleep(0.01)


def _high(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) * 1024
    return 0


def ours(module: str, source: Path, out: Path, memory: str, workers: int, **options) -> dict:
    """`moerl convert` in a fresh process."""
    cold(source)
    code = ONE.format(module=module, source=str(source), out=str(out), memory=memory, workers=workers, options=options)
    began, used = time.perf_counter(), _cpu()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    peaks = Peaks(process.pid)
    answer = process.communicate()[0]
    command = time.perf_counter() - began
    peaks.over = True
    if process.returncode:
        raise SystemExit(f"{module} failed on {source}: exit code {process.returncode}")
    return {"seconds": float(answer.split()[-1]), "command_s": command, "cpu_s": _cpu() - used, "worker_peak_MB": peaks.worker / 1e6,
            "parent_peak_MB": peaks.own / 1e6}


class Peer:
    """Another converter in a process of its own, which holds the model."""

    def __init__(self, name: str, python: str, source: Path, log: Path):
        self.name = name
        command = [python, str(HERE / "convert_peers.py"), name, str(source)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(log, "w"), text=True,
                                        env=os.environ | {"PYTHONPATH": str(HERE.parent)})
        self.versions = self._answer()["versions"]

    def __call__(self, *order) -> dict:
        self.process.stdin.write(" ".join(map(str, order)) + "\n")
        self.process.stdin.flush()
        found = self._answer()
        return {"seconds": found["seconds"], "peak_MB": found["peak"] / 1e6}

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed, see its log")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def round(self, source: Path, work: Path) -> dict:
        megatron, hf, found = work / "peer_megatron", work / "peer_hf", {}
        cold(source)
        found["load"] = self("load")
        if self.name == "megatron-bridge":
            os.sync()
            found["save_megatron"] = self("save_megatron", megatron)
            shutil.rmtree(megatron)
        os.sync()
        found["save_hf"] = self("save_hf", hf)
        shutil.rmtree(hf)
        return found


def measure(model: str, source: Path, work: Path, rounds: int, memories: list[str], workers: int, peers: dict[str, str]) -> dict:
    """All rounds on one model; peers one after the other, each beside `cp` and ours."""
    megatron, hf = work / "megatron", work / "hf"
    steps: dict[str, list] = {}
    versions = {}

    def keep(step: str, found: dict) -> None:
        steps.setdefault(step, []).append(found)
        print(f"{model}: {step}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)

    sizes = {"hf": size_of(source)}
    for peer in peers or {None: ""}:
        running = Peer(peer, peers[peer], source, work / f"{peer}.log") if peer else None
        if running:
            versions[peer] = running.versions
            running.round(source, work)  # imports and first touches of memory are not counted
        for _ in range(rounds):
            keep("cp", copy(source, work / "copy"))
            for memory in memories:
                keep(f"ours hf->megatron {memory}", ours("hf_to_megatron", source, megatron, memory, workers))
                sizes["megatron"] = size_of(megatron)
                if "fp8" in model:
                    keep("cp of the output", copy(megatron, work / "copy"))
                keep(f"ours megatron->hf {memory}", ours("megatron_to_hf", megatron, hf, memory, workers))
                shutil.rmtree(hf)
                if "fp8" in model:
                    keep(f"ours megatron->hf fp8 {memory}", ours("megatron_to_hf", megatron, hf, memory, workers, fp8_block=True))
                    shutil.rmtree(hf)
                shutil.rmtree(megatron)
            if running:
                found = running.round(source, work)
                for step, result in found.items():
                    keep(f"{peer} {step}", result)
                if "save_megatron" in found:
                    keep(f"{peer} hf->megatron", {"seconds": found["load"]["seconds"] + found["save_megatron"]["seconds"]})
        if running:
            running.close()
    return {"bytes": sizes, "versions": versions, "steps": {step: summary(found) for step, found in steps.items()}}


def summary(found: list[dict]) -> dict:
    out = {"min_s": min(f["seconds"] for f in found), "median_s": statistics.median(f["seconds"] for f in found)}
    for name in found[0]:
        if name != "seconds":
            out[f"max_{name}" if "peak" in name else name] = (max if "peak" in name else statistics.median)(f[name] for f in found)
    return {k: round(v, 3) for k, v in out.items()} | {"seconds": [round(f["seconds"], 3) for f in found]}


def machine() -> dict:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    names = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in info if ":" in line}
    return {"processor": names.get("model name", platform.machine()), "processors": os.cpu_count(), "memory_GB": round(memory / 1e9, 1),
            "kernel": platform.release(), "load_1m": round(os.getloadavg()[0], 2)}


def conditions() -> dict:
    packages = {p: version(p) for p in ("torch", "safetensors")} | {"python": platform.python_version()}
    return {"when": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": " ".join(["python", *sys.argv]),
            "machine": machine(), "versions": packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    full = [name for name in convert_models.MODELS if not name.endswith("-small")]
    parser.add_argument("--models", nargs="*", default=full, choices=convert_models.MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", nargs="+", default=["8GiB", "1GiB"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megatron-bridge", metavar="PYTHON")
    parser.add_argument("--mbridge", metavar="PYTHON")
    given = parser.parse_args()
    peers = {"megatron-bridge": given.megatron_bridge, "mbridge": given.mbridge}
    for name in [n for n, python in peers.items() if not python]:
        print(f"{name}: no interpreter given, left out")
        del peers[name]
    result = conditions() | {"workers": given.workers, "models": {}}
    given.work.mkdir(parents=True, exist_ok=True)
    for model in given.models:
        source = given.work / model
        if not source.is_dir():
            convert_models.write(model, source)
        # Megatron-Bridge and mbridge are shown on the model that they were made to build here.
        result["models"][model] = measure(model, source, given.work, given.rounds, given.memory, given.workers,
                                          peers if model.startswith("qwen3") else {})
        given.out.write_text(json.dumps(result, indent=1))
        shutil.rmtree(source)


if __name__ == "__main__":
    main()
