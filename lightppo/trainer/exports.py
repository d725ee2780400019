"""Exports of the actor: at times of their own, with checkpoints, and after the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightppo.callbacks import Callback
from lightppo.checkpoint.layout import best_folder
from lightppo.checkpoint.run_exports import best_line, best_note, catch_up, save_best, save_hf
from lightppo.errors import ConfigError


class Exports(Callback):
    """Exports with checkpoints, keeps the best, and after a resume makes what an interrupted run lacks.

    A checkpoint keeps the value to pass. ``best_hf`` may be of a later step, or of another run.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.best: float | None = None  # value of --best_metric
        self.knows_best = False  # a checkpoint of this run has said it
        run.register_state("best", self)

    def on_start(self, run: Any) -> None:
        """Make what an interrupted run lacks."""
        checkpoint = run.config.checkpoint
        metric = _metric(run)
        step = run.state.global_step
        if step == 0:
            return
        if metric is not None:
            self._look_at_kept(run, step, metric)
        if run.owns_parts and not run.only_evaluates:
            if run.evaluation.step == step and run.evaluation.result and metric is not None:
                self._keep_best(run, step, metric)
            due = checkpoint.save_hf_ckpt or _is_due(run, step)
            catch_up(run.checkpointer, run.ckpt_path, step, due and checkpoint.resume == "auto")

    def _look_at_kept(self, run: Any, step: int, metric: str) -> None:
        """Say what stands in ``best_hf`` after a resume. Collective."""
        folder = best_folder(run.ckpt_path)
        note = best_note(run.checkpointer, folder)
        if note is None or note.get("run", run.checkpointer.run) != run.checkpointer.run:
            return
        if not self.knows_best and note["metric"] == metric:  # of an older lightppo
            self.best = note["value"]
        elif note["step"] > step:
            run.strategy.print(
                f"{folder} is of step {note['step']}, which this run does again: it stays until a step is the best"
            )

    def on_evaluation(self, run: Any, step: int, result: Any) -> None:
        if (metric := _metric(run)) is not None:
            self._keep_best(run, step, metric)

    def _keep_best(self, run: Any, step: int, metric: str) -> None:
        result = run.evaluation.result
        if metric not in result:
            names = ", ".join(sorted(result))
            raise ConfigError(
                f"--best_metric {metric} is not among the evaluation's metrics: {names}"
            )
        sign = -1 if metric.endswith("loss") else 1
        if not math.isfinite(result[metric]):
            return
        if self.best is not None and sign * result[metric] <= sign * self.best:
            return
        self.best = result[metric]
        if step > 0:  # the start is the bar to pass, not a result
            with run.saving("save"):
                save_best(run.checkpointer, run.ckpt_path, step, metric, self.best)

    def on_end(self, run: Any, error: BaseException | None) -> None:
        metric = _metric(run)
        if error is None and metric is not None and run.owns_parts and not run.only_evaluates:
            run.strategy.print(best_line(run.checkpointer, best_folder(run.ckpt_path), metric))

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run.checkpointer.run, "metric": _metric(self.run), "value": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.knows_best = True
        # With --resume PATH another run goes on, whose best_hf is another one.
        if (state["run"], state["metric"]) == (self.run.checkpointer.run, _metric(self.run)):
            self.best = state["value"]


class TimedExports(Callback):
    """Exports the actor every ``--hf_save_steps`` steps."""

    def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
        if _is_due(run, step):
            with run.saving("save"):
                save_hf(run.checkpointer, run.ckpt_path, step)


def _is_due(run: Any, step: int) -> bool:
    """Tell whether ``--hf_save_steps`` asks for an export of this step."""
    every = run.config.checkpoint.hf_save_steps
    return every > 0 and step % every == 0


def _metric(run: Any) -> str | None:
    return run.config.evaluation.best_metric
