"""KL estimates, the exact KL, and the controllers of the coefficient."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.entries import KL_ESTIMATORS
from lightppo.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    approx_kl,
    full_kl,
    k2,
    make_kl_controller,
)

NAN, INF = float("nan"), float("inf")
SAMPLED = [name for name, entry in KL_ESTIMATORS.items() if not entry.over_vocabulary]
STRAIGHT_THROUGH = ["k1+", "k3+"]


def random_log_probs(seed: int, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_estimators_by_hand():
    log_probs, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -2.0]])
    # d = 0.5, 0, -1
    torch.testing.assert_close(approx_kl(log_probs, ref, "k1"), torch.tensor([[0.5, 0.0, -1.0]]))
    torch.testing.assert_close(approx_kl(log_probs, ref, "abs"), torch.tensor([[0.5, 0.0, 1.0]]))
    # ½d² = 0.125, 0, 0.5
    torch.testing.assert_close(approx_kl(log_probs, ref, "k2"), torch.tensor([[0.125, 0.0, 0.5]]))
    # e^{-d} + d - 1: e^{-0.5} - 0.5 = 0.1065307, 0, e - 2 = 0.7182818
    torch.testing.assert_close(
        approx_kl(log_probs, ref, "k3"), torch.tensor([[0.1065307, 0.0, 0.7182818]])
    )


@pytest.mark.parametrize("name", SAMPLED)
def test_float32_is_close_to_float64(name):
    log_probs, ref = random_log_probs(0), random_log_probs(1)
    single = approx_kl(log_probs.float(), ref.float(), name)
    assert single.dtype == torch.float32
    exact = approx_kl(log_probs, ref, name)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


def test_times_the_ratio_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    ref, old = torch.tensor([[-1.5, -2.0, -2.0]]), torch.tensor([[-1.0, -2.0, -3.6931472]])
    # d = 0.5, 0, -1; ρ = 1, 1, 2
    k1 = approx_kl(log_probs, ref, "k1_ratio", old_log_probs=old)
    torch.testing.assert_close(k1, torch.tensor([[0.5, 0.0, -2.0]]))
    # ρ·(d + 1)
    (slope,) = torch.autograd.grad(k1.sum(), log_probs)
    torch.testing.assert_close(slope, torch.tensor([[1.5, 1.0, 0.0]]))
    k3 = approx_kl(log_probs, ref, "k3_ratio", old_log_probs=old)
    torch.testing.assert_close(k3, torch.tensor([[0.1065307, 0.0, 2 * 0.7182818]]))
    # ρ·(e^{-d} + d - 1) + ρ·(1 - e^{-d}) = ρ·d
    (slope,) = torch.autograd.grad(k3.sum(), log_probs)
    torch.testing.assert_close(slope, torch.tensor([[0.5, 0.0, -2.0]]))


def test_times_the_ratio_only_as_a_loss_and_not_under_the_mask():
    log_probs, ref, old = (random_log_probs(seed) for seed in range(3))
    assert torch.equal(approx_kl(log_probs, ref, "k3_ratio"), approx_kl(log_probs, ref, "k3"))
    assert torch.equal(
        approx_kl(log_probs, ref, "k3", old_log_probs=old), approx_kl(log_probs, ref, "k3")
    )
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) > 0.5
    log_probs = log_probs.masked_fill(~mask, NAN).requires_grad_()
    dirty = approx_kl(
        log_probs, ref, "k3_ratio", action_mask=mask, old_log_probs=old.masked_fill(~mask, -INF)
    )
    assert not dirty[~mask].any()
    dirty.sum().backward()
    assert log_probs.grad.isfinite().all()
    assert not log_probs.grad[~mask].any()


class TestWhatDocsClaim:
    """Facts about expectations under the policy, by summing over a vocabulary of 4 instead of sampling."""

    LOGITS = (0.3, -0.2, 0.5, -1.0)
    REF = torch.tensor([0.2, 0.2, 0.5, 0.1], dtype=torch.float64)

    def policy(self) -> tuple[Tensor, Tensor]:
        logits = torch.tensor(self.LOGITS, dtype=torch.float64, requires_grad=True)
        return logits, logits.log_softmax(-1)

    def gradient_of(self, fn) -> Tensor:
        """∇ of fn(p, q) by autograd through the distribution itself."""
        logits, log_p = self.policy()
        (gradient,) = torch.autograd.grad(fn(log_p.exp(), self.REF), logits)
        return gradient

    def as_a_loss(self, name: str) -> Tensor:
        """E[∇ estimate]: the samples, and so their weights, are constants."""
        logits, log_p = self.policy()
        estimate = approx_kl(log_p, self.REF.log(), name)
        (gradient,) = torch.autograd.grad((log_p.detach().exp() * estimate).sum(), logits)
        return gradient

    def in_the_reward(self, name: str) -> Tensor:
        """E[estimate · ∇ log p], the policy gradient of the penalty."""
        logits, log_p = self.policy()
        estimate = approx_kl(log_p, self.REF.log(), name).detach()
        (gradient,) = torch.autograd.grad((log_p.detach().exp() * estimate * log_p).sum(), logits)
        return gradient

    @staticmethod
    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum()

    def test_values(self):
        p = torch.tensor(self.LOGITS, dtype=torch.float64).softmax(-1)
        expected = {name: (p * approx_kl(p.log(), self.REF.log(), name)).sum() for name in SAMPLED}
        for name in ("k1", "k3", "k1+", "k3+"):
            torch.testing.assert_close(expected[name], self.kl(p, self.REF))
        torch.testing.assert_close(
            full_kl(p.log()[None], self.REF.log()[None])[0], self.kl(p, self.REF)
        )
        assert expected["abs"] > 1.5 * self.kl(p, self.REF)
        assert not torch.isclose(expected["k2"], self.kl(p, self.REF), rtol=1e-2)

    def test_gradients_as_a_loss(self):
        true = self.gradient_of(self.kl)
        assert true.abs().max() > 0.01
        torch.testing.assert_close(self.as_a_loss("k1"), torch.zeros_like(true))
        for name in ("k2", "k1+", "k3+"):
            torch.testing.assert_close(self.as_a_loss(name), true)
        reverse = self.gradient_of(lambda p, q: self.kl(q, p))
        torch.testing.assert_close(self.as_a_loss("k3"), reverse)
        assert not torch.allclose(reverse, true, rtol=0.1)
        torch.testing.assert_close(
            self.as_a_loss("abs"), self.gradient_of(lambda p, q: (p - q).abs().sum())
        )
        logits = torch.tensor([self.LOGITS], dtype=torch.float64, requires_grad=True)
        full_kl(logits, self.REF.log()[None]).sum().backward()
        torch.testing.assert_close(logits.grad[0], true)

    @pytest.mark.parametrize("name", ["k1_ratio", "k3_ratio"])
    def test_times_the_ratio_values_and_gradients_hold_for_samples_of_another_policy(self, name):
        old = torch.tensor([0.4, 0.3, 0.1, 0.2], dtype=torch.float64)
        logits, log_p = self.policy()
        estimate = approx_kl(log_p, self.REF.log(), name, old_log_probs=old.log())
        mean = (old * estimate).sum()
        torch.testing.assert_close(mean, self.kl(log_p.exp(), self.REF))
        (gradient,) = torch.autograd.grad(mean, logits)
        torch.testing.assert_close(gradient, self.gradient_of(self.kl))
        plain = approx_kl(log_p, self.REF.log(), name.removesuffix("_ratio"))
        assert not torch.isclose((old * plain).sum(), mean, rtol=1e-3)

    def test_gradients_in_the_reward(self):
        true = self.gradient_of(self.kl)
        for name in ("k1", "k1+"):
            torch.testing.assert_close(self.in_the_reward(name), true)
        for name in ("k3", "k3+"):
            torch.testing.assert_close(
                self.in_the_reward(name),
                self.gradient_of(lambda p, q: self.kl(p, q) - self.kl(q, p)),
            )
        half_square = self.gradient_of(lambda p, q: (p * k2((p / q).log())).sum())
        torch.testing.assert_close(self.in_the_reward("k2"), half_square - true)
        mean_abs = self.gradient_of(lambda p, q: (p * (p / q).log().abs()).sum())
        torch.testing.assert_close(self.in_the_reward("abs"), mean_abs - self.as_a_loss("abs"))
        # full is the same number whichever token was sampled, and E[∇ log p] = 0
        logits, log_p = self.policy()
        same = full_kl(logits.detach()[None], self.REF.log()[None])
        (of_full,) = torch.autograd.grad((log_p.detach().exp() * same * log_p).sum(), logits)
        torch.testing.assert_close(of_full, torch.zeros_like(of_full))

    def test_k2_and_k3_in_the_reward_pull_an_order_less_than_the_kl_near_the_reference(self):
        """Halving the distance halves the gradient of the KL and quarters those of k2 and k3 in the reward."""
        direction = torch.tensor([0.5, -0.3, 0.1, 0.4], dtype=torch.float64)
        sizes: dict[str, list[float]] = {"k1": [], "k2": [], "k3": []}
        for scale in (0.02, 0.01):
            self.LOGITS = (self.REF.log() + scale * direction).tolist()
            for name, norms in sizes.items():
                norms.append(self.in_the_reward(name).norm().item())
        assert sizes["k1"][0] / sizes["k1"][1] == pytest.approx(2.0, rel=0.02)
        for name in ("k2", "k3"):
            assert sizes[name][0] / sizes[name][1] == pytest.approx(4.0, rel=0.02)

    def test_over_a_sequence_the_loss_leaves_out_what_a_token_does_to_later_ones(self):
        """Two tokens of a vocabulary of 3: k1 in the reward to go is the gradient of the sequence's KL, k2 and full as
        losses give its direct part only."""
        first = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
        # logits of the second token, by the first
        second = random_log_probs(3, (3, 3)).requires_grad_()
        ref_first, ref_second = (
            random_log_probs(4, (3,)).log_softmax(-1),
            random_log_probs(5, (3, 3)).log_softmax(-1),
        )
        log_1, log_2 = first.log_softmax(-1), second.log_softmax(-1)
        d_1, d_2 = log_1 - ref_first, log_2 - ref_second  # (3,), (3, 3)
        p_1, p_2 = log_1.exp(), log_2.exp()
        kl_2 = (p_2 * d_2).sum(-1)  # (3,)
        sequence_kl = (p_1 * (d_1 + kl_2)).sum()
        true = torch.autograd.grad(sequence_kl, [first, second], retain_graph=True)

        joint = (p_1[:, None] * p_2).detach()  # (3, 3)
        to_go = (d_1[:, None] + d_2).detach()
        reward_form = (joint * (to_go * log_1[:, None] + d_2.detach() * log_2)).sum()
        k1_in_reward = torch.autograd.grad(reward_form, [first, second], retain_graph=True)
        torch.testing.assert_close(k1_in_reward, true)

        k2_loss = (joint * (k2(d_1)[:, None] + k2(d_2))).sum()
        full_loss = (
            full_kl(first[None], ref_first[None]).sum()
            + (p_1.detach() * full_kl(second, ref_second)).sum()
        )
        for loss in (k2_loss, full_loss):
            of_first, of_second = torch.autograd.grad(loss, [first, second], retain_graph=True)
            torch.testing.assert_close(of_second, true[1])
            (missing,) = torch.autograd.grad((p_1 * kl_2.detach()).sum(), first, retain_graph=True)
            torch.testing.assert_close(of_first + missing, true[0])
            assert missing.abs().max() > 0.01


class TestStraightThrough:
    @pytest.mark.parametrize("name", STRAIGHT_THROUGH)
    @pytest.mark.parametrize("clip", [None, 0.1])
    def test_value_of_the_one_gradient_of_k2(self, name, clip):
        log_probs, ref = random_log_probs(0).requires_grad_(), random_log_probs(1)
        kl = approx_kl(log_probs, ref, name, clip=clip)
        assert torch.equal(kl, approx_kl(log_probs, ref, name.rstrip("+"), clip=clip))
        upstream = random_log_probs(2)
        (gradient,) = torch.autograd.grad((upstream * kl).sum(), log_probs)
        # d/dx ½(x - ref)² = x - ref, clipped or not
        torch.testing.assert_close(gradient, upstream * (log_probs - ref).detach())

    def test_far_away(self):
        log_probs = torch.tensor([30.0, -30.0], requires_grad=True)
        kl = approx_kl(log_probs, torch.zeros(2), "k3+")
        # the value sees d in ±20, the gradient is d
        torch.testing.assert_close(kl.detach(), torch.tensor([19.0, math.exp(20) - 21]))
        kl.sum().backward()
        assert log_probs.grad.tolist() == [30.0, -30.0]


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradcheck(name):
    log_probs = random_log_probs(0, (2, 3)).requires_grad_()
    ref = random_log_probs(1, (2, 3))
    assert torch.autograd.gradcheck(lambda x: approx_kl(x, ref, name), (log_probs,))


def test_gradient_of_abs_is_the_sign():
    log_probs = torch.tensor([0.5, 0.0, -2.0], requires_grad=True)
    approx_kl(log_probs, torch.zeros(3), "abs").sum().backward()
    assert log_probs.grad.tolist() == [1.0, 0.0, -1.0]


def test_clip_limits_value_and_gradient():
    log_probs = torch.tensor([3.0, 1.0, -1.0, -3.0], requires_grad=True)
    kl = approx_kl(log_probs, torch.zeros(4), "k1", clip=2.0)
    assert kl.tolist() == [2.0, 1.0, -1.0, -2.0]
    kl.sum().backward()
    assert log_probs.grad.tolist() == [0.0, 1.0, 1.0, 0.0]
    # k2: ½·9 = 4.5 → 2; k3: e^3 - 4 = 16.09 → 2, e^{-3} + 2 = 2.0498 → 2
    assert approx_kl(log_probs, torch.zeros(4), "k2", clip=2.0).tolist() == [2.0, 0.5, 0.5, 2.0]
    k3_clipped = approx_kl(log_probs, torch.zeros(4), "k3", clip=2.0)
    torch.testing.assert_close(k3_clipped, torch.tensor([2.0, math.exp(-1), math.e - 2, 2.0]))


@pytest.mark.parametrize("name", SAMPLED)
def test_masked_tokens_reach_neither_value_nor_gradient(name):
    log_probs = torch.tensor([[1.0, NAN, 0.5, INF], [NAN, -INF, INF, 0.0]], requires_grad=True)
    ref = torch.tensor([[0.0, 0.0, NAN, INF], [0.0, -INF, 0.0, NAN]])
    mask = torch.tensor([[True, False, False, False], [False, False, False, False]])
    kl = approx_kl(log_probs, ref, name, action_mask=mask)
    (2.0 * kl).sum().backward()
    one = torch.tensor([1.0], requires_grad=True)
    alone = approx_kl(one, torch.zeros(1), name)
    (2.0 * alone).sum().backward()
    assert kl.tolist() == [[alone.item(), 0.0, 0.0, 0.0], [0.0] * 4]
    assert log_probs.grad.tolist() == [[one.grad.item(), 0.0, 0.0, 0.0], [0.0] * 4]


def test_k3_far_away_stays_finite():
    out = approx_kl(torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -200.0]), "k3")
    # d = -20 and 20 after the clamp: e^20 - 20 - 1, e^-20 + 20 - 1
    torch.testing.assert_close(out, torch.tensor([math.exp(20) - 21, 19.0]))


def test_k3_is_exact_near_zero():
    # e^{-d} + d - 1 = d²/2 for small d; computed naively in float32 it would be 0 or 1e-7 at d = 1e-4
    d = torch.tensor([1e-4])
    assert approx_kl(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=2e-2)


def test_low_precision_gives_float32():
    # In bfloat16 -3 - (-2.984375) is exact, its square over two is not
    out = approx_kl(torch.tensor([-3.0]).bfloat16(), torch.tensor([-2.984375]).bfloat16(), "k2")
    assert out.dtype == torch.float32
    assert out.item() == 0.5 * 0.015625**2


def test_bad_input():
    with pytest.raises(ValueError, match=r"--kl_estimator: .*'k4'"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="shapes"):
        approx_kl(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"action_mask \(2, 1\)"):
        approx_kl(torch.zeros(2, 3), torch.zeros(2, 3), action_mask=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"--kl_estimator full .*full_kl"):
        approx_kl(torch.zeros(1), torch.zeros(1), "full")


class TestControllers:
    def test_adaptive_by_hand(self):
        controller = AdaptiveKLController(init_coef=0.1, target=6.0, horizon=10_000)
        controller.update(6.6, n_samples=500)
        # error 6.6/6 - 1 = 0.1: 0.1 · (1 + 0.1·500/10000) = 0.1 · 1.005
        assert controller.value == pytest.approx(0.1005)
        controller.update(60.0, n_samples=500)
        # error clipped to 0.2: 0.1005 · 1.01
        assert controller.value == pytest.approx(0.101505)
        controller.update(-3.0, n_samples=1000)
        # k1 may be negative; error clipped to -0.2: 0.101505 · 0.98
        assert controller.value == pytest.approx(0.0994749)
        controller.update(6.0, n_samples=1000)
        assert controller.value == pytest.approx(0.0994749)

    def test_fixed_stays(self):
        controller = FixedKLController(0.05)
        controller.update(100.0, n_samples=512)
        assert controller.value == 0.05

    def test_target_chooses(self):
        assert isinstance(make_kl_controller(0.1, None, 10_000), FixedKLController)
        adaptive = make_kl_controller(0.1, 3.0, 5_000)
        assert isinstance(adaptive, AdaptiveKLController)
        assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.1, 3.0, 5_000)

    def test_state_survives_json(self):
        controller = AdaptiveKLController(0.1, 6.0, 1000)
        controller.update(9.0, 77)
        resumed = AdaptiveKLController(0.1, 6.0, 1000)
        resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
        assert resumed.value == controller.value != 0.1

    def test_fixed_takes_the_flag_and_says_so(self, caplog):
        controller = FixedKLController(0.2)
        with caplog.at_level(logging.WARNING):
            controller.load_state_dict(FixedKLController(0.2).state_dict())
            assert not caplog.records
            controller.load_state_dict(FixedKLController(0.1).state_dict())
        assert controller.value == 0.2
        assert "--init_kl_coef is 0.2; the checkpoint was made with 0.1" in caplog.text

    def test_another_kind_of_state_is_refused(self):
        with pytest.raises(ValueError, match=r"fixed.* adaptive.*--kl_target"):
            AdaptiveKLController(0.1, 6.0, 1000).load_state_dict(
                FixedKLController(0.1).state_dict()
            )
        with pytest.raises(ValueError, match=r"adaptive.* fixed.*--kl_target"):
            FixedKLController(0.1).load_state_dict(
                AdaptiveKLController(0.1, 6.0, 1000).state_dict()
            )

    @pytest.mark.parametrize("kl", [math.nan, math.inf])
    def test_broken_kl_is_refused(self, kl):
        controller = AdaptiveKLController(0.1, 6.0, 1000)
        with pytest.raises(ValueError, match=str(kl)):
            controller.update(kl, 10)
        assert controller.value == 0.1

    def test_too_short_a_horizon_is_refused_and_the_advice_works(self):
        # 0.2 · 50 / 10 = 1: the coefficient could reach 0
        with pytest.raises(ValueError, match=r"--kl_horizon 10 .*50 samples"):
            AdaptiveKLController(0.1, 6.0, 10).update(6.0, 50)
        controller = AdaptiveKLController(0.1, 6.0, 11)
        controller.update(0.0, 50)
        assert controller.value == pytest.approx(0.1 * (1 - 10 / 11))

    def test_bad_constants(self):
        with pytest.raises(ValueError, match="--init_kl_coef"):
            FixedKLController(-0.1)
        with pytest.raises(ValueError, match="--init_kl_coef"):
            AdaptiveKLController(math.nan, 6.0, 10)
        for target, horizon in ((0.0, 10), (6.0, 0)):
            with pytest.raises(ValueError, match=r"--kl_target .* --kl_horizon"):
                AdaptiveKLController(0.1, target, horizon)
