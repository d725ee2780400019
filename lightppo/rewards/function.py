"""Rewards written as a Python function: our own convention and the conventions of OpenRLHF, verl, TRL and AReaL.

Parameter names tell the convention; if none fits, or several do, the function is refused rather than guessed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.runners import ManagerName, build_runner
from lightppo.rewards.source import (
    Call,
    OnFailure,
    RewardOutput,
    Settled,
    check_failure_options,
    check_output,
    describe_sample,
    finite,
    join_outputs,
    output_from_result,
    settle,
    shown,
)

RewardFunction = Callable[..., Any]
Values = dict[str, Any]

_KINDS = inspect.Parameter


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one call returned, and which of its scores cannot be used."""

    output: RewardOutput
    bad: list[bool]


_Reading = tuple[_Answer | None, str | None]  # the text says why the answer is incomplete


def _read_list(value: Any, part: list[Rollout], label: str) -> _Reading:
    """Reads a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``, and keeps what can be used of it."""
    try:
        output = output_from_result(value, len(part), label)
    except RewardError as error:
        return None, str(error)
    try:
        return _Answer(check_output(output, part, label), [False] * len(part)), None
    except RewardError as error:
        if any(len(values) != len(part) for values in (output.scores, *output.metrics.values())):
            return None, str(error)
        scores = [finite(score) for score in output.scores]
        metrics = {str(name): [finite(item) for item in values] for name, values in output.metrics.items()}
        bad = [number is None and score is not None for number, score in zip(scores, output.scores)]
        return _Answer(RewardOutput(scores, metrics), bad), str(error)


def _read_sample(value: Any, part: list[Rollout], label: str) -> _Reading:
    """Reads a score, a dict with ``score``, a tuple that begins with the score, or ``None``."""
    score, metrics = value, {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return None, f"it returned a dict without 'score': {shown(value)}"
        score = value["score"]
        numbers = {str(name): finite(item) for name, item in value.items() if name != "score"}
        metrics = {name: [number] for name, number in numbers.items() if number is not None}
    elif isinstance(value, (list, tuple)) and value:
        score = value[0]
    number = finite(score)
    if number is None and score is not None:
        return None, f"it returned {shown(value)}; a score must be a finite number, or None for an unscored sample"
    return _Answer(RewardOutput([number], metrics), [False]), None


def _read_samples(value: Any, part: list[Rollout], label: str) -> _Reading:
    """Reads a list with one entry per sample, each as :func:`_read_sample` does."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != len(part):
        return None, f"it returned {shown(value)}; a list with one entry for each of {len(part)} samples is needed"
    readings = [_read_sample(item, part[i : i + 1], label) for i, item in enumerate(values)]
    problem = next((f"{describe_sample(part, i)}: {text}" for i, (_, text) in enumerate(readings) if text), None)
    outputs = [RewardOutput([None]) if answer is None else answer.output for answer, _ in readings]
    return _Answer(join_outputs(outputs), [answer is None for answer, _ in readings]), problem


@dataclass(frozen=True, slots=True)
class Style:
    """One convention: how to recognise its functions, what to pass to them, and how to read what they return."""

    shape: str  # its signature, for error texts
    needs: frozenset[str]  # parameter names that tell it from the other conventions
    named: Callable[[Rollout], Values]  # one sample's arguments; they win over data columns
    per_sample: bool = False  # called once per sample; otherwise once, with lists of one entry per sample
    positional: tuple[str, ...] = ()  # names in ``named`` that are passed by position
    columns: Callable[[Rollout], Values] = lambda rollout: {}  # one sample's data columns
    always: Values = field(default_factory=dict)  # keywords passed in every call
    open_ended: bool = False  # only functions with **kwargs are recognised
    read: Callable[[Any, list[Rollout], str], _Reading] = _read_list  # value, samples of the call, name for errors


def _ours(rollout: Rollout) -> Values:
    return {
        "queries": rollout.prompt.text + rollout.response_text,
        "prompts": rollout.prompt.text,
        "labels": rollout.prompt.label,
        "responses": rollout.response_text,
        "prompt_ids": rollout.prompt.token_ids,
        "response_ids": rollout.response_ids,
        "finish_reasons": rollout.finish_reason,
        "data_sources": rollout.prompt.data_source,
        "extras": rollout.prompt.extra,
    }


def _verl(rollout: Rollout) -> Values:
    info = rollout.prompt.extra.get("extra_info")
    info = info if isinstance(info, dict) else rollout.prompt.extra
    return {
        "data_source": rollout.prompt.data_source,
        "solution_str": rollout.response_text,
        "ground_truth": rollout.prompt.label,
        # a copy, as functions write into it; the two keys are always there in verl
        "extra_info": {"num_turns": None, "rollout_reward_scores": {}} | info,
    }


def _verl_batch(rollout: Rollout) -> Values:
    values = _verl(rollout)
    names = {"data_source": "data_sources", "solution_str": "solution_strs"}
    names |= {"ground_truth": "ground_truths", "extra_info": "extra_infos"}
    return {names[name]: value for name, value in values.items()}


def _trl(rollout: Rollout) -> Values:
    """If the prompt is a chat, the completion is one too: one message of the assistant."""
    chat = rollout.prompt.messages
    text = rollout.response_text
    return {
        "prompts": rollout.prompt.text if chat is None else chat,
        "completions": text if chat is None else [{"role": "assistant", "content": text}],
        "completion_ids": rollout.response_ids,
    }


def _areal(rollout: Rollout) -> Values:
    return {
        "prompt": rollout.prompt.text,
        "completions": rollout.response_text,
        "prompt_ids": rollout.prompt.token_ids,
        "completion_ids": rollout.response_ids,
    }


def _row(rollout: Rollout) -> Values:
    return rollout.prompt.extra


def _row_and_chat(rollout: Rollout) -> Values:
    chat = rollout.prompt.messages
    return rollout.prompt.extra if chat is None else {"messages": chat} | rollout.prompt.extra


def discard(*args: Any) -> None:
    """Stands for TRL's ``log_extra(column, values)`` and ``log_metric(name, value)``; keeps nothing."""


STYLES: dict[str, Style] = {
    "queries": Style(
        shape="f(queries, prompts, labels, **extra)",
        needs=frozenset({"queries"}),
        positional=("queries", "prompts", "labels"),
        named=_ours,
        columns=_row,
    ),
    "verl": Style(
        shape="f(data_source, solution_str, ground_truth, extra_info)",
        needs=frozenset({"solution_str", "ground_truth"}),
        per_sample=True,
        named=_verl,
        read=_read_sample,
    ),
    "verl_batch": Style(
        shape="f(data_sources, solution_strs, ground_truths, extra_infos)",
        needs=frozenset({"solution_strs", "ground_truths"}),
        named=_verl_batch,
        read=_read_samples,
    ),
    "trl": Style(
        shape="f(prompts, completions, completion_ids, **columns)",
        needs=frozenset({"completions"}),
        named=_trl,
        columns=_row,
        open_ended=True,
        always={"log_extra": discard, "log_metric": discard},
    ),
    "areal": Style(
        shape="f(prompt, completions, prompt_ids, completion_ids, **row)",
        needs=frozenset({"prompt", "completions", "prompt_ids", "completion_ids"}),
        per_sample=True,
        positional=("prompt", "completions", "prompt_ids", "completion_ids"),
        named=_areal,
        columns=_row_and_chat,
        read=_read_sample,
    ),
}

# Words with a meaning in some convention: among the first three parameters, each must stand where our own has it.
_WORDS = frozenset(
    {"query", "queries", "prompt", "prompts", "label", "labels", "response", "responses", "completion", "completions"}
    | {"data_source", "data_sources", "ground_truth", "ground_truths", "solution_str", "solution_strs", "extra_info"}
    | {"prompt_ids", "completion_ids", "response_ids", "solution", "solutions", "answer", "answers", "messages"}
)


# Names that mark another convention; prompt_ids is a keyword of our own too.
_FOREIGN = frozenset().union(*(style.needs for key, style in STYLES.items() if key != "queries")) - {"prompt_ids"}


def recognise(fn: RewardFunction, name: str) -> str:
    """The convention that a function follows, a name in :data:`STYLES`; ``ValueError`` if none fits or several do."""
    parameters = _signature(fn, name).parameters.values()
    names = {p.name for p in parameters} - _filled(fn)
    open_ended = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters)
    fits = [key for key, style in STYLES.items() if style.needs <= names and (open_ended or not style.open_ended)]
    if "areal" in fits and "trl" in fits:  # AReaL's names hold TRL's only mark
        fits.remove("trl")
    if len(fits) == 1 and (fits[0] != "queries" or _in_place(parameters)):
        return fits[0]
    if not fits and not names & _FOREIGN and _in_place(parameters):
        return "queries"  # names of its own, e.g. f(q, p, labels)
    raise ValueError(
        f"reward function {name}{_signature(fn, name)} may follow {' or '.join(fits) or 'no convention'}; say which "
        f"with --reward_fn_style: {'; '.join(f'{key}: {style.shape}' for key, style in STYLES.items())}"
    )


def _in_place(parameters: Sequence[_KINDS]) -> bool:
    """True if each known word among the first three parameters stands where our own convention has it."""
    by_position = [p.name for p in parameters if p.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)]
    return all(word == right or word not in _WORDS for word, right in zip(by_position, STYLES["queries"].positional))


class BoundFunction:
    """A reward function and how to call it; ``style`` is a name in :data:`STYLES`, or ``"auto"``."""

    def __init__(self, fn: RewardFunction, name: str, style: str = "auto") -> None:
        if style != "auto" and style not in STYLES:
            raise ValueError(f"--reward_fn_style must be one of auto, {', '.join(STYLES)}, got {style!r}")
        self.fn = fn
        self.name = name
        self.signature = _signature(fn, name)
        self.style = STYLES[recognise(fn, name) if style == "auto" else style]
        self.is_async = _is_coroutine_function(fn)
        try:
            taken = set(self.signature.bind_partial(*[None] * len(self.style.positional)).arguments)
        except TypeError as error:
            raise ValueError(
                f"reward function {name}{self.signature} must take {self.style.shape[1:]}: {error}"
            ) from None
        parameters = self.signature.parameters.values()
        self._named = {p.name for p in parameters if p.kind in (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)}
        self._named -= taken
        self._taken = taken | _filled(fn)
        self._open_ended = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters)

    @property
    def per_sample(self) -> bool:
        """True if the function is called once per sample."""
        return self.style.per_sample

    def calls(self, rollouts: list[Rollout]) -> list[Call]:
        """The calls that score the samples: one per sample, or one with lists."""
        rows = [(self.style.named(rollout), self.style.columns(rollout)) for rollout in rollouts]
        if self.per_sample:
            return [self._call(columns | named) for named, columns in rows]
        names = dict.fromkeys(name for _, columns in rows for name in columns)
        lists: Values = {name: [columns.get(name) for _, columns in rows] for name in names}
        lists |= {name: [named[name] for named, _ in rows] for name in rows[0][0]}
        return [self._call(lists)]

    def _call(self, values: Values) -> Call:
        values = self.style.always | values
        args = tuple(values[name] for name in self.style.positional)
        kwargs = {name: value for name, value in values.items() if self._accepts(name)}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            there = ", ".join(name for name in values if name not in self.style.positional)
            raise RewardError(
                f"reward function {self.name}{self.signature}: {error}; beside its first {len(args)} arguments there "
                f"are: {there or 'none'}"
            ) from None
        return Call(args, kwargs)

    def _accepts(self, keyword: str) -> bool:
        if keyword in self._taken or keyword in self.style.positional:
            return False
        return self._open_ended or keyword in self._named


def _filled(fn: RewardFunction) -> set[str]:
    """The keywords that a partial has filled in: still parameters, but not ours to set, nor signs of a convention."""
    return set(fn.keywords) if isinstance(fn, functools.partial) else set()


def _signature(fn: RewardFunction, name: str) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {name}: its parameters cannot be read: {error}") from None


def _is_coroutine_function(fn: RewardFunction) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class FunctionReward:
    """Scores with a Python function, sync or async, in our own convention or OpenRLHF's, verl's, TRL's or AReaL's.

    Ours, ``reward_func(queries, prompts, labels, **extra)``, is called once with all samples of the rank. ``queries``
    (prompt + response), ``prompts`` and ``labels`` are lists with one entry per sample, passed by position. If the
    function names them or takes ``**extra``, these lists follow by keyword: ``responses`` (text), ``prompt_ids``,
    ``response_ids``, ``finish_reasons`` (``"stop"`` | ``"length"``), ``data_sources``; every further column of the
    data, with ``None`` for rows without it; and ``extras``, all further columns as one dict per sample.

    It returns a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``; ``None`` means unscored. The other
    conventions are in :data:`STYLES`; a function that is called per sample returns a score, a dict with ``score`` (its
    other numbers become metrics), or a tuple that begins with the score. A call that raises, runs past its limit or
    returns something else never becomes a score. Metrics per sample, with retries or ``"unscored"``: ``failures``
    (tries that failed) and ``timeouts`` (tries that ran past the limit).

    Args:
        reward_fn_style: the convention's name; ``"auto"``: told by the names of the parameters.
        reward_manager: who runs the calls, see :mod:`lightppo.rewards.runners`.
        reward_workers: calls at a time.
        reward_timeout: wall-clock seconds per call; ``None``: no limit.
        reward_retries: further tries of a failed call.
        on_reward_failure: ``"error"`` or ``"unscored"``.
        spec: where ``reward_manager="prime"`` loads the function from, if its module does not tell.
    """

    def __init__(
        self,
        fn: RewardFunction,
        name: str | None = None,
        *,
        reward_fn_style: str = "auto",
        reward_manager: ManagerName = "auto",
        reward_workers: int | None = None,
        reward_timeout: float | None = None,
        reward_retries: int = 0,
        on_reward_failure: OnFailure = "error",
        spec: str | None = None,
    ) -> None:
        check_failure_options(on_reward_failure, reward_retries, reward_timeout)
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.reward_retries = reward_retries
        self.on_reward_failure = on_reward_failure
        self._label = f"reward function {self.name}"
        self._bound = BoundFunction(fn, self.name, reward_fn_style)
        self._run = build_runner(
            fn,
            self.name,
            per_sample=self._bound.per_sample,
            is_async=self._bound.is_async,
            shape=self._bound.style.shape,
            reward_manager=reward_manager,
            reward_workers=reward_workers,
            reward_timeout=reward_timeout,
            spec=spec,
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; a failed call is a :class:`RewardError` with ``on_reward_failure="error"``."""
        if not rollouts:
            return RewardOutput([])
        parts = [[rollout] for rollout in rollouts] if self._bound.per_sample else [rollouts]
        calls = self._bound.calls(rollouts)
        read = self._bound.style.read
        settled = settle(self._run, calls, lambda i, value: read(value, parts[i], self._label), self.reward_retries)
        failed = next((i for i, state in enumerate(settled) if state.problem is not None), None)
        if failed is not None and self.on_reward_failure == "error":
            raise RewardError(self._error_text(settled[failed], rollouts, failed)) from settled[failed].cause
        answers: list[_Answer] = [
            state.result or _Answer(RewardOutput([None] * len(part)), [True] * len(part))
            for state, part in zip(settled, parts)
        ]
        output = join_outputs([answer.output for answer in answers])
        if self.on_reward_failure == "unscored" or self.reward_retries:
            counts = _counts(settled, answers)
            taken = sorted(counts.keys() & output.metrics.keys())
            if taken:
                raise RewardError(f"{self._label}: {taken[0]!r} is counted for it; give its own number another name")
            output.metrics |= counts
        return output

    def _error_text(self, state: Settled, rollouts: list[Rollout], call: int) -> str:
        problem = state.problem or ""
        if problem.startswith(self._label):
            return problem
        which = describe_sample(rollouts, call) if self._bound.per_sample else f"a batch of {len(rollouts)}"
        return f"{self._label} {'failed' if state.cause is None else 'raised'} on {which}: {problem}"


def _counts(settled: list[Settled], answers: list[_Answer]) -> dict[str, list[float | None]]:
    """Failed tries per sample; a last try that failed only in part does not count for the samples it scored."""
    pairs = list(zip(settled, answers))
    return {
        "failures": [float(s.failures - (s.problem is not None and not bad)) for s, a in pairs for bad in a.bad],
        "timeouts": [float(s.timeouts) for s, a in pairs for _ in a.bad],
    }
