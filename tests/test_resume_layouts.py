"""A run goes on at another layout as it would have gone on at its own: loss, gradient norm and all weights of the next step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moerl.layout import ParallelLayout
from moerl.models import params_of, read_arch
from moerl.models.tensormap import assemble
from tests import train_jobs as jobs
from tests.models import write_deepseek, write_qwen3_moe, write_random
from tests.test_families_dense import COMMON, TINY
from tests.test_parity import LAYOUTS

ALL = LAYOUTS | {"dp4": ParallelLayout(dp=4), "dp2 ep2": ParallelLayout(dp=2, ep=2), "tp2 pp2": ParallelLayout(tp=2, pp=2),
                 "pp2 dp2 ep2": ParallelLayout(pp=2, dp=2, ep=2)}


def write_llama(path):
    from transformers import AutoConfig

    return write_random(path, AutoConfig.for_model("llama", **COMMON | TINY["llama"]))


# qwen3_moe has a dense layer among the mixtures, llama and "tied" one table at both ends of the pipeline, deepseek biases that move.
WRITERS = {
    "qwen3_moe": write_qwen3_moe, "tied": lambda path: write_qwen3_moe(path, tie_word_embeddings=True), "llama": write_llama,
    "deepseek": lambda path: write_deepseek(path, 3),
}


def step_job(rank, layout, path, seed, load=None, save=None, then=None):
    """Restore, if there is something; a step; save it, if asked, and take one more: numbers and weights after the last step."""
    from moerl.megatron import checkpoint, model
    from moerl.megatron.optimizer import Schedule

    arch = read_arch(path)
    router = {"bias_update_rate": 1e-2} if arch.expert_bias else None
    # Adam divides by the gradient's size: an eps far below it would let the last bits of a vanishing gradient decide.
    options = jobs.OPTIMIZER | {"eps": 1e-4}
    schedule = Schedule(2e-3, kind="linear", total=10)
    made = model.make(arch, layout, rank, torch.float32, optimizer=options, schedule=schedule, router=router)
    made.load_weights(path)
    if load:
        checkpoint.load(made, load)
    out = jobs.step(made, jobs.samples(seed=seed), rank, layout)
    if save:
        checkpoint.save(made, save)
        out = jobs.step(made, jobs.samples(seed=then), rank, layout)
    return out | {"layout": layout}, [(s.name, s.tensor.clone(), s.parts, s.index) for s in made.owned_shards()]


def outcome(path, answers) -> tuple[float, float, dict[str, torch.Tensor]]:
    params = params_of(read_arch(path))
    return jobs.total([out for out, _ in answers]), answers[0][0]["grad_norm"], assemble(params, [shards for _, shards in answers])


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Model, checkpoint after one step, and what the second step gave, for a kind of model and the layout that saved it."""
    made, paths, root = {}, {}, tmp_path_factory.mktemp("resume")

    def get(kind: str, name: str):
        if kind not in paths:
            paths[kind] = WRITERS[kind](root / kind)
        if (kind, name) not in made:
            directory = root / f"{kind} {name}"
            answers = ranks.run(ALL[name], step_job, str(paths[kind]), 0, None, str(directory), 1)
            made[kind, name] = directory, outcome(paths[kind], answers)
        return paths[kind], *made[kind, name]

    return get


OTHERS = ("1", "tp2", "pp2", "dp4", "dp2 ep2")


@pytest.mark.parametrize(("kind", "before", "after"), [
    *(("qwen3_moe", "tp2 pp2 ep2", after) for after in (*OTHERS, "pp2 vpp2", "tp2 etp2")),
    *(("deepseek", "tp2 pp2 ep2", after) for after in OTHERS),
    *(("tied", "tp2 pp2 ep2", after) for after in ("1", "dp4", "pp2")),
    *(("llama", "tp2 pp2", after) for after in ("1", "tp2", "pp2", "dp4")),
    ("llama", "pp2", "dp4"), ("llama", "dp4", "pp2"), ("qwen3_moe", "1", "tp2 pp2 ep2"), ("qwen3_moe", "dp4", "pp2 dp2 ep2"),
    ("deepseek", "dp2 ep2", "tp2 pp2 ep2"), ("tied", "pp2 vpp2", "tp2 pp2 ep2"),
])
def test_the_next_step_is_the_same(ranks, saved, kind, before, after):
    path, directory, (loss, norm, weights) = saved(kind, before)
    got_loss, got_norm, got = outcome(path, ranks.run(ALL[after], step_job, str(path), 1, str(directory)))
    assert got_loss == pytest.approx(loss, rel=2e-5)
    assert got_norm == pytest.approx(norm, rel=2e-5)
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_allclose(got[name].numpy(), tensor.numpy(), rtol=0, atol=1e-6, err_msg=name)
