"""One optimizer step is the same step at every layout, and a restored run takes the step the saved one would have taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.layout import ParallelLayout
from tests import train_jobs as jobs

ONE = ParallelLayout()
LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2 etp2": ParallelLayout(tp=2, etp=2),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "dp2": ParallelLayout(dp=2),
    "tp2 ep2 etp2": ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    "pp2 vpp2": ParallelLayout(pp=2, vpp=2),
    "tp2 pp2 ep2": ParallelLayout(tp=2, pp=2, ep=2),
    "dp2 pp2 ep2": ParallelLayout(dp=2, pp=2, ep=2),
}


@pytest.fixture(scope="module")
def one_rank(ranks, tiny_moe):
    return {critic: ranks.run(ONE, jobs.train_job, str(tiny_moe), 3, critic) for critic in (False, True)}


def curve(results):
    """(loss, gradient norm) of every step."""
    return [(jobs.total(step), step[0]["grad_norm"]) for step in zip(*results)]


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradient_norm(ranks, tiny_moe, one_rank, name, critic):
    """Ragged lengths, several micro-batches, global denominators: averaging by micro-batch or rank would show here."""
    got = curve(ranks.run(LAYOUTS[name], jobs.train_job, str(tiny_moe), 3, critic))
    np.testing.assert_allclose(got, curve(one_rank[critic]), rtol=1e-4)


def test_equals_a_plain_torch_step(tiny_moe, one_rank):
    """Loss and gradient norm of the first step against transformers' model and a loss written out here."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    loss = 0.0
    for s in jobs.samples(seed=0):
        logits = model(torch.tensor(s.tokens)[None]).logits[0] / 0.7
        logp = logits.log_softmax(-1)
        at = torch.arange(s.prompt - 1, len(s.tokens) - 1)
        entropy = -(logp.exp() * logp).sum(-1)[at]
        picked = logp[at, torch.tensor(s.tokens[s.prompt :])]
        weights, advantages = (torch.tensor(s.fields[k]) for k in ("weights", "advantages"))
        loss = loss - (weights * (advantages * picked + 0.01 * entropy)).sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    np.testing.assert_allclose(curve(one_rank[False])[0], (float(loss), float(norm)), rtol=1e-4)


def micro_batch_job(rank, layout, path, max_tokens):
    made = jobs.make(rank, layout, path)
    return [jobs.step(made, jobs.samples(seed=0), rank, layout, max_tokens) | {"layout": layout}]


def test_micro_batch_size_does_not_change_the_step(ranks, tiny_moe):
    small, large = (curve(ranks.run(ONE, micro_batch_job, str(tiny_moe), cap)) for cap in (32, 4096))
    np.testing.assert_allclose(small, large, rtol=1e-5)


def few_samples_job(rank, layout, path):
    made = jobs.make(rank, layout, path)
    batch = jobs.samples(1)
    assert [len(micro) for micro in jobs.plan(rank, layout, batch)] in ([1], [0])
    return [jobs.step(made, batch, rank, layout) | {"layout": layout}]


def test_rank_without_samples_takes_part(ranks, tiny_moe):
    """One sample for two data-parallel ranks: the idle one runs a placeholder, nobody hangs, the step is the same."""
    want = curve(ranks.run(ONE, few_samples_job, str(tiny_moe)))
    np.testing.assert_allclose(curve(ranks.run(LAYOUTS["ep2"], few_samples_job, str(tiny_moe))), want, rtol=1e-4)


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize(
    ("saved", "restored"), [("tp2 pp2 ep2", "tp2 pp2 ep2"), ("tp2 pp2 ep2", "dp2"), ("ep2", "tp2"), ("dp2", "pp2")]
)
def test_resume_takes_the_same_step(ranks, tiny_moe, one_rank, tmp_path, saved, restored, critic):
    """Saved after two steps; the third is the one of a run that never stopped, at the same layout or another."""
    ranks.run(LAYOUTS[saved], jobs.save_job, str(tiny_moe), 2, str(tmp_path), critic)
    got = curve(ranks.run(LAYOUTS[restored], jobs.resume_job, str(tiny_moe), 2, 1, str(tmp_path), critic))
    np.testing.assert_allclose(got, curve(one_rank[critic])[2:], rtol=1e-4)


@pytest.fixture(scope="module")
def tied_moe(tmp_path_factory):
    from tests.models import write_qwen3_moe

    return write_qwen3_moe(tmp_path_factory.mktemp("tied") / "moe", tie_word_embeddings=True)


def test_tied_embeddings_over_a_pipeline(ranks, tied_moe, tmp_path):
    """Both ends hold the table: one gradient, and a checkpoint whose other parameters are not shifted by the table's padding."""
    want = curve(ranks.run(ONE, jobs.train_job, str(tied_moe), 3))
    np.testing.assert_allclose(curve(ranks.run(LAYOUTS["pp2"], jobs.train_job, str(tied_moe), 3)), want, rtol=1e-4)
    ranks.run(LAYOUTS["pp2"], jobs.save_job, str(tied_moe), 2, str(tmp_path))
    for name in ("pp2", "tp2"):
        got = curve(ranks.run(LAYOUTS[name], jobs.resume_job, str(tied_moe), 2, 1, str(tmp_path)))
        np.testing.assert_allclose(got, want[2:], rtol=1e-4)


def steps_job(rank, layout, path, directory):
    """Adam's step counters after two steps, a save and a restore, and one more step."""
    from moerl.megatron import checkpoint

    jobs.save_job(rank, layout, path, 2, directory)
    made = jobs.make(rank, layout, path)
    checkpoint.load(made, directory)
    jobs.step(made, jobs.samples(seed=2), rank, layout)
    parts = getattr(made.optimizer, "chained_optimizers", [made.optimizer])
    return [float(s["step"]) for part in parts for s in part.optimizer.state.values()]


def test_restored_step_counters_advance_once(ranks, tiny_moe, tmp_path):
    (counters,) = ranks.run(ONE, steps_job, str(tiny_moe), str(tmp_path))
    assert len(counters) > 10 and set(counters) == {3.0}


def balance_job(rank, layout, path):
    """What pre-training adds to the gradient: nothing of it may be on."""
    config = jobs.make(rank, layout, path).chunks[0].config
    return config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.moe_router_bias_update_rate


def test_no_balancing_loss_in_the_gradient(ranks, tiny_moe):
    ((kind, aux, z, rate),) = ranks.run(ONE, balance_job, str(tiny_moe))
    assert (kind, aux, rate) == ("none", 0.0, 0.0) and not z


def value_start_job(rank, layout, path):
    return [r["values"].numpy() for r in jobs.make(rank, layout, path, value_head=True).values([jobs.samples(4)])]


def test_value_head_starts_at_zero(ranks, tiny_moe):
    answers = ranks.run(LAYOUTS["tp2 pp2 ep2"], value_start_job, str(tiny_moe))
    assert answers[0] == [] and np.all(answers[-1][0] == 0) and answers[-1][0].size == sum(s.response for s in jobs.samples(4))


def test_learning_rate_schedule(ranks):
    """Plain arithmetic, but the module imports Megatron: asked of a rank."""
    (rates,) = ranks.run(ONE, schedule_job)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])


def schedule_job(rank, layout):
    from moerl.megatron.optimizer import Schedule

    warm = Schedule(1.0, min_lr=0.1, kind="cosine", warmup=2, total=4)
    return [warm.at(i) for i in (0, 1, 2, 3, 4, 9)]


def restart_job(rank, layout, path):
    """A missing tensor in a Megatron checkpoint is named, not skipped."""
    from moerl.megatron.checkpoint import _load_chunk

    made = jobs.make(rank, layout, path, train=False)
    state = made.bare()[0].state_dict()
    del state["decoder.final_layernorm.weight"]
    try:
        _load_chunk(made.bare()[0], state)
    except ValueError as error:
        return str(error)


def test_incomplete_state_is_refused(ranks, tiny_moe):
    (message,) = ranks.run(ONE, restart_job, str(tiny_moe))
    assert "1 tensors, first decoder.final_layernorm.weight" in message
