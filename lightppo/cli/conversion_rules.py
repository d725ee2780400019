"""What rules for options of other trainers are made of: see ``conversions``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightppo.cli.other_commands import PROGRAMS, OtherCommand

NOT_HERE, LOOK = "not here", "look"  # what a rule may yield in place of an option, with a text
SUPERVISED = "sft rm dpo"
EVERY = f"ppo {SUPERVISED}"

Converted = Iterator[tuple[str, Any]]  # our options with their values


class Rule(NamedTuple):
    """A rule for options that say something together."""

    trainer: str
    commands: list[str]
    names: list[str]
    convert: Callable[[Arguments], Converted]


RULES: list[Rule] = []


def rule(trainer: str, option_names: str, commands: str = "ppo") -> Callable[[Any], Any]:
    """Add a function of the values of these names, which yields our options with their values.

    It takes their place in other_trainers.txt where one of them is given, in these commands.
    """

    def register(function: Any) -> Any:
        RULES.append(Rule(trainer, commands.split(), option_names.split(), function))
        return function

    return register


class Arguments:
    """The options of a command of another trainer, for rules. Of several names, the first that is given counts."""

    def __init__(self, values: Mapping[str, Any], command: OtherCommand) -> None:
        self.values = values
        self.program = command.program
        self.ranks = command.ranks
        self.command = PROGRAMS[command.program].command  # ours

    def value(self, *option_names: str) -> Any:
        """Return the value of the first of these names that is given and not null."""
        values = (self.values.get(option_name) for option_name in option_names)
        return next((value for value in values if not is_none(value)), None)

    def text(self, *option_names: str) -> str | None:
        value = self.value(*option_names)
        return None if value is None else str(value)

    def items(self, *option_names: str) -> list[str]:
        """Return the values of a list."""
        value = self.value(*option_names)
        return [] if value is None else items_of(value)

    def words(self, *option_names: str) -> list[str]:
        """Return the values of a list, which may have blanks between them."""
        return [word for list_item in self.items(*option_names) for word in list_item.split()]

    def on(self, *option_names: str) -> bool:
        return truth(self.value(*option_names))

    def number(self, *option_names: str) -> float | None:
        """Return a number; ValueError for what is none, such as a variable of the shell."""
        text = self.text(*option_names)
        return None if text is None else float(text)

    def whole(self, *option_names: str, default: int = 1) -> int:
        number = self.number(*option_names)
        return default if number is None else math.ceil(number)

    def copied(self, option: str, *option_names: str) -> Converted:
        """Yield an option with the value of these names, if there is one."""
        if (text := self.text(*option_names)) is not None:
            yield option, text

    def counted(self, option: str, *option_names: str, above: float = -math.inf) -> Converted:
        """Yield an option with the whole number of these names, if there is one above this."""
        number = self.number(*option_names)
        if number is not None and number > above:
            yield option, int(number)


def truth(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def is_none(value: Any) -> bool:
    return str(value).lower() in ("none", "null", "")


def items_of(value: Any) -> list[str]:
    """Return a list, also where it is written as text."""
    if isinstance(value, (list, tuple)):
        return [str(list_item) for list_item in value]
    list_text = str(value).strip()
    if list_text[:1] in ("[", "("):
        list_text = list_text[1:-1]
    return [
        list_item.strip().strip("'\"") for list_item in list_text.split(",") if list_item.strip()
    ]


def precision(text: str | None) -> Converted:
    precision_name = (text or "").lower().removeprefix("torch.")
    if precision_name in ("bf16", "bfloat16"):
        yield "bf16", True
    elif precision_name in ("fp16", "float16", "half"):
        yield "fp16", True


def adam_betas(arguments: Arguments, option: str, first: str, second: str) -> Converted:
    yield option, (arguments.text(first) or 0.9, arguments.text(second) or 0.999)


def clip_range(lower_bound: str, upper_bound: str | None) -> Converted:
    if upper_bound in (None, lower_bound):
        yield "eps_clip", lower_bound
    else:
        yield "eps_clip_low", lower_bound
        yield "eps_clip_high", upper_bound


def trackers(tracker_names: Iterable[str], folder: str | None, project: str | None) -> Converted:
    options = {
        "wandb": ("use_wandb", True),
        "tensorboard": ("use_tensorboard", folder or "runs"),
        "trackio": ("use_trackio", project or "lightppo"),
    }
    for tracker in tracker_names:
        if tracker in options:
            yield options[tracker]
        elif tracker in ("mlflow", "swanlab", "clearml", "comet_ml", "all"):
            yield (
                LOOK,
                f"{tracker}: see --use_wandb, --use_tensorboard, --use_trackio, --use_mlflow",
            )


def correction(
    correction_kind: str | None, lower_bound: float | None, upper_bound: float | None
) -> Converted:
    if correction_kind is not None:
        yield "rollout_correction", correction_kind
        if lower_bound:
            yield "correction_low", lower_bound
        if upper_bound is not None:
            yield "correction_high", upper_bound


KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs"}


def kl_estimator(estimator: str) -> Converted:
    yield "kl_estimator", KL_ESTIMATORS.get(estimator, estimator)
    if estimator in ("low_var_kl", "k3"):
        yield "kl_clip", 10
