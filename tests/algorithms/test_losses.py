"""Policy and value losses: by hand, and what holds for every one in the table."""

from __future__ import annotations

import math

import pytest
import torch
from support.whole_step import PolicyLoss, ValueLoss
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.losses import LossInputs, binary_kl
from lightppo.algorithms.masking import LossNormalizer
from lightppo.errors import ConfigError
from lightppo.user_code import is_from_users_file

NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


KINDS = sorted(POLICY_LOSSES)
SUM = "seq-mean-token-sum"


def policy_loss(kind: str, **fields) -> PolicyLoss:
    """With epsilons that clip some tokens and not others, also where the loss's own are narrow or wide."""
    if POLICY_LOSSES[kind].eps_clip is not None:
        fields = {"clip_eps_low": 0.3, "clip_eps_high": 0.4} | fields
    return PolicyLoss(policy_loss=kind, **fields)


def selection(kind: str, *shape: int) -> dict[str, torch.Tensor]:
    """What a loss that singles out tokens needs besides: every third one."""
    picked = torch.arange(math.prod(shape)).view(shape) % 3 == 0
    return {"selected": picked} if POLICY_LOSSES[kind].selection else {}


class TestPolicyLoss:
    """What holds for every loss; the numbers of each are below."""

    MASK = torch.tensor(
        [[True, True, False, True], [True, False, False, False], [True, True, True, True]]
    )

    def gradient(self, loss_fn, log_probs, *args, **kwargs):
        log_probs = log_probs.clone().requires_grad_()
        loss, metrics = loss_fn(log_probs, *args, **kwargs)
        loss.backward()
        return loss.detach(), log_probs.grad, metrics

    def test_defaults_are_those_of_the_loss(self):
        assert PolicyLoss() == PolicyLoss(0.2, 0.2, "ppo", "token-mean", {"dual_clip": None})
        for name, traits in POLICY_LOSSES.items():
            loss_fn = PolicyLoss(policy_loss=name, options=dict.fromkeys(traits.defaults))
            assert (loss_fn.clip_eps_low, loss_fn.clip_eps_high) == (
                traits.eps_clip or (None, None)
            )
            assert loss_fn.options == traits.defaults
        assert PolicyLoss(clip_eps_high=0.28).clip_eps_low == 0.2
        assert PolicyLoss(clip_eps_low=0.1).clip_eps_high == 0.2
        for loss in (
            PolicyLoss(0.1),
            PolicyLoss(clip_eps=0.1),
        ):  # one of both sides, as scripts give it
            assert (loss.clip_eps_low, loss.clip_eps_high) == (0.1, 0.1)
        assert (
            PolicyLoss(policy_loss="sapo", options={"sapo_tau_neg": 2.0}).options["sapo_tau_pos"]
            == 1.0
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_first_step_on_policy_is_reinforce(self, kind):
        """old = the same tensor, which nobody detached: ratio 1, and the gradient -A of REINFORCE for every loss."""
        log_probs, advantages = randn(3, 4), randn(3, 4, seed=1)
        advantages[2, 1] = 0.0
        selected = {name: torch.zeros_like(x) for name, x in selection(kind, 3, 4).items()}
        log_probs.requires_grad_()
        options = {"dual_clip": 3.0} if "dual_clip" in POLICY_LOSSES[kind].defaults else {}
        loss_fn = PolicyLoss(policy_loss=kind, options=options)
        loss, metrics = loss_fn(log_probs, log_probs, advantages, self.MASK, **selected)
        loss.backward()
        torch.testing.assert_close(log_probs.grad, -advantages * self.MASK / 8)
        assert metrics["ratio"].item() == pytest.approx(1.0)
        assert (metrics["clip_ratio"].item(), metrics["approx_kl"].item()) == (0.0, 0.0)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_has_its_gradient_from_its_own_loss_alone(self, kind):
        """So that a weight of a token is a weight of its gradient, also where one ratio belongs to the whole row."""
        log_probs, old, advantages = randn(2, 3), randn(2, 3, seed=1), randn(2, 3, seed=2)
        loss_fn = policy_loss(kind)

        def token_loss(x: torch.Tensor) -> torch.Tensor:
            eps = loss_fn.clip_eps_low, loss_fn.clip_eps_high
            inputs = LossInputs(
                x, old, advantages, torch.ones(2, 3).bool(), *eps, **selection(kind, 2, 3)
            )
            return POLICY_LOSSES[kind].fn(inputs, **loss_fn.options)[0].flatten()

        jacobian = torch.autograd.functional.jacobian(token_loss, log_probs).view(6, 6)
        assert jacobian.diagonal().any()
        assert torch.equal(jacobian, jacobian.diagonal().diag())

    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_are_weights_of_the_gradient(self, kind):
        tensors = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), self.MASK
        weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)).double()
        weights[0, 0] = weights[1, 0] = 0.0
        weights[0, 2] = NAN  # masked
        weights.requires_grad_()
        loss_fn, extra = policy_loss(kind), selection(kind, 3, 4)
        _, plain, plain_metrics = self.gradient(loss_fn, *tensors, **extra)
        loss, weighted, metrics = self.gradient(loss_fn, *tensors, **extra, weights=weights)
        torch.testing.assert_close(weighted, torch.where(self.MASK, plain * weights.detach(), 0.0))
        assert torch.equal(weighted[1], torch.zeros(4).double())
        assert loss.isfinite()
        assert weights.grad is None
        assert metrics == plain_metrics

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_weight_of_zero_silences_a_token_that_is_not_finite(self, kind):
        """A token that the model holds impossible: -inf. Its row's ratio is lost, its neighbours' rows are not."""
        log_probs = randn(2, 2)
        log_probs[0] = -math.inf
        weights = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
        loss_fn, extra, ones = policy_loss(kind), selection(kind, 2, 2), torch.ones(2, 2).bool()
        loss, gradient, _ = self.gradient(
            loss_fn,
            log_probs,
            randn(2, 2, seed=1),
            randn(2, 2, seed=2),
            ones,
            weights=weights,
            **extra,
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert not gradient[0].any()

    def test_old_log_probs_and_advantages_are_constants(self):
        for kind in KINDS:
            old, advantages = randn(1, 2).requires_grad_(), randn(1, 2, seed=1).requires_grad_()
            self.gradient(
                policy_loss(kind),
                randn(1, 2),
                old,
                advantages,
                torch.ones(1, 2),
                **selection(kind, 1, 2),
            )
            assert old.grad is None
            assert advantages.grad is None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
    @pytest.mark.parametrize("advantage", [2.0, -2.0])
    def test_an_absurd_log_ratio_stays_finite(self, kind, log_ratio, advantage):
        log_probs, ones = torch.tensor([[log_ratio, log_ratio, 0.1]]), torch.ones(1, 3)
        loss, gradient, metrics = self.gradient(
            policy_loss(kind), log_probs, 0 * ones, advantage * ones, ones, **selection(kind, 1, 3)
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(x.isfinite() for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_lies_under_the_mask_never_matters(self, kind):
        log_probs, old, advantages, extra = (
            randn(3, 4),
            randn(3, 4, seed=1),
            randn(3, 4, seed=2),
            selection(kind, 3, 4),
        )
        clean = self.gradient(policy_loss(kind), log_probs, old, advantages, self.MASK, **extra)
        for bad in (NAN, math.inf, -math.inf):
            dirty = self.gradient(
                policy_loss(kind), *(x.masked_fill(~self.MASK, bad) for x in (log_probs, old, advantages)), self.MASK,
                **{name: x | ~self.MASK for name, x in extra.items()},
            )  # fmt: skip
            assert torch.equal(clean[0], dirty[0])
            assert torch.equal(clean[1], dirty[1])
            assert clean[2] == dirty[2]
        assert not clean[1][~self.MASK].any()

    # cispo and the drift of cpgd are stop-gradient forms that are no derivative of their value: see the closed forms
    # below, and there also gspo and gmpo, which are one where a row has one advantage.
    @pytest.mark.parametrize("kind", ["ppo", "sapo", "clip_cov", "kl_cov", "gpg", "cpgd", "dual"])
    def test_gradcheck(self, kind):
        mask = torch.tensor([[True, True, False, True]] * 3)
        options = {"dual": {"dual_clip": 1.5}, "cpgd": {"cpgd_drift_coef": 0.0}}.get(kind, {})
        kind = {"dual": "ppo"}.get(kind, kind)
        old, advantages, extra = randn(3, 4), randn(3, 4, seed=1), selection(kind, 3, 4)
        # some clipped, none on the kink
        log_probs = (old + 0.7 * randn(3, 4, seed=2)).requires_grad_()
        loss_fn = policy_loss(kind, options=options)
        clipped = loss_fn(log_probs, old, advantages, mask, **extra)[1]["clip_ratio"].item()
        assert 0 < clipped < 1 or POLICY_LOSSES[kind].eps_clip is None
        assert torch.autograd.gradcheck(
            lambda x: loss_fn(x, old, advantages, mask, **extra)[0], (log_probs,)
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_equal_rewards_train_nothing(self, kind):
        loss_fn = policy_loss(kind, options={"cpgd_drift_coef": 0.0} if kind == "cpgd" else {})
        extra = {name: torch.zeros_like(x) for name, x in selection(kind, 3, 4).items()}
        zeros = torch.zeros(3, 4).double()
        loss, gradient, metrics = self.gradient(
            loss_fn, 5 * randn(3, 4), 5 * randn(3, 4, seed=1), zeros, zeros == 0, **extra
        )
        assert loss == 0
        assert not gradient.any()
        assert metrics["clip_ratio"] == 0  # there was no gradient to take away

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_reports_the_promised_metrics(self, kind):
        _, _, metrics = self.gradient(policy_loss(kind), *(randn(3, 4, seed=i) for i in range(3)), self.MASK,
                                      **selection(kind, 3, 4))  # fmt: skip
        assert {"clip_ratio", "ratio", "approx_kl"} <= metrics.keys()
        assert all(x.dim() == 0 and not x.requires_grad for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_fully_masked_micro_batch(self, kind):
        bad, mask = torch.full((2, 3), NAN), torch.zeros(2, 3).bool()
        loss, gradient, metrics = self.gradient(
            policy_loss(kind),
            bad,
            bad,
            bad,
            mask,
            LossNormalizer(tokens=5, sequences=2),
            **selection(kind, 2, 3),
        )
        assert loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros(2, 3))
        assert all(x.item() == 0.0 for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_precision(self, kind):
        tensors, extra = [randn(3, 4, seed=i) for i in range(3)], selection(kind, 3, 4)
        exact = self.gradient(policy_loss(kind), *tensors, self.MASK, **extra)
        single = self.gradient(policy_loss(kind), *(x.float() for x in tensors), self.MASK, **extra)
        assert (exact[0].dtype, single[0].dtype) == (torch.float64, torch.float32)
        torch.testing.assert_close(single[0], exact[0].float())
        torch.testing.assert_close(single[1], exact[1].float())
        # bf16 log probs are taken as they are, and all that follows is float32: old would round to -1 in bf16
        half, old, ones = (
            torch.tensor([[-1.0]]).bfloat16(),
            torch.tensor([[-1.001]]),
            torch.ones(1, 1),
        )
        loss, _, metrics = self.gradient(
            policy_loss(kind), half, old, ones, ones, **selection(kind, 1, 1)
        )
        assert loss.dtype == torch.float32
        torch.testing.assert_close(metrics["ratio"], torch.tensor(0.001).exp())

    def test_bad_names(self):
        with pytest.raises(ValueError, match=r"--policy_loss: .*'gsop'.*'gspo'"):
            PolicyLoss(policy_loss="gsop")
        with pytest.raises(ValueError, match="--loss_agg_mode"):
            PolicyLoss(loss_agg_mode="mean")
        with pytest.raises(ValueError, match=r"--dual_clap .*--policy_loss ppo.*dual_clip"):
            PolicyLoss(options={"dual_clap": 3.0})
        with pytest.raises(ValueError, match=r"--dual_clip .*--policy_loss gpg"):
            PolicyLoss(policy_loss="gpg", options={"dual_clip": 3.0})

    def test_bad_numbers(self):
        for low in (0.0, 1.01, -0.1, NAN):
            with pytest.raises(ValueError, match="--eps_clip_low"):
                PolicyLoss(clip_eps_low=low)
        with pytest.raises(ValueError, match="--eps_clip_high"):
            PolicyLoss(clip_eps_high=0.0)
        for kind in ("sapo", "kl_cov", "gpg"):
            with pytest.raises(ValueError, match=f"--eps_clip: .*'{kind}'"):
                PolicyLoss(0.2, policy_loss=kind)
        for kind, option, bad in [
            ("ppo", "dual_clip", 1.0),
            ("sapo", "sapo_tau_pos", 0.0),
            ("sapo", "sapo_tau_neg", -1.0),
            ("clip_cov", "clip_cov_ratio", 0.0),
            ("clip_cov", "clip_cov_low", NAN),
            ("clip_cov", "clip_cov_high", NAN),
            ("kl_cov", "kl_cov_ratio", 1.5),
            ("kl_cov", "kl_cov_coef", -0.1),
            ("cpgd", "cpgd_drift_coef", -0.1),
            ("dppo_tv", "dppo_ratio_max", 1.0),
            ("dppo_kl", "dppo_drift_coef", -0.1),
        ]:
            with pytest.raises(ValueError, match=f"--{option} .*{bad}"):
                PolicyLoss(policy_loss=kind, options={option: bad})
        with pytest.raises(ValueError, match=r"--clip_cov_low 5 .*--clip_cov_high 5"):
            PolicyLoss(policy_loss="clip_cov", options={"clip_cov_low": 5.0})

    def test_bad_tensors(self):
        good = [torch.zeros(2, 3)] * 3 + [torch.ones(2, 3).bool()]
        with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
            PolicyLoss()(good[0], good[1], torch.zeros(2, 1), good[3])
        with pytest.raises(ValueError, match=r"weights \(2, 1\)"):
            PolicyLoss()(*good, weights=torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"selected \(3,\)"):
            PolicyLoss(policy_loss="kl_cov")(*good, selected=torch.ones(3))
        for kind in ("clip_cov", "kl_cov"):
            with pytest.raises(ValueError, match=f"'{kind}'.*selected"):
                PolicyLoss(policy_loss=kind)(*good)
        for kind in set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}:
            with pytest.raises(ValueError, match=f"'{kind}'.*selected"):
                PolicyLoss(policy_loss=kind)(*good, selected=good[3])


class TestValueLoss:
    OLD, RETURNS = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 0.0, NAN]])
    MASK = torch.tensor([[True, True, True, False]])

    def test_huber_by_hand(self):
        # errors 0.5, -3, 1 with delta 1: 0.5*0.25 = 0.125; 1*(3 - 0.5) = 2.5; 0.5 (where both forms meet)
        values = torch.tensor([[0.5, -3.0, 1.0]], requires_grad=True)
        zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
        loss, _ = ValueLoss(value_clip=None, huber_delta=1.0)(values, zeros, zeros, mask)
        torch.testing.assert_close(loss, torch.tensor((0.125 + 2.5 + 0.5) / 3))
        loss.backward()
        # the slope ends at delta
        torch.testing.assert_close(values.grad, torch.tensor([[0.5, -1.0, 1.0]]) / 3)
        # clipped to 0 +- 0.2: errors 0.2, -0.2, 0.2; the larger, unclipped ones count
        clipped, metrics = ValueLoss(value_clip=0.2, huber_delta=1.0)(
            values.detach(), zeros, zeros, mask
        )
        torch.testing.assert_close(clipped, loss.detach())
        assert metrics["value_clip_ratio"] == 0

    def test_huber_delta_must_be_above_0(self):
        with pytest.raises(ValueError, match="--value_huber_delta"):
            ValueLoss(huber_delta=0.0)

    def test_by_hand(self):
        values = torch.tensor([[0.5, 0.1, 0.5, 3.0]])
        loss, metrics = ValueLoss(value_clip=0.2)(values, self.OLD, self.RETURNS, self.MASK)
        # (0.5 - 1)² = 0.25 against (0.2 - 1)² = 0.64: 0.64, clipped
        # (0.1 - 1)² = 0.81 inside the clip
        # (0.5 - 0)² = 0.25 against (0.2 - 0)² = 0.04: 0.25
        torch.testing.assert_close(loss, torch.tensor(0.5 * (0.64 + 0.81 + 0.25) / 3))
        torch.testing.assert_close(metrics["value_clip_ratio"], torch.tensor(1 / 3))

    def test_without_clip(self):
        values = torch.tensor([[0.5, 0.1, 0.5, 3.0]])
        loss, metrics = ValueLoss(value_clip=None)(values, self.OLD, self.RETURNS, self.MASK)
        torch.testing.assert_close(loss, torch.tensor(0.5 * (0.25 + 0.81 + 0.25) / 3))
        assert metrics["value_clip_ratio"].item() == 0.0

    def test_gradient_by_hand(self):
        values = torch.tensor([[0.5, 0.1, 0.5, NAN]], requires_grad=True)
        loss, _ = ValueLoss(value_clip=0.2)(values, self.OLD, self.RETURNS, self.MASK)
        loss.backward()
        # V - R over 3 tokens, 0 where the clipped error rules
        torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.9 / 3, 0.5 / 3, 0.0]]))

    def test_values_inside_the_clip_are_not_counted_as_clipped(self):
        """old + (v - old) is not v in float32; a clip written so would count rounding as clipping."""
        old = 0.05 * randn(1, 1000, dtype=torch.float32)
        values = 0.05 * randn(1, 1000, seed=1, dtype=torch.float32)
        assert not torch.equal(old + (values - old), values)
        mask = torch.ones(1, 1000).bool()
        _, metrics = ValueLoss(value_clip=2.0)(
            values, old, randn(1, 1000, seed=3, dtype=torch.float32), mask
        )
        assert metrics["value_clip_ratio"].item() == 0.0

    def test_gradcheck(self):
        mask = torch.tensor([[True, False, True, True]] * 3)
        old, returns, values = (
            randn(3, 4),
            randn(3, 4, seed=1),
            randn(3, 4, seed=2).requires_grad_(),
        )
        for clip in (0.5, None):
            loss_fn = ValueLoss(value_clip=clip)
            assert torch.autograd.gradcheck(
                lambda v, f=loss_fn: f(v, old, returns, mask)[0], (values,)
            )

    def test_targets_are_constants(self):
        old, returns = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
        loss, _ = ValueLoss()(
            torch.zeros(1, 1, requires_grad=True), old, returns, torch.ones(1, 1).bool()
        )
        loss.backward()
        assert old.grad is None
        assert returns.grad is None

    def test_fully_masked_micro_batch(self):
        values, mask = torch.full((1, 2), NAN, requires_grad=True), torch.zeros(1, 2).bool()
        loss, _ = ValueLoss()(values, values, values, mask)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(values.grad, torch.zeros(1, 2))

    def test_bad_input(self):
        with pytest.raises(ValueError, match="--value_clip"):
            ValueLoss(value_clip=0.0)
        with pytest.raises(ValueError, match="--loss_agg_mode"):
            ValueLoss(loss_agg_mode="mean")
        with pytest.raises(ValueError, match=r"old_values \(1, 1\)"):
            ValueLoss()(
                torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 2).bool()
            )


# with one row: the plain sum, so that each token's gradient stands alone
ROW_MEAN = "seq-mean-token-mean"


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def step(
    loss_fn: PolicyLoss,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    **more: Tensor | None,
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics; the old log probs are -1, so that log probs are not ratios by chance."""
    log_probs = (log_ratio - 1.0).requires_grad_()
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    loss, metrics = loss_fn(log_probs, torch.full_like(log_ratio, -1.0), advantages, mask, **more)
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
        _, gradient, metrics = step(
            PolicyLoss(1.0, 0.2, loss_agg_mode=SUM), row(0.001, 1e-8).log(), row(-1.0, -1.0)
        )
        check(gradient, row(0.001, 1e-8))
        assert metrics["clip_ratio"] == 0.0

    def test_dual_clip(self):
        loss_fn = PolicyLoss(loss_agg_mode=SUM, options={"dual_clip": 3.0})
        loss, gradient, metrics = step(
            loss_fn, row(1.5, 4.0, 4.0, 0.5).log(), row(-2.0, -2.0, 2.0, -2.0)
        )
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
        loss, gradient, metrics = step(
            PolicyLoss(loss_agg_mode=SUM), row(200.0, -200.0, 19.0), row(-1.0, 1.0, -1.0)
        )
        # e^20, -e^-20, e^19: beyond ±20 the value stops and so does the gradient, and the metric says so
        check(loss, math.exp(20) - math.exp(-20) + math.exp(19))
        check(gradient, row(0.0, 0.0, math.exp(19)))
        check(metrics["clip_ratio"], 2 / 3)


class TestGSPO:
    LOG_RATIO = torch.tensor(
        [[0.3, -0.1, 9.0, 0.1], [0.5, 9.0, 9.0, 9.0], [0.5, 0.3, 9.0, 9.0]]
    ).double()
    MASK = torch.tensor(
        [[True, True, False, True], [True, False, False, False], [True, True, False, False]]
    )
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
        check(
            gradient, torch.tensor([[first, first, 0, first], [0, 0, 0, 0], [third, third, 0, 0]])
        )
        check(metrics["clip_ratio"], 1 / 6)
        check(metrics["ratio"], (3 * 1.1051709 + 1.6487213 + 2 * 1.4918247) / 6)

    def test_dual_clip_by_hand(self):
        loss_fn = PolicyLoss(0.2, 0.2, "gspo", ROW_MEAN, {"dual_clip": 1.3})
        loss, gradient, metrics = step(loss_fn, self.LOG_RATIO, self.ADVANTAGES, self.MASK)
        # as above, but row 3, A -1, with s = 1.4918247 costs 1.3 and has no gradient: its two of six tokens
        check(loss, (-2.2103418 - 1.2 + 1.3) / 3)
        check(gradient[2], torch.zeros(4))
        assert gradient[0].any()
        check(metrics["dual_clip_ratio"], 2 / 6)
        check(metrics["clip_ratio"], 3 / 6)

    def test_a_row_is_clipped_whole_or_not_at_all(self):
        """Token 1 alone is far outside the clip; the row is not."""
        _, gradient, metrics = step(
            PolicyLoss(0.2, 0.2, "gspo", SUM), row(0.9, -0.9), row(1.0, 1.0)
        )
        check(gradient, row(-1.0, -1.0))
        assert metrics["clip_ratio"] == 0.0

    def test_advantages_may_differ_within_a_row(self):
        _, gradient, _ = step(PolicyLoss(0.2, 0.2, "gspo", SUM), row(0.1, 0.1), row(1.0, -3.0))
        check(gradient, math.exp(0.1) * row(-1.0, 3.0))

    def test_it_is_the_gradient_of_the_sequence_loss(self):
        """Numerically: the token form has the derivative of -min(sA, clip(s)·A), s of the whole row."""
        mask = torch.tensor(
            [[True, True, True, False], [True, False, True, True], [True, False, False, False]]
        )
        old, advantages = randn(3, 4), randn(3, 1, seed=1).expand(3, 4)
        log_probs = (old + 0.3 * randn(3, 4, seed=2)).requires_grad_()
        loss_fn = PolicyLoss(0.2, 0.2, "gspo", ROW_MEAN)
        assert torch.autograd.gradcheck(
            lambda x: loss_fn(x, old, advantages, mask)[0], (log_probs,)
        )

    def test_one_token_is_ppo(self):
        log_ratio, advantages = 0.4 * randn(6, 1), randn(6, 1, seed=1)
        gspo, ppo = (
            step(PolicyLoss(0.2, 0.3, kind), log_ratio, advantages) for kind in ("gspo", "ppo")
        )
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
        loss, gradient, metrics = step(
            PolicyLoss(policy_loss="cispo", loss_agg_mode=SUM), ratio.log(), advantages
        )
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
        loss, gradient, metrics = step(
            PolicyLoss(policy_loss="gmpo", loss_agg_mode=ROW_MEAN), log_ratio, advantages
        )
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
        mask = torch.tensor(
            [[True, True, True, False], [True, False, True, True], [True, False, False, False]]
        )
        old, advantages = randn(3, 4), randn(3, 1, seed=1).expand(3, 4)
        log_probs = (old + 0.5 * randn(3, 4, seed=2)).requires_grad_()
        loss_fn = PolicyLoss(0.4, 0.3, "gmpo", ROW_MEAN)
        assert 0 < loss_fn(log_probs, old, advantages, mask)[1]["clip_ratio"].item() < 1
        assert torch.autograd.gradcheck(
            lambda x: loss_fn(x, old, advantages, mask)[0], (log_probs,)
        )


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
        _, gradient, metrics = step(
            loss_fn, row(0.0, 0.0), row(1.0, 1.0), mask, selected=torch.tensor([[False, True]])
        )
        check(gradient, row(-1.0, 0.0))
        assert metrics["selected_ratio"] == 0.0


class TestKLCov:
    def test_by_hand(self):
        loss_fn = PolicyLoss(policy_loss="kl_cov", loss_agg_mode=SUM, options={"kl_cov_coef": 0.5})
        selected = torch.tensor([[True, True, False]])
        loss, gradient, metrics = step(
            loss_fn, row(1.5, 0.5, 0.5).log(), row(2.0, -2.0, -2.0), selected=selected
        )
        # -ρA + 0.5·|ln ρ|: -3 + 0.5·0.4054651; 1 + 0.5·0.6931472; 1 (not selected; and nothing is clipped)
        check(loss, -3 + 0.5 * 0.4054651 + 1 + 0.5 * 0.6931472 + 1)
        # -ρA ± 0.5
        check(gradient, row(-2.5, 0.5, 1.0))
        assert metrics["selected_ratio"] == 2 / 3
        assert metrics["clip_ratio"] == 0.0


class TestGPG:
    def test_by_hand(self):
        loss, gradient, metrics = step(
            PolicyLoss(policy_loss="gpg"), row(0.5, -0.5), row(2.0, -1.0)
        )
        # log probs -0.5 and -1.5: (0.5·2 - 1.5) / 2; whatever the ratio, the gradient is -A / 2
        check(loss, (1.0 - 1.5) / 2)
        check(gradient, row(-1.0, 0.5))
        check(metrics["ratio"], (math.exp(0.5) + math.exp(-0.5)) / 2)
        assert metrics["clip_ratio"] == 0.0


class TestCPGD:
    def test_by_hand(self):
        loss_fn = PolicyLoss(
            policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 0.0}
        )
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
        loss_fn = PolicyLoss(
            policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 0.1}
        )
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
        loss_fn = PolicyLoss(
            policy_loss="cpgd", loss_agg_mode=SUM, options={"cpgd_drift_coef": 1.0}
        )
        _, gradient, _ = step(loss_fn, log_ratio.detach(), torch.zeros(1, 8).double())
        check(gradient, log_ratio.grad)

    def test_a_low_epsilon_of_1_is_no_lower_bound(self):
        loss_fn = PolicyLoss(1.0, 0.2, "cpgd", SUM, {"cpgd_drift_coef": 0.0})
        _, gradient, _ = step(loss_fn, row(-30.0), row(-1.0))
        check(gradient, row(1.0))


class TestDPPO:
    # π_old is 1/e = .3678794, so π is .5518192 .5518192 .1839397 .1839397 .4046674
    RATIO, ADVANTAGES = row(1.5, 1.5, 0.5, 0.5, 1.1), row(2.0, -2.0, 2.0, -2.0, 1.0)

    @pytest.mark.parametrize(
        ("kind", "eps"),
        [
            # changes ±.1839397 and .0367880
            ("dppo_tv", 0.183),
            # at ρ 1.5: .3678794·ln(1/1.5) + .6321206·ln(.6321206/.4481808) = .0682117, at ρ 0.5:
            # .3678794·ln 2 + .6321206·ln(.6321206/.8160603) = .0935371, at ρ 1.1: .0028390
            ("dppo_kl", 0.068),
        ],
    )
    def test_by_hand(self, kind, eps):
        loss_fn = PolicyLoss(eps, eps, kind, SUM)
        loss, gradient, metrics = step(loss_fn, self.RATIO.log(), self.ADVANTAGES)
        # -ρ·A·log π: ρ 1.5, A 2 has gone too far; 3·(ln 1.5 - 1); -1·(ln 0.5 - 1); ρ 0.5, A -2 too far;
        # -1.1·(ln 1.1 - 1)
        check(loss, -1.7836047 + 1.6931472 + 0.9951588)
        check(gradient, row(0.0, 3.0, -1.0, 0.0, -1.1))
        assert metrics["clip_ratio"] == 2 / 5
        # a little wider, and all are trusted
        wider = PolicyLoss(eps + 0.002, eps + 0.03, kind, SUM)
        _, _, metrics = step(wider, self.RATIO.log(), self.ADVANTAGES)
        assert metrics["clip_ratio"] == (0 if kind == "dppo_tv" else 1 / 5)

    def test_weight_and_drift_by_hand(self):
        options = {"dppo_ratio_max": 1.2, "dppo_drift_coef": 0.1}
        loss_fn = PolicyLoss(0.1, 0.1, "dppo_tv", SUM, options)
        loss, gradient, metrics = step(loss_fn, row(1.5, 1.5).log(), row(2.0, -2.0))
        # ρ 1.5 weighs 1.2: 2.4·(ln 1.5 - 1) = -1.4268837; the drift 0.1·(ln 1.5)² = 0.0164402 is never masked,
        # and its slope 0.2·ln 1.5 = 0.0810930
        check(loss, -1.4268837 + 2 * 0.0164402)
        check(gradient, row(0.0810930, 2.4 + 0.0810930))
        assert metrics["dppo_truncated_ratio"] == 1.0

    @pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
    def test_rare_tokens_are_free_and_frequent_ones_are_not(self, kind):
        """The point of the method: ρ 5 of a token of 1e-4 moves little mass, ρ 1.25 of one of 0.6 much."""
        old, new = row(1e-4, 0.6).log(), row(5e-4, 0.75).log()
        ones = torch.ones(1, 2)
        lost = {
            name: PolicyLoss(policy_loss=name, **eps)(new, old, ones, ones)[1]["clip_ratio"].item()
            for name, eps in ((kind, {}), ("ppo", {"clip_eps_high": 0.28}))
        }
        # KL of the second: 0.6·ln 0.8 + 0.4·ln 1.6 = 0.0541
        assert lost == {kind: 0.5, "ppo": 0.5}
        _, gradient, _ = step(PolicyLoss(policy_loss=kind), row(0.0), row(1.0))
        assert gradient.item() == -1.0
        first = PolicyLoss(policy_loss=kind)(new[:, :1], old[:, :1], ones[:, :1], ones[:, :1])[1]
        assert first["clip_ratio"] == 0

    def test_binary_kl_where_all_mass_is_on_the_token(self):
        """0·ln 0 is 0; to a probability of 1 it is infinitely far, from one it is -ln p."""
        log_q, log_p = row(0.0, 0.0, math.log(0.5)), row(0.0, math.log(0.25), 0.0)
        divergence = binary_kl(log_q, log_p)
        check(divergence[0, :2], row(0.0, math.log(4.0))[0])
        assert divergence[0, 2] == math.inf
        # in float32, where 1 - (1 - 1e-9) would be 0
        tiny = binary_kl(torch.tensor([-1e-9]), torch.tensor([-2e-9]))
        assert tiny.isfinite().all()


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
            assert gradient.sign().item() == (0 if far_enough else -math.copysign(1, advantage)), (
                log_ratio,
                advantage,
            )
            assert metrics["clip_ratio"] == far_enough


# Slope of each loss in log_probs, from log-ratio d (B, A), advantages a and the row means of d, inside all clips.
SLOPES = {
    "ppo": lambda d, a, mean: -d.exp() * a,
    "gspo": lambda d, a, mean: -mean.exp() * a,
    "cispo": lambda d, a, mean: -d.exp() * a,
    "gmpo": lambda d, a, mean: -mean.exp() * a,
    "sapo": lambda d, a, mean: (
        -d.exp() * a / torch.cosh(0.5 * (1 + 0.05 * (a < 0)) * (d.exp() - 1)).square()
    ),
    "clip_cov": lambda d, a, mean: -d.exp() * a,
    "kl_cov": lambda d, a, mean: -d.exp() * a,
    "gpg": lambda d, a, mean: -a,
    "cpgd": lambda d, a, mean: -a + 0.01 * (d.exp() - 1),
    "dppo_tv": lambda d, a, mean: -d.exp() * a,
    "dppo_kl": lambda d, a, mean: -d.exp() * a,
}


@pytest.mark.parametrize("kind", SLOPES)
def test_gradients_in_closed_form(kind):
    """What autograd makes of the stop-gradient forms is what they claim; (4σ(1-σ) is 1/cosh² of half the argument)."""
    d, advantages = 0.1 * randn(4, 6), randn(4, 6, seed=1)
    eps = (
        {} if POLICY_LOSSES[kind].eps_clip is None else {"clip_eps_low": 0.9, "clip_eps_high": 0.9}
    )
    nothing = torch.zeros(4, 6).bool() if POLICY_LOSSES[kind].selection else None
    loss_fn = PolicyLoss(policy_loss=kind, loss_agg_mode=SUM, **eps)
    _, gradient, metrics = step(loss_fn, d, advantages, selected=nothing)
    check(gradient, SLOPES[kind](d, advantages, d.mean(1, keepdim=True)) / 4)
    assert metrics["clip_ratio"] == 0.0


OWN_LOSS = """
import torch
from lightppo.algorithms.entries import policy_loss

def loss(x):
    return -x.ratio * x.advantages
"""


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (
            "loss(x)",
            "must return a pair (loss of each token, metrics), as (loss, x.metrics()), not Tensor",
        ),
        (
            "(loss(x), x.metrics(), 1)",
            "must return a pair (loss of each token, metrics), as (loss, x.metrics()), not 3 values",
        ),
        (
            "(loss(x).mean(), x.metrics())",
            "must return losses of shape (2, 3), one per token: without a mean, not ()",
        ),
        (
            "(loss(x).sum(1), x.metrics())",
            "must return losses of shape (2, 3), one per token: without a mean, not (2,)",
        ),
        (
            "(None, x.metrics())",
            "must return losses, a tensor of shape (2, 3), one per token: without a mean, not None",
        ),
        (
            "(loss(x).detach(), x.metrics())",
            "returns losses without a gradient: compute them from x.log_probs or x.ratio",
        ),
        ("(loss(x), None)", "must return metrics by name, as x.metrics() does, not NoneType"),
        ("(loss(x), {'ratio': x.ratio})", "returns no metric 'approx_kl': begin with x.metrics()"),
        (
            "(loss(x), x.metrics() | {'mine': 'good'})",
            "must return the metric 'mine', a tensor of shape (2, 3), one per token, not str",
        ),
        (
            "(loss(x), x.metrics() | {'mine': loss(x).mean()})",
            "must return the metric 'mine' of shape (2, 3), one per token, not ()",
        ),
    ],
)
def test_what_a_loss_of_the_users_gives_is_looked_at(tmp_path, returned, says):
    path = tmp_path / "mine.py"
    path.write_text(f"{OWN_LOSS}\ndef mine(x):\n    return {returned}\n")
    loss = PolicyLoss(policy_loss=f"{path}:mine")
    log_probs = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ConfigError) as caught:
        loss(log_probs, torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert str(caught.value) == f"--policy_loss: mine ({path}:8) {says}"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "def mine(x, beta): return x",
            "{place} cannot be called: mine() missing 1 required positional argument: 'beta'; it is called with",
        ),
        ("@policy_loss\ndef mine(x): return x", "{path}:8: write @policy_loss() with brackets"),
        (
            "import sys\nsys.exit(3)\ndef mine(x): return x",
            "fails when run: SystemExit: 3 ({path}:9 in",
        ),
    ],
)
def test_a_loss_that_cannot_be_called_is_named(tmp_path, code, says):
    path = tmp_path / "mine.py"
    path.write_text(f"{OWN_LOSS}\n{code}\n")
    ones = torch.ones(2, 3)
    with pytest.raises(ConfigError) as caught:
        PolicyLoss(policy_loss=f"{path}:mine")(ones, ones, ones, ones)
    assert says.format(path=path, place=f"mine ({path}:8)") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_within_a_loss_keeps_its_type(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def mine(x):\n    return x.log_prob\n")
    ones = torch.ones(2, 3)
    with pytest.raises(AttributeError) as caught:
        PolicyLoss(policy_loss=f"{path}:mine")(ones, ones, ones, ones)
    assert is_from_users_file(caught.value)
