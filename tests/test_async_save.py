"""A checkpoint that is written while training goes on holds the state of its step, and fails or dies without harm to the one before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from moerl.models import torch_dist
from moerl.track.metrics import read
from tests import train_jobs as jobs
from tests.models import write_deepseek
from tests.test_parity import LAYOUTS
from tests.test_run import REWARDS, make_home, moerl


def contents(path: Path) -> dict[str, object]:
    """Every tensor of a checkpoint, and the bytes of everything else in it."""
    from torch.distributed.checkpoint import FileSystemReader

    tensors = torch_dist.read_metadata(path)
    reader = torch_dist.Reader(path, tensors)
    found = {key: reader.read(key, tuple(slice(0, n) for n in t.shape)) for key, t in tensors.items()}
    for index, place in FileSystemReader(str(path)).read_metadata().storage_data.items():
        if index.fqn not in tensors:
            found[index.fqn] = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    if (path / "common.pt").is_file():
        found["common.pt"] = repr(torch.load(path / "common.pt", weights_only=False))
    return found


def assert_same_contents(one: Path, two: Path, least: int) -> None:
    ours, theirs = contents(one), contents(two)
    assert ours.keys() == theirs.keys() and len(ours) > least
    assert any("exp_avg_sq" in key for key in ours) and any(key.startswith("rng") for key in ours)
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key], key


def beside_job(rank, layout, path, sync, beside):
    """Save a step both ways; two more steps are taken before the first byte of the second one is written."""
    import threading

    from moerl.megatron import checkpoint, saving

    made = jobs.make(rank, layout, path)
    jobs.step(made, jobs.samples(seed=0), rank, layout)
    checkpoint.save(made, sync)
    gate, write = threading.Event(), saving._write
    saving._write = lambda *args: gate.wait() and write(*args)
    try:
        save = checkpoint.start_save(made, beside)
        before = [s.tensor.clone() for s in made.owned_shards()]
        out = [jobs.step(made, jobs.samples(seed=seed), rank, layout) | {"layout": layout} for seed in (1, 2)]
        torch.rand(3)
        for bias in (b for chunk in made.bare() for name, b in chunk.named_buffers() if name.endswith("expert_bias")):
            bias.fill_(7.0)  # unlike parameters it is its own memory, which Megatron-core would hand to the writer as it is
        idle = not save.buckets
        assert idle or save.written(wait=False) is None
        moved = any(not torch.equal(a, s.tensor) for a, s in zip(before, made.owned_shards()))
        assert not [*Path(beside).glob(f"__{rank}_*.distcp")] and not (Path(beside) / ".metadata").exists()
        gate.set()
        seconds = save.written(wait=True)
        save.finish()
    finally:
        saving._write = write
    assert (idle or seconds > 0) and all(not tensors for _, _, (_, tensors) in save.buckets), "host memory is given back"
    return out, moved


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("models") / "deepseek", 3, mtp=True)


@pytest.mark.parametrize(("kind", "name"), [
    ("tiny_moe", "1"), ("tiny_moe", "tp2 pp2 ep2"), ("tiny_moe", "ep2"), ("tiny_moe", "pp2 vpp2"), ("deepseek", "1"),
    ("deepseek", "tp2 pp2 ep2"),
])
def test_what_is_written_beside_training_is_the_state_of_its_step(ranks, request, tmp_path, kind, name):
    """Bit for bit what a save that is waited for has: weights, moments, counts, random states. And training feels nothing of it."""
    path, sync, beside = request.getfixturevalue(kind), tmp_path / "sync", tmp_path / "beside"
    answers = ranks.run(LAYOUTS[name], beside_job, str(path), str(sync), str(beside))
    assert all(moved for _, moved in answers)
    assert_same_contents(sync, beside, 100)
    plain = ranks.run(LAYOUTS[name], jobs.train_job, str(path), 3)
    for (ours, _), theirs in zip(answers, plain):
        assert [o["sums"] for o in ours] == [t["sums"] for t in theirs[1:]]
        assert [o["grad_norm"] for o in ours] == [t["grad_norm"] for t in theirs[1:]]


def refused_job(rank, layout, path, directory):
    """A directory stands where rank 1 is to write its file."""
    from moerl.megatron import checkpoint

    made = jobs.make(rank, layout, path)
    jobs.step(made, jobs.samples(seed=0), rank, layout)
    (Path(directory) / "__1_0.distcp").mkdir(parents=True, exist_ok=True)
    save = checkpoint.start_save(made, directory)
    said = []
    for end in (lambda: save.written(wait=True), save.finish):
        try:
            end()
            said.append("")
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_file_that_cannot_be_written_is_named_and_no_rank_completes(ranks, tiny_moe, tmp_path):
    answers = ranks.run(LAYOUTS["tp2 pp2 ep2"], refused_job, str(tiny_moe), str(tmp_path / "actor"))
    assert [bool(written) for written, _ in answers] == [False, True, False, False]
    assert answers[1][0].startswith(f"OSError: {tmp_path}/actor/__1_0.distcp: not written ([Errno 21] Is a directory")
    assert all("CheckpointException" in finish for _, finish in answers)
    assert not torch_dist.is_torch_dist(tmp_path / "actor")


# ---- whole runs


MORE_REWARDS = '''
def killed_in_save_2(prompt, response, record):
    """The run is killed as soon as the directory of step 2's checkpoint is there, whose files and manifest come later."""
    import pathlib, threading, time
    begun = pathlib.Path(__file__).parent / "killed" / "checkpoints" / "step_000002"
    def watch():
        while not begun.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    calls["n"] += 1
    if calls["n"] == 16 + 5:
        threading.Thread(target=watch, daemon=True).start()
    return dense(prompt, response, record)

def no_room_in_step_2(prompt, response, record):
    """From here on a rank's files may not grow beyond 256 KiB."""
    import psutil
    calls["n"] += 1
    if calls["n"] == 16 + 5:
        for rank in megatron_ranks():
            rank.rlimit(psutil.RLIMIT_FSIZE, (2**18, 2**18))
    return dense(prompt, response, record)
'''
FAST = ("--set", "algorithm.name=grpo", "--set", "actor.layout={pp: 2}", "--set", "rollout.layout={tp: 1}", "--set", "trainer.steps=3")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("async"), REWARDS + MORE_REWARDS)


def complete(home: Path, output: str) -> list[str]:
    steps = (home / output / "checkpoints").iterdir()
    return sorted(p.name for p in steps if (p / "manifest.json").is_file())


def test_a_killed_run_goes_on_from_the_last_whole_checkpoint(home):
    """Killed while step 2 had no manifest yet: step 1 is the latest. Without `async_save` the loop waits for all of a save."""
    output = ("--set", f"trainer.output={home}/killed")
    killed = moerl(home, *FAST, *output, "--set", f"reward.function={home}/rewards.py:killed_in_save_2")
    assert killed.returncode == -9
    assert complete(home, "killed") == ["step_000001"] and (home / "killed" / "checkpoints" / "step_000002").is_dir()
    resumed = moerl(home, *FAST, *output, "--set", "trainer.async_save=false", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    checkpoints = home / "killed" / "checkpoints"
    assert complete(home, "killed") == ["step_000002", "step_000003"] == sorted(os.listdir(checkpoints))
    assert "hf/tokenizer.json" in json.loads((checkpoints / "step_000003" / "manifest.json").read_text())["files"]
    first, *others = read(home / "killed" / "metrics.jsonl")
    assert [row["step"] for row in (first, *others)] == [1, 2, 3] and first["time/save_blocked_s"] > 0
    assert all(row["time/save_blocked_s"] > 0 and "time/save_background_s" not in row for row in others)


def test_a_failed_save_is_reported_and_the_last_whole_one_stays(home):
    """Ranks run out of room in step 2, after or before step 1 is written: the run ends with a rank's error, and what is whole stays."""
    done = moerl(home, *FAST, "--set", f"trainer.output={home}/full", "--set", f"reward.function={home}/rewards.py:no_room_in_step_2")
    assert done.returncode == 1
    whole = complete(home, "full")
    assert whole in ([], ["step_000001"])
    assert f"the checkpoint of step {len(whole) + 1} could not be written: actor/reference rank" in done.stderr
    assert "File too large" in done.stderr and json.loads((home / "full" / "run.json").read_text())["status"] == "failed"
