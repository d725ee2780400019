"""Conventions of reward functions: ours, which is OpenRLHF's too, and those of verl, TRL and AReaL; docs/rewards.md.

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
from lightppo.plugin import REWARD_STYLES
from lightppo.rewards.reward_source import (
    POSITIONAL,
    RewardOutput,
    check_output,
    describe_sample,
    join_outputs,
    output_from_result,
    shown,
)
from lightppo.user_code import UserCall, finite, is_non_finite, reading_error

RewardFunction = Callable[..., Any]


Values = dict[str, Any]


_KINDS = inspect.Parameter


class Answer(NamedTuple):
    """Hold what one call returned, and which of its scores cannot be used."""

    output: RewardOutput
    bad: list[bool]


class NonFinite(str):
    """Say that all that an answer lacks are finite numbers."""


Reading = tuple[Answer | None, str | None]  # the text says why the answer is incomplete


def read_list(value: Any, samples: list[Rollout], label: str) -> Reading:
    """Read a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``, and keeps what can be used of it."""
    output = None
    try:
        output = output_from_result(value, len(samples), label)
        return Answer(check_output(output, samples, label), [False] * len(samples)), None
    except RewardError as error:
        problem = NonFinite(error) if isinstance(error, NonFiniteRewardError) else str(error)
    return (None if output is None else _usable_part(output, samples)), problem


def _usable_part(output: RewardOutput, samples: list[Rollout]) -> Answer | None:
    """Return the scores that can be used of an answer that has others; None: they cannot be told apart."""
    columns = [output.scores, *output.metrics.values(), *output.texts.values()]
    if any(len(values) != len(samples) for values in columns):
        return None
    scores = [finite(score) for score in output.scores]
    metrics = {
        str(metric_name): [finite(metric_value) for metric_value in values]
        for metric_name, values in output.metrics.items()
    }
    is_bad = [number is None and score is not None for number, score in zip(scores, output.scores)]
    return Answer(RewardOutput(scores, metrics, texts=output.texts), is_bad)


@dataclass(frozen=True, slots=True)
class Style:
    """Describe one convention: how to recognise its functions, what to pass to them, and how to read what they return."""

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
    renames: Callable[[Iterable[inspect.Parameter]], dict[str, str]] = lambda parameters: {}


def values_of(rollout: Rollout) -> Values:
    """Return what a reward function may ask for of a sample, by the names of its parameters."""
    prompt = rollout.prompt
    values = {
        "queries": prompt.text + rollout.response_text,
        "prompts": prompt.text,
        "labels": prompt.label,
        "responses": rollout.response_text,
        "finish_reasons": rollout.finish_reason,
        "prompt_ids": prompt.token_ids,
        "response_ids": rollout.response_ids,
        "data_sources": prompt.data_source,
        "extras": prompt.extra,
    }
    if rollout.turns is not None:  # of an episode
        values |= {"conversations": rollout.messages, "num_turns": len(rollout.turns)}
    return values


def row_of(rollout: Rollout) -> Values:
    """Return the columns of a sample's row that have no meaning of their own."""
    return rollout.prompt.extra


QUERIES = Style(
    "(queries, prompts, labels, **extra)",
    {"queries"},
    values_of,
    positional=POSITIONAL,
    columns=row_of,
    words={"query", "prompt", "label", "response", "responses", "prompt_ids", "response_ids"},
)


# -- which one a function follows, and its calls


def recognise(function: RewardFunction, name: str) -> str:
    """Return the convention that a function follows, a name in ``REWARD_STYLES``; ``ValueError`` if none or several fit."""
    parameters = _signature(function, name).parameters.values()
    styles: dict[str, Style] = {key: entry.fn for key, entry in REWARD_STYLES.items()}
    renamed = {word for style in styles.values() for word in style.renames(parameters).values()}
    names = ({parameter.name for parameter in parameters} | renamed) - _filled(function)
    open_ended = any(parameter.kind is _KINDS.VAR_KEYWORD for parameter in parameters)
    fitting_styles = [
        key
        for key, style in styles.items()
        if {*style.needs} <= names and (open_ended or style.forbids not in names)
    ]
    # Drop a convention whose marks are among those of another one that fits.
    matching_styles = [
        key
        for key in fitting_styles
        if not any(
            {*styles[key].needs} < {*styles[second_style].needs} for second_style in fitting_styles
        )
    ]
    foreign_styles = [key for key, style in styles.items() if style is not QUERIES]
    in_place = _in_place(parameters, styles.values())
    if len(matching_styles) == 1 and (matching_styles[0] in foreign_styles or in_place):
        return matching_styles[0]
    # prompt_ids is a keyword of our own convention, too.
    foreign = {word for key in foreign_styles for word in styles[key].needs} - {"prompt_ids"}
    if not matching_styles and not names & foreign and in_place:
        return "queries"  # names of its own, e.g. f(q, p, labels)
    choices = " or ".join(matching_styles) or "no convention"
    raise ValueError(
        f"reward function {name}{_signature(function, name)} may follow {choices}; say which "
        f"with --reward_fn_style: {'; '.join(f'{key}: f{style.shape}' for key, style in styles.items())}"
    )


def _in_place(parameters: Iterable[inspect.Parameter], styles: Iterable[Style]) -> bool:
    """Tell whether each known word among the first three parameters stands where our own convention has it."""
    words = {word for style in styles for word in (*style.needs, *style.words, *style.positional)}
    by_position = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
    ]
    return all(
        word == expected or word not in words
        for word, expected in zip(by_position, QUERIES.positional)
    )


class BoundFunction:
    """Know how to call a reward function; ``style`` is a name in ``REWARD_STYLES``, or ``"auto"``."""

    def __init__(self, function: RewardFunction, name: str, style_name: str = "auto") -> None:
        if style_name != "auto" and style_name not in REWARD_STYLES:
            raise ValueError(
                f"--reward_fn_style must be one of auto, {', '.join(REWARD_STYLES)}, got {style_name!r}"
            )
        self.name = name
        self.signature = _signature(function, name)
        self._style_name = recognise(function, name) if style_name == "auto" else style_name
        self.style: Style = REWARD_STYLES[self._style_name].fn
        if style_name != "auto" and not {*self.style.needs} <= {*self.signature.parameters}:
            self._refuse_another_style()
        try:
            positional_names = set(self.signature.bind_partial(*self.style.positional).arguments)
        except TypeError as error:
            raise ValueError(
                f"reward function {name}{self.signature} must take {self.style.shape}: {error}"
            ) from None
        parameters = self.signature.parameters.values()
        self._named = {
            parameter.name
            for parameter in parameters
            if parameter.kind in (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
        }
        self._taken = positional_names | _filled(function) | set(self.style.positional)
        self._own_names = self.style.renames(parameters)
        self._open_ended = any(parameter.kind is _KINDS.VAR_KEYWORD for parameter in parameters)

    def calls(self, rollouts: list[Rollout]) -> list[UserCall]:
        """Return the calls that score the samples: one per sample, or one with lists."""
        rows = [(self.style.named(rollout), self.style.columns(rollout)) for rollout in rollouts]
        if self.style.per_sample:
            return [self._call(columns | named_values) for named_values, columns in rows]
        names = dict.fromkeys(name for _, columns in rows for name in columns)
        columns_of_batch: Values = {
            name: [columns.get(name) for _, columns in rows] for name in names
        }
        columns_of_batch |= {
            name: [named_values[name] for named_values, _ in rows] for name in rows[0][0]
        }
        return [self._call(columns_of_batch)]

    @property
    def label_parameter(self) -> str | None:
        """Return the parameter that gets the label, where the convention has one."""
        if self.style is QUERIES:
            return [*self.signature.parameters, None, None][2]
        return self.style.label or None

    def _refuse_another_style(self) -> None:
        names = {*self.signature.parameters}
        for other_style, entry in REWARD_STYLES.items():
            if len(entry.fn.needs) > 1 and {*entry.fn.needs} <= names:
                raise ValueError(
                    f"reward function {self.name}{self.signature} is {other_style}'s, not --reward_fn_style "
                    f"{self._style_name}'s"
                )

    def _call(self, values: Values) -> UserCall:
        renamed_values = {
            own_name: values[name] for own_name, name in self._own_names.items() if name in values
        }
        values = self.style.always | values | renamed_values
        positional_arguments = tuple(values.pop(name) for name in self.style.positional)
        accepted = (values.keys() if self._open_ended else self._named) - self._taken
        keyword_arguments = {name: value for name, value in values.items() if name in accepted}
        try:
            self.signature.bind(*positional_arguments, **keyword_arguments)
        except TypeError as error:
            raise RewardError(
                f"reward function {self.name}{self.signature}: {error}; called as f{self.style.shape}, "
                f"--reward_fn_style {self._style_name}, it could get {', '.join((*self.style.positional, *values))}"
            ) from None
        return UserCall(positional_arguments, keyword_arguments)


def _filled(function: RewardFunction) -> set[str]:
    """Return the keywords that a partial has filled in: still parameters, but not ours to set, nor signs of a convention."""
    if isinstance(function, functools.partial):
        return set(function.keywords)
    return set()


def _signature(function: RewardFunction, name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {name}: its parameters cannot be read: {error}"
        ) from None


# -- how others read what a function returns


def read_sample(value: Any, samples: list[Rollout], label: str) -> Reading:
    """Read a score, a dict with ``score``, a tuple that begins with the score, or ``None``."""
    raw_score = value
    metrics = {}
    texts = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return None, f"it returned a dict without 'score': {shown(value)}"
        raw_score = value["score"]
        numbers = {
            str(metric_name): finite(metric_value)
            for metric_name, metric_value in value.items()
            if metric_name != "score"
        }
        metrics = {
            metric_name: [number] for metric_name, number in numbers.items() if number is not None
        }
        texts = {
            str(metric_name): [metric_value]
            for metric_name, metric_value in value.items()
            if isinstance(metric_value, str)
        }
    elif isinstance(value, (list, tuple)) and value:
        raw_score = value[0]
    number = finite(raw_score)
    if number is None and raw_score is not None:
        problem = f"it returned {shown(value)}; a score must be a finite number, or None for an unscored sample"
        problem += reading_error(raw_score)
        return None, NonFinite(problem) if is_non_finite(raw_score) else problem
    return Answer(RewardOutput([number], metrics, texts=texts), [False]), None


def read_samples(value: Any, samples: list[Rollout], label: str) -> Reading:
    """Read a list with one entry per sample, each as :func:`read_sample` does."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        return (
            None,
            f"it returned {shown(value)}; a list with one entry for each of {len(samples)} samples is needed",
        )
    readings = [
        read_sample(sample_value, samples[i : i + 1], label)
        for i, sample_value in enumerate(values)
    ]
    answers = [answer or Answer(RewardOutput([None]), [True]) for answer, _ in readings]
    problem = None
    if incomplete := [i for i, (_, reason) in enumerate(readings) if reason]:
        # Other problems come before numbers that are not finite.
        worst_position = min(incomplete, key=lambda i: isinstance(readings[i][1], NonFinite))
        reason = readings[worst_position][1]
        problem = type(reason)(f"{describe_sample(samples, worst_position)}: {reason}")
    output = join_outputs([answer.output for answer in answers])
    return Answer(output, [bad for answer in answers for bad in answer.bad]), problem


# -- verl

_SOLUTION_WORDS = {"response", "solution", "answer"}  # verl's users call its solution_str so
_WORDS = {"completion", "completions", "messages"} | {
    word for name in ("data_source", "ground_truth", "solution_str", "extra_info", *_SOLUTION_WORDS)
    for word in (name, f"{name}s")
}  # fmt: skip


def _verl(rollout: Rollout) -> Values:
    info = rollout.prompt.extra.get("extra_info")
    if not isinstance(info, dict):
        info = rollout.prompt.extra
    num_turns = None if rollout.turns is None else len(rollout.turns)
    return {
        "data_source": rollout.prompt.data_source,
        "solution_str": rollout.response_text,
        "ground_truth": rollout.prompt.label,
        # A copy, because functions write into it. In verl the two keys are always there.
        "extra_info": {"num_turns": num_turns, "rollout_reward_scores": {}} | info,
    }


def _verl_batch(rollout: Rollout) -> Values:
    return {f"{argument_name}s": value for argument_name, value in _verl(rollout).items()}


def verl_names(plural: str, parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Return the function's own names of verl's arguments → verl's, by their places before ``ground_truth``."""
    names = [parameter.name for parameter in parameters]
    label = f"ground_truth{plural}"
    if label not in names:
        return {}
    function_names = names[: names.index(label)]
    verl_arguments = [f"data_source{plural}", f"solution_str{plural}"]
    if len(function_names) > len(verl_arguments):
        return {}
    pairs = zip(function_names, verl_arguments[len(verl_arguments) - len(function_names) :])
    renamed = {
        function_name: argument for function_name, argument in pairs if function_name != argument
    }
    of_solution = {"completion"} | {f"{word}{plural}" for word in _SOLUTION_WORDS}
    reserved = _WORDS | {*QUERIES.words, *QUERIES.positional}  # have a meaning of their own
    has_meaning = any(
        function_name in reserved
        and (argument == f"data_source{plural}" or function_name not in of_solution)
        for function_name, argument in renamed.items()
    )
    return {} if has_meaning or {*renamed.values()} & {*names} else renamed


VERL = Style(
    "(data_source, solution_str, ground_truth, extra_info)",
    {"solution_str", "ground_truth"},
    _verl,
    read_sample,
    per_sample=True,
    label="ground_truth",
    words=_WORDS,
    renames=functools.partial(verl_names, ""),
)

VERL_BATCH = Style(
    "(data_sources, solution_strs, ground_truths, extra_infos)",
    {"solution_strs", "ground_truths"},
    _verl_batch,
    read_samples,
    label="ground_truths",
    renames=functools.partial(verl_names, "s"),
)


# -- TRL


def _trl(rollout: Rollout) -> Values:
    """Return what TRL passes.

    If the prompt is a chat, the completion is one too: one message of the assistant, or those of an episode.
    """
    prompt = rollout.prompt
    response_text = rollout.response_text
    response_ids = rollout.response_ids
    if prompt.messages is None:
        return {
            "prompts": prompt.text,
            "completions": response_text,
            "completion_ids": response_ids,
        }
    answer = [{"role": "assistant", "content": response_text}]
    if rollout.messages is not None:
        answer = rollout.messages[len(prompt.messages) :]
    values = {"prompts": prompt.messages, "completions": answer, "completion_ids": response_ids}
    if rollout.environment is not None:
        values["environments"] = rollout.environment
    return values


def discard(*arguments: Any) -> None:
    """Stand for TRL's ``log_extra(column, values)`` and ``log_metric(name, value)``; keeps nothing."""


TRL = Style(
    "(prompts, completions, completion_ids, **columns)",
    {"completions"},
    _trl,
    columns=row_of,
    forbids="prompt",  # AReaL's
    always={"log_extra": discard, "log_metric": discard},
)


# -- AReaL

_AREAL_NAMES = ("prompt", "completions", "prompt_ids", "completion_ids")


def _areal(rollout: Rollout) -> Values:
    prompt = rollout.prompt
    response_text = rollout.response_text
    id_columns = {"prompt_ids": prompt.token_ids, "completion_ids": rollout.response_ids}
    return {"prompt": prompt.text, "completions": response_text} | id_columns


def _row_and_chat(rollout: Rollout) -> Values:
    chat = rollout.prompt.messages
    if chat is None:
        return rollout.prompt.extra
    return {"messages": chat} | rollout.prompt.extra


AREAL = Style(
    "(prompt, completions, prompt_ids, completion_ids, **row)",
    {*_AREAL_NAMES},
    _areal,
    read_sample,
    per_sample=True,
    positional=_AREAL_NAMES,
    columns=_row_and_chat,
)
