"""Answers and errors of environments and tools, and the report of a failed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Contract = Literal["lightppo", "trl"]
FailureKind = Literal["exception", "timeout", "not_finite", "failure", "lost"]
CallKind = Literal["constructor", "reset", "tool", "step", "get_reward", "close"]


# in a worker process, which leads a group that is killed with it
in_worker = False


class ToolError(Exception):
    """Refuse what the model asked a tool for: the text goes to the model, and the episode goes on."""


class EnvFailure(Exception):
    """Say that the world failed, not the model: the episode ends without a score."""


@dataclass
class Reply:
    """Answer a call of a tool; a plain text is enough where nothing else is to be said."""

    text: str
    done: bool = False  # the episode is over
    reward: float = 0.0  # of the turn that made the call
    metrics: dict[str, float] = field(default_factory=dict)
    error: bool = False  # the call was refused: counted, no failure


@dataclass
class Step:
    """Answer a turn, in an environment with ``step``; a plain observation is enough, too."""

    observation: str | list[dict[str, Any]] | None
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Opening:
    """Hold what an agent program asks the model first: the whole conversation so far, and its tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


class EnvironmentFailed(Exception):
    """Say that an environment failed, so its episode has no score. The text names file, class, place and error."""

    def __init__(self, kind: FailureKind, place: CallKind, text: str) -> None:
        super().__init__(kind, place, text)  # all three, so that it pickles
        self.kind = kind
        self.place = place
        self.text = text

    def __str__(self) -> str:
        return self.text
