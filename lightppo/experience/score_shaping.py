"""From what a reward source says to what training maximises: scaled, normalised, punished for length, clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.masking import AllReduceSum
from lightppo.algorithms.reward_shaping import (
    clip_scores,
    dense_rewards,
    overlong_penalty,
    scale_scores,
    stop_properly,
    zero_truncated,
)
from lightppo.algorithms.running import RunningMeanStd
from lightppo.config import RewardConfig
from lightppo.data.records import Rollout


class ScoreShaper:
    """Shapes the scores of one rank's samples, in the order of the flags in ``--help``.

    Args:
        config: which steps, and how.
        max_len: longest response, tokens (``--generate_max_len``).
        all_reduce_sum: sums over ranks, for the running statistics.
        device: where the scores go.
    """

    def __init__(
        self, config: RewardConfig, max_len: int, all_reduce_sum: AllReduceSum, device: torch.device | str
    ) -> None:
        self.config = config
        self.max_len = max_len
        self.all_reduce_sum = all_reduce_sum
        self.device = device
        self.running = RunningMeanStd() if config.reward_running_norm else None

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Take the samples of this rollout into the running statistics. Collective, also for a rank without samples."""
        if self.running is not None:
            self.running.update(self._scaled(rollouts), all_reduce_sum=self.all_reduce_sum)

    def shape(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The score of each response (B,); with dense rewards what is added at its end."""
        c = self.config
        scores = self._scaled(rollouts)  # (B,)
        truncated = torch.tensor([r.truncated for r in rollouts], dtype=torch.bool, device=self.device)
        if self.running is not None:
            scores = self.running.normalize(scores)
        if c.use_dense_reward:
            scores = torch.zeros_like(scores)
        if c.stop_properly_penalty is not None:
            scores = stop_properly(scores, truncated, c.stop_properly_penalty)
        if c.overlong_buffer_len is not None:
            scores = scores + self.overlong(rollouts)
        if c.mask_no_eos_with_zero:
            scores = zero_truncated(scores, truncated)
        return clip_scores(scores, c.reward_clip_range)

    def token_scores(self, rollouts: Sequence[Rollout], action_mask: Tensor) -> Tensor | None:
        """Dense rewards (B, A), scaled like scores; ``None`` without ``--use_dense_reward``."""
        c = self.config
        if not c.use_dense_reward:
            return None
        rows = torch.zeros(action_mask.shape, device=self.device)  # (B, A)
        for row, rollout in zip(rows, rollouts):
            row[: len(rollout.token_rewards)] = torch.tensor(rollout.token_rewards, device=self.device)
        return dense_rewards(scale_scores(rows, **self._scale()), action_mask, c.reward_delta)

    def overlong(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The penalty of each response for its length, at most 0 (B,)."""
        lengths = torch.tensor([len(r.response_ids) for r in rollouts], dtype=torch.float32, device=self.device)
        return overlong_penalty(
            lengths, self.max_len, self.config.overlong_buffer_len, self.config.overlong_penalty_factor
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The running statistics."""
        return self.running.state_dict() if self.running is not None else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """From ``state_dict``."""
        if self.running is not None and state is not None:
            self.running.load_state_dict(state)

    def _scaled(self, rollouts: Sequence[Rollout]) -> Tensor:
        raw = torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=self.device)  # (B,)
        return scale_scores(raw, **self._scale())

    def _scale(self) -> dict[str, Any]:
        c = self.config
        return {"bias": c.reward_bias, "scaling": c.reward_scaling, "max_clip": c.max_reward_clip}
