"""Rewards written as a Python function, in the script or in a file of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.failures import OnFailure, Settled, check_failure_options, finite, settle, shown
from lightppo.rewards.managers import ManagerName, build_runner
from lightppo.rewards.signatures import BoundFunction, RewardFunction
from lightppo.rewards.source import RewardOutput, check_output, describe_sample, output_from_result


class FunctionReward:
    """Scores with a Python function, sync or async, of our own convention or of OpenRLHF's, verl's, TRL's or AReaL's.

    Our own, ``reward_func(queries, prompts, labels, **extra)``, is called once with all samples of the rank.
    ``queries`` (prompt + response), ``prompts`` and ``labels`` are lists with one entry per sample, given by position.
    By keyword, and only where the function names them or takes ``**extra``, also one entry per sample:

    - ``responses`` (text), ``prompt_ids``, ``response_ids``, ``finish_reasons`` (``"stop"`` | ``"length"``),
      ``data_sources``;
    - every further column of the data, ``None`` for rows without it;
    - ``extras``: all further columns as one dict per sample; the way to a column whose name is taken above.

    It returns a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``; ``None`` = unscored. The other
    conventions are in :data:`lightppo.rewards.signatures.STYLES`; one called per sample returns a score, a dict with
    ``score`` (its other numbers become metrics), or a tuple that begins with the score.

    A call that raises, exceeds its limit or returns something else is a failure: tried again, then an error, or
    ``None`` for its samples. It is never a score. Metrics per sample, where failures do not end the run at once:
    ``failures`` (tries that failed) and ``timeouts`` (those of them that ran into the limit).

    Args:
        fn: the function.
        name: what errors and metrics call it; the function's own name by default.
        reward_fn_style: name of its convention; ``"auto"``: by the names of its parameters.
        reward_manager: who runs the calls, see :mod:`lightppo.rewards.managers`.
        reward_workers: calls at a time.
        reward_timeout: wall-clock seconds of one call; ``None``: no limit.
        reward_retries: further tries of a call that failed.
        on_reward_failure: ``"error"`` or ``"unscored"``.
        spec: for ``reward_manager="prime"``, where to load the function from, if its module does not tell.

    Raises:
        ValueError: the function cannot be recognised or called that way, or an argument is out of range.
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
            self._bound,
            reward_manager=reward_manager,
            reward_workers=reward_workers,
            reward_timeout=reward_timeout,
            spec=spec,
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; no sample, no call.

        Raises:
            RewardError: a failure with ``on_reward_failure="error"``, or the function needs what is not there.
        """
        if not rollouts:
            return RewardOutput([])
        parts = [[rollout] for rollout in rollouts] if self._bound.per_sample else [rollouts]
        calls = self._bound.calls(rollouts)
        settled = settle(self._run, calls, lambda i, value: self._read(value, parts[i]), self.reward_retries)
        failed = next((i for i, state in enumerate(settled) if state.problem is not None), None)
        if failed is not None and self.on_reward_failure == "error":
            raise RewardError(self._error_text(settled[failed], rollouts, failed)) from settled[failed].cause
        answers = [state.result or _Answer.missing(len(part)) for state, part in zip(settled, parts)]
        scores = [score for answer in answers for score in answer.scores]
        output = RewardOutput(scores, _joined_metrics(answers), _joined_token_scores(answers))
        if self.on_reward_failure == "unscored" or self.reward_retries:
            counts = _counts(settled, answers)
            taken = sorted(counts.keys() & output.metrics.keys())
            if taken:
                raise RewardError(f"{self._label}: {taken[0]!r} is counted for it; give its own number another name")
            output.metrics |= counts
        return output

    def _read(self, value: Any, part: list[Rollout]) -> tuple[_Answer | None, str | None]:
        read = _READERS.get(self._bound.style_name, _read_list)
        return read(value, part, self._label)

    def _error_text(self, state: Settled, rollouts: list[Rollout], call: int) -> str:
        problem = state.problem or ""
        if problem.startswith(self._label):
            return problem
        which = describe_sample(rollouts, call) if self._bound.per_sample else f"a batch of {len(rollouts)}"
        return f"{self._label} {'failed' if state.cause is None else 'raised'} on {which}: {problem}"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was read from one call: per sample the score, metrics, whether its score could not be used, token scores."""

    scores: list[float | None]
    metrics: dict[str, list[float | None]]
    bad: list[bool]
    token_scores: list[list[float] | None] | None = None

    @classmethod
    def missing(cls, n: int) -> _Answer:
        """For a call that gave no usable answer to its n samples."""
        return cls([None] * n, {}, [True] * n)


def _joined_metrics(answers: list[_Answer]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for answer in answers for name in answer.metrics)
    return {
        name: [item for answer in answers for item in answer.metrics.get(name, [None] * len(answer.scores))]
        for name in names
    }


def _joined_token_scores(answers: list[_Answer]) -> list[list[float] | None] | None:
    """``None`` where no call gave any."""
    if all(answer.token_scores is None for answer in answers):
        return None
    return [row for answer in answers for row in answer.token_scores or [None] * len(answer.scores)]


def _counts(settled: list[Settled], answers: list[_Answer]) -> dict[str, list[float | None]]:
    """Failed tries per sample; a last try that failed as a whole did not for those that it scored."""
    pairs = list(zip(settled, answers))
    return {
        "failures": [float(s.failures - (s.problem is not None and not bad)) for s, a in pairs for bad in a.bad],
        "timeouts": [float(s.timeouts) for s, a in pairs for _ in a.bad],
    }


_Reading = tuple[_Answer | None, str | None]


def _read_sample(value: Any, part: list[Rollout], label: str) -> _Reading:
    """A score, a dict with ``score``, a tuple that begins with it, or ``None``."""
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
    return _Answer([number], metrics, [False]), None


def _read_samples(value: Any, part: list[Rollout], label: str) -> _Reading:
    """A list with one entry per sample, each as :func:`_read_sample` reads it."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != len(part):
        return None, f"it returned {shown(value)}; a list with one entry for each of {len(part)} samples is needed"
    readings = [_read_sample(item, part[i : i + 1], label) for i, item in enumerate(values)]
    problem = next((f"{describe_sample(part, i)}: {text}" for i, (_, text) in enumerate(readings) if text), None)
    answers = [answer or _Answer([None], {}, [True]) for answer, _ in readings]
    names = dict.fromkeys(name for answer in answers for name in answer.metrics)
    metrics = {name: [answer.metrics.get(name, [None])[0] for answer in answers] for name in names}
    return _Answer([a.scores[0] for a in answers], metrics, [a.bad[0] for a in answers]), problem


def _read_list(value: Any, part: list[Rollout], label: str) -> _Reading:
    """A list or tensor of scores, or ``dict(rewards, scores, extra_logs)``; what can be used of it if not all can."""
    try:
        output = output_from_result(value, len(part), label)
    except RewardError as error:
        return None, str(error)
    try:
        checked = check_output(output, part, label)
        return _Answer(checked.scores, checked.metrics, [False] * len(part), checked.token_scores), None
    except RewardError as error:
        if any(len(values) != len(part) for values in (output.scores, *output.metrics.values())):
            return None, str(error)
        scores = [finite(score) for score in output.scores]
        metrics = {str(name): [finite(item) for item in values] for name, values in output.metrics.items()}
        bad = [number is None and score is not None for number, score in zip(scores, output.scores)]
        return _Answer(scores, metrics, bad), str(error)


_READERS = {"verl": _read_sample, "areal": _read_sample, "verl_batch": _read_samples}


def load_python_function(spec: str, default_name: str, *, option: str = "") -> Callable[..., Any]:
    """Loads a function from ``path.py`` or ``path.py:name``.

    The file is run anew, from exactly that path: no search path is consulted and none is changed.

    Args:
        spec: where the function is; ``~`` is expanded.
        default_name: the function's name where ``spec`` has none.
        option: the flag that errors name, e.g. ``--reward_fn``.

    Raises:
        ValueError: no such file or function (what is there is named), or the file fails when run.
    """
    value = load_python_object(spec, default_name, option=option)
    if not callable(value):
        raise ValueError(f"{_prefix(option)}{spec!r} is of type {type(value).__name__}, not a function")
    return value


def load_python_object(spec: str, *default_names: str, option: str = "") -> Any:
    """:func:`load_python_function` for any object of a module, e.g. a reward source built there.

    Where ``spec`` has no name, it is the first of ``default_names`` that the module has.
    """
    path, name = split_python_spec(spec, default_names[0], option=option)
    module = _run_file(path, option)
    if name == default_names[0]:
        name = next((known for known in default_names if hasattr(module, known)), name)
    try:
        return getattr(module, name)
    except AttributeError:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"{_prefix(option)}{path} has no {name!r}; it has {', '.join(own) or 'no function'}. "
            f"Name one as {path}:name"
        ) from None


def split_python_spec(spec: str, default_name: str, *, option: str = "") -> tuple[Path, str]:
    """Splits ``path.py[:name]`` and looks whether the file is there.

    Raises:
        ValueError: another form, or no such file (its neighbours are named).
    """
    head, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        head, name = spec, default_name
    if not head.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{_prefix(option)}{spec!r} is not of the form path.py or path.py:name")
    path = Path(head).expanduser().absolute()
    if path.is_file():
        return path, name
    if path.parent.is_dir():
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.py"))) or "no Python file"
        raise ValueError(f"{_prefix(option)}no file {path}; {path.parent} has {found}")
    raise ValueError(f"{_prefix(option)}no file {path}; there is no directory {path.parent}")


def _run_file(path: Path, option: str) -> Any:
    # a name of its own, so that a file called math.py hides nothing; in sys.modules, for dataclasses and pickle
    module_name = f"lightppo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{_prefix(option)}{path} fails when run: {type(error).__name__}: {error}") from error
    return module


def _prefix(option: str) -> str:
    return f"{option}: " if option else ""
