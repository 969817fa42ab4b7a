"""Whole runs of the command on this machine: Megatron ranks, vLLM, Ray, checkpoints, and what happens when something breaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moerl.track.metrics import read

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240

REWARDS = '''
import os, signal
calls = {"n": 0}

def dense(prompt, response, record):
    """Share of digits, a signal that exists before any training."""
    return sum(c.isdigit() for c in response) / max(1, len(response))

def breaks_in_step_2(prompt, response, record):
    calls["n"] += 1
    if calls["n"] == 25:
        raise KeyError("answer key of the user")
    return dense(prompt, response, record)

def fails_on_one(prompt, response, record):
    calls["n"] += 1
    if calls["n"] == 3:
        raise KeyError("answer key of the user")
    return dense(prompt, response, record)

def megatron_ranks():
    import psutil
    return [p for p in psutil.process_iter(["cmdline"]) if "ray::MegatronWorker" in " ".join(p.info["cmdline"] or [])
            and os.getpid() in [a.pid for a in p.parents()]]

def kills_a_rank_in_step_3(prompt, response, record):
    calls["n"] += 1
    if calls["n"] == 41:
        ranks = megatron_ranks()
        open(os.path.join(os.path.dirname(__file__), "killed.pid"), "w").write(str(ranks[1].pid))
        ranks[1].send_signal(signal.SIGKILL)
    return dense(prompt, response, record)
'''

CONFIG = """
model: {path: PATH/start, dtype: float32}
data: {prompts: "reasoning_gym:chain_sum", options: {max_terms: 2, max_digits: 2}, size: 64, max_prompt_tokens: 64}
rollout: {layout: {tp: 2}, prompts_per_step: 8, samples_per_prompt: 2, sampling: {max_tokens: 8}, kv_cache_gib: 0.1}
actor: {layout: {tp: 2, pp: 2, ep: 2}, max_tokens_per_rank: 256, optimizer: {lr: 1.0e-3}}
critic: {optimizer: {lr: 1.0e-3}}
reward: {function: "PATH/rewards.py:dense"}
algorithm: {kl_coef: 0.05, mini_batch: 8, entropy_coef: 0.01, lam: 0.9}
trainer: {steps: 3, output: PATH/out, checkpoint_every: 1, keep: 2, seed: 3}
cluster: {device: cpu}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("run"))


def make_home(path: Path, rewards: str = REWARDS) -> Path:
    """A start model, reward functions and a configuration."""
    subprocess.run([sys.executable, "-m", "moerl.demo_model", "--out", str(path / "start")], check=True, cwd=ROOT, capture_output=True)
    (path / "rewards.py").write_text(rewards)
    (path / "config.yaml").write_text(CONFIG.replace("PATH", str(path)))
    return path


def moerl(home: Path, *arguments: str) -> subprocess.CompletedProcess:
    # A Ray of another run on this machine must not be joined.
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "moerl.cli", "train", str(home / "config.yaml"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def straight(home):
    """Three PPO steps without a stop."""
    done = moerl(home, "--set", f"trainer.output={home}/straight")
    assert done.returncode == 0, done.stderr
    return home / "straight", done


def test_first_step_is_on_policy(straight):
    """Before any update: ratio 1, no divergence from the reference, and vLLM's log-probs are Megatron's."""
    first = read(straight[0] / "metrics.jsonl")[0]
    assert abs(first["first/ratio"] - 1) < 1e-5
    assert abs(first["kl"]) < 1e-6 and abs(first["first/approx_kl"]) < 1e-6
    assert first["mismatch/max_logp_gap"] < 1e-3


def test_every_sync_reaches_vllm(straight):
    """Log-probs of sampling equal Megatron's after each update; a stale or half-loaded engine is far off."""
    rows = read(straight[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["kl"] > 1e-5, "the policy did not move: the test would prove nothing"
    assert all(row["mismatch/max_logp_gap"] < 1e-3 for row in rows)


def test_what_a_run_leaves(straight):
    output, done = straight
    record = json.loads((output / "run.json").read_text())
    assert record["status"] == "finished"
    assert "value loss" in done.stdout and "sync time" in done.stdout
    assert list(output.glob("events.*")) or list(output.rglob("events.out*"))
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["step_000002", "step_000003"], "the last two are kept"
    rows = read(output / "metrics.jsonl")
    assert all(row["time/save_blocked_s"] > 0 for row in rows) and all(row["time/save_background_s"] > 0 for row in rows[1:])
    assert (output / "reward.png").stat().st_size > 5000


def test_export_loads_in_transformers(straight):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(straight[0] / "hf")
    model, info = AutoModelForCausalLM.from_pretrained(straight[0] / "hf", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 2"}], add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"] if not torch.is_tensor(ids) else ids
    assert torch.isfinite(model(ids).logits).all()


def comparable(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith("time/") and k not in ("tokens_per_s", "sync_s", "time", "wall")}


def test_stopped_by_a_reward_and_resumed_equals_never_stopped(home, straight):
    """A reward that raises stops the run with the sample named and the trained step kept; resuming repeats and skips nothing."""
    from moerl.models.checkpoint import HFReader

    output = f"trainer.output={home}/stopped"
    broken = moerl(
        home, "--set", output, "--set", f"reward.function={home}/rewards.py:breaks_in_step_2", "--set", "trainer.checkpoint_every=0"
    )
    assert broken.returncode == 1
    assert "sample 8: KeyError" in broken.stderr and "answer key of the user" in broken.stderr and "Traceback" not in broken.stderr
    assert json.loads((home / "stopped" / "run.json").read_text())["status"] == "failed"
    resumed = moerl(home, "--set", output, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    never, again = (read(path / "metrics.jsonl") for path in (straight[0], home / "stopped"))
    assert [row["step"] for row in again] == [1, 2, 3]
    for a, b in zip(never, again):
        assert comparable(a).keys() == comparable(b).keys()
        for name, value in comparable(a).items():
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (a["step"], name)
    one, two = HFReader(straight[0] / "hf"), HFReader(home / "stopped" / "hf")
    for name in one.files:
        np.testing.assert_allclose(one._slice(name)[:].numpy(), two._slice(name)[:].numpy(), atol=1e-5)


def test_roles_with_layouts_of_their_own(home):
    """Critic and reference on other layouts (other processes), two engines, a sample left out, mini-batches that do not divide."""
    done = moerl(
        home, "--set", f"trainer.output={home}/mixed", "--set", "trainer.steps=2", "--set", "critic.layout={dp: 2, ep: 2}",
        "--set", "reference.layout={pp: 2}", "--set", "actor.layout={tp: 2, ep: 2}", "--set", "rollout.layout={tp: 1, dp: 2}",
        "--set", f"reward.function={home}/rewards.py:fails_on_one", "--set", "reward.on_error=skip", "--set", "algorithm.mini_batch=6",
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 16 samples left out" in done.stdout
    one, two = read(home / "mixed" / "metrics.jsonl")
    assert one["reward/skipped"] == 1 and two["reward/skipped"] == 0
    assert abs(one["kl"]) < 1e-6 and two["kl"] > 1e-6, "the reference scores like the actor it was, at another layout"
    assert max(one["mismatch/max_logp_gap"], two["mismatch/max_logp_gap"]) < 1e-3
    assert one["value_loss"] > 0


def test_a_killed_rank_is_named_at_once(home):
    """GRPO (no critic is started); a rank is killed in step 3: the driver names it within seconds, and nothing hangs."""
    began = time.monotonic()
    done = moerl(
        home, "--set", f"trainer.output={home}/killed", "--set", f"reward.function={home}/rewards.py:kills_a_rank_in_step_3",
        "--set", "algorithm.name=grpo",
    )
    assert done.returncode == 1
    assert re.search(r"error: (the checkpoint of step 2 could not be written: )?actor/reference rank \d died", done.stderr), done.stderr
    assert f"pid: {(home / 'killed.pid').read_text()}\n" in done.stderr
    record = json.loads((home / "killed" / "run.json").read_text())
    assert "critic" not in record["extra"]["placement"]
    first = read(home / "killed" / "metrics.jsonl")[0]
    assert "critic/value_loss" not in first and first["step"] == 1
    assert (home / "killed" / "checkpoints" / "step_000001" / "manifest.json").is_file()
    assert time.monotonic() - began < 120


CLUSTER = '''
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
'''


def on_two_nodes(home: Path, output: str, *arguments: str) -> subprocess.CompletedProcess:
    """The command, told the address of a Ray cluster that lives as long as it runs."""
    server = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().strip()
        return moerl(home, "--set", f"trainer.output={home}/{output}", "--set", f"cluster.address={address}", *arguments)
    finally:
        server.communicate("", timeout=60)


def test_a_cluster_of_two_nodes(home):
    """The same command on a running Ray of two nodes of two slots each: ranks on both, the engine's workers on one."""
    done = on_two_nodes(home, "two", "--set", "trainer.steps=1", "--set", "algorithm.name=grpo")
    assert done.returncode == 0, done.stderr
    assert read(home / "two" / "metrics.jsonl")[0]["mismatch/max_logp_gap"] < 1e-3


def test_too_small_a_cluster_is_named(home):
    done = on_two_nodes(home, "small", "--set", "actor.layout.dp=2", "--set", "cluster.start_timeout_s=3")
    assert done.returncode == 1 and "needs 8 CPUs, the Ray cluster offers 4" in done.stderr and "Traceback" not in done.stderr
