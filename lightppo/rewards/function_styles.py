"""Conventions of reward functions: ours, which is OpenRLHF's too, and those of other plugins.

Parameter names tell the convention; if none fits, or several do, the function is refused rather than guessed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.plugins.reward_sources import REWARD_STYLES
from lightppo.rewards.reward_calls import Call
from lightppo.rewards.reward_source import (
    POSITIONAL,
    RewardOutput,
    check_output,
    finite,
    output_from_result,
    values_of,
)

RewardFunction = Callable[..., Any]


Values = dict[str, Any]


_KINDS = inspect.Parameter


class Answer(NamedTuple):
    """What one call returned, and which of its scores cannot be used."""

    output: RewardOutput
    bad: list[bool]


class NonFinite(str):
    """Says of an answer that all that it lacks are finite numbers."""


Reading = tuple[Answer | None, str | None]  # the text says why the answer is incomplete


def read_list(value: Any, part: list[Rollout], label: str) -> Reading:
    """Reads a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``, and keeps what can be used of it."""
    output = None
    try:
        output = output_from_result(value, len(part), label)
        return Answer(check_output(output, part, label), [False] * len(part)), None
    except RewardError as error:
        problem = NonFinite(error) if isinstance(error, NonFiniteRewardError) else str(error)
    columns = (
        [] if output is None else [output.scores, *output.metrics.values(), *output.texts.values()]
    )
    if output is None or any(len(values) != len(part) for values in columns):
        return None, problem
    scores = [finite(score) for score in output.scores]
    metrics = {
        str(name): [finite(item) for item in values] for name, values in output.metrics.items()
    }
    bad = [number is None and score is not None for number, score in zip(scores, output.scores)]
    return Answer(RewardOutput(scores, metrics, texts=output.texts), bad), problem


def _as_they_are(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Style:
    """One convention: how to recognise its functions, what to pass to them, and how to read what they return."""

    shape: str  # its signature, for error texts
    needs: Collection[str]  # parameter names that tell it from the other conventions
    named: Callable[[Rollout], Values]  # one sample's arguments; they win over data columns
    # (value, samples of the call, name for errors) → scores
    read: Callable[[Any, list[Rollout], str], Reading] = read_list
    per_sample: bool = False  # called once per sample, not once with lists of one entry per sample
    positional: tuple[str, ...] = ()  # names in ``named`` that are passed by position
    columns: Callable[[Rollout], Values] = lambda rollout: {}  # one sample's data columns
    always: Values = field(default_factory=dict)  # keywords passed in every call
    forbids: str = ""  # a parameter name that only functions with **kwargs may have
    label: str = ""  # the parameter that gets the label
    # Further names with a meaning in this convention. A function that has one in another place does not follow our own.
    words: Collection[str] = ()
    # Where arguments go by their places: the function's own names → the convention's.
    renames: Callable[[Iterable[inspect.Parameter]], dict[str, str]] = _as_they_are


def _ours(rollout: Rollout) -> Values:
    return values_of(rollout) | _episode(rollout)


def _episode(rollout: Rollout) -> Values:
    """What there is to say of a conversation of several turns; nothing of a single response."""
    if rollout.turns is None:
        return {}
    return {"conversations": rollout.messages, "num_turns": len(rollout.turns)}


def row_of(rollout: Rollout) -> Values:
    """The columns of a sample's row that have no meaning of their own."""
    return rollout.prompt.extra


QUERIES = Style(
    "(queries, prompts, labels, **extra)",
    {"queries"},
    _ours,
    positional=POSITIONAL,
    columns=row_of,
    words={"query", "prompt", "label", "response", "responses", "prompt_ids", "response_ids"},
)


def recognise(fn: RewardFunction, name: str) -> str:
    """The convention that a function follows, a name in ``REWARD_STYLES``; ``ValueError`` if none or several fit."""
    parameters = _signature(fn, name).parameters.values()
    styles: dict[str, Style] = {key: entry.fn for key, entry in REWARD_STYLES.items()}
    renamed = {word for style in styles.values() for word in style.renames(parameters).values()}
    names = ({p.name for p in parameters} | renamed) - _filled(fn)
    open_ended = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters)
    fits = [
        key
        for key, style in styles.items()
        if {*style.needs} <= names and (open_ended or style.forbids not in names)
    ]
    # Drop a convention whose marks are among those of another one that fits.
    fits = [
        one
        for one in fits
        if not any({*styles[one].needs} < {*styles[other].needs} for other in fits)
    ]
    others = {key: style for key, style in styles.items() if style is not QUERIES}
    in_place = _in_place(parameters, _words(styles))
    if len(fits) == 1 and (fits[0] in others or in_place):
        return fits[0]
    # prompt_ids is a keyword of our own convention, too.
    foreign = {word for style in others.values() for word in style.needs} - {"prompt_ids"}
    if not fits and not names & foreign and in_place:
        return "queries"  # names of its own, e.g. f(q, p, labels)
    raise ValueError(
        f"reward function {name}{_signature(fn, name)} may follow {' or '.join(fits) or 'no convention'}; say which "
        f"with --reward_fn_style: {'; '.join(f'{key}: f{style.shape}' for key, style in styles.items())}"
    )


def _words(styles: Mapping[str, Style]) -> set[str]:
    """Names with a meaning in some convention."""
    return {
        word
        for style in styles.values()
        for word in (*style.needs, *style.words, *style.positional)
    }


def _in_place(parameters: Iterable[inspect.Parameter], words: Collection[str]) -> bool:
    """True if each known word among the first three parameters stands where our own convention has it."""
    by_position = [
        p.name
        for p in parameters
        if p.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
    ]
    return all(
        word == right or word not in words for word, right in zip(by_position, QUERIES.positional)
    )


class BoundFunction:
    """A reward function and how to call it; ``style`` is a name in ``REWARD_STYLES``, or ``"auto"``."""

    def __init__(self, fn: RewardFunction, name: str, style: str = "auto") -> None:
        if style != "auto" and style not in REWARD_STYLES:
            raise ValueError(
                f"--reward_fn_style must be one of auto, {', '.join(REWARD_STYLES)}, got {style!r}"
            )
        self.name = name
        self.signature = _signature(fn, name)
        self._style_name = recognise(fn, name) if style == "auto" else style
        self.style: Style = REWARD_STYLES[self._style_name].fn
        if style != "auto" and not {*self.style.needs} <= {*self.signature.parameters}:
            self._refuse_another_style()
        try:
            taken = set(self.signature.bind_partial(*self.style.positional).arguments)
        except TypeError as error:
            raise ValueError(
                f"reward function {name}{self.signature} must take {self.style.shape}: {error}"
            ) from None
        parameters = self.signature.parameters.values()
        self._named = {
            p.name
            for p in parameters
            if p.kind in (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
        }
        self._taken = taken | _filled(fn) | set(self.style.positional)
        self._own_names = self.style.renames(parameters)
        self._open_ended = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters)

    def calls(self, rollouts: list[Rollout]) -> list[Call]:
        """The calls that score the samples: one per sample, or one with lists."""
        rows = [(self.style.named(rollout), self.style.columns(rollout)) for rollout in rollouts]
        if self.style.per_sample:
            return [self._call(columns | named) for named, columns in rows]
        names = dict.fromkeys(name for _, columns in rows for name in columns)
        lists: Values = {name: [columns.get(name) for _, columns in rows] for name in names}
        lists |= {name: [named[name] for named, _ in rows] for name in rows[0][0]}
        return [self._call(lists)]

    @property
    def label_parameter(self) -> str | None:
        """The parameter that gets the label, where the convention has one."""
        if self.style is QUERIES:
            return [*self.signature.parameters, None, None][2]
        return self.style.label or None

    def _refuse_another_style(self) -> None:
        names = {*self.signature.parameters}
        for other, entry in REWARD_STYLES.items():
            if len(entry.fn.needs) > 1 and {*entry.fn.needs} <= names:
                raise ValueError(
                    f"reward function {self.name}{self.signature} is {other}'s, not --reward_fn_style "
                    f"{self._style_name}'s"
                )

    def _call(self, values: Values) -> Call:
        renamed = {own: values[name] for own, name in self._own_names.items() if name in values}
        values = self.style.always | values | renamed
        args = tuple(values.pop(name) for name in self.style.positional)
        accepted = (values.keys() if self._open_ended else self._named) - self._taken
        kwargs = {name: value for name, value in values.items() if name in accepted}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RewardError(
                f"reward function {self.name}{self.signature}: {error}; called as f{self.style.shape}, "
                f"--reward_fn_style {self._style_name}, it could get {', '.join((*self.style.positional, *values))}"
            ) from None
        return Call(args, kwargs)


def _filled(fn: RewardFunction) -> set[str]:
    """The keywords that a partial has filled in: still parameters, but not ours to set, nor signs of a convention."""
    return set(fn.keywords) if isinstance(fn, functools.partial) else set()


def _signature(fn: RewardFunction, name: str) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {name}: its parameters cannot be read: {error}"
        ) from None
