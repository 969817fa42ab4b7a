"""Policy loss, value loss and KL estimators against closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from moerl.rl.kl import KL_KINDS, kl_estimate
from moerl.rl.losses import actor_loss, clipped_policy_loss, clipped_value_loss, critic_loss, sft_loss

SETTINGS = dict(
    clip_low=0.2, clip_high=0.2, value_clip=None, entropy_coef=0.0, kl_coef=0.0, kl_in="loss", kl_kind="k3"
)


def policy(ratio: float, advantage: float, **clips):
    """Loss, clip fraction and d loss / d logp of one token."""
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    clips = dict(clip_low=0.2, clip_high=0.3) | clips
    loss, stats = clipped_policy_loss(logp, torch.zeros_like(logp), torch.tensor(advantage), **clips)
    return float(loss.detach()), float(stats["clip_fraction"]), float(torch.autograd.grad(loss, logp)[0])


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.2, 2.0, -2.4, 0),  # inside the trust region
        (1.5, 2.0, -2.6, 1),  # good token, already likelier: held at 1.3
        (0.5, 2.0, -1.0, 0),  # good token, less likely: the pessimistic side, not clipped
        (0.9, -2.0, 1.8, 0),
        (0.5, -2.0, 1.6, 1),  # bad token, already rarer: held at 0.8
        (1.5, -2.0, 3.0, 0),  # bad token, likelier: not clipped
    ],
)
def test_both_sides_of_the_clip(ratio, advantage, loss, clipped):
    value, fraction, gradient = policy(ratio, advantage)
    assert value == pytest.approx(loss)
    assert fraction == clipped
    assert gradient == pytest.approx(0 if clipped else loss)  # d(-A ratio)/d logp = -A ratio


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    """With logits as parameters: d loss / d logits = -sum of A d log pi(token) / d logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    token = torch.randint(0, 5, (6, 1), generator=generator)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    logp = logits.log_softmax(-1).gather(-1, token).squeeze(-1)
    loss, stats = clipped_policy_loss(logp, logp.detach(), advantages, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    one_hot = torch.zeros(6, 5, dtype=torch.float64).scatter(-1, token, 1)
    torch.testing.assert_close(gradient, -advantages.unsqueeze(-1) * (one_hot - logits.detach().softmax(-1)))
    assert not stats["clip_fraction"].any() and torch.equal(stats["ratio"], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_policies_give_finite_losses_and_gradients(gap, advantage):
    """A packed prompt token may carry 0 for its old log-probability; weight 0 must then be enough to silence it."""
    logp = torch.tensor([gap], requires_grad=True)
    zero = torch.zeros(1)
    loss, stats = actor_loss(
        logp, zero, zero, zero, torch.tensor([advantage]), zero, SimpleNamespace(**SETTINGS | {"kl_coef": 1.0})
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    assert float(loss) == 0 and float(gradient) == 0
    assert all(float(value) == 0 for value in stats.values())


def test_value_loss_with_and_without_clip():
    old, target = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([2.0, 2.0, 0.0, 1.0])
    values = torch.tensor([1.1, 1.9, 1.9, 1.0], requires_grad=True)
    plain = clipped_value_loss(values, old, target, clip=None)
    torch.testing.assert_close(plain, torch.tensor([0.405, 0.005, 1.805, 0.0]))
    # held at 1.2: a step too far towards the target pays 0.5 * 0.8^2 without gradient; one away from it pays in full
    clipped = clipped_value_loss(values, old, target, clip=0.2)
    torch.testing.assert_close(clipped, torch.tensor([0.405, 0.32, 1.805, 0.0]))
    (gradient,) = torch.autograd.grad(clipped.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 0.0, 1.9, 0.0]))

    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    loss, stats = critic_loss(values, old, target, weights, SimpleNamespace(**SETTINGS | {"value_clip": 0.2}))
    assert float(loss) == pytest.approx(0.405 / 2 + 0.32 / 4 + 1.805 / 8) == float(stats["value_loss"])
    assert float(stats["value_clip_fraction"]) == 0.25
    assert float(stats["value"]) == pytest.approx(1.1 / 2 + 1.9 / 4 + 1.9 / 8 + 1 / 8)


def test_actor_loss_adds_its_terms_with_their_signs():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, ref = torch.tensor([-1.1, -1.9]), torch.tensor([-1.5, -1.0])
    entropy, advantages, weights = torch.tensor([0.7, 0.3]), torch.tensor([1.0, -1.0]), torch.tensor([0.75, 0.25])
    settings = SimpleNamespace(**SETTINGS | {"entropy_coef": 0.5, "kl_coef": 2.0, "kl_kind": "k2"})
    loss, stats = actor_loss(logp, entropy, old, ref, advantages, weights, settings)
    policy_loss = -0.75 * math.exp(0.1) + 0.25 * math.exp(-0.1)
    kl = 0.75 * 0.5**2 / 2 + 0.25 * 1.0**2 / 2
    assert float(loss) == pytest.approx(policy_loss - 0.5 * 0.6 + 2 * kl)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {
            "policy_loss": policy_loss,
            "entropy": 0.6,
            "kl": kl,
            "clip_fraction": 0,
            "ratio": 0.75 * math.exp(0.1) + 0.25 * math.exp(-0.1),
            "approx_kl": 0.75 * (math.exp(0.1) - 1 - 0.1) + 0.25 * (math.exp(-0.1) - 1 + 0.1),
        }
    )
    assert not any(value.requires_grad for value in stats.values())

    in_reward, stats = actor_loss(
        logp, entropy, old, ref, advantages, weights, SimpleNamespace(**vars(settings) | {"kl_in": "reward"})
    )
    assert float(in_reward) == pytest.approx(float(loss) - 2 * kl) and float(stats["kl"]) == pytest.approx(kl)
    no_reference, stats = actor_loss(logp, entropy, old, None, advantages, weights, settings)
    assert torch.equal(no_reference, in_reward) and "kl" not in stats


def test_sft_loss_is_cross_entropy():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 0, 6, 3])
    logp = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    loss, stats = sft_loss(logp, torch.full((4,), 0.25))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
    assert stats["sft_loss"] == loss


def test_kl_closed_forms():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-3.0])  # r = -2
    assert float(kl_estimate(logp, ref, "k1")) == 2
    assert float(kl_estimate(logp, ref, "k2")) == 2
    assert float(kl_estimate(logp, ref, "k3")) == pytest.approx(math.exp(-2) - 1 + 2)
    assert all(float(kl_estimate(logp, logp, kind)) == 0 for kind in KL_KINDS)
    with pytest.raises(ValueError, match="'k4' is unknown: choose one of k1, k2, k3"):
        kl_estimate(logp, ref, "k4")


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    """The expectation under p, taken exactly over a categorical of five."""
    generator = torch.Generator().manual_seed(3)
    logp, ref = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = float((logp.exp() * (logp - ref)).sum())
    mean = {kind: float((logp.exp() * kl_estimate(logp, ref, kind)).sum()) for kind in KL_KINDS}
    assert mean["k1"] == pytest.approx(exact, rel=1e-12) and mean["k3"] == pytest.approx(exact, rel=1e-12)
    assert abs(mean["k2"] - exact) > 0.01 * exact > 0


def test_gradients_as_losses_are_what_the_docstring_says():
    """Expected gradient over the categorical with the sampling weights held fixed, as a trainer sees it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    sampled = {
        kind: torch.autograd.grad(
            (logp.detach().exp() * kl_estimate(logp, ref, kind)).sum(), logits, retain_graph=True
        )[0]
        for kind in KL_KINDS
    }
    torch.testing.assert_close(sampled["k1"], torch.zeros_like(exact), atol=1e-12, rtol=0)
    torch.testing.assert_close(sampled["k2"], exact)


def test_k3_is_never_negative_nor_infinite():
    sizes = torch.logspace(-12, 2.9, 400)
    gaps = torch.cat([-sizes.flip(0), torch.zeros(1), sizes])
    ref = gaps.requires_grad_()
    k3 = kl_estimate(torch.zeros_like(ref), ref, "k3")
    (gradient,) = torch.autograd.grad(k3.sum(), ref)
    assert (k3 >= 0).all() and k3.isfinite().all() and gradient.isfinite().all()
    small = gaps.detach().abs() < 1e-2  # r^2 / 2 there, where exp(r) - 1 - r in float32 would be rounding noise
    torch.testing.assert_close(k3[small], 0.5 * gaps[small].square(), rtol=0.02, atol=1e-9)
