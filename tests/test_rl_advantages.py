"""GAE, whitening, GRPO and the two algorithms' advantages against numbers worked out by hand or by brute force."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moerl.rl import ALGORITHMS, grpo, ppo
from moerl.rl.batch import Rollouts
from moerl.rl.gae import gae, whiten
from moerl.rl.grpo import group_advantages

GARBAGE = (float("nan"), float("inf"), 1e30)


def settings(**changes) -> SimpleNamespace:
    defaults = dict(
        gamma=1.0, lam=1.0, whiten=False, normalize_std=True, kl_coef=0.1, kl_in="reward", kl_kind="k1"
    )
    return SimpleNamespace(**defaults | changes)


def ragged_batch(seed: int = 0, holes: bool = False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 1, 4, 0, 9])
    mask = torch.arange(10) < lengths.unsqueeze(-1)
    if holes:
        mask &= torch.rand(5, 10, generator=generator) > 0.4
    return torch.randn(5, 10, generator=generator), torch.randn(5, 10, generator=generator), mask


def test_gae_by_hand():
    # gamma 0.5, lam 0.5; V = 1, 2, 4; r = 0, 0, 3
    # delta_2 = 3 - 4 = -1              A_2 = -1
    # delta_1 = 0.5 * 4 - 2 = 0         A_1 = 0 + 0.25 * -1 = -0.25
    # delta_0 = 0.5 * 2 - 1 = 0         A_0 = 0 + 0.25 * -0.25 = -0.0625
    rewards, values = torch.tensor([[0.0, 0, 3, 9]]), torch.tensor([[1.0, 2, 4, 9]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.0625, -0.25, -1.0, 0.0]]
    assert returns.tolist() == [[0.9375, 1.75, 3.0, 0.0]]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("gamma, lam", [(0.9, 0.8), (1.0, 0.95), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_residuals(gamma, lam, holes):
    """arXiv 1506.02438 eq. 16, A_t = sum over l of (gamma lam)^l delta_{t+l}, one response at a time."""
    rewards, values, mask = ragged_batch(holes=holes)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(len(mask)):
        r, v = rewards[i][mask[i]].tolist(), values[i][mask[i]].tolist() + [0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = torch.tensor(
            [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
        )
        torch.testing.assert_close(advantages[i][mask[i]], expected)
        torch.testing.assert_close(returns[i][mask[i]], expected + values[i][mask[i]])
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_with_gamma_and_lam_one_it_is_the_monte_carlo_return_less_the_value():
    rewards, values, mask = ragged_batch(1)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = (rewards * mask).flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns, to_go * mask)
    torch.testing.assert_close(advantages, (to_go - values) * mask)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_tokens_outside_the_mask_are_never_read(garbage):
    rewards, values, mask = ragged_batch(holes=True)
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.9)
    dirty_values = values.masked_fill(~mask, garbage)
    dirty = gae(rewards.masked_fill(~mask, garbage), dirty_values, mask, gamma=0.9, lam=0.9)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert torch.equal(whiten(values, mask), whiten(dirty_values, mask))


def test_whiten():
    _, values, mask = ragged_batch(2)
    white = whiten(5 + 3 * values, mask)
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white[mask].std()) == pytest.approx(1, abs=1e-6)
    assert not white[~mask].any()
    torch.testing.assert_close(white, whiten(values, mask))  # shift and scale do not matter


def test_whiten_of_too_few_or_equal_tokens_stays_finite():
    one = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[3.0, 9.0]]), one).tolist() == [[0.0, 0.0]]
    assert whiten(torch.ones(2, 2), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)).abs().max() < 1e-6


def test_group_advantages_by_hand():
    # group 7: rewards 1, 0, 0, 1 (interleaved): mean 1/2, unbiased variance 4 * (1/4) / 3 = 1/3, std 0.57735
    # group 2: rewards 2, 4: mean 3, std sqrt(2); group 5: one response
    rewards, group = torch.tensor([1.0, 2, 0, 0, 4, 1, 8]), torch.tensor([7, 2, 7, 7, 2, 7, 5])
    a, b = 0.5 / (1 / 3) ** 0.5, 1 / 2**0.5
    expected = torch.tensor([a, -b, -a, -a, b, a, 0])
    torch.testing.assert_close(group_advantages(rewards, group), expected, atol=2e-6, rtol=0)
    expected = torch.tensor([0.5, -1, -0.5, -0.5, 1, 0.5, 0])
    torch.testing.assert_close(group_advantages(rewards, group, normalize_std=False), expected)


def test_group_advantages_agree_with_torch_std_group_by_group():
    generator = torch.Generator().manual_seed(0)
    rewards, group = torch.randn(40, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    result = group_advantages(rewards, group, eps=1e-6)
    for g in group.unique():
        r = rewards[group == g]
        torch.testing.assert_close(result[group == g], (r - r.mean()) / (r.std() + 1e-6))


def test_equal_rewards_give_no_advantage():
    """In float32 the mean of 0.1 is off by an ulp, and 1e-9 / 1e-6 would be a gradient out of nothing."""
    assert group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)).abs().max() < 1e-9


def test_whole_number_rewards_give_float_advantages():
    assert group_advantages(torch.tensor([0, 1]), torch.tensor([0, 0]), normalize_std=False).tolist() == [-0.5, 0.5]


def rollouts(**changes) -> Rollouts:
    defaults = dict(
        mask=torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        rewards=torch.tensor([1.0, 5.0, 7.0]),
        old_logp=torch.tensor([[-1.0, -2, -3], [-1, -9, -9], [-9, -9, -9]]),
        ref_logp=torch.tensor([[-2.0, -2, -1], [-4, -1, -1], [-1, -1, -1]]),
        values=torch.tensor([[0.5, 0.5, 0.5], [1, 3, 3], [3, 3, 3]]),
        group=torch.tensor([0, 0, 0]),
    )
    return Rollouts(**defaults | changes)


def test_ppo_token_rewards_by_hand():
    # -0.1 * (old - ref) on each token, the score on the last; nothing for the response without tokens
    rewards = ppo.token_rewards(rollouts(), settings())
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.0, 0.2 + 1], [-0.3 + 5, 0, 0], [0, 0, 0]]))
    for no_kl in (rollouts(ref_logp=None), settings()), (rollouts(), settings(kl_in="loss")):
        assert ppo.token_rewards(*no_kl).tolist() == [[0, 0, 1], [5, 0, 0], [0, 0, 0]]


def test_ppo_advantages_by_hand():
    # gamma = lam = 1: reward to go less value: [1.1, 1.2, 1.2] - 0.5 and 4.7 - 1
    advantages, returns = ppo.advantages(rollouts(), settings())
    torch.testing.assert_close(returns, torch.tensor([[1.1, 1.2, 1.2], [4.7, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.6, 0.7, 0.7], [3.7, 0, 0], [0, 0, 0]]))
    white, same_returns = ppo.advantages(rollouts(), settings(whiten=True))
    torch.testing.assert_close(white, whiten(advantages, rollouts().mask))
    assert torch.equal(returns, same_returns)


def test_ppo_without_a_critic_says_so():
    with pytest.raises(ValueError, match="PPO needs a critic"):
        ppo.advantages(rollouts(values=None), settings())


def test_grpo_advantages_by_hand():
    # KL in the loss: scores 1, 5, 7, mean 13/3
    advantages, returns = grpo.advantages(rollouts(), settings(kl_in="loss", normalize_std=False))
    assert returns is None
    torch.testing.assert_close(advantages, torch.tensor([[-10 / 3] * 3, [2 / 3, 0, 0], [0, 0, 0]]))
    # KL in the reward: penalties -0.1 + 0 + 0.2 and -0.3, so 1.1, 4.7, 7, mean 12.8 / 3
    advantages, _ = grpo.advantages(rollouts(), settings(normalize_std=False))
    torch.testing.assert_close(advantages, torch.tensor([[1.1 - 12.8 / 3] * 3, [4.7 - 12.8 / 3, 0, 0], [0, 0, 0]]))
    # unbiased std of 1, 5, 7 is sqrt(28 / 3)
    advantages, _ = grpo.advantages(rollouts(), settings(kl_in="loss"))
    assert float(advantages[0, 0]) == pytest.approx(-10 / 3 / (28 / 3) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_never_read_outside_the_mask(name, garbage):
    clean = rollouts()
    outside = ~clean.mask.bool()
    dirty = rollouts(
        **{key: getattr(clean, key).masked_fill(outside, garbage) for key in ("old_logp", "ref_logp", "values")}
    )
    assert torch.equal(
        ALGORITHMS[name].advantages(clean, settings())[0], ALGORITHMS[name].advantages(dirty, settings())[0]
    )


def test_algorithms_share_one_interface():
    assert ppo.NEEDS_CRITIC and callable(ppo.critic_loss) and not grpo.NEEDS_CRITIC
    assert ppo.actor_loss is grpo.actor_loss


def test_rollouts_name_the_tensor_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"ref_logp has shape \(3, 2\): it must be \(3, 3\)"):
        rollouts(ref_logp=torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"rewards has shape \(3, 3\): it must be \(3,\)"):
        rollouts(rewards=torch.zeros(3, 3))
