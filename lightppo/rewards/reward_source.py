"""Sources of rewards: what they are made of, and how their answers are read and checked.

Strings and lists only, no tensors. A source is any object with ``name`` and ``score``.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lightppo.config import PPOConfig
from lightppo.config.reward_options import reward_sources
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, NonFiniteRewardError, RewardError
from lightppo.ranks import Alone, Ranks
from lightppo.redaction import plain
from lightppo.user_code import error_text, finite, in_daemon_thread, is_non_finite, reading_error

# what a reward function gets by place; the rest of reward_styles.values_of by name
POSITIONAL = ("queries", "prompts", "labels")


@dataclass(slots=True)
class RewardOutput:
    """Hold the answer of a source about n samples, in their order."""

    scores: list[float | None]  # None: unscored; the sample leaves its group and the statistics
    metrics: dict[str, list[float | None]] = field(default_factory=dict)  # logged as reward/<name>
    # dense rewards: per sample one number per response token
    token_scores: list[list[float] | None] | None = None
    # kept in files; "pred": the answer that was found
    texts: dict[str, list[str | None]] = field(default_factory=dict)


@runtime_checkable
class RewardSource(Protocol):
    """Score finished samples of one rank, possibly none; raise :class:`RewardError` where that fails.

    A source that acts on all ranks together has ``needs_all_ranks = True``; it is never called in another thread. One
    whose score of a sample depends on no other sample has ``per_sample = True``: it need not wait for the others.
    """

    name: str

    def score(self, rollouts: list[Rollout]) -> RewardOutput: ...


class NoReward:
    """Score 0 for every sample of a run that learns without rewards: nothing is added up."""

    name = "no reward"
    per_sample = True

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        return RewardOutput([0.0] * len(rollouts))


@dataclass(frozen=True)
class RewardRequest:
    """Hold what a source of ``lightppo.plugin.REWARDS`` is made of: all that a run knows of its rewards."""

    config: PPOConfig  # resolved: what None means is in it
    tokenizer: Any  # the actor's
    ranks: Ranks = field(default_factory=Alone)
    reward_models: Sequence[Any] = ()  # of --reward_pretrain, prepared
    flag: str = "--reward_fn"  # what errors call the option of the reward function
    # Called with (make, name, is_certain, request) for a source that may be outside the run (``RewardEntry.outside``):
    # returns make(), a source around it, or one in its place, which is then never made.
    around: Callable[..., RewardSource] | None = None

    def options_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the run's options that ``function`` takes as arguments, by their names; without those that are None."""
        options = self.config.flat()
        option_values = {
            option_name: options.get(option_name)
            for option_name in inspect.signature(function).parameters
        }
        return {
            option_name: value for option_name, value in option_values.items() if value is not None
        }

    @property
    def names(self) -> list[str]:
        """Return all sources of the run, in the order in which they are called."""
        return reward_sources(self.config)


def is_source(value: Any) -> bool:
    """Tell whether this is a source, and not the class of one."""
    return isinstance(value, RewardSource) and not isinstance(value, type)


def close_source(source: RewardSource) -> None:
    """End the processes that a source has started, if it has a ``close``."""
    getattr(source, "close", lambda: None)()


def describe_sample(rollouts: Sequence[Rollout], position: int) -> str:
    """Name a sample in an error text: place in the batch, prompt row, sample index, start of the prompt."""
    rollout = rollouts[position]
    prompt = shown(rollout.prompt.text, 80)
    return f"sample {position} (prompt row {rollout.prompt.index}, sample_index {rollout.sample_index}, {prompt!r})"


def shown(any_value: Any, max_chars: int = 300) -> str:
    """Return the start of a value's text, for error texts."""
    try:
        value_text = any_value if isinstance(any_value, str) else repr(any_value)
    except Exception as error:  # the value's own code
        value_text = f"a {type(any_value).__name__} (no text: {error_text(error)})"
    value_text = plain(value_text)
    return value_text if len(value_text) <= max_chars else value_text[:max_chars] + "…"


# -- answers ----------------------------------------------------------------------------------------------------------


def join_outputs(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """Join answers about consecutive runs of samples, in order; ``None`` where an answer lacks a metric."""
    joined = RewardOutput(
        [], {column_name: [] for output in outputs for column_name in output.metrics}
    )
    joined.texts = {column_name: [] for output in outputs for column_name in output.texts}
    token_scores: list[list[float] | None] = []
    for output in outputs:
        missing: list[None] = [None] * len(output.scores)
        joined.scores += output.scores
        token_scores += output.token_scores or missing
        for column_name, metric_column in joined.metrics.items():
            metric_column += output.metrics.get(column_name, missing)
        for column_name, text_column in joined.texts.items():
            text_column += output.texts.get(column_name, missing)
    if any(output.token_scores is not None for output in outputs):
        joined.token_scores = token_scores
    return joined


def split_output(output: RewardOutput, counts: Sequence[int]) -> list[RewardOutput]:
    """Return the answers about the first, the next, … so many samples: what :func:`join_outputs` joins."""
    outputs = []
    end = 0
    for count in counts:
        start, end = end, end + count
        outputs.append(
            RewardOutput(
                output.scores[start:end],
                {name: column[start:end] for name, column in output.metrics.items()},
                output.token_scores and output.token_scores[start:end],
                {name: column[start:end] for name, column in output.texts.items()},
            )
        )
    return outputs


def check_output(
    output: RewardOutput, rollouts: Sequence[Rollout], source_name: str
) -> RewardOutput:
    """Return the answer with plain Python floats; a :class:`RewardError` names source and sample of an unusable value.

    It is a :class:`NonFiniteRewardError` where all that is wrong with the values are NaN and infinite numbers.
    """
    try:
        if not isinstance(output, RewardOutput):
            raise RewardError(
                f"{source_name}: score() must return a RewardOutput, got {type(output).__name__}"
            )
        metrics = {}
        for column_name, values in output.metrics.items():
            if not isinstance(column_name, str) or not column_name:
                raise RewardError(
                    f"{source_name}: metric names must be non-empty strings, got {column_name!r}"
                )
            label = f"metric {column_name!r}"
            metrics[column_name] = _numbers(values, rollouts, source_name, label)
        scores = _numbers(output.scores, rollouts, source_name, "score")
        if (token_scores := output.token_scores) is not None:
            token_scores = _token_numbers(token_scores, rollouts, source_name)
        if output.texts:
            _check_texts(output.texts, len(rollouts), source_name)
        return RewardOutput(scores, metrics, token_scores, dict(output.texts))
    except RewardError:
        raise
    except Exception as error:  # the values' own code, such as a tensor's tolist
        raise RewardError(
            f"{source_name}: its answer cannot be read: {error_text(error)}"
        ) from error


def _check_texts(texts: Mapping[str, Sequence[str | None]], count: int, source_name: str) -> None:
    for column_name, column in texts.items():
        if len(column) != count or not all(isinstance(text, str | None) for text in column):
            raise RewardError(
                f"{source_name}: {column_name!r} must be a text or None for each of {count} samples"
            )


def score_rollouts(source: RewardSource, rollouts: list[Rollout]) -> RewardOutput:
    """Score samples and write the checked answer into them; if that fails, no sample changes."""
    output = check_output(source.score(rollouts), rollouts, source.name)
    write_output(output, rollouts)
    return output


def write_output(output: RewardOutput, rollouts: Sequence[Rollout]) -> None:
    """Write a checked answer into its samples: ``reward``, ``token_rewards``, ``extras`` and ``texts``."""
    for i, rollout in enumerate(rollouts):
        rollout.reward = output.scores[i]
        rollout.token_rewards = output.token_scores and output.token_scores[i]
        for target, columns in ((rollout.extras, output.metrics), (rollout.texts, output.texts)):
            for column_name, values in columns.items():
                if values[i] is not None:
                    target[column_name] = values[i]


_KEYS = {"rewards", "scores", "extra_logs", "token_scores"}  # of a dict that is an answer


def output_from_result(result: Any, count: int, source_name: str) -> RewardOutput:
    """Read what reward functions and servers return: a list or tensor of ``count`` scores, or a dict.

    Keys of the dict: ``rewards`` (required; used for training), ``scores`` (as many, kept as metric ``score``),
    ``extra_logs`` (name → as many numbers or texts, or one number for the batch), ``token_scores`` (per sample one number
    per response token). :func:`check_output` checks the values.
    """
    if isinstance(result, Mapping):
        return _output_from_mapping(result, count, source_name)
    return RewardOutput(_as_list(result, source_name, "the result"))


def _output_from_mapping(result: Mapping[str, Any], count: int, source_name: str) -> RewardOutput:
    """Read the dict of :func:`output_from_result`."""
    if result.get("rewards") is None or result.keys() - _KEYS:
        raise RewardError(
            f"{source_name}: the keys must be 'rewards' and, optionally, 'scores', 'extra_logs', 'token_scores'; "
            f"got {[str(key) for key in result]}"
        )
    extra_logs = result.get("extra_logs") or {}
    if not isinstance(extra_logs, Mapping):
        raise RewardError(
            f"{source_name}: 'extra_logs' must map names to numbers, got {type(extra_logs).__name__}"
        )
    metrics = {}
    texts = {}
    token_scores = result.get("token_scores")
    if result.get("scores") is not None:
        metrics["score"] = _as_list(result["scores"], source_name, "'scores'")
        if "score" in extra_logs:
            raise RewardError(
                f"{source_name}: 'extra_logs' has a 'score', the name under which 'scores' are logged"
            )
    for log_name, values in extra_logs.items():
        number = finite(values)
        if number is not None:
            metrics[log_name] = [number] * count
            continue
        column = _as_list(values, source_name, f"extra_logs[{log_name!r}]")
        is_text = any(isinstance(value, str) for value in column)
        (texts if is_text else metrics)[log_name] = column
    if token_scores is not None:
        token_scores = _as_list(token_scores, source_name, "'token_scores'")
    return RewardOutput(
        _as_list(result["rewards"], source_name, "'rewards'"), metrics, token_scores, texts
    )


def _as_list(values: Any, source_name: str, label: str) -> list[Any]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{source_name}: {label} must have shape (B,), got {tuple(shape)}")
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (list, tuple)):
        return list(values)
    raise RewardError(
        f"{source_name}: {label} must be a list or tensor with one number per sample, got {type(values).__name__}"
    )


def _numbers(
    values: Any, rollouts: Sequence[Rollout], source_name: str, label: str
) -> list[float | None]:
    values = _as_list(values, source_name, f"{label}s")
    if len(values) != len(rollouts):
        raise RewardError(f"{source_name}: {len(values)} {label}s for {len(rollouts)} samples")
    numbers = [finite(value) for value in values]
    invalid = [i for i, value in enumerate(values) if value is not None and numbers[i] is None]
    if invalid:
        worst_position = min(invalid, key=lambda i: is_non_finite(values[i]))
        raise _number_error(
            values[worst_position],
            f"{source_name}: the {label} of {describe_sample(rollouts, worst_position)}",
            "; it must be a finite number, or None for an unscored sample",
        )
    return numbers


def _number_error(value: Any, subject: str, rule: str) -> RewardError:
    """Return the error of a value that is no finite number."""
    error_class = RewardError
    if is_non_finite(value):
        error_class = NonFiniteRewardError
    value_text = shown(repr(value) if isinstance(value, str) else value, 80)
    return error_class(f"{subject} is {value_text}{reading_error(value)}{rule}")


def _token_numbers(
    scores_of_samples: Any, rollouts: Sequence[Rollout], source_name: str
) -> list[list[float] | None]:
    if len(scores_of_samples) != len(rollouts):
        raise RewardError(
            f"{source_name}: {len(scores_of_samples)} rows of token scores for {len(rollouts)} samples"
        )
    checked_rows: list[list[float] | None] = [None] * len(scores_of_samples)
    for i, token_scores in enumerate(scores_of_samples):
        if token_scores is None:
            continue
        checked_rows[i] = numbers = [
            finite(value)
            for value in _as_list(token_scores, source_name, f"token scores of sample {i}")
        ]
        sample = describe_sample(rollouts, i)
        length = len(rollouts[i].response_ids)
        if len(numbers) != length:
            raise RewardError(
                f"{source_name}: {len(numbers)} token scores for the {length} response tokens of {sample}"
            )
        if None in numbers:
            token_position = numbers.index(None)
            raise _number_error(
                token_scores[token_position],
                f"{source_name}: token score {token_position} of {sample}",
                "; it must be a finite number",
            )
    return checked_rows


# -- scores of finished samples while the engine still generates the others (--async_rewards, --max_staleness) --------


class WholeGroups:
    """Hand on finished samples once all answers to their prompt are there, in the order of a batch.

    So a source may compare the answers to a prompt, in whatever order they end.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        answers_per_prompt: int,
        hand_on: Callable[[list[Rollout]], object],
    ) -> None:
        self._missing = Counter([prompt.index for prompt in prompts] * answers_per_prompt)
        self._groups: dict[int, list[tuple[int, Rollout]]] = defaultdict(list)
        self._hand_on = hand_on
        self._lock = threading.Lock()  # an engine's calls may run at the same time

    def add(self, call: int, rollouts: Sequence[Rollout]) -> None:
        """Take samples that ended in one of the engine's calls, which have the numbers of their order."""
        with self._lock:
            whole_groups: list[Rollout] = []
            for rollout in rollouts:
                index = rollout.prompt.index
                self._groups[index].append((call, rollout))
                self._missing[index] -= 1
                if self._missing[index] == 0:
                    group = self._groups.pop(index)
                    group.sort(key=lambda answer: (answer[0], answer[1].sample_index))
                    whole_groups += [answer for _, answer in group]
            if whole_groups:
                self._hand_on(whole_groups)


ScoringPart = tuple[list[Rollout], Future[RewardOutput]]


@dataclass(eq=False)
class AsyncScorer:
    """Score finished samples in threads, while the engine still generates the others.

    The source is called once per part, so it must judge each prompt's answers by themselves: :class:`WholeGroups` makes
    such parts. One with ``per_sample`` gets all samples that wait. With more than one worker it must be thread-safe. It
    must not act on all ranks together, as reward models do: the ranks' threads would meet in any order, and would mix
    with the collectives of generation.
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
            raise ValueError(
                f"max_workers must be ≥ 1 and timeout > 0, got {self.max_workers} and {self.timeout}"
            )
        self.per_sample: bool = getattr(self.source, "per_sample", False)
        self._parts: list[ScoringPart] = []
        self._waiting: queue.SimpleQueue[ScoringPart | None] = queue.SimpleQueue()
        self._threads: list[Future[None]] = []
        self._ended = False

    def with_source(self, source: RewardSource) -> AsyncScorer:
        """Return the same for another source; this one ends."""
        self.close()
        return replace(self, source=source)

    def submit(self, rollouts: list[Rollout]) -> None:
        """Have samples scored and return at once; :meth:`collect` raises their errors."""
        if self._ended:
            raise RuntimeError("this AsyncScorer has ended")
        part: ScoringPart = (list(rollouts), Future())
        self._parts.append(part)
        self._waiting.put(part)
        if len(self._threads) < self.max_workers:
            self._threads.append(in_daemon_thread(self._work))

    def collect(self) -> RewardOutput:
        """Wait for all samples submitted since the last call; write their scores into them and return them in order.

        If the source fails on a part, or the time limit has passed, it raises and no sample changes.
        """
        waiting_parts = self._parts
        self._parts = []
        unfinished = wait([future for _, future in waiting_parts], self.timeout).not_done
        samples = [rollout for rollouts, _ in waiting_parts for rollout in rollouts]
        if unfinished:
            self.close()
            unscored = sum(
                len(rollouts) for rollouts, future in waiting_parts if future in unfinished
            )
            raise RewardError(
                f"{self.source.name}: {unscored} of {len(samples)} samples were not scored {self.timeout:g} s after the "
                "end of generation"
            )
        errors = [error for _, future in waiting_parts if (error := future.exception()) is not None]
        if errors:
            # The worst error is raised.
            raise min(errors, key=lambda error: isinstance(error, NonFiniteRewardError))
        output = join_outputs([future.result() for _, future in waiting_parts])
        write_output(output, samples)
        return output

    def close(self) -> None:
        """End the threads once they have scored their present part; nothing more can be submitted."""
        self._ended = True
        self._waiting.put(None)

    def _work(self) -> None:
        while parts := self._next_parts():
            rollouts = [rollout for part, _ in parts for rollout in part]
            try:
                if self._ended:
                    raise RewardError(f"{self.source.name}: scoring was ended before these samples")
                output = check_output(self.source.score(rollouts), rollouts, self.source.name)
                outputs = split_output(output, [len(part) for part, _ in parts])
                for (_, future), part_output in zip(parts, outputs):
                    future.set_result(part_output)
            except BaseException as error:  # SystemExit too: later parts are still to be scored
                for _, future in parts:
                    future.set_exception(error)

    def _next_parts(self) -> list[ScoringPart]:
        """Wait for a part; of samples that are judged alone take all that wait. Return none at the end."""
        parts = [self._waiting.get()]
        if self.per_sample:
            with suppress(queue.Empty):
                while parts[-1] is not None:
                    parts.append(self._waiting.get_nowait())
        if parts[-1] is None:
            self._waiting.put(parts.pop())  # for the other threads, and for this one's next call
        return parts


def status_check(
    config: PPOConfig, strategy: Ranks, source: RewardSource
) -> Callable[[Sequence[Rollout]], None]:
    """Return the check of each scored batch of training."""
    minimum = config.verifier.reward_minimum
    if minimum is None:
        minimum = getattr(source, "minimum", None)
    if minimum is None:
        raise ConfigError(
            f"--check_verifier_status: {source.name} does not say its lowest score; set --reward_minimum"
        )
    return partial(check_verifier_status, minimum=minimum, source_name=source.name, ranks=strategy)


def check_verifier_status(
    rollouts: Sequence[Rollout], *, minimum: float, source_name: str, ranks: Ranks
) -> None:
    """Raise if all scores of a batch, before shaping, are missing or at the source's minimum. Collective.

    The verifier is then more likely broken than the model. Source: AReaL, ``check_verifier_status`` (of the mean).
    """
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    above = sum(not score <= minimum for score in scores)  # NaN says nothing of a minimum
    counts = {"samples": len(rollouts), "scored": len(scores), "above": above}
    totals = ranks.all_reduce({name: float(count) for name, count in counts.items()}, "sum")
    if totals["samples"] == 0 or totals["above"] > 0:
        return
    problem = f"every one of the {totals['scored']:g} scores is at the minimum of {minimum:g}"
    if totals["scored"] == 0:
        problem = f"none of the {totals['samples']:g} samples has a score"
    example = "this rank has no sample to show"
    if rollouts:
        i = next((i for i, rollout in enumerate(rollouts) if rollout.reward is not None), 0)
        rollout = rollouts[i]
        label = shown(rollout.prompt.label)
        ending = rollout.response_text[-300:]
        example = f"{describe_sample(rollouts, i)}: label {label!r}, score {rollout.reward}, end {ending!r}"
    raise RewardError(
        f"--check_verifier_status: {problem} ({source_name}). Does the prompt ask for the form that it looks for, and "
        f"--label_key name the right column? For example: {example}"
    )
