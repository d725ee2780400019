"""Rewards written as a Python function, of our own convention, which is OpenRLHF's too, or of one of a plugin's.

Parameter names tell the convention; if none fits, or several do, the function is refused rather than guessed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.plugin import REWARD_MANAGERS, REWARD_STYLES
from lightppo.ranks import heartbeat
from lightppo.rewards.source import (
    NO_LABELS,
    Call,
    OnFailure,
    Outcome,
    RewardOutput,
    Runner,
    RunnerRequest,
    check_failure_options,
    check_output,
    describe_sample,
    finite,
    join_outputs,
    output_from_result,
    settle,
)
from lightppo.user_code import error_text

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


# --- conventions


def _as_they_are(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Style:
    """One convention: how to recognise its functions, what to pass to them, and how to read what they return."""

    shape: str  # its signature, for error texts
    needs: Collection[str]  # parameter names that tell it from the other conventions
    named: Callable[[Rollout], Values]  # one sample's arguments; they win over data columns
    # value, samples of the call, name for errors
    read: Callable[[Any, list[Rollout], str], Reading] = read_list
    per_sample: bool = False  # called once per sample, not once with lists of one entry per sample
    positional: tuple[str, ...] = ()  # names in ``named`` that are passed by position
    columns: Callable[[Rollout], Values] = lambda rollout: {}  # one sample's data columns
    always: Values = field(default_factory=dict)  # keywords passed in every call
    forbids: str = ""  # a parameter name that only functions with **kwargs may have
    label: str = ""  # the parameter that gets the label
    # further names with a meaning in it: a function that has one elsewhere is not of our own convention
    words: Collection[str] = ()
    # the function's own names of arguments that go by their places → the convention's
    renames: Callable[[Iterable[inspect.Parameter]], dict[str, str]] = _as_they_are


def _ours(rollout: Rollout) -> Values:
    prompt = rollout.prompt
    return {
        "queries": prompt.text + rollout.response_text,
        "prompts": prompt.text,
        "labels": prompt.label,
        "responses": rollout.response_text,
        "finish_reasons": rollout.finish_reason,
        "prompt_ids": prompt.token_ids,
        "response_ids": rollout.response_ids,
        "data_sources": prompt.data_source,
        "extras": prompt.extra,
    } | _episode(rollout)


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
    positional=("queries", "prompts", "labels"),
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
    # a convention whose marks are among those of another one that fits
    fits = [
        one
        for one in fits
        if not any({*styles[one].needs} < {*styles[other].needs} for other in fits)
    ]
    others = {key: style for key, style in styles.items() if style is not QUERIES}
    in_place = _in_place(parameters, _words(styles))
    if len(fits) == 1 and (fits[0] in others or in_place):
        return fits[0]
    # prompt_ids is a keyword of our own too
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


# --- calls, one after the other; plugins bring threads, event loops and processes


@dataclass(eq=False)
class OneByOne:
    """Makes the calls in their order, in the thread that asks, without a limit for their time."""

    request: RunnerRequest

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order."""
        return [self._call(call) for call in calls]

    def _call(self, call: Call) -> Outcome:
        try:
            return Outcome(awaited(self.request.fn(*call.args, **call.kwargs)))
        except (Exception, SystemExit) as error:
            return raised(error)
        finally:
            heartbeat.beat()


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether a call gives what must be awaited, be it a function or an object with ``__call__``."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    )  # noqa: B004, RUF100


def awaited(value: Any) -> Any:
    """The value, awaited to its end if it is awaitable."""

    async def run() -> Any:
        return await value

    return asyncio.run(run()) if inspect.isawaitable(value) else value


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    return Outcome(error=error_text(error), cause=error)


# --- the source


@dataclass(eq=False)
class FunctionReward:
    """Scores with a Python function, sync or async, of one of the conventions in ``REWARD_STYLES``; see docs/rewards.md.

    A call that raises, runs past its limit or returns something else than scores never becomes a score. Metrics per
    sample, with retries or ``"unscored"``: ``failures`` (tries that failed), ``timeouts`` (tries past the limit).
    """

    fn: RewardFunction
    name: str | None = None  # None: the function's own
    _: KW_ONLY
    reward_fn_style: str = (
        "auto"  # a name in REWARD_STYLES; auto: told by the names of the parameters
    )
    # naive: one call per sample, in threads or, of coroutines, in one event loop; batch: one call with all samples;
    # prime: calls in processes that are killed at their limit; auto: naive or batch, as the function takes it
    reward_manager: str = "auto"  # a name in lightppo.plugin.REWARD_MANAGERS
    reward_workers: int | None = None  # calls at a time; None: 16, or one process per core
    # wall-clock seconds per call; past it a thread is left behind
    reward_timeout: float | None = None
    reward_retries: int = 0  # further tries of a failed call
    on_reward_failure: OnFailure = "error"
    # where prime loads it from, path.py:name or module:name, if its module does not tell
    spec: str | None = None

    def __post_init__(self) -> None:
        check_failure_options(self.on_reward_failure, self.reward_retries, self.reward_timeout)
        manager = REWARD_MANAGERS.find(self.reward_manager)
        if self.reward_workers is not None and self.reward_workers < 1:
            raise ValueError(f"--reward_workers must be ≥ 1, got {self.reward_workers}")
        self.name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        self._label = f"reward function {self.name}"
        self._bound = BoundFunction(self.fn, self.name, self.reward_fn_style)
        self._style = self._bound.style
        if manager.calls == ("batch" if self._style.per_sample else "sample"):
            takes = f"{'one sample' if self._style.per_sample else 'a whole batch'} f{self._style.shape}"
            raise ValueError(f"--reward_manager {self.reward_manager}: {self._label} takes {takes}")
        request = RunnerRequest(
            self.fn,
            self.name,
            spec=self.spec,
            workers=self.reward_workers,
            timeout=self.reward_timeout,
        )
        self._runner: Runner = manager.fn(request)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; a failed call is a :class:`RewardError` with ``on_reward_failure="error"``."""
        if not rollouts:
            return RewardOutput([])
        parts = [[rollout] for rollout in rollouts] if self._style.per_sample else [rollouts]

        def read(i: int, value: Any) -> Reading:
            try:
                return self._style.read(value, parts[i], self._label)
            except Exception as error:  # code of the values themselves: __len__, tolist, items, …
                return None, f"its answer cannot be read: {error_text(error)}"

        settled = settle(self._runner.run, self._bound.calls(rollouts), read, self.reward_retries)
        failed = [i for i, state in enumerate(settled) if state.error is not None]
        if failed and self.on_reward_failure == "error":
            worst = next(
                (i for i in failed if not isinstance(settled[i].error, NonFinite)), failed[0]
            )
            kind = (
                NonFiniteRewardError if isinstance(settled[worst].error, NonFinite) else RewardError
            )
            raise kind(self._error_text(settled[worst], rollouts, worst)) from settled[worst].cause
        answers: list[Answer] = [
            state.value or Answer(RewardOutput([None] * len(part)), [True] * len(part))
            for state, part in zip(settled, parts)
        ]
        output = join_outputs([answer.output for answer in answers])
        if self.on_reward_failure == "unscored" or self.reward_retries:
            if taken := sorted({"failures", "timeouts"} & output.metrics.keys()):
                raise RewardError(
                    f"{self._label}: its metric {taken[0]!r} has the name of a count of ours; rename it"
                )
            samples = [
                (state, bad) for state, answer in zip(settled, answers) for bad in answer.bad
            ]
            # a last try that failed only in part does not count for the samples that it scored
            output.metrics["failures"] = [
                float(s.failures - (s.error is not None and not bad)) for s, bad in samples
            ]
            output.metrics["timeouts"] = [float(state.timeouts) for state, _ in samples]
        return output

    def _error_text(self, state: Outcome, rollouts: list[Rollout], call: int) -> str:
        problem = state.error or ""
        if problem.startswith(self._label):
            return problem
        which = (
            describe_sample(rollouts, call)
            if self._style.per_sample
            else f"a batch of {len(rollouts)}"
        )
        unlabelled = self._bound.label_parameter and all(
            rollout.prompt.label is None for rollout in rollouts
        )
        hint = f". {NO_LABELS}" if unlabelled else ""
        return f"{self._label} {'failed' if state.cause is None else 'raised'} on {which}: {problem}{hint}"
