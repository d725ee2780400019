"""Loss, gradient and metrics of an optimizer step do not depend on micro batches, padding or ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES, POLICY_LOSSES
from lightppo.algorithms.kl import approx_kl
from lightppo.algorithms.losses import PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss
from lightppo.config import PPOConfig
from lightppo.experience.experience import Experience
from lightppo.experience.token_weights import token_weights
from lightppo.trainer.training_losses import weighted_policy_loss

LENGTHS = [1, 40, 3, 0, 17, 2, 40, 5]  # very different, one row without a trained token
B, A = len(LENGTHS), max(LENGTHS)
SplitLoss = Callable[[Tensor, Tensor, Tensor, LossNormalizer], Tensor]


def mask_and_constants() -> tuple[Tensor, Tensor]:
    """(B, A) mask with a hole in the longest row, and (4, B, A) numbers to serve as old log probs, targets, ..."""
    mask = torch.tensor(LENGTHS)[:, None] > torch.arange(A)
    mask[1, 10:15] = False
    return mask, torch.randn(4, B, A, generator=torch.Generator().manual_seed(0))


def policy_and_metrics(
    kind: str, mode: str
) -> Callable[[Tensor, Tensor, Tensor, LossNormalizer], tuple]:
    """A policy loss with weights, with selected tokens where it takes them, and clips that some tokens reach."""
    traits = POLICY_LOSSES[kind]
    clips = {} if traits.eps_clip is None else {"clip_eps_low": 0.1, "clip_eps_high": 0.2}
    loss_fn = PolicyLoss(policy_loss=kind, loss_agg_mode=mode, **clips)

    def both(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> tuple:
        selected = c[2] > 1 if traits.selection else None
        return loss_fn(c[0] + 0.3 * x, c[0], c[1], m, n, weights=c[3].abs(), selected=selected)

    return both


def policy(mode: str, kind: str = "ppo") -> SplitLoss:
    both = policy_and_metrics(kind, mode)
    return lambda x, c, m, n: both(x, c, m, n)[0]


def value(mode: str) -> SplitLoss:
    loss_fn = ValueLoss(loss_agg_mode=mode)
    return lambda x, c, m, n: loss_fn(x, c[0], c[1], m, n)[0]


def kl_loss(mode: str) -> SplitLoss:
    return lambda x, c, m, n: aggregate_loss(approx_kl(x, c[0], "k3"), m, mode, n)


def rejecting(mode: str) -> SplitLoss:
    """Rows and tokens left out by the policy in training, and their share."""
    options = {
        "rollout_rejection": ["opsm=0.1", "token_k2=3", "seq_mean_k2=1.5"],
        "old_log_probs": "rollout",
    }
    weights = token_weights(PPOConfig.from_flat(options), in_training=True)
    loss_fn = PolicyLoss(loss_agg_mode=mode)

    def loss(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> Tensor:
        rows = Experience(
            *(torch.zeros_like(c[0]), m, m),
            action_log_probs=c[0],
            advantages=c[1],
            rollout_log_probs=c[2],
        )
        value, metrics = weighted_policy_loss(
            *(loss_fn, rows, n), log_probs=c[0] + 0.3 * x, entropy=c[0], token_weights=weights
        )
        return value + metrics["rejected_ratio"]

    return loss


def policy_metrics(mode: str, kind: str = "ppo") -> SplitLoss:
    """All metrics of a loss in one number, so that each must be right."""
    both = policy_and_metrics(kind, mode)

    def metric(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> Tensor:
        metrics = both(x, c, m, n)[1]
        return (
            sum(place * value for place, value in enumerate(metrics.values(), start=1))
            + 0.0 * x.sum()
        )

    return metric


def run_step(
    loss: SplitLoss, ranks: list[list[list[int]]], simulate_ranks, *, trim: bool = False
) -> tuple[Tensor, Tensor]:
    """One optimizer step: ``ranks[r][k]`` are the rows of micro batch k of rank r. Loss and gradient as an engine
    makes them: backward adds up on a rank, ranks are averaged. ``trim`` pads each micro batch to its own longest row.
    """
    mask, constants = mask_and_constants()
    inputs = torch.randn(B, A, generator=torch.Generator().manual_seed(1))

    def one_rank(rank: int, all_reduce_sum: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        batches = []
        for rows in ranks[rank]:
            width = max(1, max(LENGTHS[row] for row in rows)) if trim else A
            batches.append((rows, width))
        masks = [mask[rows, :width] for rows, width in batches]
        normalizer = LossNormalizer.from_masks(
            masks, all_reduce_sum=all_reduce_sum, dp_size=len(ranks), scale=50.0
        )
        x = inputs.clone().requires_grad_()
        total = torch.zeros(())
        for (rows, width), micro_mask in zip(batches, masks):
            micro_loss = loss(x[rows, :width], constants[:, rows, :width], micro_mask, normalizer)
            micro_loss.backward()
            total = total + micro_loss.detach()
        return total, x.grad

    results = simulate_ranks(len(ranks), one_rank)
    losses, gradients = zip(*results)
    return torch.stack(losses).mean(), torch.stack(gradients).mean(0)


def split(rows: list[int], size: int) -> list[list[int]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


ALL = list(range(B))
SPLITS = {
    "micro 1": [split(ALL, 1)],
    "micro 2": [split(ALL, 2)],
    "micro 4": [split(ALL, 4)],
    "uneven": [[[0, 1, 2], [3], [4, 5, 6, 7]]],
    "shuffled": [split([5, 2, 7, 0, 3, 6, 1, 4], 3)],
    "2 ranks": [split(ALL[:4], 1), split(ALL[4:], 2)],
    "2 ranks, all the tokens on one": [[[0], [3]], [[1, 2, 4, 5], [6, 7]]],
    "3 ranks": [[[0, 1]], [[2, 3, 4]], [[5], [6], [7]]],
}


@pytest.mark.parametrize("trim", [False, True], ids=["one width", "own width"])
@pytest.mark.parametrize("ranks", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("make_loss", [value, kl_loss, rejecting])
def test_loss_and_gradient_do_not_depend_on_the_split(make_loss, mode, ranks, trim, simulate_ranks):
    whole_loss, whole_gradient = run_step(make_loss(mode), [[ALL]], simulate_ranks)
    loss, gradient = run_step(make_loss(mode), ranks, simulate_ranks, trim=trim)
    assert whole_loss.abs() > 1e-3
    torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_policy_losses_do_not_depend_on_the_split(kind, mode, ranks, simulate_ranks):
    """Each loss under each aggregation, with its metrics; padding goes along, each micro batch has its own width."""
    for make_loss in (policy, policy_metrics):
        whole_loss, whole_gradient = run_step(make_loss(mode, kind), [[ALL]], simulate_ranks)
        loss, gradient = run_step(make_loss(mode, kind), ranks, simulate_ranks, trim=True)
        assert whole_loss.abs() > 1e-4
        assert whole_gradient.any() or make_loss is policy_metrics
        torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["gspo", "gmpo"])
def test_a_row_ratio_within_a_micro_batch_only_would_differ(kind, simulate_ranks):
    """The test above can fail: cut a row in two, and its ratio is another."""

    def in_halves(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> Tensor:
        halves = [policy("token-mean", kind)(x[:, part], c[:, :, part], m[:, part], n)
                  for part in (slice(0, 2), slice(2, None))]  # fmt: skip
        return sum(halves)

    _, whole = run_step(policy("token-mean", kind), [[ALL]], simulate_ranks)
    _, gradient = run_step(in_halves, [[ALL]], simulate_ranks)
    assert not torch.allclose(gradient, whole, rtol=1e-2, atol=1e-4)


def test_means_per_micro_batch_would_differ(simulate_ranks):
    """The test above can fail: without the normalizer of the step the gradient changes with the split."""

    def per_micro_batch(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> Tensor:
        return PolicyLoss()(c[0] + 0.3 * x, c[0], c[1], m)[0] / 4

    _, whole = run_step(policy("token-mean"), [[ALL]], simulate_ranks)
    _, gradient = run_step(per_micro_batch, [split(ALL, 2)], simulate_ranks)
    assert not torch.allclose(gradient, whole, rtol=1e-2, atol=1e-4)


def test_rejections_leave_out_some(simulate_ranks):
    """Else their invariance would say nothing."""
    shares = []

    def share(x: Tensor, c: Tensor, m: Tensor, n: LossNormalizer) -> Tensor:
        loss = rejecting("token-mean")(x, c, m, n)
        plain = PolicyLoss()(c[0] + 0.3 * x, c[0], c[1], m, n)[0]
        shares.append((loss - plain).item())
        return loss

    run_step(share, [[ALL]], simulate_ranks)
    assert abs(shares[0]) > 0.1
