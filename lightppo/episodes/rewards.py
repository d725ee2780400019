"""Rewards of environments, and no score for episodes whose environment failed."""

from __future__ import annotations

from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.registry import RewardRequest
from lightppo.rewards.reward_source import RewardOutput, RewardSource, close_source


def environment_reward(request: RewardRequest) -> RewardSource:
    """``--reward_source environment``."""
    return EnvironmentReward(of_turns=request.config.episodes.env_reward == "turns")


class EnvironmentReward:
    """What the environments gave: the rewards of an episode's turns and of its end, added up.

    With ``of_turns`` each turn's reward also stands on the turn's last sampled token (that of the end on the last
    turn's), as a token score.
    """

    name = "environment"

    def __init__(self, of_turns: bool = False) -> None:
        self.of_turns = of_turns

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        if strange := next((one for one in rollouts if one.turns is None), None):
            raise RewardError(
                f"prompt {strange.prompt.index} is no episode: --reward_source environment needs --env"
            )
        scores = [
            None if has_failed(one) else sum(turn["reward"] for turn in one.turns)
            for one in rollouts
        ]
        if not self.of_turns:
            return RewardOutput(scores)
        return RewardOutput(scores, token_scores=[_token_scores(one) for one in rollouts])


def has_failed(rollout: Rollout) -> bool:
    """Whether it is an episode whose environment failed: no token of it was kept."""
    return rollout.turns is not None and not rollout.response_ids


def _token_scores(rollout: Rollout) -> list[float] | None:
    if has_failed(rollout):
        return None
    scores = [0.0] * len(rollout.response_ids)
    for turn in rollout.turns:
        scores[turn["end"]] += turn["reward"]
    return scores


def unless_failed(source: RewardSource, request: RewardRequest) -> RewardSource:
    """For ``lightppo.plugin.REWARD_WRAPPERS``: around every source of a run with episodes."""
    asked = request.config.episodes
    plays = asked.env or asked.tools
    return UnlessFailed(source) if plays and not isinstance(source, EnvironmentReward) else source


class UnlessFailed:
    """Another source, which does not see episodes whose environment failed: they have no score."""

    def __init__(self, source: RewardSource) -> None:
        self.source = source
        self.name = source.name
        self.needs_all_ranks = getattr(source, "needs_all_ranks", False)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        played = [i for i, rollout in enumerate(rollouts) if not has_failed(rollout)]
        answer = self.source.score([rollouts[i] for i in played])
        if len(played) == len(rollouts):
            return answer

        def spread(values: list[Any] | None) -> list[Any] | None:
            if values is None:
                return None
            row: list[Any] = [None] * len(rollouts)
            for place, value in zip(played, values):
                row[place] = value
            return row

        return RewardOutput(
            spread(answer.scores),
            {name: spread(values) for name, values in answer.metrics.items()},
            spread(answer.token_scores),
            {name: spread(texts) for name, texts in answer.texts.items()},
        )

    def close(self) -> None:
        close_source(self.source)
