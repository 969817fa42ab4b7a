"""bfloat16: Megatron's log-probs are as close to float32 on the same weights as transformers' own in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import train_jobs as jobs
from tests.models import write_deepseek, write_random
from tests.test_families_dense import TINY, tiny
from tests.test_families_glm import WRITERS
from tests.test_parity import LAYOUTS

FAMILIES = [*TINY, "glm4_moe", "minimax_m2", "gpt_oss", "deepseek_v2", "deepseek_v3"]


def write(path, family):
    """A random model whose weights are bfloat16 numbers."""
    from transformers import AutoModelForCausalLM

    if family in TINY:
        tiny(family).save_pretrained(path / "plain")
    elif family in WRITERS:
        write_random(path / "plain", WRITERS[family]())
    else:
        write_deepseek(path / "plain", int(family[-1]))
    AutoModelForCausalLM.from_pretrained(path / "plain", dtype=torch.bfloat16).save_pretrained(path / "model")
    return path / "model"


def logprobs_job(rank, layout, path, batch):
    (scored,) = jobs.make(rank, layout, path, dtype="bfloat16", train=False).logprobs([batch], 1.0)
    return scored["logp"].float().numpy()


@torch.no_grad()
def transformers_logprobs(path, dtype, batch) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model, out = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval(), []
    for sample in batch:
        tokens = torch.tensor(sample.tokens)
        logp = model(tokens[None]).logits[0].float().log_softmax(-1)
        out.append(logp[:-1].gather(1, tokens[1:, None])[sample.prompt - 1 :, 0].numpy())
    return np.concatenate(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_error_is_that_of_the_format(ranks, tmp_path, family):
    path, batch = write(tmp_path, family), jobs.samples(40)
    exact, theirs = (transformers_logprobs(path, dtype, batch) for dtype in (torch.float32, torch.bfloat16))
    layout = LAYOUTS["1" if family in ("llama", "qwen2", "qwen3") else "tp2 ep2"]
    ours = ranks.run(layout, logprobs_job, str(path), batch)[0]
    error, usual = np.abs(ours - exact).mean(), np.abs(theirs - exact).mean()
    assert 0 < error < 2 * usual, (error, usual)
