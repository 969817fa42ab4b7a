"""DeepSeek-V2, V3, Moonlight and Kimi-K2: transformers' logits, tensors bit for bit, the same step at every layout, published sizes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moerl.models import FAMILIES, config_of, params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.checkpoint import HFReader, write_hf
from moerl.models.tensormap import Assembler, Copy, Piece, copy_again, duplicates, hf_shapes
from moerl.reshard.receiver import checkpoint_header
from tests import train_jobs as jobs
from tests.models import tensors_of, write_deepseek
from tests.test_parity import LAYOUTS, export_job, logits_job

LITE = dict(q_lora_rank=None, n_group=1, topk_group=1)
FLAT = dict(rope_type="yarn", rope_theta=100.0, factor=32.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=1.0, mscale=1.0,
            mscale_all_dim=1.0)
KINDS = {
    "v3": dict(version=3, mtp=True),
    "moonlight": dict(version=3, **LITE, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    "kimi_k2": dict(version=3, model_type="kimi_k2", n_group=1, topk_group=1, n_shared_experts=1, rope_parameters=FLAT),
    "v3 plain scores": dict(version=3, norm_topk_prob=False, n_group=1, topk_group=1, num_experts_per_tok=3),
    "v2": dict(version=2, topk_method="group_limited_greedy"),
    "v2_lite": dict(version=2, **LITE, topk_method="greedy", routed_scaling_factor=1.0),
}
EVERYWHERE = ("v3", "v2")
CASES = [(kind, name) for kind in KINDS for name in (LAYOUTS if kind in EVERYWHERE else ("1", "tp2 pp2 ep2"))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = write_deepseek(tmp_path_factory.mktemp("deepseek") / kind.replace(" ", "_"), **KINDS[kind])
        return made[kind]

    return get


def reference(path):
    """transformers' model of a checkpoint; Kimi-K2 is a DeepSeek-V3 under another name."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    two = read_arch(path).family == "deepseek_v2"
    kind, make = (DeepseekV2ForCausalLM, DeepseekV2Config) if two else (DeepseekV3ForCausalLM, DeepseekV3Config)
    fields = json.loads((path / "config.json").read_text())
    del fields["model_type"]
    return kind.from_pretrained(path, config=make(**fields), dtype=torch.float32)


def both_job(rank, layout, path, micro_batches):
    return logits_job(rank, layout, path, micro_batches), export_job(rank, layout, path)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_logits_and_round_trip(ranks, tiny, kind, name):
    """Logits of packed sequences, some longer than the context before scaling, and every tensor back bit for bit."""
    path, layout = tiny(kind), LAYOUTS[name]
    batch = jobs.samples(9)
    assert max(len(s.tokens) for s in batch) > 16
    micro = [batch[:4], batch[4:]]
    answers = ranks.run(layout, both_job, str(path), micro)
    model = reference(path)
    for got, samples in zip(answers[layout.rank_of(pp=layout.pp - 1)][0], micro):
        at = 0
        for sample in samples:
            with torch.no_grad():
                want = model(torch.tensor(sample.tokens)[None]).logits[0].numpy()
            ours = got[at : at + len(sample.tokens), : want.shape[1]]
            at += len(sample.tokens)
            assert np.abs(ours - want).max() < 2e-4
    whole, stored = Assembler(params_of(read_arch(path))), tensors_of(path)
    for _, shards in answers:
        for shard in shards:
            whole.add(*shard)
    found = copy_again(whole.params.values(), whole.finish(), stored)
    assert set(stored) == set(found)
    assert all(torch.equal(stored[n], tensor) and stored[n].dtype == tensor.dtype for n, tensor in found.items())


@pytest.mark.parametrize("kind", ["v3", "v2", "moonlight"])
def test_a_step_is_the_same_at_every_layout(ranks, tiny, kind):
    """Loss and gradient norm of two steps; the second sees what the first did to the weights."""
    one = ranks.run(LAYOUTS["1"], jobs.train_job, str(tiny(kind)), 2)
    for name in ("tp2", "tp2 pp2 ep2"):
        many = ranks.run(LAYOUTS[name], jobs.train_job, str(tiny(kind)), 2)
        for step in range(2):
            results = [r[step] for r in many]
            assert jobs.total(results) == pytest.approx(jobs.total([one[0][step]]), rel=1e-4, abs=1e-6)
            assert results[0]["grad_norm"] == pytest.approx(one[0][step]["grad_norm"], rel=1e-4)
    assert one[0][0]["grad_norm"] > 0


def test_stored_rotary_frequencies_are_kept_and_not_synced(tiny, tmp_path):
    """Moonlight's and Kimi-K2's checkpoints have them, of a length that fits no head; nobody reads them."""
    path = shutil.copytree(tiny("moonlight"), tmp_path / "with")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.randn(7)}, path / "frequencies.safetensors")
    arch = read_arch(path)
    HFReader(path).fit(params_of(arch))
    kept = HFReader(path).frequencies()
    assert set(kept) == {name} and torch.equal(kept[name], tensors_of(path)[name])
    assert name not in checkpoint_header(str(path)) and "lm_head.weight" in checkpoint_header(str(path))


# ---- float8 checkpoints

def quantize(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float8 values, a scale a block, and their float32 product, by loops over blocks."""
    rows, columns = weight.shape
    values, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[at] = values[at].float() * scales[i, j]
    return values, scales, plain


@pytest.fixture
def blocks(tmp_path):
    """One float8 matrix, its scales in another file, and its values by a plain reference."""
    torch.manual_seed(0)
    values, scales, plain = quantize(torch.randn(300, 200), 128)
    save_file({"a.weight": values}, tmp_path / "one.safetensors")
    save_file({"a.weight_scale_inv": scales}, tmp_path / "two.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, plain


def test_float8_slices_equal_a_plain_reference(blocks):
    path, plain = blocks
    reader = HFReader(path)
    reader.check({"a.weight": (300, 200)})
    for rows, columns in (((0, 300), (0, 200)), ((120, 140), (0, 200)), ((5, 299), (127, 129)), ((256, 300), (3, 4))):
        box = (slice(*rows), slice(*columns))
        assert torch.equal(reader.read(Copy(Piece("a.weight", (300, 200), (300, 200), (0, 0)), box, ())), plain[box])
    grouped = Copy(Piece("a.weight", (300, 200), (3, 100, 200), (0, 0, 0)), (slice(1, 3), slice(20, 90), slice(0, 200)), ())
    assert torch.equal(reader.read(grouped), plain.view(3, 100, 200)[grouped.source])
    gate = Copy(Piece("a.weight", (300, 200), (1, 300, 200), (0, 0, 0)), (slice(0, 1), slice(150, 300), slice(0, 200)), ())
    assert torch.equal(reader.read(gate), plain[None, 150:])


def test_float8_without_scales_is_an_error(blocks):
    path, _ = blocks
    save_file({"b.weight_scale_inv": torch.ones(3, 2)}, path / "two.safetensors")
    with pytest.raises(ModelError, match=r"tensor a.weight is F8_E4M3 without scales \(a.weight_scale_inv is missing\)"):
        HFReader(path).check({"a.weight": (300, 200)})
    save_file({"a.weight_scale_inv": torch.ones(3, 3)}, path / "two.safetensors")
    with pytest.raises(ModelError, match=r"a.weight_scale_inv has shape \(3, 3\)"):
        HFReader(path).check({"a.weight": (300, 200)})


def write_float8(source, path) -> dict[str, torch.Tensor]:
    """A float8 copy of a checkpoint at `path`, its scales in another file. Its values as a plain reference dequantises them."""
    shutil.copytree(source, path)
    plain, values, scales = {}, {}, {}
    for name, tensor in tensors_of(path).items():
        plain[name] = values[name] = tensor
        if tensor.ndim == 2 and not any(part in name for part in ("embed", "head", "gate.weight", "eh_proj")):
            values[name], scales[name + "_scale_inv"], plain[name] = quantize(tensor, 16)
    for file in path.glob("*.safetensors"):
        file.unlink()
    save_file(values, path / "values.safetensors")
    save_file(scales, path / "scales.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(config))
    return plain


def test_float8_model_loads_as_its_dequantised_values(ranks, tiny, tmp_path):
    path = tmp_path / "fp8"
    plain = write_float8(tiny("v3"), path)
    whole = Assembler(params_of(read_arch(path)))
    for shards in ranks.run(LAYOUTS["tp2 etp2"], export_job, str(path)):
        for shard in shards:
            whole.add(*shard)
    found = copy_again(whole.params.values(), whole.finish(), plain)
    assert set(found) == set(plain) and all(torch.equal(found[n], plain[n]) for n in plain)
    write_hf(tmp_path / "out", {"x": torch.zeros(1)}, path, dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_what_is_not_as_exported(tiny, tmp_path):
    """Quantised weights, or a config.json as transformers saves it, without fields that vLLM needs: an engine cannot start from them."""
    path = tiny("v3")
    params, fields = params_of(read_arch(path)), config_of(read_arch(path))
    assert fields and not HFReader(path).as_exported(params, fields) and HFReader(path).as_exported(params, {})
    write_float8(path, tmp_path / "fp8")
    assert not HFReader(tmp_path / "fp8").as_exported(params, {})
    out = write_hf(tmp_path / "out", tensors_of(path), path, dtype="float32", fields=fields)
    assert HFReader(out).as_exported(params, fields)


# ---- real sizes

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, moe_layer_freq=1,
    norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1,
    vocab_size=129280, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    hidden_act="silu", attention_bias=False, tie_word_embeddings=False, max_position_embeddings=163840,
    quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
)
KIMI = V3 | dict(
    model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1, topk_group=1,
    first_k_dense_replace=1, routed_scaling_factor=2.827, vocab_size=163840, num_nextn_predict_layers=0, rope_theta=50000.0,
    rope_scaling=YARN | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
)
SMALL = dict(hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
             moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
             first_k_dense_replace=1)
MOONLIGHT = {k: v for k, v in V3.items() if k not in ("rope_scaling", "quantization_config")} | SMALL | dict(
    intermediate_size=11264, vocab_size=163840, rope_theta=50000.0, num_nextn_predict_layers=0, routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
)
V2 = {k: v for k, v in V3.items() if k not in ("num_nextn_predict_layers", "quantization_config")} | dict(
    model_type="deepseek_v2", hidden_size=5120, num_hidden_layers=60, intermediate_size=12288, moe_intermediate_size=1536,
    n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, topk_group=3, first_k_dense_replace=1, norm_topk_prob=False,
    routed_scaling_factor=16.0, scoring_func="softmax", topk_method="group_limited_greedy", vocab_size=102400,
    rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
)
V2_LITE = V2 | SMALL | dict(intermediate_size=10944, topk_method="greedy", routed_scaling_factor=1.0)
# Billions of parameters as published; DeepSeek-V3 also with its multi-token prediction layer.
PUBLISHED = {"V3": (V3, 671.03, 684.49), "Kimi-K2": (KIMI, 1026.4, None), "Moonlight": (MOONLIGHT, 15.96, None),
             "V2": (V2, 235.74, None), "V2-Lite": (V2_LITE, 15.706, None)}


def same(number: float, published: float) -> bool:
    """Equal to the digits published."""
    digits = len(str(published).split(".")[1])
    return round(number / 1e9, digits) == published


def elements_of_transformers(config: dict) -> int:
    """Parameters (and the router's bias) of the model that transformers builds from the same configuration."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    two = config["model_type"] == "deepseek_v2"
    make, kind = (DeepseekV2Config, DeepseekV2ForCausalLM) if two else (DeepseekV3Config, DeepseekV3ForCausalLM)
    options = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        model = kind(make(**options))
    return sum(t.numel() for t in model.state_dict().values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_is_the_published_one(name):
    """Every Hugging Face tensor in one place of the map, no place without one, and the count that transformers and papers give."""
    config, main, with_mtp = PUBLISHED[name]
    arch = FAMILIES[config["model_type"]].arch(config)
    params = params_of(arch)
    uses = Counter(piece.name for param in params.values() for piece in param.pieces)
    assert set(uses.values()) == {1}
    assert all(sum(prod(piece.shape) for piece in param.pieces) == prod(param.shape) for param in params.values())
    total = sum(map(prod, hf_shapes(params_of(arch.main()).values()).values()))
    assert same(total, main)
    assert total == elements_of_transformers(config)
    shapes = hf_shapes(params.values())
    copies = duplicates(params.values())
    assert not set(copies) & set(uses) and bool(copies) == any("layers.61" in name for name in uses) == (with_mtp is not None)
    if with_mtp:
        assert same(sum(map(prod, shapes.values())) + sum(prod(shapes[own]) for own in copies.values()), with_mtp)


def test_spellings_of_transformers_5_and_of_the_hub_agree():
    rope = V3["rope_scaling"]
    new = {k: v for k, v in V3.items() if k not in ("rope_theta", "rope_scaling", "n_routed_experts", "num_nextn_predict_layers")} | dict(
        rope_parameters={**rope, "rope_type": "yarn", "rope_theta": 10000}, num_local_experts=256, num_mtp_layers=1,
    )
    arch = FAMILIES["deepseek_v3"].arch
    assert arch(new) == arch(V3)


@pytest.mark.parametrize(("base", "change", "message"), [
    (V3, {"rope_scaling": {"type": "linear", "factor": 2}}, "deepseek_v3: rope type 'linear' is not supported"),
    (V3, {"rope_scaling": V3["rope_scaling"] | {"attention_factor": 1.5}}, "rope fields attention_factor are not supported"),
    (V3, {"rope_interleave": False}, "rope_interleave False is not supported"),
    (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    (V3, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    (V3, {"attention_bias": True}, "attention_bias True is not supported"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    (V3, {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config 'compressed-tensors'"),
    (V2, {"norm_topk_prob": True}, "deepseek_v2: norm_topk_prob True is not supported"),
    (V2, {"num_key_value_heads": 8}, "num_key_value_heads 8 differs"),
])
def test_a_field_that_is_not_understood_is_an_error(base, change, message):
    with pytest.raises(ModelError, match=message):
        FAMILIES[base["model_type"]].arch(base | change)
