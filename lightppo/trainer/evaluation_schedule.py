"""When a run is evaluated, and what is said of it: never twice for the same step, also after a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightppo.callbacks import Callback, numbers_of
from lightppo.errors import NonFiniteError
from lightppo.logging.performance import PhaseTimer
from lightppo.trainer.due_times import Cadence

logger = logging.getLogger(__name__)

_SHOWN = ("loss", "accuracy", "reward", "margin")


class Evaluation(Callback):
    """Asks ``run.evaluator``: ``evaluate(step)`` returns metrics ``eval/<name>``. It is ``run.evaluation``.

    A checkpoint keeps the last evaluation: a resumed run need not do it again.
    """

    def __init__(self, run: Any) -> None:
        self.run, run.evaluation = run, self
        self.cadence: Cadence | None = None  # from the start of the run on
        self.step: int | None = None  # of the last evaluation
        self.result: Mapping[str, float] | None = None  # None where a score was not finite
        run.register_state("evaluation", self)

    def on_start(self, run: Any) -> None:
        """Clocks begin when the run does."""
        asked = run.config.evaluation
        epochs = asked.eval_epochs
        if asked.eval_steps == -1 and asked.eval_seconds is None:
            epochs = epochs or 1
        self.cadence = Cadence(
            asked.eval_steps, epochs, asked.eval_seconds, agree=run.strategy.broadcast_object
        )

    def before_steps(self, run: Any) -> None:
        """The evaluation that a resumed run lacks, or that before training. Collective."""
        step = run.state.global_step
        if run.only_evaluates:
            self.evaluate(run, step)
        elif step > 0:
            if run.owns_parts and self.cadence.due(step, run.finished_episodes):
                self.evaluate(run, step)
        elif run.config.evaluation.val_before_train:
            self.evaluate(run, step)

    def votes(self, run: Any) -> Mapping[str, float]:
        is_due = self.cadence.due(run.state.global_step, run.finished_episodes)
        return {"evaluate": float(is_due)}

    def evaluate(self, run: Any, step: int) -> None:
        self.evaluate_step(step)

    def evaluate_step(self, step: int) -> Mapping[str, float]:
        """Evaluate the current weights, once per step at most; empty without an evaluator. Collective."""
        run = self.run
        if run.evaluator is None or self.step == step:
            return {}
        timer = PhaseTimer()
        try:
            with timer("eval"):
                result = run.evaluator.evaluate(step)
        except NonFiniteError as error:
            if run.only_evaluates:
                raise
            self.step, self.result = step, None
            if run.strategy.is_rank_0():
                logger.warning("the evaluation after step %d is left out: %s", step, error)
            return {}
        self.step, self.result = step, result
        shown = [name for name in _SHOWN if f"eval/{name}" in result]
        numbers = ", ".join(f"{name} {result[f'eval/{name}']:.3f}" for name in shown)
        run.strategy.print(f"[step {step}] evaluation: {numbers}")
        seconds = {f"perf/{name}": value for name, value in timer.reset().items()}
        self.result = dict(result) | self._told({**result, **seconds})
        return self.result

    def _told(self, result: Mapping[str, float]) -> dict[str, float]:
        """What the callbacks add; each gets what those before it have added, too."""
        added: dict[str, float] = {}
        for callback in self.run.callbacks:
            given = callback.on_evaluation(self.run, self.step, {**result, **added})
            added |= numbers_of(callback, "on_evaluation", given)
        return added

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "result": self.result}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.result = state["step"], state["result"]
