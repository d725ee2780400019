"""What happens where a score is missing: calls that fail are tried again, counted, and never become a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.source import describe_sample

OnFailure = Literal["error", "unscored"]

_SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a reward function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What one call came to.

    Attributes:
        value: what it returned; means nothing where ``error`` is set.
        error: why there is no value.
        timed_out: the reason is the time limit.
        cause: the exception, where the call ran in this process.
    """

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    cause: BaseException | None = None


@dataclass(slots=True)
class Settled:
    """A call after its last try.

    Attributes:
        result: what was read from the last answer that could be read, also where a part of it cannot be used.
        problem: why the last try is not a full answer; ``None`` = it is one.
        cause: the exception behind ``problem``.
        failures: tries without a full answer, time-outs included.
        timeouts: those of them that ran into the time limit.
    """

    result: Any = None
    problem: str | None = None
    cause: BaseException | None = None
    failures: int = 0
    timeouts: int = 0


Runner = Callable[[Sequence[Call]], list[Outcome]]
Reader = Callable[[int, Any], tuple[Any, str | None]]


def check_failure_options(on_reward_failure: str, reward_retries: int, reward_timeout: float | None) -> None:
    """Refuses what the flags of these names cannot be.

    Raises:
        ValueError: naming the flag.
    """
    if on_reward_failure not in get_args(OnFailure):
        raise ValueError(f"--on_reward_failure must be one of {', '.join(get_args(OnFailure))}, "
                         f"got {on_reward_failure!r}")  # fmt: skip
    if reward_retries < 0:
        raise ValueError(f"--reward_retries must be ≥ 0, got {reward_retries}")
    if reward_timeout is not None and not reward_timeout > 0:
        raise ValueError(f"--reward_timeout must be > 0 seconds, got {reward_timeout}")


def settle(run: Runner, calls: Sequence[Call], read: Reader, retries: int) -> list[Settled]:
    """Runs calls, and those that failed again, up to ``retries`` times more.

    Args:
        run: runs calls; one outcome each, in their order.
        calls: what to run.
        read: (position of the call, returned value) → (result, why it is no full answer or ``None``).
        retries: further tries of a call that failed.
    """
    settled = [Settled() for _ in calls]
    pending = list(range(len(calls)))
    for _ in range(retries + 1):
        if not pending:
            break
        outcomes = run([calls[i] for i in pending])
        for i, outcome in zip(pending, outcomes, strict=True):
            state = settled[i]
            state.problem, state.cause = outcome.error, outcome.cause
            if outcome.error is None:
                result, state.problem = read(i, outcome.value)
                state.result = state.result if result is None else result
            state.failures += state.problem is not None
            state.timeouts += outcome.timed_out
        pending = [i for i in pending if settled[i].problem is not None]
    return settled


def finite(value: Any) -> float | None:
    """A number of Python, numpy or a 0-d tensor as a float; ``None`` for anything else, NaN and infinity too."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """Start of a value's text, for error texts."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def check_verifier_status(
    rollouts: Sequence[Rollout],
    *,
    minimum: float = 0.0,
    source_name: str = "the reward source",
    all_reduce_sum: Callable[[dict[str, float]], dict[str, float]] = lambda counts: counts,
) -> None:
    """Raises where a whole batch has the lowest score there is, or none at all: more likely a broken verifier.

    All ranks decide the same, as the counts are summed over them; a rank without samples takes part too.

    Args:
        rollouts: this rank's scored samples; ``reward`` as the source gave it, before any shaping.
        minimum: the lowest score the source can give.
        source_name: what the error calls the source.
        all_reduce_sum: sums each number over the ranks.

    Raises:
        RewardError: with one sample: its prompt, response, label and score.

    Source: AReaL, ``check_verifier_status`` (there: the mean is at the minimum).
    """
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    counts = {"samples": len(rollouts), "scored": len(scores), "above": sum(score > minimum for score in scores)}
    total = all_reduce_sum({name: float(count) for name, count in counts.items()})
    if total["samples"] == 0 or total["above"] > 0:
        return
    found = f"every one of the {total['scored']:g} scores is at the minimum of {minimum:g}"
    if total["scored"] == 0:
        found = f"none of the {total['samples']:g} samples has a score"
    raise RewardError(
        f"--check_verifier_status: {found}, which {source_name} gives where it finds nothing right. Does the prompt "
        f"ask for the form that it looks for, and --label_key name the right column? {_example(rollouts)}"
    )


def _example(rollouts: Sequence[Rollout]) -> str:
    if not rollouts:
        return "This rank has no sample to show."
    shown_first = next((i for i, rollout in enumerate(rollouts) if rollout.reward is not None), 0)
    rollout = rollouts[shown_first]
    return (
        f"For example {describe_sample(rollouts, shown_first)}: label {shown(rollout.prompt.label)!r}, "
        f"score {rollout.reward}, response ends in {rollout.response_text[-_SHOWN_CHARS:]!r}"
    )
