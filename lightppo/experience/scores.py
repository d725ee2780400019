"""Steps of the shaping of scores. Notation: B responses, A action positions; a score is one number per response (B,)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightppo.algorithms.masking import at_least_float32, require_same_shape, zero_where_masked
from lightppo.data.records import Rollout
from lightppo.experience.maker import ScoreStep
from lightppo.experience.running import RunningMeanStd
from lightppo.ranks import Ranks


def scale_scores(
    scores: Tensor, bias: float = 0.0, scaling: float = 1.0, max_clip: float | None = None
) -> Tensor:
    """clip((score - bias) · scaling, ±max_clip): ``max_clip`` is in units of the result, None for no limit."""
    scores = (at_least_float32(scores) - bias) * scaling
    return scores if max_clip is None else scores.clamp(-max_clip, max_clip)


def zero_truncated(scores: Tensor, truncated: Tensor) -> Tensor:
    """Score 0 for truncated answers, which still pay for their KL (``--mask_no_eos_with_zero``)."""
    return zero_where_masked(scores, ~truncated.bool())


def stop_properly(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated answers score less: min(score, coef · score) for coef in [0, 1], min(score, coef) below 0.

    The minimum keeps an answer from gaining by not ending: half of a negative score would be a higher score.
    Source: the recipe of ProRL v2 (NVIDIA 2025), which multiplies every truncated score.
    """
    scores = at_least_float32(scores)
    penalised = scores * coef if coef >= 0 else torch.full_like(scores, coef)
    return torch.where(truncated.bool(), torch.minimum(scores, penalised), scores)


def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """min(-(L - (max_len - buffer_len)) / buffer_len · factor, 0), at least -factor, to add to the scores.

    Source: DAPO (arXiv:2503.14476), eq. 13, soft overlong punishment, with a factor. ``lengths`` (B,) are L in tokens.
    """
    beyond = (lengths - (max_len - buffer_len)).clamp(0, buffer_len)  # (B,)
    return -(beyond.float() / buffer_len) * factor


@torch.no_grad()
def dense_rewards(token_scores: Tensor, action_mask: Tensor, delta: bool) -> Tensor:
    """Rewards of the trained tokens from a reward source's token scores, both (B, A); 0 at untrained positions.

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
    latest = torch.where(mask, positions, -1).cummax(dim=1).values
    # (B, A), last trained position before here
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    previous = scores.gather(1, before.clamp(min=0)).masked_fill(before < 0, 0.0)
    return (scores - previous).masked_fill(~mask, 0.0)


# -- as steps --------------------------------------------------------------------------------------------------------


class Simple(ScoreStep):
    """A function of scores and rollouts."""

    def __init__(self, function: Callable[[Tensor, Sequence[Rollout]], Tensor]) -> None:
        self.function = function

    def __call__(self, scores: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
        return self.function(scores, rollouts)


def scaling_of(config: Any) -> Callable[[Tensor], Tensor]:
    """:func:`scale_scores` with the options of a run."""
    reward = config.reward
    return partial(
        scale_scores,
        bias=reward.reward_bias,
        scaling=reward.reward_scaling,
        max_clip=reward.max_reward_clip,
    )


def scale_step(config: Any, ranks: Ranks) -> ScoreStep:
    """``--reward_bias``, ``--reward_scaling``, ``--max_reward_clip``."""
    scale = scaling_of(config)
    return Simple(lambda scores, rollouts: scale(scores))


class RunningNorm(ScoreStep):
    """:class:`RunningMeanStd` over all ranks; a rollout is normalised by statistics that hold it, too."""

    def __init__(self, ranks: Ranks) -> None:
        self.running, self.all_reduce_sum = RunningMeanStd(), partial(ranks.all_reduce, op="sum")

    def learn(self, scores: Tensor) -> None:
        self.running.update(scores, all_reduce_sum=self.all_reduce_sum)

    def __call__(self, scores: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
        return self.running.normalize(scores)

    def state_dict(self) -> dict[str, float]:
        return self.running.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.running.load_state_dict(state)


def running_norm_step(config: Any, ranks: Ranks) -> ScoreStep | None:
    """``--reward_running_norm``."""
    return RunningNorm(ranks) if config.reward.reward_running_norm else None


class DenseRewards(ScoreStep):
    """One score per token in place of one per response: scaled like it, and :func:`dense_rewards`."""

    def __init__(self, scale: Callable[[Tensor], Tensor], delta: bool, device: Any) -> None:
        self.scale, self.delta, self.device = scale, delta, device

    def __call__(self, scores: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
        return torch.zeros_like(scores)

    def of_tokens(self, rollouts: Sequence[Rollout], action_mask: Tensor | None) -> Tensor:
        if action_mask is None:
            trained = [
                rollout.trained or [True] * len(rollout.response_ids) for rollout in rollouts
            ]
            masks = [torch.tensor(mask, device=self.device) for mask in trained]
            action_mask = pad_sequence(masks, batch_first=True)  # (B, A)
        rows = torch.zeros(action_mask.shape, device=self.device)  # (B, A)
        for row, rollout in zip(rows, rollouts):
            row[: len(rollout.token_rewards)] = torch.tensor(
                rollout.token_rewards, device=self.device
            )
        return dense_rewards(self.scale(rows), action_mask, self.delta)


def dense_step(config: Any, ranks: Ranks) -> ScoreStep | None:
    """``--use_dense_reward``."""
    if not config.reward.use_dense_reward:
        return None
    return DenseRewards(scaling_of(config), config.reward.reward_delta, ranks.device)


def stop_properly_step(config: Any, ranks: Ranks) -> ScoreStep | None:
    """``--stop_properly_penalty``."""
    penalty = config.reward.stop_properly_penalty
    if penalty is None:
        return None
    return Simple(
        lambda scores, rollouts: stop_properly(scores, truncated_of(rollouts, scores), penalty)
    )


class OverlongPenalty(ScoreStep):
    """:func:`overlong_penalty`, which is logged, too."""

    def __init__(self, max_len: int, buffer_len: int, factor: float, device: Any) -> None:
        self.penalty_of = partial(
            overlong_penalty, max_len=max_len, buffer_len=buffer_len, factor=factor
        )
        self.device = device

    def __call__(self, scores: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
        return scores + self.penalty_of(lengths_of(rollouts, self.device))

    def numbers(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        penalty = self.penalty_of(lengths_of(rollouts, self.device))
        return {"reward/overlong": (penalty < 0).float(), "reward/overlong_reward": penalty}


def overlong_step(config: Any, ranks: Ranks) -> ScoreStep | None:
    """``--overlong_buffer_len``, ``--overlong_penalty_factor``."""
    reward, max_len = config.reward, config.rollout.generate_max_len
    if reward.overlong_buffer_len is None:
        return None
    return OverlongPenalty(
        max_len, reward.overlong_buffer_len, reward.overlong_penalty_factor, ranks.device
    )


def zero_step(config: Any, ranks: Ranks) -> ScoreStep | None:
    """``--mask_no_eos_with_zero``."""
    if not config.reward.mask_no_eos_with_zero:
        return None
    return Simple(lambda scores, rollouts: zero_truncated(scores, truncated_of(rollouts, scores)))


def lengths_of(rollouts: Sequence[Rollout], device: Any) -> Tensor:
    """Trained tokens of each response (B,)."""
    lengths = [rollout.trained_length for rollout in rollouts]
    return torch.tensor(lengths, dtype=torch.float32, device=device)


def truncated_of(rollouts: Sequence[Rollout], scores: Tensor) -> Tensor:
    """Whether each response was truncated (B,), where the scores are."""
    truncated = [rollout.truncated for rollout in rollouts]
    return torch.tensor(truncated, dtype=torch.bool, device=scores.device)
