"""Vocabulary-parallel log-probability and entropy: exact, differentiable, and without touching the logits."""

from __future__ import annotations

import pytest
import torch

from moerl.layout import ParallelLayout


def stats_job(rank, layout, vocab, tokens, temperature, dtype):
    """Values and gradients of token_stats on this rank's columns, and the logits before and after."""
    from megatron.core import parallel_state

    from moerl.megatron import logprob

    logprob.CHUNK = 5
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(tokens, layout.padded_vocab(vocab), generator=generator) * 4
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    width = whole.shape[1] // layout.tp
    mine = whole[:, rank * width : (rank + 1) * width].to(dtype).clone().requires_grad_()
    before = mine.detach().clone()
    logp, entropy = logprob.token_stats(mine, target, vocab, temperature, parallel_state.get_tensor_model_parallel_group())
    (torch.sin(logp) + 0.3 * entropy * logp).sum().backward()
    return logp.detach(), entropy.detach(), mine.grad, torch.equal(before, mine.detach()), whole, target


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(ranks, tp, temperature):
    """Against torch's own log_softmax on whole logits; 13 tokens in chunks of 5; the vocabulary of 31 is padded at tp 2."""
    vocab, layout = 31, ParallelLayout(tp=tp)
    answers = ranks.run(layout, stats_job, vocab, 13, temperature, torch.float32)
    whole, target = answers[0][4][:, :vocab].clone().requires_grad_(), answers[0][5]
    log_p = (whole / temperature).log_softmax(-1)
    logp, entropy = log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (torch.sin(logp) + 0.3 * entropy * logp).sum().backward()
    grad = torch.cat([a[2] for a in answers], 1)
    for found_logp, found_entropy, _, untouched, _, _ in answers:
        torch.testing.assert_close(found_logp, logp.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_entropy, entropy.detach(), atol=1e-5, rtol=1e-5)
        assert untouched, "entropy and log-probability must not change the logits they share"
    torch.testing.assert_close(grad[:, :vocab], whole.grad, atol=1e-4, rtol=1e-4)
    assert torch.all(grad[:, vocab:] == 0)


def test_bfloat16_logits(ranks):
    answers = ranks.run(ParallelLayout(tp=2), stats_job, 31, 13, 1.0, torch.bfloat16)
    whole, target = answers[0][4].bfloat16().float()[:, :31], answers[0][5]
    want = whole.log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(answers[1][0], want, atol=1e-5, rtol=1e-5)
    assert answers[0][2].dtype == torch.bfloat16
