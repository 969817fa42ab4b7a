"""The command's answers to bad input: one clear line, before any process starts, and nothing written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import write_qwen3_moe

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A small model with a tokenizer, and a configuration that is right."""
    from transformers import AutoTokenizer

    from moerl import demo_model

    path = tmp_path_factory.mktemp("cli")
    demo_model.main(["--out", str(path / "tokenizer")])
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    tokenizer.save_pretrained(write_qwen3_moe(path / "model", vocab_size=len(tokenizer)))
    (path / "prompts.jsonl").write_text('{"question": "1 + 1"}\n')
    (path / "empty.jsonl").write_text("")
    (path / "config.yaml").write_text(
        f"""
model: {{path: {path}/model, dtype: float32}}
data: {{prompts: "reasoning_gym:chain_sum", size: 16, max_prompt_tokens: 64}}
rollout: {{sampling: {{max_tokens: 64}}}}
reward: {{function: reasoning_gym}}
trainer: {{steps: 1, output: {path}/out}}
cluster: {{device: cpu}}
"""
    )
    return path


def train(home, *options: str, dry: bool = True):
    """The command in this process: exit code and what it printed."""
    from typer.testing import CliRunner

    from moerl.cli import app

    return CliRunner().invoke(app, ["train", str(home / "config.yaml"), *(["--dry-run"] if dry else []), *options])


def test_dry_run_prints_configuration_and_placement(home):
    done = train(home, "--set", "actor.layout.tp=2", "--set", "actor.layout.ep=2", "--set", "rollout.layout.dp=3")
    assert done.exit_code == 0, done.stderr
    assert "max_prompt_tokens: 64" in done.stdout
    assert "actor, critic: TP2" in done.stdout and "3 vLLM engines TP1, slots 0-2" in done.stdout and "3 slots" in done.stdout
    assert not (home / "out").exists()


BAD = {
    "unknown key": (["actor.layuot.tp=2"], "unknown key actor.layuot", "actor.layout"),
    "wrong value": (["trainer.steps=0"], "trainer.steps", "0"),
    "heads": (["actor.layout.tp=3"], "actor.layout: heads 4 is not divisible by tp 3",),
    "experts": (["actor.layout.ep=3", "actor.layout.dp=3"], "actor.layout", "8", "ep 3"),
    "layers": (["actor.layout.pp=3"], "actor.layout", "4", "pp"),
    "critic": (["critic.layout.tp=8"], "critic.layout: heads 4"),
    "rollout": (["rollout.layout.tp=3"], "rollout.layout: attention heads 4 are not divisible by tp 3"),
    "context parallel": (["actor.layout.cp=2"], "actor.layout: cp 2 is not supported yet"),
    "tokens": (["actor.max_tokens_per_rank=100"], "actor.max_tokens_per_rank 100 is below the longest sample 128"),
    "context": (["rollout.sampling.max_tokens=200"], "context of 256 tokens is below the longest sample 264"),
    "alignment": (
        ["actor.max_tokens_per_rank=129", "rollout.sampling.max_tokens=65", "actor.layout.tp=2"],
        "actor.max_tokens_per_rank 129 (128 in whole units of tp 2) is below the longest sample 129",
    ),
    "kl": (["algorithm.kl_coef=0.1", "algorithm.kl_in=loss"], "kl_kind k1 has no gradient"),
    "prompts": (["data.prompts=nowhere.jsonl"], "nowhere.jsonl"),
    "reward": (["reward.function=nothing.here:reward"], "nothing.here"),
    "top-p": (["rollout.sampling.top_p=0.9"], "top_p", "whole vocabulary"),
    "grpo": (["algorithm.name=grpo"], "rollout.samples_per_prompt must be 2 or more for grpo"),
    "model": (["model.path=/nowhere"], "/nowhere: no Hugging Face checkpoint there"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configuration(home, name):
    overrides, *words = BAD[name]
    done = train(home, *[part for o in overrides for part in ("--set", o)])
    assert done.exit_code == 1, done.stdout
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


BAD_DATA = {
    "column": ("prompts.jsonl", "prompt", "question"),
    "empty": ("empty.jsonl", "empty"),
    "missing": ("nowhere.jsonl", "nowhere.jsonl"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_prompts(home, name):
    file, *words = BAD_DATA[name]
    done = train(home, "--set", f"data.prompts={home / file}", dry=False)
    assert done.exit_code == 1 and "Traceback" not in done.stderr, done.stderr
    for word in (file, *words):
        assert word in done.stderr
    assert not (home / "out").exists()


def test_unknown_reward(home):
    done = train(home, "--set", "reward.function=nothing.here:reward", dry=False)
    assert done.exit_code == 1 and "nothing.here" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_checkpoint_that_does_not_fit(home, tmp_path, damage):
    """Named before any process starts."""
    import shutil

    shutil.copytree(home / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors[name := "model.layers.9.input_layernorm.weight"] = torch.zeros(64)
    else:
        tensors[name] = torch.zeros(3, 64)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    done = train(home, "--set", f"model.path={tmp_path}/model")
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    want = {
        "missing": f"missing tensor {name} (32, 64)",
        "extra": f"unexpected tensor {name}",
        "shape": f"tensor {name} has shape (3, 64), expected (32, 64)",
    }
    assert want[damage] in done.stderr


def test_resume_without_a_checkpoint(home):
    done = train(home, "--resume", dry=False)
    assert done.exit_code == 1 and "no complete checkpoint to resume from" in done.stderr and "Traceback" not in done.stderr


def test_earlier_run_is_moved_aside(tmp_path):
    from types import SimpleNamespace

    from moerl.controller.checkpoints import CheckpointError
    from moerl.controller.run import prepare_output

    def config(path):
        return SimpleNamespace(
            trainer=SimpleNamespace(output=str(tmp_path / "out")), model=SimpleNamespace(path=str(path))
        )

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("{}")
    assert prepare_output(config(tmp_path), resume=False) is None
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == "{}" and not any((tmp_path / "out").iterdir())
    with pytest.raises(CheckpointError, match="lies in trainer.output"):
        prepare_output(config(tmp_path / "out" / "hf"), resume=False)


def test_unsupported_model_type(home, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    done = train(home, "--set", f"model.path={tmp_path}")
    assert "model_type 'gpt2' is not supported (supported: " in done.stderr and "qwen3_moe" in done.stderr


def test_doctor():
    done = subprocess.run([sys.executable, "-m", "moerl.cli", "doctor"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "megatron-core" in done.stdout and "vllm" in done.stdout
