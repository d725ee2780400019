"""Rewards written as a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.ranks import heartbeat
from lightppo.rewards.reward_source import (
    POSITIONAL,
    RewardOutput,
    check_output,
    output_from_result,
    values_of,
)
from lightppo.user_code import error_text


@dataclass(eq=False)
class FunctionReward:
    """Scores with a function ``(queries, prompts, labels, **extra)``, called once with lists of all samples' values.

    It may name any of :func:`values_of`, and any column of the data. It returns what :func:`output_from_result` reads.
    """

    fn: Callable[..., Any]
    name: str | None = None  # None: the function's own
    _: KW_ONLY
    spec: str | None = None  # where it is from, path.py:name

    def __post_init__(self) -> None:
        self.name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        self._label = f"reward function {self.name}"
        try:
            signature = inspect.signature(self.fn)
            signature.bind_partial(*POSITIONAL)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._label} must take (queries, prompts, labels, **extra): {error}"
            ) from None
        further = list(signature.parameters.values())[len(POSITIONAL) :]
        self._named = {parameter.name for parameter in further}
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in further)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; what the function raises is in a :class:`RewardError`."""
        if not rollouts:
            return RewardOutput([])
        rows = [rollout.prompt.extra | values_of(rollout) for rollout in rollouts]
        names = dict.fromkeys(name for row in rows for name in row)
        values = {name: [row.get(name) for row in rows] for name in names}
        in_place = [values.pop(name) for name in POSITIONAL]
        named = {
            name: column
            for name, column in values.items()
            if self._takes_all or name in self._named
        }
        try:
            result = self.fn(*in_place, **named)
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{self._label} raised on a batch of {len(rollouts)}: {error_text(error)}"
            ) from error
        heartbeat.beat()
        output = output_from_result(result, len(rollouts), self._label)
        return check_output(output, rollouts, self._label)
