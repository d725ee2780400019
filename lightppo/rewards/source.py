"""The reward protocol and what holds for every source: checks, failures, weighted sums, scoring in the background.

Strings and lists only, no tensors. A source is any object with ``name`` and ``score``.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.ranks import Ranks
from lightppo.terminal import plain
from lightppo.user_code import error_text

OnFailure = Literal["error", "unscored"]
T = TypeVar("T")

DEFAULT_ROUTE = "*"
NO_LABELS = "rows have no label: set --label_key"


@dataclass(slots=True)
class RewardOutput:
    """The answer of a source about n samples, in their order."""

    scores: list[float | None]  # None: unscored; the sample leaves its group and the statistics
    metrics: dict[str, list[float | None]] = field(default_factory=dict)  # logged as reward/<name>
    token_scores: list[list[float] | None] | None = None  # dense rewards: per sample one number per response token
    texts: dict[str, list[str | None]] = field(default_factory=dict)  # kept in files; "pred": the answer that was found


@runtime_checkable
class RewardSource(Protocol):
    """Scores finished samples of one rank, possibly none; raises :class:`RewardError` if it cannot.

    A source that acts on all ranks together has ``needs_all_ranks = True``; it is never called in another thread.
    """

    name: str

    def score(self, rollouts: list[Rollout]) -> RewardOutput: ...


class NoReward:
    """Of a run that learns from a teacher alone: nothing is added up, so every score is 0."""

    name = "no reward"

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        return RewardOutput([0.0] * len(rollouts))


Routes = Mapping[str, Sequence[tuple[RewardSource, float]]]  # route → sources and their weights


def close_source(source: RewardSource) -> None:
    """Ends the processes that a source has started, if it has a ``close``."""
    getattr(source, "close", lambda: None)()


def describe_sample(rollouts: Sequence[Rollout], position: int) -> str:
    """Names a sample in an error text: place in the batch, prompt row, sample index, start of the prompt."""
    rollout = rollouts[position]
    prompt = shown(rollout.prompt.text, 80)
    return f"sample {position} (prompt row {rollout.prompt.index}, sample_index {rollout.sample_index}, {prompt!r})"


def shown(value: Any, chars: int = 300) -> str:
    """The start of a value's text, for error texts."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # the value's own code
        text = f"a {type(value).__name__} (no text: {error_text(error)})"
    text = plain(text)
    return text if len(text) <= chars else text[:chars] + "…"


def in_daemon_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Calls a function in a thread of its own, which does not keep the program alive if the function hangs."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # SystemExit of a user's function too: it would end this thread unseen
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


# --- answers


def finite(value: Any) -> float | None:
    """A finite number of Python or numpy, or a 0-d tensor, as a float; ``None`` for anything else, also for strings."""
    number = _read_number(value)
    return number if isinstance(number, float) and math.isfinite(number) else None


def is_non_finite(value: Any) -> bool:
    """Whether a value is a number, but NaN or infinite."""
    number = _read_number(value)
    return isinstance(number, float) and not math.isfinite(number)


def reading_error(value: Any) -> str:
    """What reading a value as a number raised, for error texts; empty if nothing."""
    error = _read_number(value)
    return f" (reading it raised {error_text(error)})" if isinstance(error, Exception) else ""


def _read_number(value: Any) -> float | Exception | None:
    """A number as a float, ``None`` for what is none, or what the value's own ``item`` or ``__float__`` raised."""
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        return float(value) if isinstance(value, (bool, int, float)) else None
    except OverflowError:  # an int beyond float's range
        return None
    except Exception as error:  # code of the user
        return error


def check_output(output: RewardOutput, rollouts: Sequence[Rollout], source_name: str) -> RewardOutput:
    """The answer with plain Python floats; a :class:`RewardError` names source and sample of an unusable value.

    It is a :class:`NonFiniteRewardError` where all that is wrong with the values are NaN and infinite numbers.
    """
    try:
        return _checked_output(output, rollouts, source_name)
    except RewardError:
        raise
    except Exception as error:  # the values' own code, such as a tensor's tolist
        raise RewardError(f"{source_name}: its answer cannot be read: {error_text(error)}") from error


def _checked_output(output: RewardOutput, rollouts: Sequence[Rollout], source_name: str) -> RewardOutput:
    if not isinstance(output, RewardOutput):
        raise RewardError(f"{source_name}: score() must return a RewardOutput, got {type(output).__name__}")
    metrics = {}
    for name, values in output.metrics.items():
        if not isinstance(name, str) or not name:
            raise RewardError(f"{source_name}: metric names must be non-empty strings, got {name!r}")
        metrics[name] = _numbers(values, rollouts, source_name, f"metric {name!r}")
    scores, token_scores = _numbers(output.scores, rollouts, source_name, "score"), output.token_scores
    if token_scores is not None:
        token_scores = _token_numbers(token_scores, rollouts, source_name)
    for name, texts in output.texts.items():
        if len(texts) != len(rollouts) or not all(text is None or isinstance(text, str) for text in texts):
            raise RewardError(f"{source_name}: {name!r} must be a text or None for each of {len(rollouts)} samples")
    return RewardOutput(scores, metrics, token_scores, dict(output.texts))


def score_rollouts(source: RewardSource, rollouts: list[Rollout]) -> RewardOutput:
    """Scores samples and writes the checked answer into them; if that fails, no sample changes."""
    output = check_output(source.score(rollouts), rollouts, source.name)
    write_output(output, rollouts)
    return output


def write_output(output: RewardOutput, rollouts: Sequence[Rollout]) -> None:
    """Writes a checked answer into its samples: ``reward``, ``token_rewards``, ``extras`` and ``texts``."""
    for i, rollout in enumerate(rollouts):
        rollout.reward = output.scores[i]
        rollout.token_rewards = output.token_scores[i] if output.token_scores is not None else None
        rollout.extras.update({name: values[i] for name, values in output.metrics.items() if values[i] is not None})
        rollout.texts.update({name: texts[i] for name, texts in output.texts.items() if texts[i] is not None})


def output_from_result(result: Any, n: int, source_name: str) -> RewardOutput:
    """Reads what reward functions and servers return: a list or tensor of n scores, or a dict.

    Keys of the dict: ``rewards`` (required; used for training), ``scores`` (n numbers, kept as metric ``score``),
    ``extra_logs`` (name → n numbers or n texts, or one number for the batch), ``token_scores`` (per sample one number
    per response token). :func:`check_output` checks the values.
    """
    if not isinstance(result, Mapping):
        return RewardOutput(_as_list(result, source_name, "the result"))
    if result.get("rewards") is None or result.keys() - {"rewards", "scores", "extra_logs", "token_scores"}:
        raise RewardError(
            f"{source_name}: the keys must be 'rewards' and, optionally, 'scores', 'extra_logs', 'token_scores'; "
            f"got {[str(key) for key in result]}"
        )
    extra_logs = result.get("extra_logs") or {}
    if not isinstance(extra_logs, Mapping):
        raise RewardError(f"{source_name}: 'extra_logs' must map names to numbers, got {type(extra_logs).__name__}")
    metrics, texts, token_scores = {}, {}, result.get("token_scores")
    if result.get("scores") is not None:
        metrics["score"] = _as_list(result["scores"], source_name, "'scores'")
        if "score" in extra_logs:
            raise RewardError(f"{source_name}: 'extra_logs' has a 'score', the name under which 'scores' are logged")
    for name, values in extra_logs.items():
        single = finite(values)
        column = _as_list(values, source_name, f"extra_logs[{name!r}]") if single is None else [single] * n
        (texts if any(isinstance(value, str) for value in column) else metrics)[name] = column
    if token_scores is not None:
        token_scores = _as_list(token_scores, source_name, "'token_scores'")
    return RewardOutput(_as_list(result["rewards"], source_name, "'rewards'"), metrics, token_scores, texts)


def join_outputs(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """Joins answers about consecutive runs of samples, in order; ``None`` where an answer lacks a metric."""
    joined = RewardOutput([], {name: [] for output in outputs for name in output.metrics})
    joined.texts = {name: [] for output in outputs for name in output.texts}
    token_scores: list[list[float] | None] = []
    for output in outputs:
        missing: list[None] = [None] * len(output.scores)
        joined.scores += output.scores
        token_scores += missing if output.token_scores is None else output.token_scores
        for name, values in joined.metrics.items():
            values += output.metrics.get(name, missing)
        for name, texts in joined.texts.items():
            texts += output.texts.get(name, missing)
    if any(output.token_scores is not None for output in outputs):
        joined.token_scores = token_scores
    return joined


def _as_list(values: Any, source_name: str, what: str) -> list[Any]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{source_name}: {what} must have shape (B,), got {tuple(shape)}")
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (list, tuple)):
        return list(values)
    got = type(values).__name__
    raise RewardError(f"{source_name}: {what} must be a list or tensor with one number per sample, got {got}")


def _numbers(values: Any, rollouts: Sequence[Rollout], source_name: str, what: str) -> list[float | None]:
    values = _as_list(values, source_name, f"{what}s")
    if len(values) != len(rollouts):
        raise RewardError(f"{source_name}: {len(values)} {what}s for {len(rollouts)} samples")
    numbers = [finite(value) for value in values]
    bad = [i for i, value in enumerate(values) if value is not None and numbers[i] is None]
    if bad:
        worst = next((i for i in bad if not is_non_finite(values[i])), bad[0])
        raise (NonFiniteRewardError if is_non_finite(values[worst]) else RewardError)(
            f"{source_name}: the {what} of {describe_sample(rollouts, worst)} is {_shown_number(values[worst])}; "
            "it must be a finite number, or None for an unscored sample"
        )
    return numbers


def _shown_number(value: Any) -> str:
    return shown(repr(value) if isinstance(value, str) else value, 80) + reading_error(value)


def _token_numbers(rows: Any, rollouts: Sequence[Rollout], source_name: str) -> list[list[float] | None]:
    if len(rows) != len(rollouts):
        raise RewardError(f"{source_name}: {len(rows)} rows of token scores for {len(rollouts)} samples")
    checked: list[list[float] | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if row is None:
            continue
        checked[i] = numbers = [finite(value) for value in _as_list(row, source_name, f"token scores of sample {i}")]
        sample, n = describe_sample(rollouts, i), len(rollouts[i].response_ids)
        if len(numbers) != n:
            raise RewardError(f"{source_name}: {len(numbers)} token scores for the {n} response tokens of {sample}")
        if None in numbers:
            t = numbers.index(None)
            raise (NonFiniteRewardError if is_non_finite(row[t]) else RewardError)(
                f"{source_name}: token score {t} of {sample} is {_shown_number(row[t])}; it must be a finite number"
            )
    return checked


# --- failures


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a reward function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a call ended: one try, or what :func:`settle` made of all tries."""

    value: Any = None  # after settle: of the last answer that could be read, even if only in part
    error: str | None = None  # why the last try gave no full answer
    cause: BaseException | None = None  # the exception; of a call in another process, one that holds its trace
    timeouts: int = 0  # tries that ran past the time limit
    failures: int = 0  # tries without a full answer, time-outs included


@dataclass(frozen=True)
class RunnerRequest:
    """What an entry of ``lightppo.plugin.REWARD_MANAGERS`` makes a :class:`Runner` of."""

    fn: Callable[..., Any]
    name: str  # of the function, for messages
    spec: str | None = None  # where another process can load it from, path.py:name, where that is known
    workers: int | None = None  # calls at a time; None: the runner's own number
    timeout: float | None = None  # wall-clock seconds of a call


class Runner(Protocol):
    """Makes the calls of a reward function; may have a ``close``."""

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order. What a call raises is in its outcome."""
        ...


def check_failure_options(on_reward_failure: str, reward_retries: int = 0, reward_timeout: float | None = None) -> None:
    """Refuses values out of range, with a ``ValueError`` that names the flag."""
    if on_reward_failure not in get_args(OnFailure):
        raise ValueError(f"--on_reward_failure must be {' or '.join(get_args(OnFailure))}, got {on_reward_failure!r}")
    if reward_retries < 0:
        raise ValueError(f"--reward_retries must be ≥ 0, got {reward_retries}")
    if reward_timeout is not None and not reward_timeout > 0:
        raise ValueError(f"--reward_timeout must be > 0 seconds, got {reward_timeout}")


def settle(
    run: Callable[[Sequence[Call]], list[Outcome]],
    calls: Sequence[Call],
    read: Callable[[int, Any], tuple[Any, str | None]],
    retries: int,
) -> list[Outcome]:
    """Runs calls, and runs those that failed again, up to ``retries`` times.

    ``read(position, value)`` gives the result, and why it is incomplete or ``None``.
    """
    settled = [Outcome() for _ in calls]
    pending = list(range(len(calls)))
    for _ in range(retries + 1):
        for i, outcome in zip(pending, run([calls[i] for i in pending]) if pending else []):
            state = settled[i]
            state.error, state.cause = outcome.error, outcome.cause
            if outcome.error is None:
                result, state.error = read(i, outcome.value)
                state.value = state.value if result is None else result
            state.failures += state.error is not None
            state.timeouts += outcome.timeouts
        pending = [i for i in pending if settled[i].error is not None]
    return settled


def check_verifier_status(rollouts: Sequence[Rollout], *, minimum: float, source_name: str, ranks: Ranks) -> None:
    """Raises if all scores of a batch, before shaping, are missing or at the source's minimum. Collective.

    The verifier is then more likely broken than the model. Source: AReaL, ``check_verifier_status`` (of the mean).
    """
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    above = sum(not score <= minimum for score in scores)  # NaN says nothing of a minimum
    counts = {"samples": len(rollouts), "scored": len(scores), "above": above}
    total = ranks.all_reduce({name: float(count) for name, count in counts.items()}, "sum")
    if total["samples"] == 0 or total["above"] > 0:
        return
    problem = f"every one of the {total['scored']:g} scores is at the minimum of {minimum:g}"
    if total["scored"] == 0:
        problem = f"none of the {total['samples']:g} samples has a score"
    example = "this rank has no sample to show"
    if rollouts:
        i = next((i for i, rollout in enumerate(rollouts) if rollout.reward is not None), 0)
        label, response = shown(rollouts[i].prompt.label), rollouts[i].response_text[-300:]
        example = f"{describe_sample(rollouts, i)}: label {label!r}, score {rollouts[i].reward}, end {response!r}"
    raise RewardError(
        f"--check_verifier_status: {problem} ({source_name}). Does the prompt ask for the form that it looks for, and "
        f"--label_key name the right column? For example: {example}"
    )


# --- several sources


class RoutedReward:
    """Weighted sums of sources, by a column of the data: Σ weight · score over the sources of the sample's route.

    If one source of its route leaves a sample unscored, the sample is unscored. Token scores are added with the same
    weights. Each source's own score is metric ``<name>`` and its metrics are ``<name>/<metric>``, ``None`` for samples
    of other routes; ``failures`` and ``timeouts`` are also added up. Every ``score`` calls each source once, also
    without samples, in the order of the routes: a reward model under ZeRO-3 acts on all ranks together.

    Args:
        routes: value of the column → (source, weight) pairs; ``"*"`` takes the samples without a route of their own.
        by: ``"data_source"``, ``"label"`` or a column of the data: a string, or a number as Python writes it.
    """

    def __init__(self, routes: Routes, *, by: str = "data_source", name: str = "routed") -> None:
        if not routes or not all(routes.values()):
            raise ValueError(f"{name}: every route needs at least one source")
        plan: dict[int, tuple[RewardSource, dict[str, float]]] = {}  # by identity: a source need not be hashable
        for route, pairs in routes.items():
            for source, weight in pairs:
                weights = plan.setdefault(id(source), (source, {}))[1]
                if finite(weight) is None:
                    raise ValueError(f"{name}: the weight of {source.name} must be a finite number, got {weight!r}")
                if route in weights:
                    raise ValueError(f"{name}: {source.name} is twice on the route {route!r}")
                weights[route] = float(weight)
        self._plan = list(plan.values())
        twice = [n for n, count in Counter(source.name for source, _ in self._plan).items() if count > 1]
        if twice:
            raise ValueError(f"{name}: several sources are named {', '.join(sorted(twice))}; give each its own name")
        self.name = name
        self.by = by
        self._routes = list(routes)

    @property
    def needs_all_ranks(self) -> bool:
        """Whether one of the sources acts on all ranks together."""
        return any(getattr(source, "needs_all_ranks", False) for source, _ in self._plan)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores with every source, even if an earlier source left a sample unscored."""
        n = len(rollouts)
        routes = [self._route(rollouts, i) for i in range(n)]
        totals: list[float | None] = [0.0] * n
        token_totals: list[list[float] | None] = [None] * n
        metrics: dict[str, list[float | None]] = {}
        texts: dict[str, list[str | None]] = {}
        non_finite: NonFiniteRewardError | None = None  # raised at the end: other ranks may wait in the next source
        for source, weights in self._plan:
            places = [i for i, route in enumerate(routes) if route in weights]
            share = [rollouts[i] for i in places]
            try:
                output = check_output(source.score(share), share, source.name)
            except NonFiniteRewardError as error:
                non_finite = error
                continue
            own = {source.name: output.scores} | {f"{source.name}/{m}": v for m, v in output.metrics.items()}
            for kept, columns in ((metrics, own), (texts, {f"{source.name}/{t}": v for t, v in output.texts.items()})):
                for key, values in columns.items():
                    of_place = dict(zip(places, values))
                    kept[key] = [of_place.get(i) for i in range(n)]
            for i, score, row in zip(places, output.scores, output.token_scores or [None] * len(places)):
                weight, total = weights[routes[i]], totals[i]
                totals[i] = None if total is None or score is None else total + weight * score
                if row is not None:
                    before = token_totals[i] or [0.0] * len(row)
                    token_totals[i] = [a + weight * b for a, b in zip(before, row)]
        if non_finite is not None:
            raise non_finite
        for count in ("failures", "timeouts"):
            parts = [metrics[key] for source, _ in self._plan if (key := f"{source.name}/{count}") in metrics]
            if parts:
                metrics[count] = [sum(value for value in row if value is not None) for row in zip(*parts)]
        dense = any(row is not None for row in token_totals)
        return RewardOutput(totals, metrics, token_totals if dense else None, texts)

    def close(self) -> None:
        """Ends what the sources have started."""
        for source, _ in self._plan:
            close_source(source)

    def _route(self, rollouts: Sequence[Rollout], i: int) -> str:
        prompt = rollouts[i].prompt
        value = getattr(prompt, self.by) if self.by in ("data_source", "label") else prompt.extra.get(self.by)
        key = value if isinstance(value, str) else repr(value)
        if key in self._routes:
            return key
        if DEFAULT_ROUTE in self._routes:
            return DEFAULT_ROUTE
        raise RewardError(
            f"{self.name}: no reward source for the {self.by.replace('_', ' ')} {shown(key)!r} of "
            f"{describe_sample(rollouts, i)}; there are {', '.join(map(repr, self._routes))}. Add it, or "
            f"{DEFAULT_ROUTE!r} for all others"
        )


class CombinedReward(RoutedReward):
    """Weighted sum of sources (source → weight), the same for all samples; see :class:`RoutedReward`."""

    def __init__(self, sources: Mapping[RewardSource, float], name: str = "combined") -> None:
        super().__init__({DEFAULT_ROUTE: list(sources.items())}, name=name)
        self.sources = dict(sources)


# --- in the background


@dataclass(eq=False)
class AsyncScorer:
    """Scores finished samples in threads, part by part, while the engine still generates the others.

    The source is called once per part, so it must judge each sample by itself, and with more than one worker it must be
    thread-safe. It must not act on all ranks together, as reward models do: the ranks' threads would meet in any order,
    and would mix with the collectives of generation.
    """

    source: RewardSource
    max_workers: int = 1
    _: KW_ONLY
    timeout: float | None = None  # seconds that collect waits

    def __post_init__(self) -> None:
        if getattr(self.source, "needs_all_ranks", False):
            raise ValueError(
                f"--async_rewards: {self.source.name} is or has a reward model, which all ranks must call together: "
                "leave --async_rewards out"
            )
        if self.max_workers < 1 or (self.timeout is not None and not self.timeout > 0):
            raise ValueError(f"max_workers must be ≥ 1 and timeout > 0, got {self.max_workers} and {self.timeout}")
        self._parts: list[tuple[list[Rollout], Future[RewardOutput]]] = []
        self._waiting: queue.SimpleQueue[tuple[list[Rollout], Future[RewardOutput]] | None] = queue.SimpleQueue()
        self._threads: list[Future[None]] = []
        self._ended = False

    def submit(self, rollouts: list[Rollout]) -> None:
        """Has samples scored and returns at once; :meth:`collect` raises their errors."""
        if self._ended:
            raise RuntimeError("this AsyncScorer has ended")
        self._parts.append((list(rollouts), Future()))
        self._waiting.put(self._parts[-1])
        if len(self._threads) < self.max_workers:
            self._threads.append(in_daemon_thread(self._work))

    def collect(self) -> RewardOutput:
        """Waits for all samples submitted since the last call; writes their scores into them and returns them in order.

        If the source fails on a part, or the time limit has passed, it raises and no sample changes.
        """
        parts, self._parts = self._parts, []
        late = wait([future for _, future in parts], self.timeout).not_done
        everything = [rollout for rollouts, _ in parts for rollout in rollouts]
        if late:
            self.close()
            left = sum(len(rollouts) for rollouts, future in parts if future in late)
            raise RewardError(
                f"{self.source.name}: {left} of {len(everything)} samples were not scored {self.timeout:g} s after the "
                "end of generation"
            )
        errors = [error for _, future in parts if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, NonFiniteRewardError))  # what is worse comes first
        output = join_outputs([future.result() for _, future in parts])
        write_output(output, everything)
        return output

    def close(self) -> None:
        """Ends the threads once they have scored their present part; nothing more can be submitted."""
        self._ended = True
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (part := self._waiting.get()) is not None:
            rollouts, future = part
            try:
                if self._ended:
                    raise RewardError(f"{self.source.name}: scoring was ended before these samples")
                future.set_result(check_output(self.source.score(rollouts), rollouts, self.source.name))
            except BaseException as error:  # SystemExit too: later parts are still to be scored
                future.set_exception(error)
