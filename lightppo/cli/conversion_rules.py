"""What rules for options of other trainers are made of: see ``conversions``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightppo.cli.their_command import PROGRAMS, Theirs

NOT_HERE, LOOK = "not here", "look"  # what a rule may yield in place of an option, with a text
SUPERVISED = "sft rm dpo"
EVERY = f"ppo {SUPERVISED}"


class Rule(NamedTuple):
    """A rule for options that say something together."""

    trainer: str
    commands: tuple[str, ...]
    names: tuple[str, ...]
    yields: Callable[[Their], Iterator[tuple[str, Any]]]


RULES: list[Rule] = []


def rule(trainer: str, names: str, commands: str = "ppo") -> Callable[[Any], Any]:
    """Adds a function of the values of these names, which yields our options with their values.

    It takes their place in other_trainers.txt where one of them is given, in these commands.
    """

    def add(function: Any) -> Any:
        RULES.append(Rule(trainer, tuple(commands.split()), tuple(names.split()), function))
        return function

    return add


class Their:
    """Values of another trainer's options, for rules."""

    def __init__(self, values: Mapping[str, Any], theirs: Theirs) -> None:
        self._values = values
        self.program = theirs.program
        self.ranks = theirs.ranks
        self.command = PROGRAMS[theirs.program].command  # ours

    def text(self, *names: str) -> str | None:
        """The value of the first of these names that is given and not null."""
        for name in names:
            if (value := self._values.get(name)) is not None and not is_none(value):
                return str(value)
        return None

    def items(self, *names: str) -> list[str]:
        """The values of a list."""
        for name in names:
            if (value := self._values.get(name)) is not None and not is_none(value):
                return items_of(value)
        return []

    def on(self, *names: str) -> bool:
        return truth(self.text(*names))

    def number(self, *names: str) -> float | None:
        """ValueError for what is no number, such as a variable of the shell."""
        if (text := self.text(*names)) is None:
            return None
        return float(text)

    def whole(self, *names: str, default: int = 1) -> int:
        found = self.number(*names)
        return default if found is None else math.ceil(found)


def truth(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def is_none(value: Any) -> bool:
    return value is None or str(value).lower() in ("none", "null", "")


def items_of(value: Any) -> list[str]:
    """A list, also where it is written as text."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    text = str(value).strip()
    inner = text[1:-1] if text[:1] in ("[", "(") else text
    return [one.strip().strip("'\"") for one in inner.split(",") if one.strip()]


SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine_with_min_lr"}


def precision(text: str | None) -> Iterator[tuple[str, Any]]:
    kind = (text or "").lower().removeprefix("torch.")
    if kind in ("bf16", "bfloat16"):
        yield "bf16", True
    elif kind in ("fp16", "float16", "half"):
        yield "fp16", True


def trackers(
    names: Iterable[str], folder: str | None, project: str | None
) -> Iterator[tuple[str, Any]]:
    for name in names:
        if name == "wandb":
            yield "use_wandb", True
        elif name == "tensorboard":
            yield "use_tensorboard", folder or "runs"
        elif name == "trackio":
            yield "use_trackio", project or "lightppo"
        elif name in ("mlflow", "swanlab", "clearml", "comet_ml", "all"):
            yield LOOK, f"{name}: see --use_wandb, --use_tensorboard, --use_trackio, --use_mlflow"


def correction(
    kind: str | None, low: float | None, high: float | None
) -> Iterator[tuple[str, Any]]:
    if kind is not None:
        yield "rollout_correction", kind
        if low:
            yield "correction_low", low
        if high is not None:
            yield "correction_high", high


KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs"}


def kl_estimator(name: str | None) -> Iterator[tuple[str, Any]]:
    if name is not None:
        yield "kl_estimator", KL_ESTIMATORS.get(name, name)
        if name in ("low_var_kl", "k3"):
            yield "kl_clip", 10
