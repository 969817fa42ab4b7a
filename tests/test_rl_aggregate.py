"""Loss weights: whatever the split of the batch, the sums are the whole batch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.rl.aggregate import AGGREGATIONS, token_weights
from moerl.rl.losses import actor_loss, critic_loss, sft_loss

SETTINGS = SimpleNamespace(
    clip_low=0.2, clip_high=0.3, value_clip=0.2, entropy_coef=0.01, kl_coef=0.1, kl_in="loss", kl_kind="k3"
)


def ragged(lengths: list[int]) -> torch.Tensor:
    """A right-padded mask, two columns wider than the longest response."""
    return (torch.arange(max(lengths, default=0) + 2) < torch.tensor(lengths).unsqueeze(-1)).float()


def by_hand(losses: list[list[float]], mode: str) -> float:
    """The aggregate written with plain sums and means over lists."""
    losses = [sample for sample in losses if sample]
    if not losses:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mode == "seq-mean-token-mean":
        return sum(sum(sample) / len(sample) for sample in losses) / len(losses)
    return sum(map(sum, losses)) / len(losses)


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    expected = {
        "token-mean": [[1 / 4, 1 / 4, 1 / 4, 0], [1 / 4, 0, 0, 0]],
        "seq-mean-token-mean": [[1 / 6, 1 / 6, 1 / 6, 0], [1 / 2, 0, 0, 0]],
        "seq-mean-token-sum": [[1 / 2, 1 / 2, 1 / 2, 0], [1 / 2, 0, 0, 0]],
    }
    assert set(expected) == set(AGGREGATIONS)
    for mode, rows in expected.items():
        for given_mask in (mask, mask.bool(), mask.float()):
            torch.testing.assert_close(token_weights(given_mask, mode), torch.tensor([*rows, [0.0] * 4]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_mask_weighs_nothing(mode):
    assert torch.equal(token_weights(torch.zeros(3, 5), mode), torch.zeros(3, 5))


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="'mean' is unknown: choose one of token-mean"):
        token_weights(torch.ones(1, 1), "mean")


@settings(deadline=None, max_examples=60, database=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=9), st.sampled_from(AGGREGATIONS), st.data())
def test_any_split_sums_to_the_reference(lengths, mode, data):
    mask = ragged(lengths)
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(len(lengths)))
    weights = token_weights(mask, mode)
    part = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    total = sum((weights[part == p] * losses[part == p]).sum() for p in range(4))
    rows = [losses[i, :n].tolist() for i, n in enumerate(lengths)]
    assert float(total) == pytest.approx(by_hand(rows, mode), abs=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_losses_gradients_and_statistics_of_splits_add_up(mode, seed):
    """Micro-batches of one to three responses, packed as the trainer packs them, against the batch in one piece."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged(torch.randint(0, 9, (12,), generator=generator).tolist())
    inside = mask.bool()
    weights = token_weights(mask, mode)
    base = -torch.rand(6, *mask.shape, generator=generator, dtype=torch.float64)
    shift = torch.full((), 0.05, dtype=torch.float64, requires_grad=True)  # one parameter that every output depends on

    def run(rows: list[int]):
        packed = inside[rows]
        logp, old_logp, ref_logp, entropy, advantages, returns = (x[rows][packed] for x in base)
        logp, entropy, w = logp + shift * logp.detach(), -entropy * (1 + shift), weights[rows][packed]
        actor, stats = actor_loss(logp, entropy, old_logp, ref_logp, advantages + 0.5, w, SETTINGS)
        critic, critic_stats = critic_loss(logp, old_logp, returns, w, SETTINGS)
        sft, sft_stats = sft_loss(logp, w)
        (gradient,) = torch.autograd.grad(actor + 2 * critic + 3 * sft, shift)
        return {"actor": actor.detach(), "gradient": gradient, **stats, **critic_stats, **sft_stats}

    whole = run(list(range(12)))
    order = torch.randperm(12, generator=generator).tolist()
    sizes = [1, 3, 2, 3, 1, 2]
    parts = [run([order.pop() for _ in range(size)]) for size in sizes]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, msg=name)
    assert whole["clip_fraction"] > 0 and whole["value_clip_fraction"] > 0 and whole["gradient"] != 0
    # the mean of micro-batch means, the usual mistake, is a different number
    means = [part["policy_loss"] * 12 / size for part, size in zip(parts, sizes)]
    assert not torch.isclose(sum(means) / len(means), whole["policy_loss"], rtol=1e-3)
