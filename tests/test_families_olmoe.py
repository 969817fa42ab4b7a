"""OLMoE: transformers' logits and tensors at every layout, the same step on one rank and on a grid, the published size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.models import FAMILIES, params_of, read_arch
from moerl.models.listing import count
from moerl.models.tensormap import assemble, hf_shapes, spelled
from tests import train_jobs as jobs
from tests.test_families_dense import assert_covered_once
from tests.test_parity import LAYOUTS, export_job, logits_job
from tests.test_training import curve

MICRO = [jobs.samples(6)[:3], jobs.samples(6)[3:]]
# Fewer key heads than query heads and widths that all differ: a transposed or swapped matrix does not fit.
TINY = dict(
    model_type="olmoe", vocab_size=131, hidden_size=64, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False, max_position_embeddings=256, rope_theta=10000.0,
    initializer_range=0.1, rms_norm_eps=1e-5, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)
FULL = TINY | dict(
    vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
    num_experts=64, num_experts_per_tok=8, max_position_embeddings=4096,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random checkpoint of transformers' own class and that class's logits, sequence after sequence; no norm has its neutral value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("olmoe")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
        logits = [np.concatenate([model(torch.tensor(s.tokens)[None]).logits[0].numpy() for s in micro]) for micro in MICRO]
    model.save_pretrained(path)
    return path, logits


def both_job(rank, layout, path):
    return logits_job(rank, layout, path, MICRO), export_job(rank, layout, path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_and_round_trip(ranks, tiny, name):
    (path, logits), layout = tiny, LAYOUTS[name]
    answers = ranks.run(layout, both_job, str(path))
    for got, want in zip(answers[layout.rank_of(pp=layout.pp - 1)][0], logits, strict=True):
        assert np.abs(got[: len(want), : want.shape[1]] - want).max() < 1e-4
    before, after = load_file(path / "model.safetensors"), assemble(params_of(read_arch(path)), [shards for _, shards in answers])
    assert set(before) == set(after) and all(torch.equal(before[n], after[n]) for n in before)


def test_a_step_is_the_same_on_a_grid(ranks, tiny):
    one, many = (curve(ranks.run(LAYOUTS[name], jobs.train_job, str(tiny[0]), 2)) for name in ("1", "tp2 pp2 ep2"))
    np.testing.assert_allclose(many, one, rtol=1e-4)


def test_full_size():
    """Every tensor of transformers' model in one place of the map, and the parameters of the paper: 6.9 B, 1.3 B of them active."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = FAMILIES["olmoe"].arch(FULL)
    params = params_of(arch)
    with torch.device("meta"):
        theirs = {n: tuple(t.shape) for n, t in AutoModelForCausalLM.from_config(AutoConfig.for_model(**FULL)).state_dict().items()}
    in_memory = spelled(params, theirs)
    assert hf_shapes(in_memory.values()) == theirs
    assert_covered_once(params.values())
    assert (round(count(arch).total / 1e9, 1), round(count(arch).active / 1e9, 1)) == (6.9, 1.3)
