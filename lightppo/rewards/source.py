"""The reward protocol: finished samples in, one score per sample out. Strings and lists only, no tensors.

A source is any object with ``name`` and ``score``::

    class Brevity:
        name = "brevity"

        def score(self, rollouts):
            return RewardOutput(scores=[-0.01 * len(rollout.response_ids) for rollout in rollouts])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lightppo.data.records import Rollout
from lightppo.errors import RewardError

_SNIPPET_CHARS = 80


@dataclass(slots=True)
class RewardOutput:
    """What a source says about n samples, in their order.

    Attributes:
        scores: one score per sample; ``None`` = unscored: the sample leaves its group and the statistics.
        metrics: named numbers per sample, logged as ``reward/<name>``; ``None`` where a sample has none.
        token_scores: for dense rewards, per sample one score per response token, or ``None``.
    """

    scores: list[float | None]
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    token_scores: list[list[float] | None] | None = None


@runtime_checkable
class RewardSource(Protocol):
    """Gives scores to finished samples.

    ``score`` sees the samples of one rank, and may see none of them: under ZeRO-3 a model must still take part. It
    raises :class:`RewardError` where it cannot score, and returns ``None`` for a sample it does not want to score.

    A source that acts on all ranks together also has ``needs_all_ranks = True``: it is never called in another thread.
    """

    name: str

    def score(self, rollouts: list[Rollout]) -> RewardOutput: ...


def close_source(source: RewardSource) -> None:
    """Ends the processes that a source has started, where it has such."""
    close = getattr(source, "close", None)
    if close is not None:
        close()


def describe_sample(rollouts: Sequence[Rollout], position: int) -> str:
    """Names a sample in an error text: place in the batch, prompt row, sample index, start of the prompt."""
    rollout = rollouts[position]
    text = rollout.prompt.text
    snippet = text if len(text) <= _SNIPPET_CHARS else text[:_SNIPPET_CHARS] + "…"
    return f"sample {position} (prompt row {rollout.prompt.index}, sample_index {rollout.sample_index}, {snippet!r})"


def check_output(output: RewardOutput, rollouts: Sequence[Rollout], source_name: str) -> RewardOutput:
    """Checks lengths and numbers of a source's answer.

    Returns:
        The same answer with plain Python floats.

    Raises:
        RewardError: naming source, sample and prompt, for a wrong length or a value that is no finite number.
    """
    if not isinstance(output, RewardOutput):
        raise RewardError(f"{source_name}: score() must return a RewardOutput, got {type(output).__name__}")
    scores = _numbers(output.scores, rollouts, source_name, "score")
    metrics = {}
    for name, values in output.metrics.items():
        if not isinstance(name, str) or not name:
            raise RewardError(f"{source_name}: metric names must be non-empty strings, got {name!r}")
        metrics[name] = _numbers(values, rollouts, source_name, f"metric {name!r}")
    token_scores = output.token_scores
    if token_scores is not None:
        token_scores = _token_numbers(token_scores, rollouts, source_name)
    return RewardOutput(scores, metrics, token_scores)


def score_rollouts(source: RewardSource, rollouts: list[Rollout]) -> RewardOutput:
    """Scores samples and writes the answer into them: ``reward``, ``token_rewards`` and ``extras``.

    Raises:
        RewardError: the source failed, or its answer does not pass :func:`check_output`. No sample is changed then.
    """
    output = check_output(source.score(rollouts), rollouts, source.name)
    write_output(output, rollouts)
    return output


def write_output(output: RewardOutput, rollouts: Sequence[Rollout]) -> None:
    """Writes a checked answer into its samples."""
    for i, rollout in enumerate(rollouts):
        rollout.reward = output.scores[i]
        rollout.token_rewards = output.token_scores[i] if output.token_scores is not None else None
        rollout.extras.update({name: values[i] for name, values in output.metrics.items() if values[i] is not None})


def output_from_result(result: Any, n: int, source_name: str) -> RewardOutput:
    """Reads what reward functions and servers return: a list or tensor of n scores, or a dict.

    Keys of the dict: ``rewards`` (needed; what training uses), ``scores`` (n numbers, kept as metric ``score``),
    ``extra_logs`` (name → n numbers, or one number for the whole batch), ``token_scores`` (for dense rewards: per
    sample one number per response token). Values are not looked at here; that is :func:`check_output`'s.

    Raises:
        RewardError: another type, no ``rewards``, or a key that is none of these.
    """
    if not isinstance(result, Mapping):
        return RewardOutput(_as_list(result, source_name, "the result"))
    known = ("rewards", "scores", "extra_logs", "token_scores")
    unknown = [str(key) for key in result if key not in known]
    if unknown or result.get("rewards") is None:
        optional = ", ".join(map(repr, known[1:]))
        raise RewardError(f"{source_name}: the keys must be 'rewards' and, optionally, {optional}; "
                          f"got {[str(key) for key in result]}")  # fmt: skip
    extra_logs = result.get("extra_logs") or {}
    if not isinstance(extra_logs, Mapping):
        raise RewardError(f"{source_name}: 'extra_logs' must map names to numbers, got {type(extra_logs).__name__}")
    metrics = {}
    if result.get("scores") is not None:
        metrics["score"] = _as_list(result["scores"], source_name, "'scores'")
        if "score" in extra_logs:
            raise RewardError(f"{source_name}: 'extra_logs' has a 'score', which is the name 'scores' are logged under")
    for name, values in extra_logs.items():
        single = _to_float(values)
        metrics[name] = _as_list(values, source_name, f"extra_logs[{name!r}]") if single is None else [single] * n
    token_scores = result.get("token_scores")
    if token_scores is not None:
        token_scores = _as_list(token_scores, source_name, "'token_scores'")
    return RewardOutput(_as_list(result["rewards"], source_name, "'rewards'"), metrics, token_scores)


def join_outputs(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """Answers about consecutive runs of samples as one, in order; what some of them lack is ``None`` there."""
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    joined = RewardOutput([score for output in outputs for score in output.scores], {name: [] for name in names})
    dense = any(output.token_scores is not None for output in outputs)
    rows: list[list[float] | None] = []
    for output in outputs:
        missing: list[None] = [None] * len(output.scores)
        rows += missing if output.token_scores is None else output.token_scores
        for name, values in joined.metrics.items():
            values += output.metrics.get(name, missing)
    joined.token_scores = rows if dense else None
    return joined


def _to_float(value: Any) -> float | None:
    """A Python, numpy or 0-d tensor number as a float; ``None`` if it is none. Strings are no numbers."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range
        return math.inf


def _as_list(values: Any, source_name: str, what: str) -> list[Any]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{source_name}: {what} must have shape (B,), got {tuple(shape)}")
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, (list, tuple)):
        return list(values)
    raise RewardError(f"{source_name}: {what} must be a list or tensor with one number per sample, "
                      f"got {type(values).__name__}")  # fmt: skip


def _numbers(values: Any, rollouts: Sequence[Rollout], source_name: str, what: str) -> list[float | None]:
    values = _as_list(values, source_name, f"{what}s")
    if len(values) != len(rollouts):
        raise RewardError(f"{source_name}: {len(values)} {what}s for {len(rollouts)} samples")
    numbers: list[float | None] = []
    for i, value in enumerate(values):
        number = None if value is None else _to_float(value)
        if value is not None and (number is None or not math.isfinite(number)):
            raise RewardError(f"{source_name}: the {what} of {describe_sample(rollouts, i)} is {_short(value)}; "
                              "it must be a finite number, or None for an unscored sample")  # fmt: skip
        numbers.append(number)
    return numbers


def _token_numbers(rows: Any, rollouts: Sequence[Rollout], source_name: str) -> list[list[float] | None]:
    if len(rows) != len(rollouts):
        raise RewardError(f"{source_name}: {len(rows)} rows of token scores for {len(rollouts)} samples")
    checked: list[list[float] | None] = []
    for i, row in enumerate(rows):
        if row is None:
            checked.append(None)
            continue
        numbers = [_to_float(value) for value in _as_list(row, source_name, f"token scores of sample {i}")]
        if len(numbers) != len(rollouts[i].response_ids):
            raise RewardError(f"{source_name}: {len(numbers)} token scores for the {len(rollouts[i].response_ids)} "
                              f"response tokens of {describe_sample(rollouts, i)}")  # fmt: skip
        for t, number in enumerate(numbers):
            if number is None or not math.isfinite(number):
                raise RewardError(f"{source_name}: token score {t} of {describe_sample(rollouts, i)} is "
                                  f"{_short(row[t])}; it must be a finite number")  # fmt: skip
        checked.append([number for number in numbers if number is not None])
    return checked


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SNIPPET_CHARS else text[:_SNIPPET_CHARS] + "…"
