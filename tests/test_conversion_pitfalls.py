"""Where conversions between Hugging Face and Megatron go wrong in silence: one test for each way."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import TrainConfig
from moerl.controller.placement import place
from moerl.layout import LayoutError, ParallelLayout
from moerl.models import FAMILIES, params_of, read_arch
from moerl.models.tensormap import assemble, spelled
from tests import train_jobs as jobs
from tests.models import write_qwen3_moe
from tests.test_parity import LAYOUTS, export_job, logprob_job, reference_logp
from tests.test_tensormap_properties import SIZES, load, numbered
from tests.test_training import curve

ONE = ParallelLayout()
# All widths differ: no matrix is square, no two have the same shape.
ODD = SIZES | dict(model_type="qwen3_moe", hidden_size=20, moe_intermediate_size=12, intermediate_size=28, mlp_only_layers=[1])


def marks_job(rank, layout, arch):
    """Of every expert matrix: local and whole number of elements, and what Megatron is told about it."""
    from moerl.megatron import build, weights

    params = params_of(arch)
    chunks = build.build(arch, layout, rank, torch.float32)
    weights.mark_parallel(chunks, arch, layout, rank, params)
    found = weights.shards(chunks, arch, layout, rank, params, detach=False)
    return [
        (s.name, prod(params[s.name].shape) // s.tensor.numel(), s.parts, s.index, s.tensor.tensor_model_parallel, s.tensor.partition_dim)
        for s in found if params[s.name].expert is not None
    ]


@pytest.mark.parametrize("layout", [LAYOUTS["tp2 etp2"], LAYOUTS["tp2 ep2 etp2"], ParallelLayout(dp=2, etp=2)], ids=lambda x: x.describe())
def test_expert_tensor_shards_are_shards(ranks, layout):
    """Guards against half of an expert's matrix taken for the whole: in the gradient norm, an export or a sync."""
    answers = ranks.run(layout, marks_job, FAMILIES["qwen3_moe"].arch(ODD))
    for rank, found in enumerate(answers):
        assert len(found) == 3 * 2 * 4 // layout.ep
        for name, cut, parts, index, marked, dim in found:
            assert (cut, parts, index, marked) == (2, 2, layout.coords(rank).etp, True), name
            assert dim == (1 if "fc2" in name else 0), name


def write_numbered(path, config, fused: bool) -> dict[str, torch.Tensor]:
    """A checkpoint whose every element is its own number, exact in float32; with `fused`, all experts of a layer in one tensor."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    params = params_of(read_arch(path))
    if fused:
        params = spelled(params, {other.name for p in params.values() for piece in p.pieces for other in piece.others})
    tensors = {name: tensor.float() for name, tensor in numbered(params).items()}
    assert max(float(t.max()) for t in tensors.values()) < 2**24
    save_file(tensors, path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("name", ["tp2 etp2", "ep2", "tp2 ep2 etp2"])
def test_experts_come_back_in_their_places(ranks, tmp_path, name, fused):
    """Guards the export of experts that are cut, spread over ranks or fused: by the number of each element, not by a shape that fits."""
    stored = write_numbered(tmp_path / "m", ODD, fused)
    found = assemble(params_of(read_arch(tmp_path / "m")), ranks.run(LAYOUTS[name], export_job, str(tmp_path / "m")))
    ffn = ODD["moe_intermediate_size"]
    for tensor, value in found.items():
        if not fused or ".experts." not in tensor:
            assert torch.equal(value, stored[tensor]), tensor
            continue
        place, _, rest = tensor.partition(".experts.")
        expert, kind, _ = rest.split(".")
        whole = stored[f"{place}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        assert torch.equal(value, {"down_proj": whole, "gate_proj": whole[:ffn], "up_proj": whole[ffn:]}[kind]), tensor


def test_transposed_experts_are_turned_around(ranks):
    """Guards gpt-oss's matrices, stored as inputs x outputs with gate and up interleaved: with sizes at which a wrong one cannot fit."""
    arch = FAMILIES["gpt_oss"].arch(SIZES | dict(hidden_size=20, intermediate_size=12, sliding_window=4))
    params = params_of(arch)
    tensors = numbered(params)
    for layer in range(arch.layers):
        hf = f"model.layers.{layer}.mlp.experts"
        gate_up, down = tensors[f"{hf}.gate_up_proj"], tensors[f"{hf}.down_proj"]
        assert gate_up.shape == (4, 20, 24) and down.shape == (4, 12, 20)
        for e in range(4):
            name = f"decoder.layers.{layer}.mlp.experts.{e}"
            fc1 = load(params[f"{name}.linear_fc1.weight"], 1, 0, tensors)
            assert torch.equal(fc1, torch.stack([gate_up[e][:, 0::2].T, gate_up[e][:, 1::2].T]))
            assert torch.equal(load(params[f"{name}.linear_fc2.weight"], 1, 0, tensors), down[e].T)
            bias = tensors[f"{hf}.gate_up_proj_bias"][e]
            assert torch.equal(load(params[f"{name}.linear_fc1.bias"], 1, 0, tensors), torch.stack([bias[0::2], bias[1::2]]))


def bias_job(rank, layout, path):
    """Router biases of the modules after loading, and of what is exported once they have moved."""
    made = jobs.make(rank, layout, path, train=False)
    routers = [layer.mlp.router for chunk in made.chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    loaded = {r.layer_number - 1: r.expert_bias.clone() for r in routers}
    for router in routers:
        router.expert_bias += router.layer_number
    return loaded, [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_router_biases_are_loaded_exported_and_synced(ranks, tmp_path, family):
    """Guards a buffer that lists of parameters leave out: a rollout with a stale one routes tokens to other experts than training does."""
    from moerl.rollout.engine import needed_header

    stored = write_numbered(tmp_path / "m", SIZES | dict(model_type=family), fused=False)
    stored = {name: tensor for name, tensor in stored.items() if "correction_bias" in name}
    assert set(stored) <= set(needed_header(tmp_path / "m")) and len(stored) == (4 if family == "minimax_m2" else 3)
    answers = ranks.run(LAYOUTS["tp2 pp2 ep2"], bias_job, str(tmp_path / "m"))
    for loaded, _ in answers:
        for layer, bias in loaded.items():
            assert torch.equal(bias, next(t for name, t in stored.items() if f".{layer}." in name))
    found = assemble(params_of(read_arch(tmp_path / "m")), [shards for _, shards in answers])
    for name, bias in stored.items():
        assert torch.equal(found[name], bias + int(name.split(".")[2]) + 1)


def test_tied_embeddings_over_four_stages(ranks, tmp_path):
    """Guards the shared table of a pipeline with stages in between: read at both ends, one gradient, scored right, exported once."""
    path, layout = write_qwen3_moe(tmp_path / "m", tie_word_embeddings=True), ParallelLayout(pp=4)
    one, four = (curve(ranks.run(at, jobs.train_job, str(path), 3)) for at in (ONE, layout))
    np.testing.assert_allclose(four, one, rtol=1e-4)
    answers = ranks.run(layout, logprob_job, str(path), 1.0)
    assert np.abs(answers[-1][0][0] - reference_logp(path, jobs.samples(5), 1.0)).max() < 1e-4
    exports = ranks.run(layout, export_job, str(path))
    holders = [rank for rank, shards in enumerate(exports) if any(s[0] == "embedding.word_embeddings.weight" for s in shards)]
    found, stored = assemble(params_of(read_arch(path)), exports), load_file(path / "model.safetensors")
    assert holders == [0] and set(found) == set(stored) and all(torch.equal(found[n], stored[n]) for n in stored)


def layers_job(rank, layout, arch):
    """Layer numbers (from 0) of Megatron's modules, each with whether it is a mixture, and of the map; the answer to a lost layer."""
    from dataclasses import replace

    from moerl.megatron import build, weights

    params = params_of(arch)
    chunks = build.build(arch, layout, rank, torch.float32)
    real = [(layer.layer_number - 1, hasattr(layer.mlp, "router")) for chunk in chunks for layer in chunk.decoder.layers]
    mapped = {params[s.name].stage for s in weights.shards(chunks, arch, layout, rank, params)} - {"first", "last"}
    try:
        build._count_layers(chunks, replace(arch, layers=arch.layers + 1))
    except ValueError as error:
        return real, mapped, str(error)


@pytest.mark.parametrize("layout", [
    ParallelLayout(pp=2, vpp=3), ParallelLayout(pp=3, first_stage_layers=1, last_stage_layers=2),
    ParallelLayout(pp=4, first_stage_layers=3),
    ParallelLayout(pp=2, vpp=2, first_stage_layers=4),
], ids=lambda x: x.describe())
def test_layers_keep_their_numbers_in_any_pipeline(ranks, layout):
    """Guards offsets under uneven and virtual stages (a dense layer in a mixture's place), and layers that are not built at all."""
    arch = FAMILIES["qwen3_moe"].arch(ODD | dict(num_hidden_layers=6, mlp_only_layers=[1, 3]))
    answers = ranks.run(layout, layers_job, arch)
    for real, mapped, lost in answers:
        assert {layer for layer, _ in real} == mapped and all(moe == arch.is_moe(layer) for layer, moe in real)
        assert lost == "the pipeline holds 6 layers, the model has 7"
    assert sorted(layer for real, *_ in answers for layer, _ in real) == list(range(6))


@pytest.mark.parametrize("layout", [
    dict(pp=4, first_stage_layers=2, last_stage_layers=2), dict(pp=2, first_stage_layers=0), dict(pp=2, first_stage_layers=4), dict(pp=8),
], ids=str)
def test_an_empty_stage_is_refused_before_anything_starts(layout):
    """Guards against a stage without layers, which leaves its neighbours waiting for good."""
    base = dict(model={"path": "x"}, data={"prompts": "x"}, reward={"function": "x"}, trainer={"steps": 1, "output": "x"})
    config = TrainConfig.model_validate(base | {"actor": {"layout": layout}})
    with pytest.raises(LayoutError, match="actor.layout: .*(no stage may be empty|not divisible by pp 8)"):
        place(config, FAMILIES["qwen3_moe"].arch(ODD))
