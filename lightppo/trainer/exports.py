"""Exports of the actor: at times of their own, with checkpoints, and after the best evaluation.

ckpt_path/global_stepN_hf    the actor for transformers (--save_hf_ckpt, --hf_save_steps)
ckpt_path/best_hf            the actor of the best evaluation (--best_metric), and best.json
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightppo.callbacks import Callback
from lightppo.checkpoint.export import REPLACED, SAVING
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.errors import CheckpointError, ConfigError
from lightppo.files import files_in_use, join, local_folder
from lightppo.trainer.due_times import Cadence

logger = logging.getLogger(__name__)

_BEST = "best.json"
_HF_EXPORT = re.compile(r"global_step\d+_hf")


class Exports(Callback):
    """Exports what is due, keeps the best, and after a resume makes what an interrupted run lacks.

    A checkpoint keeps the value to pass. ``best_hf`` may be of a later step, or of another run.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.cadence: Cadence | None = None  # from the start of the run on
        self.best: float | None = None  # value of --best_metric
        self.knows_best = False  # a checkpoint of this run has said it
        run.register_state("best", self)

    def on_start(self, run: Any) -> None:
        """Clocks begin when the run does."""
        checkpoint, metric, step = run.config.checkpoint, _metric(run), run.state.global_step
        agree = run.strategy.broadcast_object
        self.cadence = Cadence(
            checkpoint.hf_save_steps,
            checkpoint.hf_save_epochs,
            checkpoint.hf_save_seconds,
            agree=agree,
        )
        if step == 0:
            return
        if metric is not None:
            self._look_at_kept(run, step, metric)
        if run.owns_parts and not run.only_evaluates:
            if run.evaluation.step == step and run.evaluation.result and metric is not None:
                self._keep_best(run, step, metric)
            due = checkpoint.save_hf_ckpt or self.cadence.due(step, run.finished_episodes)
            catch_up(run.checkpointer, run.ckpt_path, step, due and checkpoint.resume == "auto")

    def _look_at_kept(self, run: Any, step: int, metric: str) -> None:
        """After a resume. Collective."""
        folder = join(run.ckpt_path, "best_hf")
        note = best_note(run.checkpointer, folder)
        if note is None or note.get("run", run.checkpointer.run) != run.checkpointer.run:
            return
        if not self.knows_best and note["metric"] == metric:  # of an older lightppo
            self.best = note["value"]
        elif note["step"] > step:
            run.strategy.print(
                f"{folder} is of step {note['step']}, which this run does again: it stays until a step is the best"
            )

    def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
        if self.cadence.due(step, run.finished_episodes):
            with run.saving("save"):
                save_hf(run.checkpointer, run.ckpt_path, step)

    def on_evaluation(self, run: Any, step: int, result: Any) -> None:
        if (metric := _metric(run)) is not None:
            self._keep_best(run, step, metric)

    def _keep_best(self, run: Any, step: int, metric: str) -> None:
        result = run.evaluation.result
        if metric not in result:
            known = ", ".join(sorted(result))
            raise ConfigError(
                f"--best_metric {metric} is not among the evaluation's metrics: {known}"
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
            run.strategy.print(told_best(run.checkpointer, join(run.ckpt_path, "best_hf"), metric))

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run.checkpointer.run, "metric": _metric(self.run), "value": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.knows_best = True
        # With --resume PATH another run goes on, whose best_hf is another one.
        if (state["run"], state["metric"]) == (self.run.checkpointer.run, _metric(self.run)):
            self.best = state["value"]


def _metric(run: Any) -> str | None:
    return run.config.evaluation.best_metric


def with_checkpoint(checkpointer: RunCheckpointer, root: str | Path, step: int) -> None:
    """``--save_hf_ckpt``. Collective."""
    if checkpointer.config.save_hf_ckpt:
        save_hf(checkpointer, root, step)


def save_hf(checkpointer: RunCheckpointer, root: str | Path, step: int) -> None:
    """Export the actor as ``root/global_stepN_hf``; the oldest exports beyond ``max_ckpt_num`` go. Collective."""
    checkpointer.require_finite(step)
    name = f"global_step{step}_hf"
    checkpointer.strategy.save_model(
        checkpointer.models["actor"], checkpointer.tokenizer, join(root, name)
    )

    def rotate() -> None:
        files = files_in_use()
        exports = [path for path in local_folder(root).iterdir() if _HF_EXPORT.fullmatch(path.name)]
        others = [path for path in exports if path.name != name]
        # By age, not by number: a run started anew in this folder counts from 1 again.
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in others[checkpointer.config.max_ckpt_num - 1 :]:
            with files.explained(old):
                files.remove(old)
            files.publish(root, old.name)

    checkpointer.strategy.on_rank_0(rotate, f"remove old exports in {root}")


def save_best(
    checkpointer: RunCheckpointer, root: str | Path, step: int, metric: str, value: float
) -> None:
    """Export the actor as ``root/best_hf``, in place of an older best; rotation leaves it alone. Collective."""
    checkpointer.require_finite(step)
    note = json.dumps({"run": checkpointer.run, "step": step, "metric": metric, "value": value})
    folder = join(root, "best_hf")
    checkpointer.strategy.save_model(
        checkpointer.models["actor"], checkpointer.tokenizer, folder, files={_BEST: note}
    )


def catch_up(checkpointer: RunCheckpointer, root: str | Path, step: int, due: bool) -> None:
    """After a resume: exports that were interrupted go; that of this step is made if it was due. Collective."""
    name, local = f"global_step{step}_hf", local_folder(root)
    interrupted: list[str] = []

    def clear() -> None:
        with files_in_use().explained(local):
            interrupted.extend(clear_exports(local))

    checkpointer.strategy.on_rank_0(clear, f"clear {root}")
    is_missing = (due or name in interrupted) and not (local / name).exists()
    if checkpointer.strategy.broadcast_object(is_missing):
        checkpointer.strategy.print(
            f"{root}/{name} was not written before the run ended: it is now"
        )
        save_hf(checkpointer, root, step)


def best_note(checkpointer: RunCheckpointer, folder: str | Path) -> dict[str, Any] | None:
    """What ``best.json`` says of the export in this folder; ``None`` without one. Collective."""
    path, note = local_folder(folder) / _BEST, None
    if checkpointer.strategy.is_rank_0() and path.is_file():
        try:
            note = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: remove {path.parent}, and the next best is kept"
            ) from error
    return checkpointer.strategy.broadcast_object(note)


def told_best(checkpointer: RunCheckpointer, folder: str | Path, metric: str) -> str:
    """The line at the end of a run: where its best model is, and whether it is this run's. No collective."""
    path, note = local_folder(folder) / _BEST, {}
    if path.is_file():
        with suppress(ValueError):  # damaged: of this run it is not, which has written it whole
            note = json.loads(path.read_text())
    if note.get("run") == checkpointer.run and note.get("metric") == metric:
        return f"best: {metric} {note['value']:.4g} after step {note['step']}, in {folder}"
    other = f"; {folder} is of another run or metric" if path.is_file() else ""
    return f"best: none is kept, as no evaluation after the start had a better {metric}{other}"


def clear_exports(root: Path) -> list[str]:
    """Remove exports below ``root`` whose saving was interrupted, and return their names; what they were to take the
    place of is there again."""
    if not root.is_dir():
        return []
    for replaced in root.glob(f".*{REPLACED}"):
        whole = root / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if whole.exists():
            files_in_use().remove(replaced)
        else:
            files_in_use().rename(replaced, whole)
    names = []
    for leftover in root.glob(f".?*{SAVING}"):
        logger.warning("removing %s, an export that was interrupted", leftover)
        shutil.rmtree(leftover)
        names.append(leftover.name.removeprefix(".").removesuffix(SAVING))
    return names
