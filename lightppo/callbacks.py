"""Callbacks: what a run does beside training, and what users add to it. docs/extending.md has examples.

``PPOTrainer(..., callbacks=[MyCallback()])`` or ``--callback file.py:MyCallback`` adds one; a package registers one in
``lightppo.plugin.CALLBACKS``, and every run has it.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lightppo.errors import ConfigError, UserError
from lightppo.suggestions import nearest
from lightppo.user_code import (
    error_text,
    finite,
    is_non_finite,
    is_of_lightppo,
    is_users_fault,
    load_python_object,
    place_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lightppo.experience.experience import Experience
    from lightppo.rollout.sampler import CollectedStep

logger = logging.getLogger(__name__)

VOTES = ("stop", "save", "evaluate")


class Callback:
    """What happens at the times of a run; a subclass has those methods that it needs.

    Every method is called on every rank, in the order of the list, and so may be collective. ``run`` is the trainer:
    ``run.config``, ``run.strategy``, ``run.state``, ``run.tokenizer``, ``run.total_steps`` and its models.
    """

    def on_start(self, run: Any) -> None:
        """Act when ``fit`` begins; a run that goes on has its state already."""

    def before_steps(self, run: Any) -> None:
        """Act when all callbacks have started; no step is trained yet."""

    def around_step(self, run: Any, step: int) -> AbstractContextManager:
        """Return a context in which the step is trained."""
        return nullcontext()

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        """Take the rollouts of a step, sampled, scored and selected; no log probs of the trainer's yet. PPO only."""

    def on_experience(self, run: Any, step: int, experience: Sequence[Experience]) -> None:
        """Take the replay buffer of this rank, with advantages; it is empty if the step is left out. PPO only."""

    def on_micro_batch(
        self, run: Any, experience: Experience, log_probs: Tensor, entropy: Tensor
    ) -> None:
        """Take the actor's pass over a micro batch, before its optimizer step: (B, A) each, without gradient. PPO only.

        The entropy of most tokens is NaN in a large step that does not train on it; see :meth:`entropy_rows`.
        """

    def on_optimizer_step(self, run: Any, model: str) -> None:
        """Act when the actor's or the critic's optimizer step was taken, and not skipped. PPO only."""

    def entropy_rows(self, run: Any, experience: Experience) -> Iterable[int]:
        """Return rows of a micro batch of a large step for which ``on_micro_batch`` needs every entropy. PPO only."""
        return ()

    def on_step_end(
        self, run: Any, step: int, metrics: Mapping[str, float]
    ) -> Mapping[str, float] | None:
        """Take a trained step's ``metrics``, by their names in docs/metrics.md, the same on every rank.

        Returns:
            numbers to add, for the callbacks that follow and for the records; the same on every rank.
        """

    def votes(self, run: Any) -> Mapping[str, float]:
        """Return ``{"stop": 1}``, ``"save"`` or ``"evaluate"``, where this rank wants it after the step, or own names.

        Votes of all callbacks and ranks are summed in one all-reduce: all callbacks must name the same on every rank.
        """
        return {}

    def on_votes(self, run: Any, step: int, votes: Mapping[str, float]) -> None:
        """Take the sums of :meth:`votes` over all ranks."""

    def evaluate(self, run: Any, step: int) -> None:
        """Evaluate the weights: the votes ask for it, or this was the last step. A checkpoint may follow."""

    def on_evaluation(
        self, run: Any, step: int, result: Mapping[str, float]
    ) -> Mapping[str, float] | None:
        """Take what held-out data gave: ``eval/…``, the same on every rank.

        Returns:
            as :meth:`on_step_end`.
        """

    def on_save(self, run: Any, step: int) -> None:
        """Act when a checkpoint was written."""

    def after_step(self, run: Any, step: int) -> None:
        """Act when all that was due after the step is done, and no callback has stopped the run."""

    def on_end(self, run: Any, error: BaseException | None) -> None:
        """Act when ``fit`` has ended; ``error`` is why, if it is not complete. Then it must not wait for other ranks."""


def load_callbacks(specs: Iterable[str]) -> list[Callback]:
    """Load ``--callback``: a class of a file, made without arguments, or an object; ConfigError says what is wrong."""
    callbacks = []
    for spec in specs:
        loaded = load_python_object(spec, "callback", option=f"--callback {spec}")
        try:
            callback = loaded() if isinstance(loaded, type) else loaded
        except BaseException as error:
            if not is_users_fault(error):
                raise
            raise ConfigError(
                f"--callback {spec}: {loaded.__name__}() fails: {error_text(error)}"
            ) from error
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"--callback {spec}: {loaded!r} is no lightppo.Callback: write class NAME(Callback)"
            )
        _check_methods(callback)  # now, and not when the models have been loaded
        callbacks.append(callback)
    return callbacks


def _check_methods(callback: Callback) -> None:
    """Raise ConfigError for a method that no run calls, or that cannot be called."""
    kind = type(callback)
    place = f"the callback {place_of(callback)}"
    for name in dir(kind):
        if name.startswith("_") or name in _OWN or not callable(getattr(kind, name)):
            continue
        suggestions = get_close_matches(name, _TIMES, n=1, cutoff=0.88)
        if suggestions or name.startswith("on_"):
            advice = f"known: {', '.join(_TIMES)}"
            if suggestions:
                advice = f"did you mean {suggestions[0]!r}?"
            raise ConfigError(
                f"{place} has a method {name!r}, which no run calls ({advice}); begin the name "
                "of a helper with _"
            )
    for name in _TIMES:
        method = getattr(callback, name)
        if getattr(kind, name, None) is getattr(Callback, name):
            continue
        parameters = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError as error:
            raise ConfigError(f"{place}: {name}({', '.join(parameters)}): {error}") from error
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{place}: {name} is async, and nothing would await it: write def")
        if inspect.isgeneratorfunction(method):
            remedy = ": put @contextmanager above it" if name == "around_step" else ""
            raise ConfigError(f"{place}: {name} has a yield, so its lines would never run{remedy}")


_OWN = frozenset(dir(Callback))
_TIMES = [name for name in vars(Callback) if not name.startswith("_")]


def numbers_of(callback: Callback, method: str, result: Any) -> Mapping[str, float]:
    """Return what a user's callback gives to be logged; ConfigError where it is not numbers by name."""
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        type_name = type(result).__name__
        problem = f"must return numbers by name, or None, not {type_name}"
        raise ConfigError(f"{_place(callback, method)} {problem}")
    for name, value in result.items():
        if not isinstance(name, str):
            problem = f"returns {name!r}, which is no text, as a name"
            raise ConfigError(f"{_place(callback, method)} {problem}")
        if finite(value) is None and not is_non_finite(value):
            problem = f"returns {value!r:.100} as {name!r}: return a number"
            raise ConfigError(f"{_place(callback, method)} {problem}")
    return {name: _number(value) for name, value in result.items()}


def _place(callback: Callback, method: str) -> str:
    """Return where a callback's method stands; this reads and parses its file, so it is for errors."""
    return f"the callback {place_of(callback)}: {method}"


def _number(value: Any) -> float:
    """Return a number of Python as it is; one of numpy, or a tensor of one, as Python's."""
    if isinstance(value, (int, float)):
        return value
    return float(value)


def _votes_of(callback: Callback, result: Any) -> Mapping[str, float]:
    """Return what a user's callback votes for; ConfigError for a name that nothing reads."""
    votes = numbers_of(callback, "votes", result)
    reads_them = type(callback).on_votes is not Callback.on_votes
    if not reads_them and (unknown := votes.keys() - set(VOTES)):
        name = min(unknown)
        raise ConfigError(
            f"the callback {place_of(callback)}: votes returns {name!r}{nearest(name, VOTES)}; known: "
            f"{', '.join(VOTES)}, and names that its own on_votes reads"
        )
    return votes


class Callbacks:
    """The callbacks of a run, called in their order."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.all = list(callbacks)
        self.of_users = [callback for callback in self.all if not is_of_lightppo(callback)]
        for callback in self.of_users:  # what they return is checked, too
            _check_methods(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.all)

    def having(self, method: str) -> list[Callback]:
        """Return the callbacks that have this method of their own, in their order."""
        inherited = getattr(Callback, method)
        return [
            callback
            for callback in self.all
            if getattr(type(callback), method, None) is not inherited or method in vars(callback)
        ]

    @contextmanager
    def around(self, run: Any) -> Iterator[None]:
        """Call :meth:`Callback.on_start`, and at the end :meth:`Callback.on_end`, which all get after an error, too."""
        try:
            for callback in self.all:
                callback.on_start(run)
            yield
        except BaseException as error:
            for callback in self.all:
                self._end_after(error, callback, run)
            raise
        for callback in self.all:
            callback.on_end(run, None)

    def _end_after(self, error: BaseException, callback: Callback, run: Any) -> None:
        """End one of several callbacks for an error, which a further error must not hide."""
        try:
            callback.on_end(run, error)
        except UserError as further:
            logger.error("%s", further)
        except Exception:
            logger.exception(
                "%s.on_end failed after %s", type(callback).__name__, type(error).__name__
            )

    @contextmanager
    def around_step(self, run: Any, step: int) -> Iterator[None]:
        with ExitStack() as contexts:
            for callback in self.having("around_step"):
                around = callback.around_step(run, step)
                if not hasattr(around, "__enter__"):
                    raise ConfigError(
                        f"the callback {place_of(callback)}: around_step must return a context, not "
                        f"{type(around).__name__}: put @contextmanager above it, and yield"
                    )
                contexts.enter_context(around)
            yield

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        for callback in self.having("on_rollouts"):
            callback.on_rollouts(run, step, collected)

    def on_experience(self, run: Any, step: int, experience: Sequence[Experience]) -> None:
        for callback in self.having("on_experience"):
            callback.on_experience(run, step, experience)

    def on_micro_batch(
        self, run: Any, experience: Experience, log_probs: Tensor, entropy: Tensor
    ) -> None:
        for callback in self.having("on_micro_batch"):
            callback.on_micro_batch(run, experience, log_probs, entropy)

    def on_optimizer_step(self, run: Any, model: str) -> None:
        for callback in self.having("on_optimizer_step"):
            callback.on_optimizer_step(run, model)

    def entropy_rows(self, run: Any, experience: Experience) -> set[int]:
        """Return the rows that any callback needs."""
        callbacks = self.having("entropy_rows")
        return {row for callback in callbacks for row in callback.entropy_rows(run, experience)}

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with what the callbacks add; each gets those of the ones before it."""
        metrics = dict(metrics)
        for callback in self.having("on_step_end"):
            numbers = callback.on_step_end(run, step, metrics)
            if callback in self.of_users:
                numbers = numbers_of(callback, "on_step_end", numbers)
            metrics |= numbers or {}
        return metrics

    def votes(self, run: Any) -> dict[str, float]:
        """Return the sum of this rank's votes, with all of ``VOTES``."""
        sums: Counter[str] = Counter(dict.fromkeys(VOTES, 0.0))
        for callback in self.having("votes"):
            votes = callback.votes(run)
            if callback in self.of_users:
                votes = _votes_of(callback, votes)
            sums.update(votes)
        return dict(sums)
