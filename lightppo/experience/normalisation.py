"""Shaping of scores; normalisation of scores, advantages and returns: by a batch, by groups, or by all seen so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightppo.algorithms.advantages import Groups, number_groups
from lightppo.algorithms.masking import (
    AllReduceSum,
    at_least_float32,
    identity,
    require_same_shape,
    zero_where_masked,
)
from lightppo.algorithms.option_values import Norm
from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.ranks import Ranks

# -- of a rollout ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def normalize_by(
    values: Tensor,
    mask: Tensor,
    group_ids: Tensor | None,
    norm: Norm,
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """Return (x - mean) / (std + eps) of the unmasked values (B, A), 0 at masked positions. In float64.

    Mean and deviation are of all ranks, of each group, or left out; the deviation is around this mean, or around 0
    without one. With ``norm.leave_one_out`` a value is not in its own mean. Of a single value, a mean that leaves it
    out is 0, and an unbiased deviation 1. Source: ``Normalization`` of AReaL (arXiv:2505.24298).

    Args:
        group_ids: (B,), equal for the samples of one prompt, which are all on this rank.
    """
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    index, group_count = number_groups(group_ids, mask)
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], group_count)
    numbers = values[mask].double()  # (N,)
    sum_of = {"group": groups.sum, "batch": lambda numbers: all_reduce_sum(numbers.sum())}
    unit_weights = torch.ones_like(numbers)
    if norm.mean is not None:
        total = sum_of[norm.mean](numbers)
        count = sum_of[norm.mean](unit_weights)
        if norm.leave_one_out:
            mean = (total - numbers) / (count - 1).clamp(min=1)
            mean = torch.where(count > 1, mean, 0.0)
        else:
            mean = total / count.clamp(min=1)
        numbers = numbers - mean
    if norm.std is not None:
        squares = sum_of[norm.std](numbers.square())
        count = sum_of[norm.std](unit_weights)
        std = (squares / (count - int(norm.unbiased)).clamp(min=1)).sqrt()
        if norm.unbiased:
            std = torch.where(count > 1, std, 1.0)
        numbers = numbers / (std + norm.eps)
    zeros = torch.zeros_like(at_least_float32(values))
    return zeros.masked_scatter(mask, numbers.to(zeros.dtype))


# -- running statistics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Weight (the count, if all weigh 1), mean and biased variance of numbers; all 0 for an empty set."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        values: Tensor,
        mask: Tensor | None = None,
        all_reduce_sum: AllReduceSum = identity,
        name: str = "values",
    ) -> Moments:
        """Measure the unmasked values of all ranks, in float64 and two passes. ``name`` is for the error message."""
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        require_same_shape(values=values, mask=mask)
        mask = mask.bool()
        exact = values.double().masked_fill(~mask, 0.0)
        total, count = all_reduce_sum(torch.stack([exact.sum(), mask.sum().double()])).tolist()
        if not math.isfinite(total):
            raise ValueError(
                f"the {name} of this rollout hold NaN or infinite numbers: no mean of them can be taken"
            )
        if count == 0:  # the same on every rank, so all leave here together
            return cls()
        mean = total / count
        squares = (exact - mean).masked_fill(~mask, 0.0).square().sum()
        return cls(count, mean, all_reduce_sum(squares).item() / count)

    def mixed_with(self, batch: Moments, share: float, weight: float) -> Moments:
        """Mix with the batch's, by share; with n_batch / n this is the merge of Chan, Golub and LeVeque 1979."""
        mean_difference = batch.mean - self.mean
        variance = (
            (1.0 - share) * self.variance
            + share * batch.variance
            + share * (1.0 - share) * mean_difference * mean_difference
        )
        return Moments(weight, self.mean + share * mean_difference, variance)


class RunningMeanStd:
    """Normalises scores by the mean and standard deviation of all scores ever seen (``--reward_running_norm``).

    The result does not depend on ranks or the order of batches. Scores that differ by less than ``EPS`` count as equal.
    """

    EPS = 1e-6

    def __init__(self) -> None:
        self._moments = Moments()

    @property
    def count(self) -> float:
        """Return how many numbers were seen."""
        return self._moments.weight

    @property
    def mean(self) -> float:
        return self._moments.mean

    @property
    def std(self) -> float:
        """Return the deviation, divided by n, not n - 1."""
        return math.sqrt(self._moments.variance)

    def update(
        self, values: Tensor, mask: Tensor | None = None, all_reduce_sum: AllReduceSum = identity
    ) -> None:
        """Call once per rollout batch and before :meth:`normalize`, on every rank; errors of :meth:`Moments.of`."""
        score_moments = Moments.of(values, mask, all_reduce_sum, name="scores")
        total_count = self.count + score_moments.weight
        if score_moments.weight:
            share = score_moments.weight / total_count
            self._moments = self._moments.mixed_with(score_moments, share, total_count)

    @torch.no_grad()
    def normalize(self, values: Tensor) -> Tensor:
        """Return (x - mean) / (std + EPS); unchanged until two numbers have been seen."""
        values = at_least_float32(values)
        if self.count < 2:
            return values
        return ((values.double() - self.mean) / (self.std + self.EPS)).to(values.dtype)

    def state_dict(self) -> dict[str, float]:
        return {
            "count": self._moments.weight,
            "mean": self._moments.mean,
            "variance": self._moments.variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = Moments(
            float(state["count"]), float(state["mean"]), float(state["variance"])
        )


class ValueNorm:
    """Statistics of the returns, so that the critic's outputs stay near mean 0 and variance 1 whatever the rewards.

    Per rollout: ``denormalize`` the critic's outputs to values and make advantages and returns of them; ``update`` with
    the returns; ``normalize`` the returns as targets, and ``normalize_old`` the values for the value clip. ``kind`` is
    ``ma`` (all returns weigh the same) or ``exp`` (a rollout's weight falls by ``beta`` per later rollout); ``eps`` is
    the least variance. Source: MAPPO, Yu et al. 2022 (arXiv:2103.01955), after van Hasselt et al. 2016
    (arXiv:1602.07714), whose rescaling of the critic's last layer is left out.
    """

    def __init__(self, kind: str = "exp", beta: float = 0.99995, eps: float = 1e-5) -> None:
        if kind not in ("ma", "exp"):
            raise ValueError(f"ValueNorm: kind must be ma or exp, not {kind!r}")
        self.kind = kind
        self.beta = beta
        self.eps = eps
        self._moments = Moments()
        self._old = (0.0, 1.0)  # mean and std before the last update

    @property
    def mean(self) -> float:
        """Return the mean of the returns; 0 before the first update."""
        return self._moments.mean

    @property
    def std(self) -> float:
        """Return the standard deviation of the returns, at least sqrt(eps); 1 before the first update."""
        if self._moments.weight:
            return math.sqrt(max(self._moments.variance, self.eps))
        return 1.0

    def update(
        self, returns: Tensor, mask: Tensor | None = None, all_reduce_sum: AllReduceSum = identity
    ) -> None:
        """Call once per rollout batch, on every rank, with unnormalised returns; errors of :meth:`Moments.of`."""
        returns_moments = Moments.of(returns, mask, all_reduce_sum, name="returns")
        self._old = (self.mean, self.std)
        if returns_moments.weight:
            weight = self._moments.weight
            if self.kind == "ma":  # all returns ever seen weigh the same
                weight = weight + returns_moments.weight
                share = returns_moments.weight / weight
            else:
                # each later rollout multiplies a weight by beta; dividing by the sum of weights
                # removes the bias
                weight = self.beta * weight + (1.0 - self.beta)
                share = (1.0 - self.beta) / weight
            self._moments = self._moments.mixed_with(returns_moments, share, weight)

    def denormalize(self, values: Tensor) -> Tensor:
        """Return the critic's outputs as returns: x · std + mean, with the current statistics."""
        return _affine(values, self.std, self.mean)

    def normalize(self, returns: Tensor) -> Tensor:
        """Return (x - mean) / std with the current statistics; nothing is clipped."""
        return _affine(returns, 1.0 / self.std, -self.mean / self.std)

    def normalize_old(self, values: Tensor) -> Tensor:
        """Return (x - mean) / std with the statistics before the last update: undoes a ``denormalize`` made before it."""
        mean, std = self._old
        return _affine(values, 1.0 / std, -mean / std)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            **asdict(self._moments),
            "old_mean": self._old[0],
            "old_std": self._old[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics; beta and eps come from flags. ValueError for a state of another kind."""
        if state["kind"] != self.kind:
            raise ValueError(
                f"the checkpoint was made with --value_norm {state['kind']}, this run has {self.kind}"
            )
        self._moments = Moments(
            float(state["weight"]), float(state["mean"]), float(state["variance"])
        )
        self._old = (float(state["old_mean"]), float(state["old_std"]))


def _affine(values: Tensor, scale: float, shift: float) -> Tensor:
    """Return values · scale + shift, in float64 because shift may be large against the values' differences."""
    values = at_least_float32(values)
    return (values.double() * scale + shift).to(values.dtype)


def make_value_norm(config: PPOConfig) -> ValueNorm | None:
    """Return the statistics of ``--value_norm`` of a resolved config; ``None``: the critic learns raw returns."""
    loss = config.loss
    if loss.value_norm is None:
        return None
    beta = {} if loss.value_norm_beta is None else {"beta": loss.value_norm_beta}
    return ValueNorm(loss.value_norm, **beta)


# -- scores (B,), one per response: what a reward source gives becomes what training maximises ------------------------


def scale_scores(
    scores: Tensor, bias: float = 0.0, scaling: float = 1.0, max_clip: float | None = None
) -> Tensor:
    """Return clip((score - bias) · scaling, ±max_clip): ``max_clip`` is in units of the result, None for no limit."""
    scores = (at_least_float32(scores) - bias) * scaling
    if max_clip is None:
        return scores
    return scores.clamp(-max_clip, max_clip)


def zero_truncated(scores: Tensor, truncated: Tensor) -> Tensor:
    """Give truncated answers the score 0; they still pay for their KL (``--mask_no_eos_with_zero``)."""
    return zero_where_masked(scores, ~truncated.bool())


def stop_properly(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Lower the scores of truncated answers: min(score, coef · score) for coef in [0, 1], min(score, coef) below 0.

    The minimum keeps an answer from gaining by not ending: half of a negative score would be a higher score.
    Source: the recipe of ProRL v2 (NVIDIA 2025), which multiplies every truncated score.
    """
    scores = at_least_float32(scores)
    penalised = scores * coef if coef >= 0 else torch.full_like(scores, coef)
    return torch.where(truncated.bool(), torch.minimum(scores, penalised), scores)


def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """Return min(-(L - (max_len - buffer_len)) / buffer_len · factor, 0), at least -factor, to add to the scores.

    Source: DAPO (arXiv:2503.14476), eq. 13, soft overlong punishment, with a factor. ``lengths`` (B,) are L in tokens.
    """
    excess_tokens = (lengths - (max_len - buffer_len)).clamp(0, buffer_len)  # (B,)
    return -(excess_tokens.float() / buffer_len) * factor


@torch.no_grad()
def dense_rewards(token_scores: Tensor, action_mask: Tensor, delta: bool) -> Tensor:
    """Return the rewards of trained tokens from a reward source's token scores, both (B, A); 0 at other positions.

    With ``delta`` (``--reward_delta``) the reward is the score minus the previous trained token's (or 0), so that a row
    sums to its last score; otherwise the score itself.
    """
    require_same_shape(token_scores=token_scores, action_mask=action_mask)
    mask = action_mask.bool()
    scores = zero_where_masked(token_scores, mask)  # (B, A)
    if not delta or mask.shape[1] == 0:
        return scores
    positions = torch.arange(mask.shape[1], device=mask.device)
    # (B, A), last trained position up to here, or -1
    latest_position = torch.where(mask, positions, -1).cummax(dim=1).values
    # (B, A), last trained position before here
    previous_position = torch.nn.functional.pad(latest_position[:, :-1], (1, 0), value=-1)
    previous = scores.gather(1, previous_position.clamp(min=0))
    previous = previous.masked_fill(previous_position < 0, 0.0)
    return (scores - previous).masked_fill(~mask, 0.0)


class ScoreShaper:
    """Shapes the scores of one rank's samples; docs/algorithms.md gives the order.

    With ``--use_dense_reward`` tokens have rewards of their own, and the score is what is added at a response's end.
    """

    def __init__(self, config: PPOConfig, ranks: Ranks) -> None:
        reward = self.options = config.reward
        self.device = ranks.device
        self.max_len = config.rollout.generate_max_len
        self.scale = partial(
            scale_scores,
            bias=reward.reward_bias,
            scaling=reward.reward_scaling,
            max_clip=reward.max_reward_clip,
        )
        self.running = RunningMeanStd() if reward.reward_running_norm else None
        self._all_reduce_sum = partial(ranks.all_reduce, op="sum")

    @property
    def states(self) -> dict[str, RunningMeanStd]:
        """Return the parts that have a state, by its name in checkpoints."""
        return {} if self.running is None else {"score_statistics": self.running}

    def shape(self, rollouts: Sequence[Rollout], learn: bool = False, clip: bool = True) -> Tensor:
        """Return the score of each response (B,).

        Args:
            learn: ``--reward_running_norm`` takes these scores in first, those of all ranks. Then collective.
            clip: to ``--reward_clip_range``.
        """
        options = self.options
        rewards = [rollout.reward for rollout in rollouts]
        scores = self.scale(torch.tensor(rewards, dtype=torch.float32, device=self.device))
        if self.running is not None:
            if learn:
                self.running.update(scores, all_reduce_sum=self._all_reduce_sum)
            scores = self.running.normalize(scores)
        if options.use_dense_reward:
            scores = torch.zeros_like(scores)
        if options.stop_properly_penalty is not None:
            truncated = self._truncated(rollouts)
            scores = stop_properly(scores, truncated, options.stop_properly_penalty)
        if options.overlong_buffer_len is not None:
            scores = scores + self._overlong_penalty(rollouts)
        if options.mask_no_eos_with_zero:
            scores = zero_truncated(scores, self._truncated(rollouts))
        if clip and options.reward_clip_range is not None:
            scores = scores.clamp(*options.reward_clip_range)
        return scores

    def _truncated(self, rollouts: Sequence[Rollout]) -> Tensor:
        truncated = [rollout.truncated for rollout in rollouts]
        return torch.tensor(truncated, dtype=torch.bool, device=self.device)  # (B,)

    def _overlong_penalty(self, rollouts: Sequence[Rollout]) -> Tensor:
        response_lengths = [rollout.trained_length for rollout in rollouts]
        return overlong_penalty(
            torch.tensor(response_lengths, dtype=torch.float32, device=self.device),  # (B,)
            max_len=self.max_len,
            buffer_len=self.options.overlong_buffer_len,
            factor=self.options.overlong_penalty_factor,
        )

    def token_scores(
        self, rollouts: Sequence[Rollout], action_mask: Tensor | None = None
    ) -> Tensor:
        """Return the rewards of single tokens (B, A), of ``--use_dense_reward``.

        Args:
            action_mask: the trained tokens; ``None``: those that the rollouts name.
        """
        if action_mask is None:
            trained = [
                rollout.trained or [True] * len(rollout.response_ids) for rollout in rollouts
            ]
            masks = [torch.tensor(mask, device=self.device) for mask in trained]
            action_mask = pad_sequence(masks, batch_first=True)  # (B, A)
        rows = torch.zeros(action_mask.shape, device=self.device)  # (B, A)
        for score_row, rollout in zip(rows, rollouts):
            score_row[: len(rollout.token_rewards)] = torch.tensor(
                rollout.token_rewards, device=self.device
            )
        return dense_rewards(self.scale(rows), action_mask, self.options.reward_delta)

    def final_scores(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return what training maximises for each sample before KL (B,)."""
        scores = self.shape(rollouts)
        if self.options.use_dense_reward:
            scores = scores + self.token_scores(rollouts).sum(-1)
        return scores

    # -- for the logs ------------------------------------------------------------------------------------------------

    def penalties(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return what ``--overlong_buffer_len`` takes from each sample (B,), by name."""
        penalty = self._overlong_penalty(rollouts)
        return {"reward/overlong": (penalty < 0).float(), "reward/overlong_reward": penalty}

    def numbers(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return what is logged of each sample's score (B,), by name."""
        numbers = {}
        scores = self.shape(rollouts, clip=False)
        if (limits := self.options.reward_clip_range) is not None:
            unclipped_scores = scores
            scores = unclipped_scores.clamp(*limits)
            numbers["reward_clip_ratio"] = (unclipped_scores != scores).float()
        if self.options.use_dense_reward:
            scores = scores + self.token_scores(rollouts).sum(-1)
        prompts = [rollout.prompt.index for rollout in rollouts]
        numbers_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        if len(numbers_of) < len(rollouts):
            groups = [numbers_of[prompt] for prompt in prompts]
            group_of_row = torch.tensor(groups, device=self.device)
            # Not by the standard deviation: for equal values, rounding may put it above 0.
            lowest, highest = (
                scores.new_zeros(len(numbers_of)).scatter_reduce(
                    0, group_of_row, scores, reduction, include_self=False
                )
                for reduction in ("amin", "amax")
            )
            numbers["equal_groups"] = (lowest == highest)[group_of_row].float()
        return numbers
