"""Shaping of scores: what a reward source gives becomes what training maximises.

Notation: B responses, A action positions; a score is one number per response (B,).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightppo.algorithms.masking import at_least_float32, require_same_shape, zero_where_masked
from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.experience.normalisation import RunningMeanStd
from lightppo.ranks import Ranks


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
    beyond = (lengths - (max_len - buffer_len)).clamp(0, buffer_len)  # (B,)
    return -(beyond.float() / buffer_len) * factor


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
    latest = torch.where(mask, positions, -1).cummax(dim=1).values
    # (B, A), last trained position before here
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    previous = scores.gather(1, before.clamp(min=0)).masked_fill(before < 0, 0.0)
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
        """The parts that have a state, by its name in checkpoints."""
        if self.running is None:
            return {}
        return {"score_statistics": self.running}

    def shape(self, rollouts: Sequence[Rollout], learn: bool = False) -> Tensor:
        """Return the score of each response (B,).

        Args:
            learn: ``--reward_running_norm`` takes these scores in first, those of all ranks. Then collective.
        """
        return self._clipped(self._unclipped(rollouts, learn))

    def _clipped(self, scores: Tensor) -> Tensor:
        limits = self.options.reward_clip_range
        return scores if limits is None else scores.clamp(*limits)

    def _unclipped(self, rollouts: Sequence[Rollout], learn: bool = False) -> Tensor:
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
        return scores

    def _truncated(self, rollouts: Sequence[Rollout]) -> Tensor:
        truncated = [rollout.truncated for rollout in rollouts]
        return torch.tensor(truncated, dtype=torch.bool, device=self.device)  # (B,)

    def _overlong_penalty(self, rollouts: Sequence[Rollout]) -> Tensor:
        lengths = [rollout.trained_length for rollout in rollouts]
        return overlong_penalty(
            torch.tensor(lengths, dtype=torch.float32, device=self.device),  # (B,)
            max_len=self.max_len,
            buffer_len=self.options.overlong_buffer_len,
            factor=self.options.overlong_penalty_factor,
        )

    def token_scores(
        self, rollouts: Sequence[Rollout], action_mask: Tensor | None = None
    ) -> Tensor | None:
        """Return the rewards of single tokens (B, A); ``None`` without ``--use_dense_reward``.

        Args:
            action_mask: the trained tokens; ``None``: those that the rollouts name.
        """
        if not self.options.use_dense_reward:
            return None
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
        return dense_rewards(self.scale(rows), action_mask, self.options.reward_delta)

    def final_scores(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return what training maximises for each sample before KL (B,)."""
        scores = self.shape(rollouts)
        token_scores = self.token_scores(rollouts)
        if token_scores is None:
            return scores
        return scores + token_scores.sum(-1)

    # -- for the logs ------------------------------------------------------------------------------------------------

    def penalties(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return what ``--overlong_buffer_len`` takes from each sample (B,), by name."""
        if self.options.overlong_buffer_len is None:
            return {}
        penalty = self._overlong_penalty(rollouts)
        return {"reward/overlong": (penalty < 0).float(), "reward/overlong_reward": penalty}

    def numbers(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """Return what is logged of each sample's score (B,), by name."""
        numbers = {}
        unclipped = self._unclipped(rollouts)
        scores = self._clipped(unclipped)
        if self.options.reward_clip_range is not None:
            numbers["reward_clip_ratio"] = (unclipped != scores).float()
        if (token_scores := self.token_scores(rollouts)) is not None:
            scores = scores + token_scores.sum(-1)
        prompts = [rollout.prompt.index for rollout in rollouts]
        groups = {prompt: group for group, prompt in enumerate(dict.fromkeys(prompts))}
        if len(groups) < len(rollouts):
            group_of_row = torch.tensor([groups[prompt] for prompt in prompts], device=self.device)
            # Not by the standard deviation: for equal values, rounding may put it above 0.
            least, most = (
                scores.new_zeros(len(groups)).scatter_reduce(
                    0, group_of_row, scores, how, include_self=False
                )
                for how in ("amin", "amax")
            )
            numbers["equal_groups"] = (least == most)[group_of_row].float()
        return numbers
