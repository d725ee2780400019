"""Each policy loss by itself: numbers worked out by hand, clip regions, and the gradients they claim to have.

What holds for all of them is in test_losses.py and test_loss_invariance.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.losses import PolicyLoss

SUM = "seq-mean-token-sum"  # with one row: the plain sum, so that each token's gradient stands alone
ROW_MEAN = "seq-mean-token-mean"


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(
    loss_fn: PolicyLoss,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    selected: Tensor | None = None,
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics; the old log probs are -1, so that log probs are not ratios by chance."""
    log_probs = (log_ratio - 1.0).requires_grad_()
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    loss, metrics = loss_fn(log_probs, torch.full_like(log_ratio, -1.0), advantages, mask, selected=selected)
    loss.backward()
    return loss.item(), log_probs.grad, {name: x.item() for name, x in metrics.items()}


def check(actual: Tensor | float, expected: Tensor | float) -> None:
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


class TestPPO:
    RATIO, ADVANTAGES = row(1.5, 1.5, 0.5, 0.5, 1.1, 9.9), row(2.0, -2.0, 2.0, -2.0, 1.0, 7.0)
    MASK = torch.tensor([[True, True, True, True, True, False]])

    def test_by_hand(self):
        loss, gradient, metrics = step(PolicyLoss(), self.RATIO.log(), self.ADVANTAGES, self.MASK)
        # -min(ρA, clip(ρ, 0.8, 1.2)·A):
        #   ρ 1.5, A 2:  -min(3, 2.4) = -2.4 clipped     ρ 1.5, A -2: -min(-3, -2.4) = 3
        #   ρ 0.5, A 2:  -min(1, 1.6) = -1               ρ 0.5, A -2: -min(-1, -1.6) = 1.6 clipped
        #   ρ 1.1, A 1:  -1.1
        check(loss, (-2.4 + 3 - 1 + 1.6 - 1.1) / 5)
        # d(-ρA)/d logp = -ρA where not clipped
        check(gradient, row(0.0, 3.0, -1.0, 0.0, -1.1, 0.0) / 5)
        check(metrics["clip_ratio"], 2 / 5)
        check(metrics["ratio"], (1.5 + 1.5 + 0.5 + 0.5 + 1.1) / 5)
        # (ρ - 1) - ln ρ: 2·(0.5 - 0.4054651) + 2·(-0.5 + 0.6931472) + (0.1 - 0.0953102) = 0.5800539
        check(metrics["approx_kl"], 0.5800539 / 5)
        assert metrics.keys() == {"clip_ratio", "ratio", "approx_kl"}

    def test_clip_higher(self):
        loss_fn = PolicyLoss(clip_eps_low=0.1, clip_eps_high=0.3, loss_agg_mode=SUM)
        loss, _, metrics = step(loss_fn, row(1.25, 1.35, 0.85).log(), row(1.0, 1.0, -1.0))
        # 1.25 is inside 1.3; 1.35 becomes 1.3; 0.85 becomes 0.9: -1.25 - 1.3 + 0.9
        check(loss, -1.65)
        check(metrics["clip_ratio"], 2 / 3)

    def test_a_low_epsilon_of_1_is_no_lower_bound(self):
        _, gradient, metrics = step(PolicyLoss(1.0, 0.2, loss_agg_mode=SUM), row(0.001, 1e-8).log(), row(-1.0, -1.0))
        check(gradient, row(0.001, 1e-8))
        assert metrics["clip_ratio"] == 0.0

    def test_dual_clip(self):
        loss_fn = PolicyLoss(loss_agg_mode=SUM, options={"dual_clip": 3.0})
        loss, gradient, metrics = step(loss_fn, row(1.5, 4.0, 4.0, 0.5).log(), row(-2.0, -2.0, 2.0, -2.0))
        # A < 0: at most -cA = 6.  ρ 1.5: 3 < 6 stays; ρ 4: 8 becomes 6, no gradient; ρ 0.5: 1.6, clipped as ever
        # A > 0: -min(8, 2.4) = -2.4, clipped as ever
        check(loss, 3 + 6 - 2.4 + 1.6)
        check(gradient, row(3.0, 0.0, 0.0, 0.0))
        assert metrics["dual_clip_ratio"] == 1 / 4
        assert metrics["clip_ratio"] == 3 / 4

    def test_without_dual_clip_nothing_bounds_a_bad_token(self):
        _, gradient, metrics = step(PolicyLoss(loss_agg_mode=SUM), row(4.0).log(), row(-2.0))
        check(gradient, row(8.0))
        assert metrics["clip_ratio"] == 0.0

    def test_beyond_the_limit_of_the_log_ratio(self):
        loss, gradient, metrics = step(PolicyLoss(loss_agg_mode=SUM), row(200.0, -200.0, 20.0), row(-1.0, 1.0, -1.0))
        # e^20, -e^-20, e^20: beyond ±20 the value stops and so does the gradient, and the metric says so
        check(loss, 2 * math.exp(20) - math.exp(-20))
        check(gradient, row(0.0, 0.0, math.exp(20)))
        check(metrics["clip_ratio"], 2 / 3)


class TestGSPO:
    LOG_RATIO = torch.tensor([[0.3, -0.1, 9.0, 0.1], [0.5, 9.0, 9.0, 9.0], [0.5, 0.3, 9.0, 9.0]]).double()
    MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [True, True, False, False]])
    ADVANTAGES = torch.tensor([[2.0], [1.0], [-1.0]]).double().expand(3, 4)

    def test_by_hand(self):
        loss_fn = PolicyLoss(0.2, 0.2, "gspo", ROW_MEAN)
        loss, gradient, metrics = step(loss_fn, self.LOG_RATIO, self.ADVANTAGES, self.MASK)
        # row 1: mean of 0.3, -0.1, 0.1 is 0.1, s = e^0.1 = 1.1051709, inside: loss -2s = -2.2103418
        # row 2: s = e^0.5 = 1.6487213, A > 0: clipped to 1.2: loss -1.2
        # row 3: s = e^0.4 = 1.4918247, A < 0: not clipped: loss s
        check(loss, (-2.2103418 - 1.2 + 1.4918247) / 3)
        # -sA / the row's tokens / 3 rows
        first, third = -2.2103418 / 3 / 3, 1.4918247 / 2 / 3
        check(gradient, torch.tensor([[first, first, 0, first], [0, 0, 0, 0], [third, third, 0, 0]]))
        check(metrics["clip_ratio"], 1 / 6)
        check(metrics["ratio"], (3 * 1.1051709 + 1.6487213 + 2 * 1.4918247) / 6)

    def test_a_row_is_clipped_whole_or_not_at_all(self):
        """Token 1 alone is far outside the clip; the row is not."""
        _, gradient, metrics = step(PolicyLoss(0.2, 0.2, "gspo", SUM), row(0.9, -0.9), row(1.0, 1.0))
        check(gradient, row(-1.0, -1.0))
        assert metrics["clip_ratio"] == 0.0

    def test_advantages_may_differ_within_a_row(self):
        _, gradient, _ = step(PolicyLoss(0.2, 0.2, "gspo", SUM), row(0.1, 0.1), row(1.0, -3.0))
        check(gradient, math.exp(0.1) * row(-1.0, 3.0))

    def test_it_is_the_gradient_of_the_sequence_loss(self):
        """Numerically: the token form has the derivative of -min(sA, clip(s)·A), s of the whole row."""
        mask = torch.tensor([[True, True, True, False], [True, False, True, True], [True, False, False, False]])
        old, advantages = randn(3, 4), randn(3, 1, seed=1).expand(3, 4)
        log_probs = (old + 0.3 * randn(3, 4, seed=2)).requires_grad_()
        loss_fn = PolicyLoss(0.2, 0.2, "gspo", ROW_MEAN)
        assert torch.autograd.gradcheck(lambda x: loss_fn(x, old, advantages, mask)[0], (log_probs,))

    def test_one_token_is_ppo(self):
        log_ratio, advantages = 0.4 * randn(6, 1), randn(6, 1, seed=1)
        gspo, ppo = (step(PolicyLoss(0.2, 0.3, kind), log_ratio, advantages) for kind in ("gspo", "ppo"))
        check(gspo[0], ppo[0])
        check(gspo[1], ppo[1])
        assert gspo[2] == pytest.approx(ppo[2])
        assert 0 < ppo[2]["clip_ratio"] < 1

    def test_beyond_the_limit(self):
        _, gradient, metrics = step(
            PolicyLoss(policy_loss="gspo", loss_agg_mode=SUM), row(100.0, 20.0), row(-1.0, -1.0)
        )
        check(gradient, row(0.0, 0.0))  # the mean is 60
        assert metrics["clip_ratio"] == 1.0


class TestCISPO:
    def test_by_hand(self):
        ratio, advantages = row(8.0, 8.0, 2.0, 0.01), row(1.0, -1.0, 3.0, 1.0)
        loss, gradient, metrics = step(PolicyLoss(policy_loss="cispo", loss_agg_mode=SUM), ratio.log(), advantages)
        # by default weights above 1 + 4 become 5, none is too small: 5, 5, 2, 0.01; the gradient is -weight·A
        check(gradient, row(-5.0, 5.0, -6.0, -0.01))
        # times the log probs, -1 + ln ρ: 1.0794415, 1.0794415, -0.3068528, -5.6051702
        check(loss, -5 * 1.0794415 + 5 * 1.0794415 + 6 * 0.3068528 + 0.01 * 5.6051702)
        assert metrics["clip_ratio"] == 0.0  # no token loses its gradient
        assert metrics["weight_clip_ratio"] == 2 / 4

    def test_a_lower_bound_lifts_small_weights(self):
        _, gradient, metrics = step(PolicyLoss(0.3, 4.0, "cispo", SUM), row(0.01).log(), row(1.0))
        check(gradient, row(-0.7))
        assert metrics["weight_clip_ratio"] == 1.0


class TestGMPO:
    def test_by_hand(self):
        log_ratio = row(0.6, -0.6, 0.1).repeat(2, 1)
        advantages = torch.tensor([[2.0], [-1.0]]).double().expand(2, 3)
        loss, gradient, metrics = step(PolicyLoss(policy_loss="gmpo", loss_agg_mode=ROW_MEAN), log_ratio, advantages)
        # A > 0: min(d, 0.4) = 0.4, -0.6, 0.1, mean -0.0333333, e^ = 0.9672161: loss -2·0.9672161
        # A < 0: max(d, -0.4) = 0.6, -0.4, 0.1, mean 0.1, e^ = 1.1051709: loss 1.1051709
        check(loss, (-2 * 0.9672161 + 1.1051709) / 2)
        first, second = -2 * 0.9672161 / 3 / 2, 1.1051709 / 3 / 2
        check(gradient, torch.tensor([[0, first, first], [second, 0, second]]))
        assert metrics["clip_ratio"] == 2 / 6
        check(metrics["ratio"], math.exp(0.1 / 3))  # of the row, before the clip

    def test_the_epsilons_bound_log_ratios(self):
        """A ratio of 1.45 is below e^0.4 = 1.49 and above 1.4."""
        _, gradient, metrics = step(PolicyLoss(0.4, 0.4, "gmpo", SUM), row(1.45).log(), row(1.0))
        check(gradient, row(-1.45))
        assert metrics["clip_ratio"] == 0.0

    def test_it_is_the_gradient_of_the_sequence_loss(self):
        mask = torch.tensor([[True, True, True, False], [True, False, True, True], [True, False, False, False]])
        old, advantages = randn(3, 4), randn(3, 1, seed=1).expand(3, 4)
        log_probs = (old + 0.5 * randn(3, 4, seed=2)).requires_grad_()
        loss_fn = PolicyLoss(0.4, 0.3, "gmpo", ROW_MEAN)
        assert 0 < loss_fn(log_probs, old, advantages, mask)[1]["clip_ratio"].item() < 1
        assert torch.autograd.gradcheck(lambda x: loss_fn(x, old, advantages, mask)[0], (log_probs,))


class TestSAPO:
    def test_by_hand(self):
        loss_fn = PolicyLoss(policy_loss="sapo", loss_agg_mode=SUM)
        loss, gradient, metrics = step(loss_fn, row(2.0, 2.0, 1.0).log(), row(1.0, -1.0, 3.0))
        # A > 0, τ 1:     σ(1) = 0.7310586, loss -4·0.7310586, slope 4σ(1-σ) = 0.7864477, gradient -ρ·slope·A
        # A < 0, τ 1.05:  σ(1.05) = 0.7407749, loss (4/1.05)·0.7407749, slope 0.7681098
        # ρ 1:            σ(0) = 1/2, loss -4·3/2, slope 1
        check(loss, -2.9242343 + 2.8219996 - 6.0)
        check(gradient, row(-2 * 0.7864477, 2 * 0.7681098, -3.0))
        check(metrics["sapo_gate"], (0.7864477 + 0.7681098 + 1.0) / 3)
        assert metrics["clip_ratio"] == 0.0

    def test_a_larger_temperature_shuts_the_gate_sooner(self):
        loss_fn = PolicyLoss(policy_loss="sapo", options={"sapo_tau_pos": 3.0})
        _, _, sharp = step(loss_fn, row(2.0).log(), row(1.0))
        _, _, soft = step(PolicyLoss(policy_loss="sapo"), row(2.0).log(), row(1.0))
        assert sharp["sapo_gate"] < soft["sapo_gate"]


class TestClipCov:
    def test_by_hand(self):
        selected = torch.tensor([[True, False, True, False, False]])
        loss_fn = PolicyLoss(0.2, 0.2, "clip_cov", SUM)
        log_ratio, advantages = row(1.1, 1.1, 1.1, 1.5, 1.5).log(), row(1.0, 1.0, 0.0, 1.0, -1.0)
        loss, gradient, metrics = step(loss_fn, log_ratio, advantages, selected=selected)
        # selected: 0; then -1.1; A = 0; clipped -1.2; 1.5
        check(loss, -1.1 - 1.2 + 1.5)
        check(gradient, row(0.0, -1.1, 0.0, 0.0, 1.5))
        assert metrics["selected_ratio"] == 2 / 5
        assert metrics["clip_ratio"] == 2 / 5  # the third token had no gradient to lose

    def test_what_is_selected_under_the_mask_is_not_counted(self):
        mask = torch.tensor([[True, False]])
        loss_fn = PolicyLoss(policy_loss="clip_cov")
        _, gradient, metrics = step(loss_fn, row(0.0, 0.0), row(1.0, 1.0), mask, torch.tensor([[False, True]]))
        check(gradient, row(-1.0, 0.0))
        assert metrics["selected_ratio"] == 0.0


class TestKLCov:
    def test_by_hand(self):
        loss_fn = PolicyLoss(policy_loss="kl_cov", loss_agg_mode=SUM, options={"kl_cov_coef": 0.5})
        selected = torch.tensor([[True, True, False]])
        loss, gradient, metrics = step(loss_fn, row(1.5, 0.5, 0.5).log(), row(2.0, -2.0, -2.0), selected=selected)
        # -ρA + 0.5·|ln ρ|: -3 + 0.5·0.4054651; 1 + 0.5·0.6931472; 1 (not selected; and nothing is clipped)
        check(loss, -3 + 0.5 * 0.4054651 + 1 + 0.5 * 0.6931472 + 1)
        # -ρA ± 0.5
        check(gradient, row(-2.5, 0.5, 1.0))
        assert metrics["selected_ratio"] == 2 / 3
        assert metrics["clip_ratio"] == 0.0


class TestGPG:
    def test_by_hand(self):
        loss, gradient, metrics = step(PolicyLoss(policy_loss="gpg"), row(0.5, -0.5), row(2.0, -1.0))
        # log probs -0.5 and -1.5: (0.5·2 - 1.5) / 2; whatever the ratio, the gradient is -A / 2
        check(loss, (1.0 - 1.5) / 2)
        check(gradient, row(-1.0, 0.5))
        check(metrics["ratio"], (math.exp(0.5) + math.exp(-0.5)) / 2)
        assert metrics["clip_ratio"] == 0.0


class TestCPGD:
    def test_by_hand(self):
        loss_fn = PolicyLoss(policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 0.0})
        log_ratio, advantages = row(0.3, 0.3, -0.5, -0.5, 0.1), row(2.0, -2.0, -2.0, 2.0, 1.0)
        loss, gradient, metrics = step(loss_fn, log_ratio, advantages)
        # -min(dA, clip(d, ln 0.8, ln 1.2)·A), ln 1.2 = 0.1823216, ln 0.8 = -0.2231436:
        #   d 0.3,  A 2:  -min(0.6, 0.3646431) clipped     d 0.3,  A -2: 0.6
        #   d -0.5, A -2: -min(1, 0.4462871) clipped       d -0.5, A 2:  1
        #   d 0.1,  A 1:  -0.1
        check(loss, -0.3646431 + 0.6 - 0.4462871 + 1.0 - 0.1)
        check(gradient, row(0.0, 2.0, 0.0, -2.0, -1.0))  # -A, not -ρA
        assert metrics["clip_ratio"] == 2 / 5

    def test_drift_by_hand(self):
        loss_fn = PolicyLoss(policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 0.1})
        log_ratio, advantages = row(0.3, -0.5, 2.0, 1000.0, -1000.0), torch.zeros(1, 5).double()
        loss, gradient, metrics = step(loss_fn, log_ratio, advantages)
        # min(ρ - 1, 2): 0.3498588, -0.3934693, 2 (ρ is 7.4), 2, -1; it is the slope, and times d the value
        slopes = row(0.3498588, -0.3934693, 2.0, 2.0, -1.0)
        check(gradient, 0.1 * slopes)
        check(loss, 0.1 * (0.1049576 + 0.1967347 + 4.0 + 2000.0 + 1000.0))
        check(metrics["cpgd_drift"], loss / 0.1 / 5)

    def test_drift_has_the_gradient_of_k3(self):
        log_ratio = (0.5 * randn(1, 8)).requires_grad_()
        (log_ratio.exp() - 1 - log_ratio).sum().backward()
        loss_fn = PolicyLoss(policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 1.0})
        _, gradient, _ = step(loss_fn, log_ratio.detach(), torch.zeros(1, 8).double())
        check(gradient, log_ratio.grad)

    def test_a_low_epsilon_of_1_is_no_lower_bound(self):
        loss_fn = PolicyLoss(1.0, 0.2, "cpgd", SUM, {"cpgd_drift_coef": 0.0})
        _, gradient, _ = step(loss_fn, row(-30.0), row(-1.0))
        check(gradient, row(1.0))


# Of the losses that clip gradients: the epsilons with which they clip log-ratios below -0.2 and above 0.3, and options.
CLIPPING = {
    "ppo": (1 - math.exp(-0.2), math.exp(0.3) - 1, {}),
    "gspo": (1 - math.exp(-0.2), math.exp(0.3) - 1, {}),
    "clip_cov": (1 - math.exp(-0.2), math.exp(0.3) - 1, {}),
    "gmpo": (0.2, 0.3, {}),
    "cpgd": (1 - math.exp(-0.2), math.exp(0.3) - 1, {"cpgd_drift_coef": 0.0}),
}


@pytest.mark.parametrize("kind", CLIPPING)
def test_clip_regions(kind):
    """No gradient where the update has gone far enough; the way back is open."""
    low, high, options = CLIPPING[kind]
    loss_fn = PolicyLoss(low, high, kind, SUM, options)
    for advantage in (-1.5, 1.5):
        for log_ratio in (-3.0, -0.21, -0.19, 0.0, 0.29, 0.31, 3.0):
            nothing = torch.zeros(1, 1).bool() if kind == "clip_cov" else None
            _, gradient, metrics = step(loss_fn, row(log_ratio), row(advantage), selected=nothing)
            far_enough = log_ratio > 0.3 if advantage > 0 else log_ratio < -0.2
            assert gradient.sign().item() == (0 if far_enough else -math.copysign(1, advantage)), (log_ratio, advantage)
            assert metrics["clip_ratio"] == far_enough


# Slope of each loss in log_probs, from log-ratio d (B, A), advantages a and the row means of d, inside all clips.
SLOPES = {
    "ppo": lambda d, a, mean: -d.exp() * a,
    "gspo": lambda d, a, mean: -mean.exp() * a,
    "cispo": lambda d, a, mean: -d.exp() * a,
    "gmpo": lambda d, a, mean: -mean.exp() * a,
    "sapo": lambda d, a, mean: -d.exp() * a / torch.cosh(0.5 * (1 + 0.05 * (a < 0)) * (d.exp() - 1)).square(),
    "clip_cov": lambda d, a, mean: -d.exp() * a,
    "kl_cov": lambda d, a, mean: -d.exp() * a,
    "gpg": lambda d, a, mean: -a,
    "cpgd": lambda d, a, mean: -a + 0.01 * (d.exp() - 1),
}


@pytest.mark.parametrize("kind", SLOPES)
def test_gradients_in_closed_form(kind):
    """What autograd makes of the stop-gradient forms is what they claim; (4σ(1-σ) is 1/cosh² of half the argument)."""
    d, advantages = 0.1 * randn(4, 6), randn(4, 6, seed=1)
    eps = {} if POLICY_LOSSES[kind].eps_clip is None else {"clip_eps_low": 0.9, "clip_eps_high": 0.9}
    nothing = torch.zeros(4, 6).bool() if POLICY_LOSSES[kind].selection else None
    loss_fn = PolicyLoss(policy_loss=kind, loss_agg_mode=SUM, **eps)
    _, gradient, metrics = step(loss_fn, d, advantages, selected=nothing)
    check(gradient, SLOPES[kind](d, advantages, d.mean(1, keepdim=True)) / 4)
    assert metrics["clip_ratio"] == 0.0
