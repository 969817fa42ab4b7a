"""Llama, Qwen2, Qwen3, Qwen2-MoE and Mixtral: the transformers model at every layout, their published sizes, and every spelling of experts."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.layout import ParallelLayout
from moerl.models import FAMILIES, ModelError, params_of, read_arch
from moerl.models.checkpoint import HFReader
from moerl.models.listing import count
from moerl.models.tensormap import Assembler, copies, hf_shapes, spelled
from moerl.sample import Sample
from tests import train_jobs as jobs
from tests.test_parity import LAYOUTS, export_job, logits_job
from tests.test_training import curve

COMMON = dict(
    vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, initializer_range=0.1, rms_norm_eps=1e-5, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)
# Within the context of 32 tokens one pair of channels turns often, one a few times, six less than once: kept, blended, stretched.
LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=6.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=32)
TINY = {
    "llama": dict(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "qwen2": dict(hidden_size=64, tie_word_embeddings=False),
    "qwen3": dict(tie_word_embeddings=True),
    # Layers 0 and 2 are dense by the step, 1 by name: the first pipeline stage of two has no experts.
    "qwen2_moe": dict(
        hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=56, num_experts=6, num_experts_per_tok=3,
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1], qkv_bias=True, router_aux_loss_coef=0.0,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0),
    "qwen3_moe": dict(moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.0),
}
MIXTURES = ("qwen2_moe", "mixtral", "qwen3_moe")
DENSE_LAYOUTS = ("1", "tp2", "pp2", "pp2 uneven", "pp2 vpp2", "tp2 pp2")
MOE_LAYOUTS = ("1", "tp2", "tp2 etp2", "pp2", "pp2 uneven", "ep2", "tp2 ep2 etp2", "pp2 vpp2", "tp2 pp2 ep2")
ALL = LAYOUTS | {"tp2 pp2": ParallelLayout(tp=2, pp=2)}
CASES = [(f, n) for f in ("llama", "qwen2", "qwen3") for n in DENSE_LAYOUTS] + [(f, n) for f in ("qwen2_moe", "mixtral") for n in MOE_LAYOUTS]


def tiny(family: str):
    """A random float32 model of transformers' own class; norms and biases, which start at one and zero, are moved away from there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | TINY[family])).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny checkpoints in the hub's spelling, and with experts fused as transformers keeps them; by family, made when first asked for."""
    home, made = tmp_path_factory.mktemp("families"), {}

    def get(family, fused=False):
        if family not in made:
            made[family] = tiny(family)
            made[family].save_pretrained(home / family)
            if family in MIXTURES:
                made[family].save_pretrained(home / f"{family}-fused", save_original_format=False)
        return home / (f"{family}-fused" if fused else family), made[family]

    return get


def batch() -> list[list[Sample]]:
    """Two micro-batches of ragged sequences, one of them longer than the context before the rope was stretched."""
    samples = jobs.samples(6)
    samples[1] = Sample(np.random.default_rng(1).integers(0, 131, 90), 5, {k: np.full(85, v[0]) for k, v in samples[1].fields.items()})
    return [samples[:3], samples[3:]]


def logits_and_export_job(rank, layout, path, micro_batches):
    return logits_job(rank, layout, path, micro_batches), export_job(rank, layout, path)


def whole_tensors(path, exports):
    whole = Assembler(params_of(read_arch(path)))
    for shard in (shard for shards in exports for shard in shards):
        whole.add(*shard)
    return whole.finish()


def assert_same(tensors, path):
    want = load_file(path / "model.safetensors")
    assert set(tensors) == set(want)
    assert [n for n in want if not torch.equal(tensors[n], want[n])] == []


@pytest.mark.parametrize("family, name", CASES, ids=[f"{f}-{n}" for f, n in CASES])
def test_logits_and_round_trip(ranks, checkpoints, family, name):
    """Logits of packed sequences equal transformers', and the exported tensors are the checkpoint's, bit for bit."""
    (path, model), layout, micro = checkpoints(family), ALL[name], batch()
    answers = ranks.run(layout, logits_and_export_job, str(path), micro)
    for got, samples in zip(answers[layout.rank_of(pp=layout.pp - 1)][0], micro):
        at = 0
        for sample in samples:
            with torch.no_grad():
                want = model(torch.tensor(sample.tokens)[None]).logits[0].numpy()
            assert np.abs(got[at : at + len(sample.tokens), : want.shape[1]] - want).max() < 2e-4
            at += len(sample.tokens)
    assert_same(whole_tensors(path, [a[1] for a in answers]), path)


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2_moe", "mixtral"])
def test_training_step(ranks, checkpoints, family, critic):
    """Loss and gradient norm of two steps are the same on one rank and on a grid; a tied model's critic has no output layer."""
    path, _ = checkpoints(family)
    layout = ALL["tp2 pp2 ep2" if family in MIXTURES else "tp2 pp2"]
    one, many = (curve(ranks.run(at, jobs.train_job, str(path), 2, critic)) for at in (ALL["1"], layout))
    np.testing.assert_allclose(many, one, rtol=1e-4)


@pytest.mark.parametrize("name", ["tp2 etp2", "tp2 pp2 ep2"])
@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_load(ranks, checkpoints, family, name):
    """A checkpoint with all experts in one tensor gives the model that the hub's spelling gives, and is exported in that."""
    fused, hub = checkpoints(family, fused=True)[0], checkpoints(family)[0]
    assert any(n.endswith("experts.gate_up_proj") for n in HFReader(fused).files)
    assert_same(whole_tensors(fused, ranks.run(ALL[name], export_job, str(fused))), hub)


def read_whole(path) -> dict[str, torch.Tensor]:
    """Every parameter of the map, read without Megatron."""
    reader, out = HFReader(path), {}
    for name, param in reader.fit(params_of(read_arch(path))).items():
        out[name] = torch.full(param.shape, float("nan"))
        for copy in copies(param, 1, 0):
            out[name][copy.target] = reader.read(copy)
    return out


def respell(path, out, rename) -> None:
    tensors = load_file(path / "model.safetensors")
    out.mkdir()
    save_file({rename(n): t for n, t in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_bytes((path / "config.json").read_bytes())


def test_mixtral_spellings(checkpoints, tmp_path):
    hub, fused = checkpoints("mixtral")[0], checkpoints("mixtral", fused=True)[0]
    long = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    respell(hub, tmp_path / "short", lambda n: n.replace("block_sparse_moe", "mlp"))
    respell(tmp_path / "short", tmp_path / "long", lambda n: next((n.replace(a, b) for a, b in long.items() if a in n), n))
    want = read_whole(hub)
    for path in (fused, tmp_path / "short", tmp_path / "long"):
        got = read_whole(path)
        assert all(torch.equal(got[n], want[n]) for n in want), path


def test_one_expert_is_read_alone(checkpoints):
    """Reading one expert out of a fused tensor touches that expert's elements, and of a shard only its rows."""
    path, model = checkpoints("qwen3_moe", fused=True)
    reader, sizes = HFReader(path), []
    plain = reader._slice

    class Counted:
        def __init__(self, name):
            self.stored = plain(name)

        def __getitem__(self, where):
            found = self.stored[where]
            sizes.append(found.numel())
            return found

    params = reader.fit(params_of(read_arch(path)))
    reader._slice = Counted
    weight = model.model.layers[2].mlp.experts.gate_up_proj[4].detach().reshape(2, 32, 48)
    for copy in copies(params["decoder.layers.2.mlp.experts.4.linear_fc1.weight"], 2, 1):
        assert torch.equal(reader.read(copy), weight[copy.piece.start[0], 16:][None])
    assert sizes == [16 * 48] * 2


def test_experts_in_two_spellings_at_once(checkpoints, tmp_path):
    fused, hub = checkpoints("qwen3_moe", fused=True)[0], checkpoints("qwen3_moe")[0]
    respell(fused, tmp_path / "both", lambda n: n)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file({name: load_file(hub / "model.safetensors")[name]}, tmp_path / "both" / "more.safetensors")
    with pytest.raises(ModelError, match=r"experts.down_proj \(6, 48, 32\) is there, and 1536 of its elements under other names"):
        HFReader(tmp_path / "both").fit(params_of(read_arch(tmp_path / "both")))


def test_written_out_tied_head_is_left_aside(checkpoints, tmp_path):
    """Some checkpoints of models with tied embeddings hold the table a second time; other unknown tensors stay errors."""
    path, _ = checkpoints("qwen3")
    respell(path, tmp_path / "m", lambda n: n)
    save_file({"lm_head.weight": torch.zeros(131, 48)}, tmp_path / "m" / "more.safetensors")
    got, want = read_whole(tmp_path / "m"), read_whole(path)
    assert all(torch.equal(got[n], want[n]) for n in want)
    untied, _ = checkpoints("qwen2")
    respell(untied, tmp_path / "n", lambda n: n.replace("lm_head", "head"))
    with pytest.raises(ModelError, match="missing tensor lm_head.weight"):
        HFReader(tmp_path / "n").fit(params_of(read_arch(tmp_path / "n")))


def test_a_sync_is_checked_against_the_map(checkpoints, tmp_path):
    """What an engine asks of a sync is what is exported, not how the start checkpoint happened to be written."""
    from moerl.rollout.engine import needed_header

    assert needed_header(checkpoints("mixtral", fused=True)[0]).keys() == needed_header(checkpoints("mixtral")[0]).keys()
    path, _ = checkpoints("qwen3")
    respell(path, tmp_path / "m", lambda n: n)
    save_file({"lm_head.weight": torch.zeros(131, 48)}, tmp_path / "m" / "more.safetensors")
    assert needed_header(tmp_path / "m") == needed_header(path) and "lm_head.weight" not in needed_header(path)


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
def test_resume_with_tied_embeddings(ranks, checkpoints, tmp_path, critic):
    """Both ends of a pipeline hold the table; saved there after a step and resumed without a pipeline, the next step is the same."""
    path, _ = checkpoints("llama")
    want = curve(ranks.run(ALL["1"], jobs.train_job, str(path), 2, critic))[1:]
    ranks.run(ALL["pp2"], jobs.save_job, str(path), 1, str(tmp_path), critic)
    got = curve(ranks.run(ALL["tp2"], jobs.resume_job, str(path), 1, 1, str(tmp_path), critic))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_shard_that_comes_twice_is_an_error(checkpoints):
    """Counting elements alone would take the first half twice for the whole."""
    path, _ = checkpoints("qwen2")
    whole = Assembler(params_of(read_arch(path)))
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    whole.add(name, torch.zeros(64, 40), 2, 0)
    with pytest.raises(ModelError, match="linear_fc2.weight: shard 0 of 2 came twice"):
        whole.add(name, torch.zeros(64, 40), 2, 0)


def qwen3_moe(hidden, layers, heads, kv, experts, ffn, **more):
    return dict(model_type="qwen3_moe", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, head_dim=128,
                num_experts=experts, num_experts_per_tok=8, moe_intermediate_size=ffn, intermediate_size=1, norm_topk_prob=True, vocab_size=151936) | more


def dense(kind, hidden, layers, heads, kv, ffn, vocab, **more):
    return dict(model_type=kind, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=ffn,
                vocab_size=vocab) | more


def qwen2_moe(*args, experts, topk, ffn, shared):
    return dense("qwen2_moe", *args, num_experts=experts, num_experts_per_tok=topk, moe_intermediate_size=ffn, shared_expert_intermediate_size=shared)


def mixtral(*args):
    return dense("mixtral", *args, num_local_experts=8, num_experts_per_tok=2)


# The hub's configurations, and the published counts: total and, for mixtures, active, in billions to the digits published, or to the element.
FULL = {
    "Qwen3-30B-A3B": (qwen3_moe(2048, 48, 32, 4, 128, 768), 30.5, 3.3),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 94, 64, 4, 128, 1536), 235, 22),
    "Qwen3-Coder-480B-A35B": (qwen3_moe(6144, 62, 96, 8, 160, 2560, rope_theta=10000000), 480, 35),
    "Mixtral-8x7B": (mixtral(4096, 32, 32, 8, 14336, 32000), 46_702_792_704, 12.9),
    "Mixtral-8x22B": (mixtral(6144, 56, 48, 8, 16384, 32000), 140_620_634_112, 39),
    "Qwen1.5-MoE-A2.7B": (qwen2_moe(2048, 24, 16, 16, 5632, 151936, experts=60, topk=4, ffn=1408, shared=5632), 14.3, 2.7),
    "Qwen2-57B-A14B": (qwen2_moe(3584, 28, 28, 4, 18944, 151936, experts=64, topk=8, ffn=2560, shared=20480), 57.41, 14),
    "Llama-3.2-1B": (dense("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True), 1_235_814_400, None),
    "Llama-3.1-8B": (dense("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248, None),
    "Llama-3.1-70B": (dense("llama", 8192, 80, 64, 8, 28672, 128256), 70_553_706_496, None),
    "Qwen2.5-0.5B": (dense("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768, None),
    "Qwen2.5-7B": (dense("qwen2", 3584, 28, 28, 4, 18944, 152064), 7_615_616_512, None),
    "Qwen3-0.6B": (dense("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920, None),
    "Qwen3-8B": (dense("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360, None),
}


def boxes(params):
    """Corners and ends [n, 2, dims] of all pieces of every Hugging Face tensor."""
    out: dict[str, list] = {}
    for piece in (p for param in params if not param.tied for p in param.pieces):
        box = piece.box()
        assert prod(b.stop - b.start for b in box) == prod(piece.view)
        out.setdefault(piece.name, []).append([[b.start for b in box], [b.stop for b in box]])
    return {name: np.array(found) for name, found in out.items()}


def assert_covered_once(params):
    """The pieces of every tensor lie inside it, share no element and are all of it; so do they in every parameter."""
    params = list(params)
    shapes = hf_shapes(params)
    for name, box in boxes(params).items():
        assert (box >= 0).all() and (box[:, 1] <= shapes[name]).all()
        assert (box[:, 1] - box[:, 0]).prod(-1).sum() == prod(shapes[name]), name
        apart = ((box[:, None, 0] >= box[None, :, 1]) | (box[:, None, 1] <= box[None, :, 0])).any(-1)
        assert (apart | np.eye(len(box), dtype=bool)).all(), name
    for param in params:
        assert sum(prod(p.view) for p in param.pieces) == prod(param.shape), param.name


def published(count: int, number: float) -> bool:
    """Whether `count` may be published as `number`: exact, or billions whose last digit is rounded or cut."""
    if number > 10**6:
        return count == number
    return abs(count / 1e9 - number) < 10.0 ** -len(str(number).partition(".")[2])


@pytest.mark.parametrize("name", FULL)
def test_full_size(name):
    """On meta data: the map has the tensors of transformers' own model, each covered once in every spelling, and the published size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf, total, active = FULL[name]
    family = FAMILIES[hf["model_type"]]
    arch = family.arch({"rms_norm_eps": 1e-6, "rope_theta": 1e6} | hf)
    params = params_of(arch)
    assert_covered_once(params.values())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    theirs = {n: tuple(t.shape) for n, t in model.state_dict().items() if not (arch.tied_embeddings and n == "lm_head.weight")}
    in_memory = spelled(params, theirs)
    assert hf_shapes(in_memory.values()) == theirs
    assert_covered_once(in_memory.values())
    found = count(arch)
    assert published(found.total, total)
    assert published(found.active, total if active is None else active)


REFUSED = {
    "llama": [dict(attention_bias=True), dict(mlp_bias=True), dict(hidden_act="gelu"), dict(rope_scaling={"type": "yarn", "factor": 4.0}),
              dict(quantization_config={"quant_method": "fp8"}), dict(rope_parameters={"rope_type": "dynamic"})],
    "qwen2": [dict(use_sliding_window=True), dict(layer_types=["full_attention", "sliding_attention"]), dict(rope_scaling={"rope_type": "llama3"})],
    "qwen3": [dict(attention_bias=True), dict(partial_rotary_factor=0.5)],
    "qwen2_moe": [dict(rope_parameters={"rope_type": "linear"})],
    "mixtral": [dict(sliding_window=4096)],
    "qwen3_moe": [dict(shared_expert_intermediate_size=64), dict(use_qk_norm=False)],
}


@pytest.mark.parametrize("family, change", [(f, c) for f, changes in REFUSED.items() for c in changes], ids=str)
def test_fields_that_are_not_understood(family, change):
    base = next(hf for hf, *_ in FULL.values() if hf["model_type"] == family) | {"rms_norm_eps": 1e-6}
    FAMILIES[family].arch(base)
    (field, value), = change.items()
    word = {"rope_scaling": "rope type", "rope_parameters": "rope type"}.get(field, field)
    with pytest.raises(ModelError, match=f"{family}: .*{word}"):
        FAMILIES[family].arch(base | change)


def test_spellings_of_config_fields():
    """The hub's and transformers' spelling of one configuration give one architecture."""
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3")
    hf = FULL["Llama-3.1-8B"][0] | {"rms_norm_eps": 1e-5}
    llama = FAMILIES["llama"].arch
    assert llama(hf | dict(rope_theta=500000.0, rope_scaling=scaling)) == llama(hf | dict(rope_parameters=scaling | {"rope_theta": 500000.0}))
    hf = FULL["Mixtral-8x7B"][0] | {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    renamed = {("num_experts" if k == "num_local_experts" else k): v for k, v in hf.items()}
    assert FAMILIES["mixtral"].arch(hf) == FAMILIES["mixtral"].arch(renamed)


def test_models_command(checkpoints):
    from typer.testing import CliRunner

    from moerl.cli import app

    listed = CliRunner().invoke(app, ["models"])
    assert listed.exit_code == 0 and all(f"\n{name} " in listed.stdout for name in FAMILIES)
    path, model = checkpoints("qwen2_moe")
    for place in (path, path / "config.json"):
        shown = CliRunner().invoke(app, ["models", str(place)])
        total = sum(p.numel() for p in model.parameters())
        idle = 3 * 3 * 32 * 64  # one mixture layer, three of six experts, three matrices each
        assert shown.exit_code == 0 and re.search(r"dense_layers +0, 1, 2\n", shown.stdout)
        for number in (total, 2 * 131 * 64, total - idle):
            assert f" {number:,} (" in shown.stdout
    missing = CliRunner().invoke(app, ["models", "/nowhere"])
    assert missing.exit_code == 1 and missing.stderr.startswith("error: /nowhere: no Hugging Face checkpoint there")
