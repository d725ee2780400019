"""Steps whose numbers are not finite: all ranks leave them out together, and many in a row end the run.

A loop ends each step so, on all ranks together::

    skipped.end_step(state)
    ...  # log, evaluate, save what is due
    skipped.check(state, step)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightppo.errors import NonFiniteError, TrainingError
from lightppo.experience.experience import non_finite_text
from lightppo.files import facts_of, files_in_use, local_folder
from lightppo.ranks import Ranks
from lightppo.trainer.checkpointing import TrainerState

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Optimizer steps that all ranks skip together for numbers that are not finite; many in a row end the run.

    Args:
        limit: ``--max_skipped_steps``; 0: none.
        folder: of the run; batches are kept as ``nonfinite/stepN_rankR.pt`` in it.
        write: ``write(path, batch, facts)`` keeps this rank's batch, and returns how many rows are not finite, by name.
        again: how to run a kept batch again: a text with ``{folder}``, ``{step}`` and ``{batch}``.
    """

    def __init__(
        self,
        strategy: Ranks,
        limit: int,
        folder: str | Path,
        write: Callable[[Path, Any, Mapping[str, Any]], Mapping[str, int]],
        again: str = "The batch: {batch}",
    ) -> None:
        self.strategy, self.limit, self.folder = strategy, limit, folder
        self.write, self.again = write, again
        self.of_model: dict[str, list[bool]] = {}  # of each optimizer step of this step: skipped
        self.batch: Any = None  # of the first one that was
        self.why = ""  # the step was left out
        self.last_why = ""  # some step was
        self._current: Any = None

    def begin(self, batch: Any) -> None:
        """What the next optimizer steps are of."""
        self._current = batch

    def add(self, state: TrainerState, model: str, skipped: bool, overflow: bool = False) -> None:
        """Count an optimizer step of a model. An ``overflow`` that fp16 looks for its loss scale by ends no run."""
        state.skipped_optimizer_steps += skipped
        state.optimizer_steps += not skipped
        state.overflowed_optimizer_steps += overflow
        if overflow:
            return
        self.of_model.setdefault(model, []).append(skipped)
        if skipped and self.batch is None:
            self.batch = self._current

    def leave_out(
        self, state: TrainerState, step: int, models: Iterable[str], batch: Any, why: NonFiniteError
    ) -> None:
        """A step in which nothing is trained, on any rank."""
        self.begin(batch)
        for model in models:
            self.add(state, model, skipped=True)
        self.last_why = str(why)
        self.batch, self.why = batch, self.last_why  # also where nothing would have been trained
        if self.strategy.is_rank_0():
            logger.warning("step %d is left out: %s", step, why)

    def models(self) -> list[str]:
        """Those of which every optimizer step of this step was skipped; the same on every rank."""
        return [name for name, skips in self.of_model.items() if all(skips)]

    def end_step(self, state: TrainerState) -> None:
        """Count the steps in a row."""
        if self.of_model:
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if self.models() else 0
        self._current = None

    def check(self, state: TrainerState, step: int) -> None:
        """After the limit: keep the batch, end the run. Begins the next step. Collective then."""
        models, batch, left_out = " and ".join(self.models()), self.batch, self.why
        self.of_model, self.batch, self.why = {}, None, ""
        if not self.limit or not models or state.skipped_in_a_row < self.limit:
            return
        rank = self.strategy.get_rank()
        path = local_folder(self.folder) / (name := f"nonfinite/step{step}_rank{rank}.pt")
        rows_not_finite = self.write(path, batch, {"step": step, "rank": rank, "models": models})
        files_in_use().publish(self.folder, name)
        of_ranks = self.strategy.all_gather_object(rows_not_finite)
        first = next((i for i, of_rank in enumerate(of_ranks) if of_rank), 0)
        why = non_finite_text(of_ranks)
        finite = "All numbers of the batch are finite: look at the weights and the loss; with --fp16 set --bf16 instead"
        why = f"Not finite: {why}" if why else finite
        why = left_out or why
        batch_of_first = f"{self.folder}/nonfinite/step{step}_rank{first}.pt"
        raise TrainingError(
            f"step {step}: no finite gradient of the {models} in {self.limit} steps in a row (--max_skipped_steps). "
            f"{why}. {self.again.format(folder=self.folder, step=step, batch=batch_of_first)}"
        )


def is_saved(strategy: Ranks, folders: Sequence[str], step: int) -> bool:
    """Whether the models of this step are in these folders, whole. Collective."""
    whole = False
    if strategy.is_rank_0():
        local = [local_folder(folder) for folder in folders]
        whole = all(facts_of(folder).get("step") == step for folder in local)
        whole = whole and not any(files_in_use().damage(folder) for folder in local)
    return strategy.broadcast_object(whole)


def check_trained(
    state: TrainerState, otherwise: str, dry_run: bool = False, left_out: str = ""
) -> None:
    """Raises TrainingError where no model has changed.

    Args:
        otherwise: the reason if no step was skipped or stopped.
        dry_run: it may end before fp16's loss scale is found.
        left_out: why the last step was, whose numbers were not finite before any gradient.
    """
    if state.global_step > 0 and state.optimizer_steps == 0:
        overflowed, stopped = state.overflowed_optimizer_steps, state.stopped_optimizer_steps
        skipped = state.skipped_optimizer_steps - overflowed
        if dry_run and overflowed and not skipped:
            return
        too_large = (
            "overflowed at --fp16's loss scale, which halves each time: go on, or set --bf16"
        )
        counts = {
            "had a gradient that is not finite": skipped,
            too_large: overflowed,
            "were stopped early": stopped,
        }
        reason = (
            ", ".join(f"{count} {what}" for what, count in counts.items() if count) or otherwise
        )
        reason = left_out or reason
        raise TrainingError(
            f"no optimizer step was taken in {state.global_step} steps, nothing is saved: {reason}"
        )
