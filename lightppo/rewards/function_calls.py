"""Reward functions of any convention, called in threads, event loops or processes, with tries again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.plugins.reward_sources import REWARD_MANAGERS
from lightppo.rewards.function_styles import (
    Answer,
    BoundFunction,
    NonFinite,
    Reading,
    RewardFunction,
)
from lightppo.rewards.registry import RewardRequest, source_of_function
from lightppo.rewards.reward_calls import (
    OnFailure,
    Outcome,
    Runner,
    RunnerRequest,
    check_failure_options,
    join_outputs,
    settle,
)
from lightppo.rewards.reward_source import RewardOutput, RewardSource, describe_sample
from lightppo.user_code import error_text

NO_LABELS = "rows have no label: set --label_key"


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
    # prime: calls in processes that are killed at their limit; auto: naive or batch, as the function takes it; dapo:
    # as auto, and scores without further numbers are also logged as reward/acc
    reward_manager: str = "auto"  # a name in lightppo.plugin.REWARD_MANAGERS
    reward_workers: int | None = None  # calls at a time; None: 16, or one process per core
    # Wall-clock seconds per call. A thread that takes longer is left behind.
    reward_timeout: float | None = None
    reward_retries: int = 0  # further tries of a failed call
    on_reward_failure: OnFailure = "error"
    # Where prime loads the function from (path.py:name or module:name), if its module does not tell.
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
        if self.reward_manager == "dapo" and not output.metrics:
            output.metrics["acc"] = list(output.scores)  # before any penalty, as in verl
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


def function_source(
    given: str | Callable[..., Any] | RewardSource,
    option: str = "--reward_fn",
    options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """The source of a function, of a file with one, or of a source itself; errors name the option.

    ``options`` are further arguments of :class:`FunctionReward`.
    """
    return source_of_function(given, option, partial(FunctionReward, **(options or {})))


def function_reward(request: RewardRequest) -> RewardSource:
    """``--reward_fn``."""
    options = request.options_of(FunctionReward)
    return function_source(request.config.reward.reward_fn, request.flag, options)
