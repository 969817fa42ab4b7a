"""Auxiliary losses of routers and the update of their biases: nothing of them unless asked for, and then what the papers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moerl.config.load import load
from moerl.config.schema import TrainConfig
from moerl.controller.placement import place
from moerl.controller.run import model_spec
from moerl.layout import ParallelLayout
from moerl.models import FAMILIES
from moerl.models.arch import ModelError
from tests import train_jobs as jobs
from tests.models import write_deepseek
from tests.test_families_deepseek import reference
from tests.test_tensormap_properties import SIZES

LAYOUTS = {
    "1": ParallelLayout(), "tp2 pp2 ep2": ParallelLayout(tp=2, pp=2, ep=2), "pp2 vpp2": ParallelLayout(pp=2, vpp=2),
    "dp2 ep2": ParallelLayout(dp=2, ep=2),
}
OFF = dict(aux_loss=0.0, z_loss=0.0, bias_update_rate=0.0)
BATCH = jobs.samples(7)


@pytest.fixture(scope="module")
def paths(tiny_moe, tmp_path_factory):
    """Softmax scores without a bias; sigmoid scores with one, in groups."""
    return {"qwen3_moe": tiny_moe, "deepseek_v3": write_deepseek(tmp_path_factory.mktemp("balance") / "v3", version=3)}


def make(rank, layout, path, router):
    from moerl.megatron import model
    from moerl.megatron.optimizer import Schedule
    from moerl.models import read_arch

    made = model.make(read_arch(path), layout, rank, torch.float32, optimizer=jobs.OPTIMIZER, schedule=Schedule(1e-2), router=router)
    made.load_weights(path)
    return made


def buffers(made):
    """Copies of what routers hold beside their weights."""
    return {n: b.clone() for c in made.bare() for n, b in c.named_buffers() if "expert_bias" in n or "local_tokens" in n}


def biases(made):
    return {s.name: s.tensor.clone() for s in made.owned_shards() if "expert_bias" in s.name}


def step_job(rank, layout, path, router):
    """Gradient norm of one step, and the biases before and after it and after one more scoring pass."""
    made = make(rank, layout, path, router)
    before = biases(made)
    result = jobs.step(made, BATCH, rank, layout)
    after = biases(made)
    made.logprobs(jobs.plan(rank, layout, BATCH), 1.0)
    return result["grad_norm"], before, after, biases(made)


def routed(path):
    """transformers' model, and of every mixture layer logits [t, experts] and choices [t, k] of every forward pass to come."""
    from transformers import AutoModelForCausalLM

    version3 = "v3" in str(path)
    model = reference(path) if version3 else AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[int, list] = {}
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            gate = layer.mlp.gate
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args, i=i, gate=gate: seen.setdefault(i, []).append((args[0] @ gate.weight.T, args[1])))
    return model, seen


def plain_step(path, layout, router):
    """Gradient norm of loss + coefficients * losses, and the load of every expert, by autograd through transformers' model."""
    model, seen = routed(path)
    sigmoid = "v3" in str(path)
    total, loss, loads = sum(len(s.tokens) for s in BATCH), 0.0, {}
    for dp in range(layout.dp):
        for micro in jobs.plan(layout.rank_of(dp=dp), layout, BATCH):
            seen.clear()
            for s in micro:
                logp = (model(torch.tensor(s.tokens)[None]).logits[0] / 0.7).log_softmax(-1)
                at = torch.arange(s.prompt - 1, len(s.tokens) - 1)
                entropy = -(logp.exp() * logp).sum(-1)[at]
                weights, advantages = (torch.tensor(s.fields[k]) for k in ("weights", "advantages"))
                picked = logp[at, torch.tensor(s.tokens[s.prompt :])]
                loss = loss - (weights * (advantages * picked + 0.01 * entropy)).sum()
            for i, found in seen.items():
                logits, chosen = torch.cat([x for x, _ in found]), torch.cat([c for _, c in found])
                tokens, experts = logits.shape
                load = torch.bincount(chosen.flatten(), minlength=experts).float()
                loads[i] = loads.get(i, 0) + load
                p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
                switch = experts * (load / chosen.numel() * p.mean(0)).sum()
                loss = loss + tokens / total * (router["aux_loss"] * switch + router["z_loss"] * logits.logsumexp(-1).square().mean())
    loss.backward()
    return float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))), loads


@pytest.mark.parametrize("family, name", [("qwen3_moe", n) for n in LAYOUTS] + [("deepseek_v3", n) for n in ("1", "tp2 pp2 ep2")])
def test_losses_and_bias_update_equal_plain_torch(ranks, paths, family, name):
    """Guards their scale and their splitting: filler, micro-batches, sequence and data parallelism must not show in the gradient."""
    layout, path = LAYOUTS[name], paths[family]
    router = dict(aux_loss=3.0, z_loss=0.1, bias_update_rate=0.05 if family == "deepseek_v3" else 0.0)
    want, loads = plain_step(path, layout, router)
    answers = ranks.run(layout, step_job, str(path), router)
    assert answers[0][0] == pytest.approx(want, rel=1e-4)
    assert plain_step(path, layout, OFF)[0] != pytest.approx(want, rel=0.05)
    moved = 0
    for _, before, after, later in answers:
        for tensor, bias in before.items():
            load = loads[int(tensor.split(".")[2])]
            assert torch.allclose(after[tensor], bias + 0.05 * torch.sign(load.mean() - load), atol=1e-6), tensor
            assert torch.equal(later[tensor], after[tensor])
            moved += 1
    assert moved == (3 if family == "deepseek_v3" else 0)


def off_job(rank, layout, path):
    """Is one step with everything set to zero the step without a word about it, and what did it leave in the routers?"""
    out = []
    for router in (None, OFF):
        made = make(rank, layout, path, router)
        before = buffers(made)
        made.logprobs(jobs.plan(rank, layout, BATCH), 1.0)
        scored = buffers(made)
        norm = jobs.step(made, BATCH, rank, layout)["grad_norm"]
        after = buffers(made)
        untouched = all(torch.equal(before[n], scored[n]) and torch.equal(before[n], after[n]) for n in before)
        out.append((made.balancer is None, untouched, len(before), norm, [s.tensor.clone() for s in made.owned_shards()]))
    (plain, still, count, norm, weights), (other, others_still, _, others_norm, others) = out
    return plain and other and still and others_still and norm == others_norm and all(map(torch.equal, weights, others)), count


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_off_is_off(ranks, paths, family):
    """Guards the policy gradient against pre-training's balancing: routers keep their biases and count nothing, scoring or training."""
    ((same, count),) = ranks.run(ParallelLayout(), off_job, str(paths[family]))
    assert same and (count > 0) == (family == "deepseek_v3")


def config(**router) -> TrainConfig:
    base = dict(model={"path": "x"}, data={"prompts": "x"}, reward={"function": "x"}, trainer={"steps": 1, "output": "x"})
    return TrainConfig.model_validate(base | {"actor": {"router": router}})


def test_the_configuration_says_off_and_reaches_the_actor_alone():
    arch = FAMILIES["deepseek_v3"].arch(SIZES)
    assert model_spec(config(), arch, "actor").router == OFF
    asked = config(aux_loss=0.1, bias_update_rate=0.001)
    assert model_spec(asked, arch, "actor").router == OFF | dict(aux_loss=0.1, bias_update_rate=0.001)
    assert model_spec(asked, arch, "critic").router is None and model_spec(asked, arch, "reference").router is None
    place(asked, arch)
    assert load(Path(__file__).parent.parent / "configs" / "demo_ppo.yaml", TrainConfig).actor.router.model_dump() == OFF


@pytest.mark.parametrize("family, router, message", [
    ("llama", dict(aux_loss=0.1), "actor.router.aux_loss 0.1: llama has no experts"),
    ("mixtral", dict(bias_update_rate=0.1), "actor.router.bias_update_rate 0.1: the routers of mixtral have no selection bias"),
])
def test_what_a_family_has_not_is_refused(family, router, message):
    with pytest.raises(ModelError, match=message):
        place(config(**router), FAMILIES[family].arch(SIZES))
