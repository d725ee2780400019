"""Metrics of the episodes of a step or an evaluation: ``episode/…`` and ``eval/episode/…``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightppo.callbacks import Callback
from lightppo.data.records import Rollout
from lightppo.episodes.env_failures import EnvironmentFailed, FailureKind
from lightppo.episodes.rewards import has_failed

# of failed tries
KINDS: dict[FailureKind, str] = {
    "exception": "tries that failed by an exception",
    "timeout": "tries in which a call took too long",
    "not_finite": "tries whose environment gave a number that is not finite",
    "failure": "tries that the environment ended by EnvFailure",
    "lost": "tries whose process or event loop was lost",
}
# why an episode ended, as its samples name it
REASONS = {
    "answer": "share of episodes that ended by a turn without a call",
    "done": "share that the environment ended",
    "length": "share that reached --generate_max_len",
    "max_turns": "share that reached --max_turns",
    "max_tool_calls": "share that reached --max_tool_calls",
    "no call": "share that ended by a turn without text or call",
}

NAMES = {
    "turns": "mean turns of the model per episode",
    "tool_calls": "mean calls of tools per episode",
    "tool_errors": "share of calls with a wrong name, wrong arguments or a ToolError",
    "observation_tokens": "mean tokens per episode that were not sampled",
    "escapes": "mean markers per episode that were broken in texts of environments",
    "failed": "share of episodes that are left out, as their environment failed",
    **{f"failures_{kind}": f"{meaning}; only if there are any" for kind, meaning in KINDS.items()},
    **{f"stop_{reason.replace(' ', '_')}": meaning for reason, meaning in REASONS.items()},
}

# what a clock measured: under perf/, as a replay does not repeat it
CLOCKED = {
    "environment_seconds": "mean seconds per episode in calls of its environment",
    "environment_share": "seconds in environments as a share of the episodes' seconds",
    "waiting_share": "share of generation in which nothing decoded, as all episodes were at their environments",
}


def names() -> dict[str, str]:
    """Return the metrics with their meanings."""
    return NAMES


def clocked_names() -> dict[str, str]:
    """Return the names of ``perf``."""
    of_evaluations = {
        f"eval_{metric_name}": f"{meaning}; of an evaluation"
        for metric_name, meaning in CLOCKED.items()
    }
    return CLOCKED | of_evaluations


class EpisodeSums:
    """Hold sums over the episodes of this rank since they were last taken, and those of the next step's episodes."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._ahead: Counter[str] = Counter()  # of episodes that the next step trains on

    def add(self, rollout: Rollout, tries: Sequence[EnvironmentFailed], seconds: float) -> None:
        """Count an episode that took so many seconds, and its failed tries."""
        sums = self._sums
        sums["episodes"] += 1
        sums["seconds"] += seconds
        for failed_try in tries:
            sums[f"failures_{failed_try.kind}"] += 1
        if has_failed(rollout):
            sums["failed"] += 1
            return
        sums["played"] += 1
        sums[f"stop_{rollout.texts['stop_reason'].replace(' ', '_')}"] += 1
        for extra_name in _OF_EXTRAS:
            sums[extra_name] += rollout.extras[extra_name]

    def generated(self, seconds: float, waited: float) -> None:
        """Count a call of the engine, and how long it had nothing to decode."""
        self._sums["generation"] += seconds
        self._sums["waiting"] += waited

    def include(self, sums_of_call: EpisodeSums, ahead: bool) -> None:
        """Add those of a call of the engine; ``ahead``: the next step trains on its episodes."""
        (self._ahead if ahead else self._sums).update(sums_of_call._sums)

    def begin_step(self) -> None:
        """Begin with the episodes that were sampled ahead; what an evaluation left is dropped."""
        self._sums = self._ahead
        self._ahead = Counter()

    def state_dict(self) -> dict[str, float]:
        """Return what waits for the next step, for checkpoints."""
        return dict(self._ahead)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore ``state_dict``."""
        self._ahead = Counter(state)

    def share_out(
        self, states: Sequence[Mapping[str, float]], world_size: int
    ) -> list[dict[str, float]]:
        """Return the states of so many ranks, made of those of another number."""
        total = sum((Counter(state) for state in states), Counter())
        return [dict(total), *({} for _ in range(world_size - 1))]

    def take(self) -> dict[str, float]:
        """Return the sums, with the same names on every rank; then they begin anew."""
        sums = self._sums
        self._sums = Counter()
        return {sum_name: float(sums[sum_name]) for sum_name in _SUMS}


_OF_EXTRAS = (
    "turns",
    "tool_calls",
    "tool_errors",
    "observation_tokens",
    "escapes",
    "environment_seconds",
)
_REASONS = [name for name in NAMES if name.startswith("stop_")]
_FAILURES = [name for name in NAMES if name.startswith("failures_")]
_SUMS = (
    "episodes",
    "played",
    "failed",
    "seconds",
    "generation",
    "waiting",
    *_OF_EXTRAS,
    *_REASONS,
    *_FAILURES,
)


def numbers_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics by their names in ``NAMES``, of the sums over all ranks; empty without episodes."""
    if not sums["episodes"]:
        return {}
    counted_names = [metric_name for metric_name in _OF_EXTRAS if metric_name not in CLOCKED]
    metrics = {
        metric_name: sums[metric_name] / max(1.0, sums["played"]) for metric_name in counted_names
    }
    metrics["tool_errors"] = sums["tool_errors"] / max(1.0, sums["tool_calls"])
    metrics["failed"] = sums["failed"] / sums["episodes"]
    reason_shares = {
        metric_name: sums[metric_name] / max(1.0, sums["played"]) for metric_name in _REASONS
    }
    return (
        metrics
        | reason_shares
        | {metric_name: sums[metric_name] for metric_name in _FAILURES if sums[metric_name]}
    )


def clocked_numbers(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics by their names in ``CLOCKED``.

    Of failed episodes the seconds in environments are not known, as theirs are only begun.
    """
    if not sums["episodes"]:
        return {}
    return {
        "environment_seconds": sums["environment_seconds"] / max(1.0, sums["played"]),
        "environment_share": _ratio(sums["environment_seconds"], sums["seconds"]),
        "waiting_share": _ratio(sums["waiting"], sums["generation"]),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


class EpisodeMetrics(Callback):
    """Add the numbers of the episodes that a step trains on, or of an evaluation."""

    def __init__(self, episode_sums: EpisodeSums) -> None:
        self.episode_sums = episode_sums

    def around_step(self, run: Any, step: int) -> Any:
        self.episode_sums.begin_step()
        return super().around_step(run, step)

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        return self._taken(run, "episode/", "perf/")

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> dict[str, float]:
        return self._taken(run, "eval/episode/", "perf/eval_")

    def _taken(self, run: Any, counted_prefix: str, clocked_prefix: str) -> dict[str, float]:
        sums = run.strategy.all_reduce(self.episode_sums.take(), "sum")
        metrics = {
            f"{counted_prefix}{metric_name}": value
            for metric_name, value in numbers_of(sums).items()
        }
        return metrics | {
            f"{clocked_prefix}{metric_name}": clocked_value
            for metric_name, clocked_value in clocked_numbers(sums).items()
        }
