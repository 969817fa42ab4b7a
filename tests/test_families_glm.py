"""GLM-4.5, MiniMax-M2 and gpt-oss: the Megatron model is the transformers model at every layout, and the map covers the published one."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.layout import LayoutError, ParallelLayout
from moerl.models import FAMILIES, params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.tensormap import Assembler, copy_again, hf_shapes
from tests import train_jobs as jobs
from tests.models import write_mxfp4, write_random
from tests.test_parity import LAYOUTS, export_job, logits_job

SIZES = dict(vocab_size=131, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
             tie_word_embeddings=False, max_position_embeddings=256, initializer_range=0.1, pad_token_id=None, bos_token_id=None,
             eos_token_id=None)


def glm4_moe():
    """Groups of experts, one dense layer, a shared expert, query/key norms as the 355B model has them, and a prediction layer."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(**SIZES, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=4, n_group=4,
                         topk_group=2, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, attention_bias=True,
                         use_qk_norm=True, num_nextn_predict_layers=1)


def glm4_moe_air():
    """As GLM-4.5-Air: no groups, no query/key norms, other scale."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(**SIZES, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
                         n_shared_experts=1, first_k_dense_replace=2, routed_scaling_factor=1.0, attention_bias=True)


def minimax_m2():
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(**SIZES, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8)


def gpt_oss():
    """Windows shorter and a first context length shorter than the sequences; no expert matrix square, since they are stored transposed."""
    from transformers import GptOssConfig

    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=8)
    return GptOssConfig(**SIZES, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, sliding_window=5, rope_parameters=rope,
                        swiglu_limit=0.5)


WRITERS = {f.__name__: f for f in (glm4_moe, glm4_moe_air, minimax_m2, gpt_oss)}
# What every layout but one rank shows is the same for the two GLM models; Megatron-core has expert biases at etp 1 only.
LEFT_OUT = {("glm4_moe_air", name) for name in LAYOUTS if name != "1"} | {("gpt_oss", "tp2 etp2"), ("gpt_oss", "tp2 ep2 etp2")}
CASES = [(family, name) for family in WRITERS for name in LAYOUTS if (family, name) not in LEFT_OUT]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_random(tmp_path_factory.mktemp("tiny") / family, WRITERS[family]())
        return made[family]

    return get


MICRO = [jobs.samples(9)[:4], jobs.samples(9)[4:]]


@pytest.fixture(scope="module")
def reference(tiny):
    """transformers' logits of every sequence, one array a sample, a list a micro-batch."""
    from transformers import AutoModelForCausalLM

    made = {}

    def get(family: str):
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                made[family] = [[model(torch.tensor(s.tokens)[None]).logits[0].numpy() for s in micro] for micro in MICRO]
        return made[family]

    return get


def logits_and_shards_job(rank, layout, path):
    """The two jobs of the parity tests behind one another in one start of the ranks."""
    return logits_job(rank, layout, path, MICRO), export_job(rank, layout, path)


@pytest.mark.parametrize("family, name", CASES)
def test_logits_equal_transformers_and_the_round_trip_is_bit_exact(ranks, tiny, reference, family, name):
    layout, path = LAYOUTS[name], tiny(family)
    answers = ranks.run(layout, logits_and_shards_job, str(path))
    for got, samples in zip(answers[layout.rank_of(pp=layout.pp - 1)][0], reference(family)):
        at = 0
        for want in samples:
            ours = got[at : at + len(want), : want.shape[1]]
            at += len(want)
            assert np.abs(want).max() > 0.5 and np.abs(ours - want).max() < 2e-4
    whole = Assembler(params_of(read_arch(path)))
    for _, shards in answers:
        for shard in shards:
            whole.add(*shard)
    before = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    after = copy_again(whole.params.values(), whole.finish(), before)
    assert set(before) == set(after) and ("model.layers.4.enorm.weight" in after) == family.startswith("glm4")
    for tensor, value in before.items():
        assert torch.equal(value, after[tensor]), tensor


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2", "gpt_oss"])
def test_one_step_is_the_same_at_every_layout(ranks, tiny, family):
    """The second step's loss also depends on the first one's gradients, of every shard."""
    results = [ranks.run(layout, jobs.train_job, str(tiny(family)), 2) for layout in (ParallelLayout(), LAYOUTS["tp2 pp2 ep2"])]
    for one, many in zip(*[[(jobs.total([rank[i] for rank in r]), r[0][i]["grad_norm"]) for i in range(2)] for r in results]):
        assert one == pytest.approx(many, rel=2e-5)


# What config.json of the published models says, in the hub's spelling, where it concerns the architecture.
GLM_AIR = dict(
    model_type="glm4_moe", hidden_size=4096, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
    attention_bias=True, use_qk_norm=False, partial_rotary_factor=0.5, intermediate_size=10944, moe_intermediate_size=1408,
    n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    routed_scaling_factor=1.0, norm_topk_prob=True, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1000000, rope_scaling=None,
    vocab_size=151552, num_nextn_predict_layers=1, tie_word_embeddings=False,
)
GLM_355B = GLM_AIR | dict(hidden_size=5120, num_hidden_layers=92, intermediate_size=12288, moe_intermediate_size=1536, n_routed_experts=160,
                          first_k_dense_replace=3, use_qk_norm=True, routed_scaling_factor=2.5)
MINIMAX_M2 = dict(
    model_type="minimax_m2", num_hidden_layers=62, hidden_size=3072, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
    intermediate_size=1536, vocab_size=200064, num_experts_per_tok=8, num_local_experts=256, rope_theta=5000000, rotary_dim=64,
    hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False, use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
    use_mtp=True, mtp_transformer_layers=1, num_mtp_modules=3, shared_intermediate_size=0, scoring_func="sigmoid",
    quantization_config={"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
)
GPT_OSS = dict(
    model_type="gpt_oss", num_hidden_layers=36, hidden_size=2880, head_dim=64, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088, attention_bias=True, hidden_act="silu",
    layer_types=["sliding_attention", "full_attention"] * 18, sliding_window=128, swiglu_limit=7.0, rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_theta=150000, max_position_embeddings=131072,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
                  "truncate": False},
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
)
FULL = {"GLM-4.5-Air": (GLM_AIR, 106.85), "GLM-4.5": (GLM_355B, 352.80), "MiniMax-M2": (MINIMAX_M2, 228.69),
        "gpt-oss-120b": (GPT_OSS, 116.83)}


@pytest.mark.parametrize("name", FULL)
def test_full_size_map(name):
    """Every element of every published tensor once, and as many of them as published (prediction layers not counted)."""
    config, billions = FULL[name]
    arch = FAMILIES[config["model_type"]].arch(config)
    params = list(FAMILIES[arch.family].params(arch))
    main = hf_shapes(FAMILIES[arch.family].params(arch.main()))
    covered: dict[str, int] = {}
    for param in params:
        assert sum(prod(piece.view) for piece in param.pieces) == prod(param.shape), param.name
        for piece in param.pieces:
            covered[piece.name] = covered.get(piece.name, 0) + prod(piece.view)
    shapes = hf_shapes(params)
    assert covered == {tensor: prod(shape) for tensor, shape in shapes.items()}
    # A correction bias is a buffer and in no published count.
    assert round(sum(n for tensor, n in covered.items() if "e_score" not in tensor and tensor in main) / 1e9, 2) == billions


@pytest.mark.parametrize("name", FULL)
def test_full_size_names_are_those_of_transformers(name):
    """transformers' own class on the meta device holds as many elements, so no tensor is left out of the map."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, _ = FULL[name]
    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    arch = FAMILIES[config["model_type"]].arch(config)
    ours = hf_shapes(FAMILIES[arch.family].params(arch.main()))
    assert sum(prod(s) for t, s in ours.items() if "e_score" not in t) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config, change, message", [
    (GLM_AIR, {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope type 'linear'"),
    (GLM_AIR, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (GLM_AIR, {"norm_topk_prob": False}, "norm_topk_prob False"),
    (GLM_AIR, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (MINIMAX_M2, {"use_qk_norm": False}, "use_qk_norm False"),
    (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
    (MINIMAX_M2, {"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
    (MINIMAX_M2, {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
    (GPT_OSS, {"attention_bias": False}, "attention_bias False"),
    (GPT_OSS, {"layer_types": ["chunked_attention"] * 36}, "layer_types"),
    (GPT_OSS, {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    (GPT_OSS, {"rope_scaling": GPT_OSS["rope_scaling"] | {"attention_factor": 1.0}}, "rope parameter attention_factor"),
])
def test_a_field_that_is_not_understood_is_an_error(config, change, message):
    with pytest.raises(ModelError, match=message):
        FAMILIES[config["model_type"]].arch(config | change)


def test_both_spellings_of_a_config_mean_the_same():
    old = FAMILIES["minimax_m2"].arch(MINIMAX_M2)
    new = {k: v for k, v in MINIMAX_M2.items() if k not in ("rotary_dim", "rope_theta", "num_local_experts")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5}, "num_experts": 256}
    assert FAMILIES["minimax_m2"].arch(new) == old and old.rotary_percent == 0.5


def test_expert_biases_need_etp_1():
    """Refused on the driver, before any process starts, and once more where the modules are made."""
    from moerl.config.schema import TrainConfig
    from moerl.controller.placement import place
    from moerl.megatron.build import transformer_config

    arch = FAMILIES["gpt_oss"].arch(GPT_OSS)
    with pytest.raises(LayoutError, match=r"gpt_oss: .*\(etp\) 1"):
        transformer_config(arch, LAYOUTS["tp2 etp2"], torch.float32)
    config = dict(model={"path": "x"}, data={"prompts": "x"}, reward={"function": "x"}, trainer={"steps": 1, "output": "x"})
    place(TrainConfig.model_validate(config | {"actor": {"layout": {"tp": 2, "ep": 2}}}), arch)
    with pytest.raises(LayoutError, match=r"^actor.layout: etp 2: gpt_oss: "):
        place(TrainConfig.model_validate(config | {"actor": {"layout": {"tp": 2, "etp": 2}}}), arch)
    with pytest.raises(LayoutError, match=r"^critic.layout: etp 2: gpt_oss: "):
        place(TrainConfig.model_validate(config | {"critic": {"layout": {"tp": 2, "etp": 2}}}), arch)


def test_what_vllm_does_otherwise_is_refused():
    from moerl.rollout.engine import unservable

    arch = FAMILIES["gpt_oss"].arch
    assert unservable(arch(GPT_OSS)) == ""
    assert "swiglu_limit 7.0" in unservable(arch(GPT_OSS | {"swiglu_limit": 5.0}))
    kinds = ["full_attention"] * GPT_OSS["num_hidden_layers"]
    assert "layer_types" in unservable(arch(GPT_OSS | {"layer_types": kinds}))


@pytest.mark.parametrize("family", ["minimax_m2", "gpt_oss"])
def test_resume_at_another_layout(ranks, tiny, tmp_path, family):
    """Norm shards and sinks are ours: saved by four ranks, they go on as whole ones on a single rank."""
    path, many = str(tiny(family)), LAYOUTS["tp2 pp2 ep2"]
    expected = ranks.run(many, jobs.train_job, path, 2)
    ranks.run(many, jobs.save_job, path, 1, str(tmp_path))
    resumed = ranks.run(ParallelLayout(), jobs.resume_job, path, 1, 1, str(tmp_path))
    assert jobs.total([r[0] for r in resumed]) == pytest.approx(jobs.total([r[1] for r in expected]), rel=2e-5)
    assert resumed[0][0]["grad_norm"] == pytest.approx(expected[0][1]["grad_norm"], rel=2e-5)


def test_a_stage_without_experts_is_saved_and_resumed(ranks, tiny, tmp_path):
    """The first stage has one dense layer: its experts' optimizer has no parameters. The next step is that of a run that never stopped."""
    path, uneven = str(tiny("glm4_moe")), LAYOUTS["pp2 uneven"]
    straight = ranks.run(ParallelLayout(), jobs.train_job, path, 2)[0][1]
    ranks.run(uneven, jobs.save_job, path, 1, str(tmp_path))
    for layout in (uneven, LAYOUTS["tp2 ep2"]):
        resumed = ranks.run(layout, jobs.resume_job, path, 1, 1, str(tmp_path))
        assert jobs.total([r[0] for r in resumed]) == pytest.approx(jobs.total([straight]), rel=2e-5)
        assert resumed[0][0]["grad_norm"] == pytest.approx(straight["grad_norm"], rel=2e-5)


def test_mxfp4_experts_are_read_as_their_values(ranks, tiny, tmp_path):
    """Every code and a range of scales, against transformers' own conversion; exported whole by expert-parallel ranks."""
    want = write_mxfp4(tiny("gpt_oss"), tmp_path, scales=(110, 130))
    whole = Assembler(params_of(read_arch(tmp_path)))
    for shards in ranks.run(LAYOUTS["tp2 ep2"], export_job, str(tmp_path)):
        for shard in shards:
            whole.add(*shard)
    found = whole.finish()
    for name, value in want.items():
        assert torch.equal(found[name], value) and torch.equal(value, value.bfloat16().float()), name


def test_sinks_and_windows_in_packed_attention():
    """Output and all gradients of two packed sequences equal the softmax with one more logit, written out."""
    from types import SimpleNamespace

    from megatron.core.packed_seq_params import PackedSeqParams

    from moerl.megatron.attention import PackedAttention

    torch.manual_seed(0)
    config = SimpleNamespace(context_parallel_size=1, kv_channels=16, window_size=(4, 0), window_attn_skip_freq=[1],
                             softmax_type="learnable", num_attention_heads=4, tensor_model_parallel_size=1, params_dtype=torch.float32)
    attention = PackedAttention(config, 1, None, "self")
    attention.softmax_offset.data.normal_()
    inputs = [torch.randn(20, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=13, max_seqlen_kv=13)
    want = []
    for first, last in ((0, 7), (7, 20)):
        q, k, v = (x[first:last].repeat_interleave(4 // x.shape[1], 1).transpose(0, 1) for x in inputs)
        n = last - first
        distance = torch.arange(n)[:, None] - torch.arange(n)
        logits = (q @ k.transpose(1, 2) / 4).masked_fill((distance < 0) | (distance > 4), float("-inf"))
        logits = torch.cat([logits, attention.softmax_offset.view(4, 1, 1).expand(4, n, 1)], -1)
        want.append((logits.softmax(-1)[..., :-1] @ v).transpose(0, 1).reshape(n, -1))
    got, want, weight = attention(*inputs, packed_seq_params=packed), torch.cat(want), torch.randn(20, 64)
    leaves = [*inputs, attention.softmax_offset]
    assert torch.allclose(got, want, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad((got * weight).sum(), leaves), torch.autograd.grad((want * weight).sum(), leaves)):
        assert theirs.abs().max() > 0.1 and torch.allclose(ours, theirs, atol=1e-5)
