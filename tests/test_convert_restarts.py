"""Conversions that are killed, that others join, and what memory they take."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools import hf_to_megatron, output
from moerl.models.arch import ModelError
from tests.convert_helpers import BUDGET, command, digests


def test_killed_anywhere_it_goes_on(large, tmp_path):
    """SIGKILL with 0, 1, 4 and 9 files written: what is there stays, the end is byte for byte that of a run that was never stopped."""
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    out, part = tmp_path / "out", tmp_path / "out.partial"
    for files in (0, 1, 4, 9):
        process = subprocess.Popen(command("--hf", str(large), "--out", str(out), "--workers", "1"), stderr=subprocess.DEVNULL)
        while process.poll() is None and not (len(list(part.glob("*.distcp"))) >= files and list(part.glob("*.writing-*"))):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() and not (part / ".metadata").exists()
        before = {f: f.stat().st_mtime_ns for f in part.glob("*.distcp")}
    assert len(before) >= 9
    hf_to_megatron.convert(large, out, **BUDGET)
    assert digests(out) == want and not part.exists()
    assert all((out / f.name).stat().st_mtime_ns == at for f, at in before.items()), "finished files were written again"


def test_another_conversion_in_the_way(large, models, tmp_path, monkeypatch):
    """What an unfinished conversion left is only gone on with by the same one, and by one at a time."""
    process = subprocess.Popen(command("--hf", str(large), "--out", str(tmp_path / "out"), "--workers", "1"), stderr=subprocess.DEVNULL)
    while not list((tmp_path / "out.partial").glob("*.writing-*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(output, "PATIENCE_S", 1)
    with pytest.raises(ModelError, match="another conversion is writing there"):
        hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)
    monkeypatch.undo()
    process.kill()
    process.wait()
    with pytest.raises(ModelError, match="left from another conversion"):
        hf_to_megatron.convert(models("llama"), tmp_path / "out", **BUDGET)
    hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)


def test_killed_before_the_first_and_after_the_last_byte(models, tmp_path):
    """While it claims the directory, and when all is there but the directory's name."""
    path, out, part = models("qwen3_moe"), tmp_path / "out", tmp_path / "out.partial"
    part.mkdir()
    (part / f"{output.PLAN}.elsewhere.77").write_text("{")
    want = digests(hf_to_megatron.convert(path, tmp_path / "want", **BUDGET))
    hf_to_megatron.convert(path, out, **BUDGET)
    assert {n: d for n, d in digests(out).items() if "elsewhere" not in n} == want
    shutil.copytree(tmp_path / "want", tmp_path / "again.partial")
    (tmp_path / "again.partial" / "__0_0.distcp.writing-host-1").write_text("half")
    hf_to_megatron.convert(path, tmp_path / "again", **BUDGET)
    assert digests(tmp_path / "again") == want


def test_what_is_complete_is_left_as_it_is(models, tmp_path):
    """The same conversion once more, or a host that comes when the others are done, changes nothing; another one is refused."""
    path, out = models("qwen3_moe"), tmp_path / "out"
    hf_to_megatron.convert(path, out, **BUDGET)
    before = {f: f.stat().st_mtime_ns for f in out.iterdir()}
    for share in ((0, 1), (1, 2), (19, 20)):
        assert hf_to_megatron.convert(path, out, share=share, **BUDGET) == out
    assert {f: f.stat().st_mtime_ns for f in out.iterdir()} == before and not (tmp_path / "out.partial").exists()
    with pytest.raises(ModelError, match="exists and is not an empty directory"):
        hf_to_megatron.convert(path, out, dtype="bfloat16", **BUDGET)


def test_many_hosts_claim_at_once(tmp_path):
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(4) as pool:
        for i in range(40):
            part = tmp_path / str(i)
            assert list(pool.map(output._claim, [part] * 4, [{"x": 1}] * 4)) == [None] * 4
            assert [f.name for f in part.iterdir()] == [output.PLAN]


def test_two_hosts_write_one_checkpoint(large, tmp_path):
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    line = command("--hf", str(large), "--out", str(tmp_path / "out"))
    hosts = [subprocess.Popen([*line, "--share", f"{i}/2"], stderr=subprocess.DEVNULL) for i in (0, 1)]
    assert [host.wait(120) for host in hosts] == [0, 0]
    assert digests(tmp_path / "out") == want


def slurm_nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    answer = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True)
    return int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0


@pytest.mark.skipif(slurm_nodes() < 2, reason="needs two idle Slurm nodes")
def test_two_slurm_nodes(large, tmp_path):
    """`sbatch launch/convert.sh`: each node writes its share."""
    want = digests(hf_to_megatron.convert(large, tmp_path / "want", **BUDGET))
    root = Path(__file__).parent.parent
    environment = os.environ | {"MOERL": f"env PYTHONPATH={root} {sys.executable} -m moerl.cli"}
    line = ["sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/log", str(root / "launch/convert.sh"), "--hf", str(large)]
    subprocess.run([*line, "--workers", "1", "--out", str(tmp_path / "out")], check=True, env=environment, cwd=tmp_path)
    assert digests(tmp_path / "out") == want
    assert "this host's share" in (tmp_path / "log").read_text()


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_a_worker_stays_in_its_budget(large, tmp_path):
    """Peak resident memory of the whole process and its workers, at the least budget there is, below budget + 400 MB: tensors larger than
    what is held at once, and a cast that doubles them."""
    large = shutil.copytree(large, tmp_path / "wide")
    tensors = {"model.embed_tokens.weight": torch.ones(100000, 1024, dtype=torch.bfloat16), "lm_head.weight": None}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    for file in large.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(file).items() if n not in tensors}
        save_file(kept, file)
    save_file(tensors, large / "tables.safetensors")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | {"vocab_size": 100000}))
    for tool, flag, source, out in (("hf_to_megatron", "--hf", large, "m"), ("megatron_to_hf", "--ckpt", tmp_path / "m", "h")):
        line = [sys.executable, "-m", f"checkpoint_tools.{tool}", flag, str(source), "--out", str(tmp_path / out), "--max-memory", "512MiB"]
        line += ["--dtype", "float32" if out == "m" else "bfloat16"]
        process, peaks = subprocess.Popen(line, stderr=subprocess.DEVNULL), {}
        while process.poll() is None:
            for pid in (process.pid, *_children(process.pid)):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    peaks[pid] = int(status.split("VmHWM:")[1].split()[0]) * 1024
                except (OSError, IndexError):
                    continue
            time.sleep(0.01)
        assert process.returncode == 0 and len(peaks) > 1
        assert max(peaks.values()) < 2**29 + 400e6, peaks
    with pytest.raises(ModelError, match="--max-memory 100 MiB: a worker needs 512 MiB"):
        hf_to_megatron.convert(large, tmp_path / "x", memory=100 * 2**20, workers=1)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
