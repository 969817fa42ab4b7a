"""Conversion between the formats: every tensor of every family and source format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint_tools import boxes, hf_to_megatron, megatron_to_hf
from moerl.layout import ParallelLayout
from moerl.models import config_of, fp8, params_of, read_arch, torch_dist
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader
from moerl.models.source import open_source
from tests import train_jobs as jobs
from tests.convert_helpers import BUDGET, SUBSTITUTES, same
from tests.models import tensors_of, write_mxfp4
from tests.test_families_deepseek import write_float8


@pytest.mark.parametrize("cut_small", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "llama", "mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_there_and_back(models, tmp_path, monkeypatch, kind, cut_small):
    """Every tensor bit for bit and in its dtype, prediction layers and their copies too, and every file that goes with a model."""
    if cut_small:
        monkeypatch.setattr(boxes, "CHUNK", 1000)
    path = models(kind)
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    back = megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET)
    assert same(tensors_of(back), tensors_of(path))
    for where in (middle, back):
        assert all((where / name).read_text() == text for name, text in SUBSTITUTES.items())
    config = json.loads((path / "config.json").read_text())
    assert json.loads((middle / "config.json").read_text()) == config
    assert json.loads((back / "config.json").read_text()) == config | config_of(read_arch(path)) | {"dtype": "float32"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fused_experts_come_out_in_the_hubs_spelling(models, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32).save_pretrained(tmp_path / "fused", save_original_format=False)
    middle = hf_to_megatron.convert(tmp_path / "fused", tmp_path / "m", **BUDGET)
    assert same(tensors_of(megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET)), tensors_of(models(kind)))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_float8_source(models, tmp_path, dtype):
    """Scales in another file than their weights; the float32 product, rounded once; float32 tensors stay what they are."""
    plain = write_float8(models("deepseek_v3"), tmp_path / "fp8")
    back = megatron_to_hf.convert(hf_to_megatron.convert(tmp_path / "fp8", tmp_path / "m", dtype=dtype, **BUDGET), tmp_path / "h", **BUDGET)
    scaled = {n.removesuffix("_scale_inv") for n in tensors_of(tmp_path / "fp8") if n.endswith("_scale_inv")}
    want = {n: t.to(torch.bfloat16) if n in scaled and dtype is None else t for n, t in plain.items()}
    found = tensors_of(back)
    assert len(scaled) > 100 and set(found) == set(want) and all(torch.equal(found[n], want[n]) for n in want)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_mxfp4_source(models, tmp_path):
    want = write_mxfp4(models("gpt_oss"), tmp_path / "packed", scales=(110, 130))
    back = megatron_to_hf.convert(hf_to_megatron.convert(tmp_path / "packed", tmp_path / "m", **BUDGET), tmp_path / "h", **BUDGET)
    found = tensors_of(back)
    assert want and all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in want.items())


def test_a_cast_leaves_selection_biases_in_float32(models, tmp_path):
    middle = hf_to_megatron.convert(models("deepseek_v3"), tmp_path / "m", dtype="bfloat16", **BUDGET)
    found = tensors_of(megatron_to_hf.convert(middle, tmp_path / "h", **BUDGET))
    for name, tensor in tensors_of(models("deepseek_v3")).items():
        assert torch.equal(found[name], tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()), name
    assert json.loads((tmp_path / "h" / "config.json").read_text())["dtype"] == "bfloat16"


def test_float8_output(models, tmp_path):
    """DeepSeek's own selection of matrices, readable, within the format's error, and the same again when written from what was read."""
    middle = hf_to_megatron.convert(models("deepseek_v3"), tmp_path / "m", **BUDGET)
    out = megatron_to_hf.convert(middle, tmp_path / "fp8", fp8_block=True, **BUDGET)
    stored, plain = tensors_of(out), tensors_of(models("deepseek_v3"))
    small = {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    assert small == {n for n in plain if n.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in n}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    for name in small:
        value = fp8.dequantize(stored[name], stored[name + "_scale_inv"])
        assert ((value - plain[name]).abs() <= plain[name].abs() / 16 + plain[name].abs().max() * 2**-15).all(), name
    assert all(torch.equal(stored[n], plain[n]) for n in set(plain) - small)
    read = hf_to_megatron.convert(out, tmp_path / "m2", dtype="float32", **BUDGET)
    again = tensors_of(megatron_to_hf.convert(read, tmp_path / "again", fp8_block=True, **BUDGET))
    assert all(torch.equal(again[n].float(), stored[n].float()) for n in small)
    qwen = hf_to_megatron.convert(models("qwen3_moe"), tmp_path / "q", **BUDGET)
    with pytest.raises(ModelError, match="--fp8-block: not for qwen3_moe"):
        megatron_to_hf.convert(qwen, tmp_path / "x", fp8_block=True, **BUDGET)


@pytest.mark.parametrize("largest", [1e30, 1e37])
def test_float8_numbers(largest):
    """Every code with scales of every size, in boxes that begin anywhere: the bits of the float32 product; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 2)[:, :500].contiguous().view(torch.float8_e4m3fn)
    scale = torch.tensor([[1e-9, 3e-4, 1.0, 7e3], [1e-38, 2.0**-126, 0.1, largest], [5e-41, 1e-3, 1e-2, 1.5]])
    whole = codes.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :500]
    for rows, columns in ((slice(0, 300), slice(0, 500)), (slice(37, 201), slice(100, 333)), (slice(255, 257), slice(127, 129))):
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
            found = fp8.dequantize(codes[rows, columns], scale, corner=(rows.start, columns.start), dtype=dtype)
            want = whole[rows, columns].to(dtype)
            assert torch.equal(found.isnan(), want.isnan())
            assert torch.equal(found.view(bits)[~want.isnan()], want.view(bits)[~want.isnan()])


def test_boxes_are_runs_of_whole_scale_rows(models):
    """A cut of a matrix that is written with a scale a block falls between blocks."""
    param = params_of(read_arch(models("deepseek_v3")))["decoder.layers.0.mlp.linear_fc1.weight"]
    shape = (2, 18432, 7168)
    found = list(boxes.cut(param, shape, 2, 128))
    assert len(found) >= 8 and all(boxes.is_run(shape, box) for box in found)
    assert all(b[1].start % 128 == 0 and (b[1].stop - b[1].start) * 7168 * 2 <= boxes.CHUNK for b in found)
    assert sum((b[0].stop - b[0].start) * (b[1].stop - b[1].start) for b in found) == 2 * 18432


def save_job(rank, layout, path, directory):
    from moerl.megatron import checkpoint

    checkpoint.save(jobs.make(rank, layout, path, train=False), directory)


def test_a_table_padded_for_more_ranks(ranks, models, tmp_path):
    """Saved at TP4 the vocabulary has 512 rows, of which the model has 131."""
    ranks.run(ParallelLayout(tp=4, ep=4), save_job, str(models("deepseek_v3")), str(tmp_path / "saved"))
    assert torch_dist.read_metadata(tmp_path / "saved")["output_layer.weight"].shape[0] == 512
    back = megatron_to_hf.convert(tmp_path / "saved", tmp_path / "h", hf=models("deepseek_v3"), **BUDGET)
    want = tensors_of(models("deepseek_v3"))
    found = tensors_of(back)
    assert all(torch.equal(found[n], want[n]) for n in found) and set(want) - set(found) == set(duplicates_of(models("deepseek_v3")))


def duplicates_of(path: Path) -> list[str]:
    return open_source(path).copies


def test_sizes_and_shares():
    import typer

    from checkpoint_tools.cli import share, size

    assert [size(text) for text in ("8GiB", "500 MB", "1.5G", "1024")] == [2**33, 500 * 10**6, 1500 * 10**6, 1024]
    assert share("1/4") == (1, 4)
    for wrong in ("4/4", "a/b", "1"):
        with pytest.raises(typer.BadParameter):
            share(wrong)
    with pytest.raises(typer.BadParameter, match="'8 apples' is not a size"):
        size("8 apples")


def test_the_engines_reader_reads_both_formats(models, tmp_path):
    """One parameter's box out of either format, with rows beyond the vocabulary as zeros."""
    path = models("llama")
    middle = hf_to_megatron.convert(path, tmp_path / "m", **BUDGET)
    a, b = open_source(path), open_source(middle)
    param = a.params["embedding.word_embeddings.weight"]
    for box in ((slice(100, 140), slice(3, 40)), (slice(250, 384), slice(0, 48))):
        assert torch.equal(a.read(param, box), b.read(param, box))
    assert a.read(param, (slice(131, 200), slice(0, 48))).abs().max() == 0
    assert HFReader(path).files and not a.copies
