"""Exports of the actor beside the checkpoints of a run: of a step, and of the best evaluation; and when they are due."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightppo.callbacks import Callback
from lightppo.checkpoint.export import REPLACED, SAVING
from lightppo.checkpoint.layout import BEST, best_folder, export_folder, exports_of
from lightppo.errors import CheckpointError, ConfigError
from lightppo.files import files_in_use, local_folder

logger = logging.getLogger(__name__)


def save_hf(checkpointer: Any, root: str | Path, step: int) -> None:
    """Export the actor as ``root/global_stepN_hf``; the oldest exports beyond ``max_ckpt_num`` go. Collective."""
    checkpointer.require_finite(step)
    export_path = export_folder(root, step)
    checkpointer.strategy.save_model(
        checkpointer.models["actor"], checkpointer.tokenizer, export_path
    )

    def rotate() -> None:
        files = files_in_use()
        other_exports = [
            path
            for path in exports_of(local_folder(root))
            if path.name != local_folder(export_path).name
        ]
        # By age, not by number: a run started anew in this folder counts from 1 again.
        other_exports.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old_export in other_exports[checkpointer.config.max_ckpt_num - 1 :]:
            with files.explained(old_export):
                files.remove(old_export)
            files.publish(root, old_export.name)

    checkpointer.strategy.on_rank_0(rotate, f"remove old exports in {root}")


def save_best(checkpointer: Any, root: str | Path, step: int, metric: str, value: float) -> None:
    """Export the actor as ``root/best_hf``, in place of an older best; rotation leaves it alone. Collective."""
    checkpointer.require_finite(step)
    note = json.dumps({"run": checkpointer.run, "step": step, "metric": metric, "value": value})
    export_path = best_folder(root)
    checkpointer.strategy.save_model(
        checkpointer.models["actor"], checkpointer.tokenizer, export_path, files={BEST: note}
    )


def catch_up(checkpointer: Any, root: str | Path, step: int, due: bool) -> None:
    """Remove, after a resume, exports that were interrupted, and make that of this step if it was due. Collective."""
    export_path = export_folder(root, step)
    local_root = local_folder(root)
    interrupted: list[str] = []

    def clear() -> None:
        with files_in_use().explained(local_root):
            interrupted.extend(clear_exports(local_root))

    checkpointer.strategy.on_rank_0(clear, f"clear {root}")
    export = local_folder(export_path)
    is_missing = (due or export.name in interrupted) and not export.exists()
    if checkpointer.strategy.broadcast_object(is_missing):
        checkpointer.strategy.print(
            f"{root}/{export.name} was not written before the run ended: it is now"
        )
        save_hf(checkpointer, root, step)


def best_note(checkpointer: Any, folder: str | Path) -> dict[str, Any] | None:
    """Return what ``best.json`` says of the export in this folder; ``None`` without one. Collective."""
    note_file = local_folder(folder) / BEST
    note = None
    if checkpointer.strategy.is_rank_0() and note_file.is_file():
        try:
            note = json.loads(note_file.read_text())
        except ValueError as error:
            raise CheckpointError(
                f"{note_file} is damaged: remove {note_file.parent}, and the next best is kept"
            ) from error
    return checkpointer.strategy.broadcast_object(note)


def best_line(checkpointer: Any, folder: str | Path, metric: str) -> str:
    """Return the line at the end of a run: where its best model is, and whether it is this run's. No collective."""
    note_file = local_folder(folder) / BEST
    note = {}
    if note_file.is_file():
        with suppress(ValueError):  # damaged: of this run it is not, which has written it whole
            note = json.loads(note_file.read_text())
    if note.get("run") == checkpointer.run and note.get("metric") == metric:
        return f"best: {metric} {note['value']:.4g} after step {note['step']}, in {folder}"
    other_note = f"; {folder} is of another run or metric" if note_file.is_file() else ""
    return f"best: none is kept, as no evaluation after the start had a better {metric}{other_note}"


def clear_exports(root: Path) -> list[str]:
    """Remove exports below ``root`` whose saving was interrupted, and return their names; what they were to take the
    place of is there again."""
    if not root.is_dir():
        return []
    for replaced_folder in root.glob(f".*{REPLACED}"):
        original_folder = root / replaced_folder.name.removeprefix(".").removesuffix(REPLACED)
        if original_folder.exists():
            files_in_use().remove(replaced_folder)
        else:
            files_in_use().rename(replaced_folder, original_folder)
    interrupted_names = []
    for leftover in root.glob(f".?*{SAVING}"):
        logger.warning("removing %s, an export that was interrupted", leftover)
        shutil.rmtree(leftover)
        interrupted_names.append(leftover.name.removeprefix(".").removesuffix(SAVING))
    return interrupted_names


# -- when a run exports ----------------------------------------------------------------------------------------------


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
