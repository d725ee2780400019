from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from lightppo.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    approx_kl,
    make_kl_controller,
)


def test_estimators_by_hand():
    log_probs, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -2.0]])
    # d = 0.5, 0, -1
    torch.testing.assert_close(approx_kl(log_probs, ref, "k1"), torch.tensor([[0.5, 0.0, -1.0]]))
    # ½d² = 0.125, 0, 0.5
    torch.testing.assert_close(approx_kl(log_probs, ref, "k2"), torch.tensor([[0.125, 0.0, 0.5]]))
    # e^{-d} + d - 1: e^{-0.5} - 0.5 = 0.1065307, 0, e - 2 = 0.7182818
    torch.testing.assert_close(approx_kl(log_probs, ref, "k3"), torch.tensor([[0.1065307, 0.0, 0.7182818]]))


def test_k1_and_k3_are_unbiased_under_the_policy():
    # Exact expectation over a vocabulary of 3: Σ p·k(d) = Σ p ln(p/q)
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    kl = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * approx_kl(p.log(), q.log(), name)).sum(), kl)


def test_expected_gradients_as_a_loss():
    """Sampled from the policy: k2 has the gradient of the KL, k1 has none."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    log_p = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)
    weights = log_p.detach().exp()
    (g2,) = torch.autograd.grad((weights * approx_kl(log_p, ref, "k2")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(g2, true)
    (g1,) = torch.autograd.grad((weights * approx_kl(log_p, ref, "k1")).sum(), logits)
    torch.testing.assert_close(g1, torch.zeros_like(g1))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradcheck(name):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: approx_kl(x, ref, name), (log_probs,))


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
    with pytest.raises(ValueError, match=r"--kl_estimator: unknown name 'k4'.*Known names: k1, k2, k3"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="shapes must be equal"):
        approx_kl(torch.zeros(2, 3), torch.zeros(2, 1))


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
        with pytest.raises(
            ValueError, match=r"of the checkpoint is fixed, that of this run is adaptive: set --kl_target"
        ):
            AdaptiveKLController(0.1, 6.0, 1000).load_state_dict(FixedKLController(0.1).state_dict())
        with pytest.raises(ValueError, match="of the checkpoint is adaptive, that of this run is fixed"):
            FixedKLController(0.1).load_state_dict(AdaptiveKLController(0.1, 6.0, 1000).state_dict())

    @pytest.mark.parametrize("kl", [math.nan, math.inf])
    def test_broken_kl_is_refused(self, kl):
        controller = AdaptiveKLController(0.1, 6.0, 1000)
        with pytest.raises(ValueError, match=f"KL of this rollout is {kl}"):
            controller.update(kl, 10)
        assert controller.value == 0.1

    def test_too_short_a_horizon_is_refused_and_the_advice_works(self):
        # 0.2 · 50 / 10 = 1: the coefficient could reach 0
        with pytest.raises(ValueError, match=r"--kl_horizon 10 .* at least 11"):
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
