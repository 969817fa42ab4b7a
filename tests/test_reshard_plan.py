"""Plans at full size and their costs, plans of drawn models and layouts, and the command that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from moerl.config.load import load
from moerl.config.schema import TrainConfig
from moerl.controller.preview import preview
from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.arch import ModelError
from moerl.models.tensormap import hf_shapes
from moerl.reshard import explain, offline
from tests import reshard_helpers as proof
from tests.test_families_deepseek import V3

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "ppo_deepseek_v3_671b.yaml"
SET = ("--config", str(CONFIG), "--set")
PUBLISHED = V3 | {"architectures": ["DeepseekV3ForCausalLM"]}
SHARED = re.compile(r"norm|\.gate\.|q_a_proj|kv_a_proj")  # tensors that every tensor-parallel worker has whole


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    (path / "config.json").write_text(json.dumps(PUBLISHED))
    return path


def planned(path, *overrides):
    return preview(load(CONFIG, TrainConfig, [f"model.path={path}", *overrides]))


def share(path, tp: int) -> int:
    """Bytes of bfloat16 (the router's bias: float32) that one of `tp` workers loads, by the shapes of the published model alone."""
    total = 0
    for name, shape in hf_shapes(params_of(read_arch(path).main()).values()).items():
        size = prod(shape) * (4 if "e_score" in name else 2)
        total += size if SHARED.search(name) else size // tp
    return total


@pytest.mark.parametrize(
    "overrides, tp, egress",
    [
        ((), 32, 1.11),
        (("actor.layout={tp: 8, pp: 4, ep: 32, dp: 8, first_stage_layers: 16}", "rollout.layout={tp: 16, dp: 16}"), 16, 1.05),
        (("actor.layout={tp: 8, pp: 4, ep: 32, dp: 8, first_stage_layers: 16}", "rollout.layout={tp: 16, ep: 16, dp: 16}"), 16, 1.09),
    ],
    ids=["TP1 PP16 EP16 to TP32", "TP8 PP4 EP32 to TP16", "TP8 PP4 EP32 to EP16"],
)
def test_deepseek_v3_on_256_gpus_moves_exactly_what_is_needed(deepseek, overrides, tp, egress):
    made = planned(deepseek, *overrides)
    costs = explain.costs(made)
    assert costs.delivered == costs.needed == 256 * share(deepseek, tp)
    assert not explain.faults(made)
    assert costs.buffers <= 2.1 * 2**30 and costs.messages < 500_000
    assert costs.egress[1] <= egress * costs.egress[0] and costs.ingress[1] <= 1.07 * costs.ingress[0]
    # As few rounds as a buffer's size allows, give or take an eighth: no process waits for others for long.
    assert made.rounds <= 1.25 * max(costs.egress[1], costs.ingress[1]) / made.cap


def test_a_tensor_that_no_worker_loads_is_named(tmp_path):
    """Without `architectures` vLLM takes a model without a head."""
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"num_hidden_layers": 8}))
    with pytest.raises(ModelError, match="lm_head.weight: no rollout worker loads it; is `architectures`"):
        planned(tmp_path, "actor.layout={tp: 1}", "rollout.layout={tp: 1}")


def moerl(*args: str):
    return subprocess.run([sys.executable, "-m", "moerl.cli", *args], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_command_explains_saves_and_checks(deepseek, tmp_path):
    small = tmp_path / "config.json"
    small.write_text(json.dumps(PUBLISHED | {"num_hidden_layers": 8, "n_routed_experts": 32, "n_group": 4}))
    sets = [f"model.path={small}", "actor.layout={pp: 2, ep: 4, dp: 4}", "rollout.layout={tp: 4, dp: 2}", "cluster.gpus_per_node=4"]
    args = [arg for one in sets for arg in ("--set", one)]
    said = moerl("reshard", "--config", str(CONFIG), "--explain", "--hardware", "h200", "--save", str(tmp_path / "plan"), *args)
    assert said.returncode == 0, said.stderr
    for line in (r"workers get +[\d.]+ GB, 1\.0000x of what they need", "network egress", r"messages +[\d,]+ in \d+ rounds", r"s on h200"):
        assert re.search(line, said.stdout), line
    again = moerl("reshard", "--plan", str(tmp_path / "plan"), "--explain", "--hardware", "h200")
    assert again.stdout == said.stdout and again.returncode == 0


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "moerl reshard takes either --config or --plan"),
        (("--config", str(CONFIG), "--hardware", "a100"), "--hardware a100: must be one of h100, h200, b200"),
        (("--plan", "README.md", "--explain"), "README.md: not a reshard plan"),
        ((*SET, "model.path=MODEL", "--set", "rollout.layout={tp: 24, dp: 8}"), "rollout.layout: attention heads 128"),
        ((*SET, "model.path=MODEL", "--set", "rollout.sync.transport=messages"), "rollout.sync.transport messages: NCCL"),
        ((*SET, "rollout.layout.ep=8"), "rollout.layout: ep 8 must be 1 or tp 32"),
        ((*SET, "rollout.colocated=false"), "rollout.sleep: engines on GPUs of their own"),
    ],
)
def test_bad_input_is_one_line(deepseek, args, message):
    said = moerl("reshard", *(a.replace("MODEL", str(deepseek)) for a in args))
    assert said.returncode == 1 and said.stderr.startswith("error: ") and message in said.stderr, said.stderr
    assert "Traceback" not in said.stderr


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_models_and_layouts(tmp_path, data):
    """Dimensions and layouts that nobody chose: each element arrives where vLLM's loader puts it."""
    from transformers import AutoConfig

    draw = data.draw
    tp, etp, ep, pp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    workers, experts_whole = draw(st.sampled_from([(1, False), (2, False), (2, True)]))
    groups, each = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2, 3]))
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=draw(st.sampled_from([64, 96, 128])), num_attention_heads=groups * each, num_key_value_heads=groups,
        head_dim=draw(st.sampled_from([16, 24])), vocab_size=draw(st.integers(90, 200)),
        num_hidden_layers=2 * draw(st.sampled_from([1, 2])),
        moe_intermediate_size=draw(st.sampled_from([32, 64, 96])), intermediate_size=draw(st.sampled_from([64, 96])),
        num_experts=draw(st.sampled_from([4, 8])), mlp_only_layers=draw(st.sampled_from([[], [0], [1]])), num_experts_per_tok=2,
        decoder_sparse_step=1, tie_word_embeddings=draw(st.booleans()), architectures=["Qwen3MoeForCausalLM"], dtype="float32",
    )
    layout = ParallelLayout(tp=tp, etp=etp, ep=ep, pp=pp, dp=max(1, etp * ep // tp) * draw(st.sampled_from([1, 2])))
    config.save_pretrained(tmp_path)
    arch = read_arch(tmp_path)
    try:
        arch.check(layout)
    except ValueError:
        assume(False)
    params = params_of(arch)
    tensors = proof.iota(params)
    engine = offline.engine_config(str(tmp_path), workers, "float32", experts_whole)
    found = proof.traces(engine, workers, params)
    made = proof.make_plan(arch, params, layout, found, engines=draw(st.sampled_from([1, 2])), node=draw(st.sampled_from([1, 2, 64])))
    got = proof.carried_out(made, proof.shards(tensors, params, arch, layout), proof.shapes_of(found, made, params))
    vllms = [proof.loaded(engine, rank, workers, tensors) for rank in range(workers)]
    for i, worker in enumerate(got):
        proof.assert_as_loaded(worker, vllms[i % workers])
    assert not explain.faults(made) and explain.costs(made).delivered == made.needed


def test_what_cannot_be_traced_goes_whole(tmp_path, monkeypatch):
    """A loader that computes: its module's tensors go to that worker's own loader, all of them, and the plan says which and how many
    bytes.
    """
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from tests.models import write_qwen3_moe

    path = write_qwen3_moe(tmp_path / "moe", head_dim=32)
    arch = read_arch(path)
    params = params_of(arch)
    tensors = proof.iota(params)
    plain = Qwen3MoeForCausalLM.load_weights
    monkeypatch.setattr(
        Qwen3MoeForCausalLM, "load_weights", lambda self, ws: plain(self, ((n, w * 1 if "down_proj" in n else w) for n, w in ws))
    )
    found = proof.traces(offline.engine_config(str(path), 2, "float32"), 2, params)
    whole = set(found[0].whole)
    assert whole == {n for n in hf_shapes(params.values()) if ".experts." in n or n.endswith("mlp.down_proj.weight")} & whole and whole
    assert "aten.mul.Tensor on the way" in next(iter(found[0].whole.values()))
    layout = ParallelLayout(tp=2, ep=2)
    made = proof.make_plan(arch, params, layout, found, engines=2, node=2)
    for worker in proof.carried_out(made, proof.shards(tensors, params, arch, layout), proof.shapes_of(found, made, params)):
        assert all((worker[n] == tensors[n.removeprefix("whole:")]).all() for n in worker if n.startswith("whole:"))
    assert re.search(r"not traced +\d+ tensors of the example layers go whole \([\d.]+ [kM]B\)", explain.report(made, "h100"))
