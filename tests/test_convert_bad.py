"""Conversion of bad input: one line that names file and tensor, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint_tools import hf_to_megatron, megatron_to_hf, output
from checkpoint_tools.stream import StreamError
from moerl.cli import app
from moerl.models.arch import ModelError
from tests.convert_helpers import BUDGET
from tests.models import write_mxfp4


def broken(models, tmp_path, change) -> Path:
    path = tmp_path / "model"
    shutil.copytree(models("qwen3_moe"), path)
    change(path)
    return path


def cut_short(path):
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(path / "model.safetensors") - 10)


def no_header(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 100)


def rewritten(change):
    def apply(path):
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def index(path, **more):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors") | more}))


def split(path):
    tensors = load_file(path / "model.safetensors")
    index(path)
    save_file({NORM: tensors.pop(NORM)}, path / "b.safetensors")
    save_file(tensors, path / "model.safetensors")


NORM = "model.layers.2.input_layernorm.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
BAD = {
    "cut short": (cut_short, r"model.safetensors: not a readable safetensors file \(tensor .* ends at byte \d+ of \d+: the file is cut"),
    "no header": (no_header, r"model.safetensors: not a readable safetensors file"),
    "file missing": (lambda p: index(p, x="gone.safetensors"), r"names files that do not exist: gone.safetensors"),
    "no index": (lambda p: (p / "model.safetensors.index.json").write_text("[]"), r"index.json: not an index of safetensors files"),
    "not in its file": (split, rf"index.json: tensor {NORM} is not in model.safetensors, where the index has it"),
    "not in the index": (lambda p: (index(p), save_file({NORM: torch.zeros(64)}, p / "b.safetensors"), index(p, x="b.safetensors")),
                         rf"tensor {NORM} is in b.safetensors, where the index does not have it"),
    "no number": (rewritten(lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int64)})), rf"tensor {NORM} is I64; of plain"),
    "expert's dtype": (rewritten(lambda t: t.update({DOWN: t[DOWN].half()})), r"the parts of \S+linear_fc2.weight are of different dtypes"),
    "in two files": (lambda p: shutil.copy(p / "model.safetensors", p / "more.safetensors"), r"is in both model.safetensors and more"),
    "missing": (rewritten(lambda t: t.pop(NORM)), rf"missing tensor {NORM} \(64,\)"),
    "unknown": (rewritten(lambda t: t.update(x=torch.zeros(2))), r"unexpected tensor x in model.safetensors"),
    "shape": (rewritten(lambda t: t.update({NORM: torch.zeros(63)})), rf"tensor {NORM} has shape \(63,\), expected \(64,\)"),
    "dtypes": (rewritten(lambda t: t.update({KEY: t[KEY].half()})), rf"{KEY}.* are of different dtypes \(torch.float16, torch.float32\)"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config.json is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_source(models, tmp_path, name):
    """One line that names file and tensor, exit code 1, and nothing written."""
    change, message = BAD[name]
    path = broken(models, tmp_path, change)
    answer = CliRunner().invoke(app, ["convert", "--hf", str(path), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 1 and answer.stderr.startswith("error: ") and "Traceback" not in answer.stderr
    assert re.search(message, answer.stderr), answer.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_bad_mxfp4(models, tmp_path):
    write_mxfp4(models("gpt_oss"), tmp_path / "packed", scales=(110, 130))
    file = next((tmp_path / "packed").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("_scales"))
    save_file(tensors | {name: tensors[name][..., :1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"_blocks and _scales are U8 \[.*\] and U8 \[.*\], MXFP4 is"):
        hf_to_megatron.convert(tmp_path / "packed", tmp_path / "m", **BUDGET)


def test_bad_output(models, tmp_path, monkeypatch):
    path = models("qwen3_moe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(ModelError, match="full: exists and is not an empty directory; nothing was changed"):
        hf_to_megatron.convert(path, tmp_path / "full", **BUDGET)
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "mine").write_text("x")
    with pytest.raises(ModelError, match="is in the way and not left from a conversion"):
        hf_to_megatron.convert(path, tmp_path / "a", **BUDGET)
    with pytest.raises(StreamError, match=r"/proc/nothing\S*: cannot be written \("):
        hf_to_megatron.convert(path, Path("/proc/nothing/out"), **BUDGET)
    monkeypatch.chdir(tmp_path / "full")
    with pytest.raises(ModelError, match="full: is the current directory; give a directory inside it"):
        hf_to_megatron.convert(path, Path("."), **BUDGET)
    with pytest.raises(ModelError, match="/: is mounted"):
        hf_to_megatron.convert(path, Path("/"), **BUDGET)
    (tmp_path / "empty").mkdir()
    hf_to_megatron.convert(path, tmp_path / "empty", **BUDGET)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**12, 10**12, 1000))
    with pytest.raises(ModelError, match=r"GB more are to be written, 0.00 GB are free"):
        hf_to_megatron.convert(path, tmp_path / "b", **BUDGET)


def test_a_disk_that_fills_up(large, tmp_path):
    """The worker's error names the file; what was finished stays for the next run."""
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2**20,) * 2)"
    code = f"import resource, signal; {limit}; from moerl.cli import app; app()"
    line = [sys.executable, "-c", code, "convert", "--hf", str(large), "--out", str(tmp_path / "out")]
    answer = subprocess.run(line, capture_output=True, text=True)
    assert answer.returncode == 1 and re.search(r"error: \S+distcp.writing-\S+: cannot be written \(File too large\)\n", answer.stderr)
    assert not (tmp_path / "out").exists()
    hf_to_megatron.convert(large, tmp_path / "out", **BUDGET)


def test_bad_megatron_checkpoints(models, tmp_path):
    good = hf_to_megatron.convert(models("qwen3_moe"), tmp_path / "good", **BUDGET)

    def refused(change, message):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad)
        with pytest.raises(ModelError, match=message):
            megatron_to_hf.convert(bad, tmp_path / "h", **BUDGET)
        assert not (tmp_path / "h").exists()

    refused(lambda p: (p / "__1_0.distcp").unlink(), r"__1_0.distcp: missing, its tensors end at byte \d+")
    refused(lambda p: os.truncate(p / "__1_0.distcp", 100), r"__1_0.distcp: 100 bytes long, its tensors end at byte")
    refused(lambda p: (p / ".metadata").write_bytes(b"x"), r"\.metadata: not readable as the metadata")
    refused(lambda p: (p / "config.json").unlink(), r"config.json is missing; name a directory that has the model's with --hf")
    refused(lambda p: (p / ".metadata").unlink(), r"neither a Megatron distributed checkpoint nor a")
    other = json.loads((good / "config.json").read_text()) | {"moe_intermediate_size": 48}
    wrong = r"linear_fc1.weight has shape \(8, 64, 64\), expected \(8, 96, 64\)"
    refused(lambda p: (p / "config.json").write_text(json.dumps(other)), wrong)
    fewer = json.loads((good / "config.json").read_text()) | {"num_hidden_layers": 3}
    refused(lambda p: (p / "config.json").write_text(json.dumps(fewer)), r"unexpected tensor decoder.layers.3")
