"""What environments and tools raise and return, and how a failed one is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Contract = Literal["lightppo", "trl"]
FailureKind = Literal["exception", "timeout", "not_finite", "failure", "lost"]
Place = Literal["constructor", "reset", "tool", "step", "get_reward", "close"]


# in a worker process, which leads a group that is killed with it
in_worker = False


class ToolError(Exception):
    """A tool refuses what the model asked for: the text goes to the model, and the episode goes on."""


class EnvFailure(Exception):
    """The world failed, not the model: the episode ends without a score."""


@dataclass
class Reply:
    """What a tool answers; a plain text is enough where nothing else is to be said."""

    text: str
    done: bool = False  # the episode is over
    reward: float = 0.0  # of the turn that made the call
    metrics: dict[str, float] = field(default_factory=dict)
    error: bool = False  # the call was refused: counted, no failure


@dataclass
class Step:
    """What an environment with ``step`` answers to a turn; a plain observation is enough, too."""

    observation: str | list[dict[str, Any]] | None
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Opening:
    """What an agent program asks the model first: the whole conversation so far, and its tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


class EnvironmentFailed(Exception):
    """An environment failed, so its episode has no score. The text names file, class, place and error."""

    def __init__(self, kind: FailureKind, place: Place, text: str) -> None:
        super().__init__(kind, place, text)  # all three, so that it pickles
        self.kind = kind
        self.place = place
        self.text = text

    def __str__(self) -> str:
        return self.text
