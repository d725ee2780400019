from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.fakes import FakeStrategy, on_ranks
from support.whole_step import PolicyLoss
from torch import Tensor

from lightppo.algorithms.correction import (
    correction_weights,
    normalize_weights,
    rejection_mask,
)
from lightppo.algorithms.entries import CORRECTIONS, REJECTIONS
from lightppo.algorithms.kl import mismatch_terms
from lightppo.algorithms.option_values import Rejection
from lightppo.errors import ConfigError
from lightppo.logging.step_metrics import (
    Summary,
    chi_square,
    effective_share,
    mismatch_metrics,
)

NAN, INF = math.nan, math.inf


def ratios(*rows: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """log_probs and rollout_log_probs with these ratios; the rollout's are -1, -2, -3, …"""
    rho = torch.tensor(rows)
    rollout = -torch.arange(1.0, rho.numel() + 1).view_as(rho)
    return rollout + rho.log(), rollout


# row 0: ρ = 0.5, 1, 4; product 2, geometric mean 2^(1/3) = 1.2599
# row 1: ρ = 1, hole, 1.5; product 1.5, geometric mean √1.5 = 1.2247
# row 2: nothing trained
RHO = ((0.5, 1.0, 4.0), (1.0, 9.0, 1.5), (3.0, 3.0, 3.0))
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]]).bool()
BY_HAND: dict[str, tuple[dict[str, float], tuple[tuple[float, ...], ...]]] = {
    "none": ({}, ((1, 1, 1), (1, 0, 1), (0, 0, 0))),
    "tis": ({"low": 0.6, "high": 2.0}, ((0.6, 1, 2), (1, 0, 1.5), (0, 0, 0))),
    "seq_tis": ({"low": 1.7, "high": 1.8}, ((1.8, 1.8, 1.8), (1.7, 0, 1.7), (0, 0, 0))),
    "geo_tis": ({"low": 1.24, "high": 1.25}, ((1.25, 1.25, 1.25), (1.24, 0, 1.24), (0, 0, 0))),
    "seq_mis": ({"low": 1.0, "high": 1.8}, ((0, 0, 0), (1.5, 0, 1.5), (0, 0, 0))),
    "geo_mis": ({"low": 1.23, "high": 2.0}, ((2 ** (1 / 3),) * 3, (0, 0, 0), (0, 0, 0))),
    "icepop": ({"low": 0.6, "high": 2.0}, ((0, 1, 0), (1, 0, 1.5), (0, 0, 0))),
    "seq_mask": ({"low": 1.0, "high": 1.25}, ((0, 0, 0), (1, 0, 1), (0, 0, 0))),
    "seq_mask_tis": ({"low": 1.23, "high": 1.27}, ((0.5, 1, 4), (0, 0, 0), (0, 0, 0))),
    "decoupled": ({"low": 0.4, "high": 2.0}, ((0.5, 1, 0), (1, 0, 1.5), (0, 0, 0))),
}
REAL = tuple(name for name in CORRECTIONS if name != "none")


@pytest.mark.parametrize("name", BY_HAND)
def test_bounds_of_each(name):
    assert [
        side for side in ("low", "high") if getattr(CORRECTIONS[name], side) is not None
    ] == list(BY_HAND[name][0])


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("junk", [0.0, NAN, INF, -INF])
def test_weights_by_hand_whatever_is_masked(name, junk):
    log_probs, rollout = ratios(*RHO)
    bounds, expected = BY_HAND[name]
    out = correction_weights(
        name, log_probs.masked_fill(~MASK, junk), rollout.masked_fill(~MASK, junk), MASK, **bounds
    )
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float32))
    assert bool((out[~MASK] == 0).all())


@pytest.mark.parametrize(
    ("name", "agg", "bounds", "rows"),
    [
        # products 2 and 1.5, largest 4 and 1.5; means 1.2599 and 1.2247
        ("geo_mis", "sum", (1.0, 1.8), (0.0, 1.5**0.5)),
        ("geo_mis", "sum", (1.8, 3.0), (2 ** (1 / 3), 0.0)),
        ("geo_mis", "max", (0.0, 3.0), (0.0, 1.5**0.5)),
        ("geo_mis", "max", (1.4, 5.0), (2 ** (1 / 3), 1.5**0.5)),
        ("geo_tis", "sum", (0.0, 1.1), (1.1, 1.1)),
        ("geo_tis", "max", (0.0, 1.24), (1.24, 1.5**0.5)),
        # the second row's largest is within, so its mean stays below the lower bound
        ("geo_tis", "max", (1.23, 2.0), (2 ** (1 / 3), 1.5**0.5)),
    ],
)
def test_what_of_a_row_is_bounded(name, agg, bounds, rows):
    log_probs, rollout = ratios(*RHO)
    low, high = bounds
    weights = correction_weights(name, log_probs, rollout, MASK, low=low, high=high, agg=agg)
    expected = torch.tensor([*rows, 0.0])[:, None] * MASK
    torch.testing.assert_close(weights, expected)


def test_defaults():
    log_probs, rollout = ratios((0.4, 1.0, 6.0, 1.5))
    mask = torch.ones(1, 4).bool()
    expected = {
        "tis": (0.4, 1, 2, 1.5),  # at most 2
        "seq_tis": (2, 2, 2, 2),  # 0.4 · 6 · 1.5 = 3.6, at most 2
        "geo_tis": (3.6**0.25,) * 4,  # 1.377
        "seq_mis": (0, 0, 0, 0),
        "geo_mis": (3.6**0.25,) * 4,
        "icepop": (0, 1, 0, 1.5),  # 0.5 to 5
        "seq_mask": (0, 0, 0, 0),  # 3.6^(1/4) = 1.377, not in 0.999 to 1.001
        "seq_mask_tis": (0.4, 1, 6, 1.5),  # 1.377 is in 0.5 to 5
        "decoupled": (0.4, 1, 0, 1.5),  # up to 5
    }
    for name, weights in expected.items():
        torch.testing.assert_close(
            correction_weights(name, log_probs, rollout, mask), torch.tensor([weights]).float()
        )
    # mean 0.00075: e^0.00075 = 1.00075
    close = rollout + torch.tensor([[0.003, -0.003, 0.002, 0.001]])
    assert correction_weights("seq_mask", close, rollout, mask).tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("name", ["icepop", "seq_mask", "seq_mask_tis"])
def test_bounds_are_inside(name):
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    for bounds in ({"low": 1.0, "high": 2.0}, {"low": 0.5, "high": 1.0}):
        assert correction_weights(name, zeros, zeros, mask, **bounds).tolist() == [[1, 1]]
    assert correction_weights("decoupled", zeros, zeros, mask, high=1.0).tolist() == [[1, 1]]
    above = {"low": 1.0001, "high": 2.0}
    assert correction_weights(name, zeros, zeros, mask, **above).tolist() == [[0, 0]]


@pytest.mark.parametrize("name", REAL)
def test_veto_drops_the_row(name):
    rows = ((1e-5, 1.0, 1.0), (1e-3, 1.0, 1.0), (1.0, 1e-5, 1.0))
    log_probs, rollout = ratios(*rows)
    # the tiny ratio of the last row is a hole
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]]).bool()
    bounds = {
        side: value
        for side, value in (("low", 1e-9), ("high", 9.0))
        if getattr(CORRECTIONS[name], side)
    }
    free = correction_weights(name, log_probs, rollout, mask, **bounds)
    out = correction_weights(name, log_probs, rollout, mask, **bounds, veto=1e-4)
    assert bool((free[mask] > 0).all())
    assert out[0].tolist() == [0, 0, 0]
    assert torch.equal(out[1:], free[1:])
    # the limit on ratios (e^-20 = 2e-9) does not hide a token from a veto below it
    tiny = rollout + torch.tensor([[-25.0, 0, 0]]).expand(3, 3)  # e^-25 = 1.4e-11
    assert correction_weights(name, tiny, rollout, mask, **bounds, veto=1e-10)[0].tolist() == [
        0,
        0,
        0,
    ]


def test_ratios_stop_at_e_to_the_20():
    rollout, mask = torch.zeros(1, 3), torch.ones(1, 3).bool()
    top, huge = math.exp(20), {"high": 1e30}
    high = torch.tensor([[50.0, INF, 15.0]])
    expected = torch.tensor([[top, top, math.exp(15)]])
    torch.testing.assert_close(correction_weights("tis", high, rollout, mask, **huge), expected)
    torch.testing.assert_close(
        correction_weights("decoupled", high, rollout, mask, **huge), expected
    )
    torch.testing.assert_close(
        correction_weights("seq_tis", high, rollout, mask, **huge), torch.full((1, 3), top)
    )
    low = torch.tensor([[-50.0, -INF, -15.0]])
    expected = torch.tensor([[1 / top, 1 / top, math.exp(-15)]])
    torch.testing.assert_close(correction_weights("tis", low, rollout, mask, **huge), expected)
    # three tokens of e^9: the product e^27 stops at e^20, the geometric mean e^9 does not notice
    nine = torch.full((1, 3), 9.0)
    torch.testing.assert_close(
        correction_weights("seq_tis", nine, rollout, mask, **huge), torch.full((1, 3), top)
    )
    assert correction_weights(
        "seq_mask", nine, rollout, mask, low=8102.0, high=8104.0
    ).tolist() == [[1, 1, 1]]
    # an impossible token of each side: 20 - 20, no NaN
    both = correction_weights("seq_tis", torch.tensor([[INF, -INF, 0.0]]), rollout, mask, **huge)
    assert both.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("name", REAL)
def test_weights_are_constants_of_at_least_float32(name):
    log_probs, rollout = ratios(*RHO)
    exact = correction_weights(name, log_probs.double(), rollout.double(), MASK)
    assert exact.dtype == torch.float64
    out = correction_weights(name, log_probs.requires_grad_(), rollout, MASK)
    assert out.dtype == torch.float32
    assert not out.requires_grad
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-7)
    assert (
        correction_weights(name, log_probs.bfloat16(), rollout.bfloat16(), MASK).dtype
        == torch.float32
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_rows_and_padding_do_not_matter(name):
    """A row's weights are its own: the same alone, permuted, wider padded, beside others."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 50, generator=generator)
    log_probs = rollout + 0.5 * torch.randn(6, 50, generator=generator)
    mask = torch.rand(6, 50, generator=generator) < 0.7
    mask[:, 0] = True
    mask[1, 1:] = False  # one token
    mask[2] = False
    bounds = {
        side: value
        for side, value in (("low", 0.97), ("high", 1.1))
        if getattr(CORRECTIONS[name], side)
    }
    veto = None if name == "none" else 0.3
    whole = correction_weights(name, log_probs, rollout, mask, **bounds, veto=veto)
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    permuted = correction_weights(
        name, log_probs[order], rollout[order], mask[order], **bounds, veto=veto
    )
    assert torch.equal(permuted, whole[order])
    wide = [
        torch.nn.functional.pad(x, (2, 5), value=v)
        for x, v in ((log_probs, NAN), (rollout, 1.0), (mask, 0))
    ]
    padded = correction_weights(name, *wide[:2], wide[2].bool(), **bounds, veto=veto)
    torch.testing.assert_close(padded[:, 2:-5], whole)
    for b in range(6):
        alone = correction_weights(
            name, log_probs[b : b + 1], rollout[b : b + 1], mask[b : b + 1], **bounds, veto=veto
        )
        torch.testing.assert_close(alone[0], whole[b])
    if name != "none":
        assert 0 < int((whole[mask] == 0).sum()) < int(mask.sum()) or name.endswith("tis")


def test_importance_sampling_takes_the_expectation_to_the_other_policy():
    """Σ_a μ(a) w(a) f(a) = Σ_a π(a) f(a), over all tokens, and over all sequences of two tokens."""
    generator = torch.Generator().manual_seed(0)
    mu, pi = (
        torch.randn(3, 5, dtype=torch.float64, generator=generator).softmax(-1) for _ in range(2)
    )
    f = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    one = torch.ones(5, 1).bool()
    w = correction_weights("tis", pi[0].log()[:, None], mu[0].log()[:, None], one, high=1e9)[:, 0]
    torch.testing.assert_close((mu[0] * w * f[0]).sum(), (pi[0] * f[0]).sum())
    pairs = torch.tensor(list(itertools.product(range(5), repeat=2)))  # (25, 2)
    log_mu = torch.stack([mu[1][pairs[:, 0]], mu[2][pairs[:, 1]]], 1).log()  # (25, 2)
    log_pi = torch.stack([pi[1][pairs[:, 0]], pi[2][pairs[:, 1]]], 1).log()
    w = correction_weights("seq_tis", log_pi, log_mu, torch.ones(25, 2).bool(), high=1e9)
    assert torch.equal(w[:, 0], w[:, 1])
    values = f[pairs[:, 0], pairs[:, 1]]
    torch.testing.assert_close(
        (log_mu.sum(1).exp() * w[:, 0] * values).sum(), (log_pi.sum(1).exp() * values).sum()
    )


def test_decoupled_ppo_by_hand():
    """Weight × PPO loss = mean of -(π_prox/π_behave) min(rA, clip(r, 0.8, 1.2)A), r = π/π_prox; 0 above the bound 5.

    | token | A  | r   | min(rA, clip(r)A)     | π_prox/π_behave | loss |
    |-------|----|-----|-----------------------|-----------------|------|
    | 0     | 1  | 1.5 | 1.2 (clipped)         | 2               | -2.4 |
    | 1     | -1 | 0.5 | -0.8 (clipped)        | 0.5             | 0.4  |
    | 2     | 2  | 1.1 | 2.2                   | 6, above 5      | 0    |
    | 3     | -2 | 1.1 | -2.2                  | 0.5             | 1.1  |
    | 4     | masked                                                     |
    Sum -0.9 over 4 tokens: -0.225. Gradient of token 3: 0.5 · 1.1 · 2 / 4 = 0.275, of all others 0.
    """
    prox, behave = ratios((2.0, 0.5, 6.0, 0.5, 1.0))
    r = torch.tensor([[1.5, 0.5, 1.1, 1.1, 1.0]])
    current = (prox + r.log()).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 2.0, -2.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]]).bool()
    weights = correction_weights("decoupled", prox, behave, mask)
    loss, _ = PolicyLoss(0.2, 0.2)(current, prox, advantages, mask, weights=weights)
    torch.testing.assert_close(loss, torch.tensor(-0.225))
    loss.backward()
    torch.testing.assert_close(current.grad, torch.tensor([[0, 0, 0, 0.275, 0]]))


def test_without_a_difference_no_real_correction_changes_anything():
    log_probs, _ = ratios(*RHO)
    for name in CORRECTIONS:
        assert torch.equal(correction_weights(name, log_probs, log_probs, MASK), MASK.float())
    assert torch.equal(normalize_weights(MASK.float(), MASK), MASK.float())


# -- rejections ------------------------------------------------------------------------------------------------------

# d of the rows above: -ln 2, 0, ln 4; 0, hole, ln 1.5; nothing trained.  k1 = -d: .693, 0, -1.386; 0, -.405
# k2 = d²/2: .240, 0, .961; 0, .0822.  k3 = ρ - 1 - d: .193, 0, 1.614; 0, .0945
# Row 0: sums .  k1 -.693, k2 1.201, k3 1.807; means -.231, .400, .602.  Row 1: -.405, .0822, .0945; -.203, .0411, .0473
KEPT = {
    "token_ratio=0.6:2": "010 101",
    "token_ratio=2": "110 101",
    "token_ratio=0.6:": "011 101",
    "token_k1=-0.5:0.7": "110 101",
    "token_k1=0.5": "011 101",
    "token_k2=0.2": "010 101",
    "token_k3=0.2": "110 101",
    "seq_sum_ratio=1:1.8": "000 101",  # 2; 1.5
    "seq_sum_k1=-0.5:0": "000 101",
    "seq_sum_k2=1.3": "111 101",
    "seq_sum_k2=1.2": "000 101",
    "seq_sum_k3=1.8": "000 101",
    "seq_mean_ratio=1.23:1.27": "111 000",  # 1.2599; 1.2247
    "seq_mean_k1=-0.3:-0.21": "111 000",
    "seq_mean_k2=0.05": "000 101",
    "seq_mean_k3=0.7": "111 101",
    "seq_mean_k3=0.6": "000 101",
    "seq_max_ratio=3": "000 101",
    "seq_max_ratio=0.6:5": "000 101",  # the 0.5, as a veto does
    "seq_max_k1=-0.5:0.1": "000 101",
    "seq_max_k2=0.9": "000 101",
    "seq_max_k2=1": "111 101",
    "seq_max_k3=0.05": "000 000",
    # k3r = 1/ρ - 1 + d: .307 0 .636, sum .943, mean .314; 0 .0721, mean .0361
    "token_k3r=0.3": "010 101",
    "seq_sum_k3r=0.9": "000 101",
    "seq_mean_k3r=0.31": "000 101",
    "seq_mean_k3r=0.32": "111 101",
    "seq_max_k3r=0.7": "111 101",
    "seq_max_k3r=0.07": "000 000",
    "m2po=0.5": "110 101",  # d² 0 0 .164 .480 1.922: means 0 0 .055 .161 .513
    "m2po=0.1": "010 101",
    "m2po=0.6": "111 101",
    # row means of k1 are below 0: the policy likes these answers more than the engine did
    "opsm=0.01": "111 101",
    "opsm=-0.22": "111 000",  # row 1 has -.203; both have A < 0
}


def kept_by(
    *texts: str, log_probs: Tensor, rollout: Tensor, mask: Tensor = MASK, **more: object
) -> Tensor:
    more = {"advantages": torch.full(mask.shape, -1.0)} | more
    return rejection_mask(
        [Rejection.parse(text) for text in texts], log_probs, rollout, mask, **more
    )


def pattern(text: str) -> list[list[bool]]:
    return [[letter == "1" for letter in row] for row in f"{text} 000".split()]


@pytest.mark.parametrize("text", KEPT)
@pytest.mark.parametrize("junk", [0.0, NAN, INF])
def test_rejections_by_hand_whatever_is_masked(text, junk):
    log_probs, rollout = (x.masked_fill(~MASK, junk) for x in ratios(*RHO))
    assert kept_by(text, log_probs=log_probs, rollout=rollout).tolist() == pattern(KEPT[text])


def test_every_rejection_has_a_case():
    assert {text.partition("=")[0] for text in KEPT} == REJECTIONS.keys()


def test_rejections_add_up():
    log_probs, rollout = ratios(*RHO)
    both = kept_by("token_k2=0.2", "seq_mean_ratio=1.23:1.27", log_probs=log_probs, rollout=rollout)
    assert both.tolist() == pattern("010 000")


def test_opsm_spares_what_was_good():
    log_probs, rollout = ratios((0.5, 0.5), (0.5, 0.5))
    mask, advantages = torch.ones(2, 2).bool(), torch.tensor([[1.0, -1.0], [0.0, -0.1]])
    kept = kept_by(
        "opsm=0.1", log_probs=log_probs, rollout=rollout, mask=mask, advantages=advantages
    )
    assert kept.tolist() == [[True, False], [True, False]]  # mean k1 is ln 2


def test_a_token_without_a_number_stays():
    """Its loss is NaN, so the optimizer step is skipped and counted: a rejection would hide it."""
    log_probs, rollout = ratios((1.0, 1.0, 9.0))
    log_probs[0, 0] = NAN
    mask = torch.ones(1, 3).bool()
    for text in ("token_k2=0.1", "seq_mean_k3=0.1", "seq_sum_ratio=0.9:1.1", "m2po=0.1"):
        assert kept_by(text, log_probs=log_probs, rollout=rollout, mask=mask)[0, 0]


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections_depend_neither_on_rows_nor_padding_nor_ranks(name):
    generator = torch.Generator().manual_seed(1)
    rollout = -torch.rand(6, 50, generator=generator)
    log_probs = rollout + 0.5 * torch.randn(6, 50, generator=generator)
    mask = torch.rand(6, 50, generator=generator) < 0.7
    mask[2] = False
    inputs = {"log_probs": log_probs, "rollout": rollout, "mask": mask}
    bounds = (0.01 * 1.1**k for k in range(100))  # one that keeps some and drops some
    tries = ((f"{name}={high}", kept_by(f"{name}={high}", **inputs)) for high in bounds)
    text, whole = next(
        (text, kept) for text, kept in tries if 0 < int(kept.sum()) < int(mask.sum())
    )
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    assert torch.equal(kept_by(text, **{key: x[order] for key, x in inputs.items()}), whole[order])
    wide = {
        key: torch.nn.functional.pad(x, (2, 5), value=0 if key == "mask" else NAN)
        for key, x in inputs.items()
    }
    assert torch.equal(kept_by(text, **wide)[:, 2:-5], whole)
    shares = [slice(0, 4), slice(4, 6), slice(0, 0)]

    def on_rank(strategy: FakeStrategy) -> Tensor:
        share = {key: x[shares[strategy.rank]] for key, x in inputs.items()}
        return kept_by(text, **share, all_reduce_sum=lambda x: strategy.all_reduce(x, op="sum"))

    parts = on_ranks(3, on_rank)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tokn_k1=2", r"--rollout_rejection: unknown name 'tokn_k1' \(did you mean 'token_k1'"),
        ("token_k1", "write token_k1=HIGH or token_k1=LOW:HIGH"),
        ("token_k1=a", "in numbers"),
        ("token_k1=inf", "write token_k1=HIGH"),
        ("token_k1=1:0.5", "the lower one first"),
        ("token_k1=1:1", "the lower one first"),
        ("token_k2=0.1:0.5", "upper bound alone: token_k2=HIGH"),
        ("token_k2=-1", "must be above 0"),
        ("seq_sum_ratio=0:2", "must be above 0"),
        ("m2po=", "write m2po=HIGH"),
    ],
)
def test_rejections_that_cannot_be_read(text, match):
    with pytest.raises(ConfigError, match=match):
        Rejection.parse(text)


# -- normalising and metrics -----------------------------------------------------------------------------------------


def test_normalize_by_hand():
    # 0.5 + 1 + 2 + 1 + 1.5 = 6 over 5 trained tokens: divided by 1.2; junk at masked positions is no weight
    weights = torch.tensor([[0.5, 1, 2], [1, NAN, 1.5], [INF, 9, 9]])
    expected = torch.tensor([[0.5, 1, 2], [1, 0, 1.5], [0, 0, 0]]) / 1.2
    torch.testing.assert_close(normalize_weights(weights, MASK), expected)
    # dropped tokens count in the mean: 3 over 4 tokens
    out = normalize_weights(torch.tensor([[0.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4).bool())
    torch.testing.assert_close(out, torch.tensor([[0, 0, 4 / 3, 8 / 3]]))
    zeros = torch.zeros(3, 3)
    assert torch.equal(normalize_weights(zeros, MASK), zeros)
    assert torch.equal(normalize_weights(zeros, torch.zeros(3, 3).bool()), zeros)
    assert normalize_weights(weights.double(), MASK).dtype == torch.float64


def test_normalize_over_ranks(simulate_ranks):
    weights = torch.tensor([[0.5, 1.0, 2.0], [1.0, 0.0, 1.5], [9.0, 9.0, 9.0]])
    whole = normalize_weights(weights, MASK)
    parts = [(weights[[0, 2]], MASK[[0, 2]]), (weights[[1]], MASK[[1]]), (weights[:0], MASK[:0])]
    out = simulate_ranks(3, lambda rank, reduce: normalize_weights(*parts[rank], reduce))
    assert torch.equal(torch.cat([out[0][:1], out[1], out[0][1:]]), whole)
    assert out[2].shape == (0, 3)


def test_mismatch_by_hand():
    log_probs, rollout = ratios(*RHO)
    terms = mismatch_terms(log_probs.masked_fill(~MASK, NAN), rollout.masked_fill(~MASK, NAN), MASK)
    ln2, ln15 = math.log(2), math.log(1.5)
    expected = {
        "kl": (ln2, 0, -2 * ln2, 0, -ln15),
        "k3_kl": (0.5 + ln2 - 1, 0, 4 - 2 * ln2 - 1, 0, 1.5 - ln15 - 1),
        "logp_diff": (ln2, 0, 2 * ln2, 0, ln15),
        "ratio": (0.5, 1, 4, 1, 1.5),
        "ppl_ratio": (2 ** (-1 / 3), 1.5**-0.5),
        "seq_ratio": (2, 1.5),
    }
    assert terms.keys() == expected.keys()
    for name, values in expected.items():
        assert terms[name].dtype == torch.float64
        torch.testing.assert_close(
            terms[name], torch.tensor(values, dtype=torch.float64), rtol=1e-6, atol=1e-6
        )
    metrics = mismatch_metrics({name: Summary.of(x) for name, x in terms.items()})
    assert metrics == pytest.approx(
        {
            "kl": (-ln2 - ln15) / 5,
            "k3_kl": (6 - 5 + 2 - ln2 - ln15) / 5,  # (Σ(ρ - 1) - Σd)/5: Σρ = 8, Σd = ln 2 + ln 1.5
            "logp_diff_max": 2 * ln2,
            "ppl_ratio": (2 ** (-1 / 3) + 1.5**-0.5) / 2,
            "chi2_token": (0.25 + 1 + 16 + 1 + 2.25) / 5 - 1,  # 3.1
            "chi2_seq": (4 + 2.25) / 2 - 1,  # 2.125
            "ess_token": 64 / (5 * 20.5),
            "ess_seq": 3.5**2 / (2 * 6.25),  # 0.98
        },
        rel=1e-5,
    )


def test_mismatch_estimates_what_it_says():
    """Under the policy that sampled, by enumeration: the KLs, the χ² divergence, and E[ρ] = 1."""
    generator = torch.Generator().manual_seed(0)
    mu, pi = (
        torch.randn(7, dtype=torch.float64, generator=generator).softmax(-1) for _ in range(2)
    )
    terms = mismatch_terms(pi.log()[:, None], mu.log()[:, None], torch.ones(7, 1).bool())
    kl = (mu * (mu / pi).log()).sum()
    torch.testing.assert_close((mu * terms["kl"]).sum(), kl)
    torch.testing.assert_close((mu * terms["k3_kl"]).sum(), kl)
    torch.testing.assert_close((mu * terms["ratio"]).sum(), mu.sum())
    torch.testing.assert_close(
        (mu * terms["ratio"].square()).sum() - 1, ((pi - mu).square() / mu).sum()
    )
    assert bool((terms["k3_kl"] >= 0).all())


def test_mismatch_over_ranks_is_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(5, 40, generator=generator)
    log_probs = rollout + 0.1 * torch.randn(5, 40, generator=generator)
    mask = torch.rand(5, 40, generator=generator) < 0.8
    mask[3] = False
    whole = mismatch_terms(log_probs, rollout, mask)
    parts = [
        mismatch_terms(log_probs[rows], rollout[rows], mask[rows]) for rows in ([3], [4, 0], [1, 2])
    ]
    assert [len(part["seq_ratio"]) for part in parts] == [0, 2, 2]
    merged = mismatch_metrics(
        {name: sum((Summary.of(part[name]) for part in parts), Summary()) for name in whole}
    )
    assert merged == pytest.approx(
        mismatch_metrics({name: Summary.of(x) for name, x in whole.items()}), rel=1e-9
    )


def test_mismatch_of_extremes():
    empty = mismatch_terms(torch.full((2, 3), NAN), torch.zeros(2, 3), torch.zeros(2, 3).bool())
    assert all(x.shape == (0,) for x in empty.values())
    assert all(
        math.isnan(x)
        for x in mismatch_metrics({name: Summary.of(x) for name, x in empty.items()}).values()
    )
    one = mismatch_terms(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1).bool())
    assert mismatch_metrics({name: Summary.of(x) for name, x in one.items()}) == {
        "kl": 0,
        "k3_kl": 0,
        "logp_diff_max": 0,
        "ppl_ratio": 1,
        "chi2_token": 0,
        "chi2_seq": 0,
        "ess_token": 1,
        "ess_seq": 1,
    }
    # a token that the trainer finds e^30 times more probable: ratios stop at e^20, differences do not
    far = mismatch_terms(torch.tensor([[-1.0]]), torch.tensor([[-31.0]]), torch.ones(1, 1).bool())
    assert far["kl"].tolist() == [-30]
    assert far["logp_diff"].tolist() == [30]
    assert far["ratio"].tolist() == far["seq_ratio"].tolist() == pytest.approx([math.exp(20)])
    assert far["ppl_ratio"].tolist() == pytest.approx([math.exp(-20)])


def test_effective_share_by_hand():
    # 4² / (3 · 6)
    assert effective_share(Summary.of(torch.tensor([1.0, 1.0, 2.0]))) == pytest.approx(16 / 18)
    # one of four counts
    assert effective_share(Summary.of(torch.tensor([5.0, 0.0, 0.0, 0.0]))) == 0.25
    assert effective_share(Summary.of(torch.full((6,), 0.3))) == pytest.approx(1)
    assert effective_share(Summary.of(torch.zeros(3))) == 0
    nothing = Summary.of(torch.zeros(0))
    assert math.isnan(chi_square(nothing))
    assert math.isnan(effective_share(nothing))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--rollout_correction: .*'icepop'"):
        correction_weights("icepops", *ratios(*RHO), MASK)


def test_bad_tensors():
    log_probs, rollout = ratios(*RHO)
    broken = log_probs.clone()
    broken[0, 1] = NAN
    for call in (
        lambda: correction_weights("icepop", broken, rollout, MASK),
        lambda: mismatch_terms(rollout, broken, MASK),
    ):
        with pytest.raises(ValueError, match=r"1 of 5 .*NaN"):
            call()
    with pytest.raises(ValueError, match=r"log_probs \(3, 3\), rollout_log_probs \(3, 2\)"):
        correction_weights("tis", log_probs, rollout[:, 1:], MASK)
    with pytest.raises(ValueError, match=r"weights \(3, 3\), mask \(3, 2\)"):
        normalize_weights(rollout, MASK[:, 1:])
