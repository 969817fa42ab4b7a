"""What two checkpoints have in common, and what one holds."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoint_tools import hf_to_megatron
from moerl.models import params_of, read_arch
from tests.convert_helpers import BUDGET, run, save
from tests.models import tensors_of
from tests.test_families_deepseek import write_float8


def test_audit(models, tmp_path):
    """The same whatever the format; a single changed element, a missing layer and another model are each named."""
    path = models("deepseek_v3")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    code, text = run("audit", path, middle)
    sums = [line.split("sha256 ")[1] for line in text.splitlines() if "sha256" in line]
    assert code == 0 and "\nthe same" in text and len(sums) == 2 and sums[0] == sums[1]
    assert f"{len(read_names(path))} tensors" in text

    tensors = tensors_of(path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    tensors[name][3, 4] += 0.5
    other = save(tmp_path / "other", path, tensors)
    code, text = run("audit", middle, other)
    assert code == 1 and f"differs: {name}: 1 of 2048 elements, by at most 0.5" in text and text.count("differs:") == 1

    without = save(tmp_path / "without", path, {n: t for n, t in tensors_of(path).items() if not n.startswith("model.layers.4.")})
    code, text = run("audit", path, without)
    assert code == 1 and f"model.layers.4.eh_proj.weight is not in {without}" in text
    code, text = run("audit", path, models("qwen3_moe"))
    assert code == 1 and "are different models: family, " in text
    code, text = run("audit", path, tmp_path)
    assert code == 1 and "neither a Hugging Face nor a Megatron checkpoint" in text


def test_audit_sees_value_heads_and_second_copies(models, tmp_path):
    tensors = tensors_of(models("qwen3_moe"))
    tensors.pop("lm_head.weight")
    one, two = ({**tensors, "score.weight": torch.full((1, 64), value)} for value in (1.0, 2.0))
    a, b = save(tmp_path / "a", models("qwen3_moe"), one), save(tmp_path / "b", models("qwen3_moe"), two)
    assert run("audit", a, a)[0] == 0
    code, text = run("audit", a, b)
    assert code == 1 and "differs: the value head" in text
    tensors = tensors_of(models("llama"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    code, text = run("audit", models("llama"), save(tmp_path / "c", models("llama"), tensors))
    assert code == 1 and "differs: lm_head.weight" in text


def read_names(path: Path) -> set[str]:
    params = params_of(read_arch(path)).values()
    return {piece.name for param in params if not param.tied for piece in param.pieces}


def test_audit_of_float8_and_its_conversion(models, tmp_path):
    write_float8(models("deepseek_v3"), tmp_path / "fp8")
    for dtype in (None, "float32"):
        middle = hf_to_megatron.convert(tmp_path / "fp8", tmp_path / f"m {dtype}", dtype=dtype, **BUDGET)
        assert run("audit", tmp_path / "fp8", middle)[0] == 0
        assert run("audit", middle, tmp_path / "fp8")[0] == 0


def test_inspect(models, tmp_path):
    path = models("deepseek_v3")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    code, text = run("inspect", path, "--only", "layers.1.mlp.experts.0.")
    assert code == 0 and "Hugging Face checkpoint, model_type deepseek_v3" in text and "3 tensors F32, 6,144 elements" in text
    assert "model.layers.1.mlp.experts.0.down_proj.weight  F32" in text and "[64, 32]" in text
    code, text = run("inspect", middle, "--only", "layers.1.mlp.experts")
    assert code == 0 and "converted, of no layout" in text
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in text and "[16, 64, 64]" in text
