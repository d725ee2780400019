"""``--max_skipped_steps``: after so many steps without a finite gradient the run ends, and keeps the batch in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightppo import tensor_file
from lightppo.algorithms.masking import LossNormalizer
from lightppo.callbacks import Callback
from lightppo.data.records import Rollout
from lightppo.errors import TrainingError
from lightppo.experience.batching import Minibatch, StepPart
from lightppo.experience.experience import Experience, non_finite_text
from lightppo.files import files_in_use, local_folder
from lightppo.models.batches import on_cpu


class SkippedInARow(Callback):
    """Ends a run after ``limit`` steps in a row in which a model had no finite gradient.

    It keeps the last batch as ``nonfinite/stepN_rankR.pt``. A trainer whose batches are no
    :class:`~lightppo.experience.batching.Minibatch` has ``write_batch(path, batch, facts)``, which returns how many rows
    are not finite, by name, and ``run_again``, which says how to run the batch again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def after_step(self, run: Any, step: int) -> None:
        skipped = run.skipped
        strategy = run.strategy
        folder = run.config.checkpoint.save_path
        models = " and ".join(skipped.models())
        if not models or run.state.skipped_in_a_row < self.limit:
            return
        rank = strategy.get_rank()
        file_name = f"nonfinite/step{step}_rank{rank}.pt"
        batch_path = local_folder(folder) / file_name
        batch_path.parent.mkdir(parents=True, exist_ok=True)
        write = getattr(run, "write_batch", partial(write_batch, run.tokenizer))
        rows_not_finite = write(
            batch_path, skipped.batch, {"step": step, "rank": rank, "models": models}
        )
        files_in_use().publish(folder, file_name)
        per_rank = strategy.all_gather_object(rows_not_finite)
        if skipped.why:
            reason = skipped.why
        elif rows := non_finite_text(per_rank):
            reason = f"Not finite: {rows}"
        else:
            reason = "All numbers of the batch are finite: look at the weights and the loss; with --fp16 set --bf16 instead"
        bad_rank = next((rank for rank, rows in enumerate(per_rank) if rows), 0)
        batch = f"{folder}/nonfinite/step{step}_rank{bad_rank}.pt"
        remedy = f"To run the batch again: lightppo replay {folder} --step {step} --batch {batch}"
        if hasattr(run, "run_again"):
            remedy = run.run_again(folder, batch)
        raise TrainingError(
            f"step {step}: no finite gradient of the {models} in {self.limit} steps in a row (--max_skipped_steps). "
            f"{reason}. {remedy}"
        )


def skipped_in_a_row(run: Any) -> SkippedInARow | None:
    """Return the callback of a run with a limit."""
    limit = run.config.flat().get("max_skipped_steps")
    return SkippedInARow(limit) if limit else None


def write_batch(
    tokenizer: Any, batch_path: Path, batch: Any, facts: Mapping[str, Any]
) -> Mapping[str, int]:
    """Keep this rank's part of a step of PPO; return its rows that are not finite, by name."""
    minibatch = batch if isinstance(batch, Minibatch) else Minibatch([_experience(batch)])
    row_texts = []
    rows_not_finite = Counter()
    for experience in minibatch.micro_batches:
        row_texts += experience.texts(tokenizer.decode)
        rows_not_finite.update(experience.non_finite())
    save_batch(batch_path, minibatch, row_texts, **facts)
    return rows_not_finite


def _experience(batch: Experience | Sequence[Rollout]) -> Experience:
    """Return what a step that was left out was to train on: experience, or rollouts with their scores."""
    if isinstance(batch, Experience):
        return batch
    rollouts = [rollout for rollout in batch if rollout.response_ids]  # a failed episode has none
    experience = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
    experience.info["reward"] = torch.tensor([rollout.reward for rollout in rollouts])
    return experience


def save_batch(
    batch_path: Path, minibatch: Minibatch, texts: Sequence[Sequence[str]], **facts: Any
) -> None:
    """Write this rank's part of an optimizer step, for :func:`load_batch`.

    Args:
        texts: prompt and response of each row, for people.
        **facts: numbers and texts, such as the step and the rank.
    """

    def plain(experience: Experience) -> dict[str, Any]:
        tensors = {**vars(experience), **experience.extra}
        for batches_name in ("extra", "info", "part"):
            del tensors[batches_name]
        for batches_name, tensor in tensors.items():
            tensors[batches_name] = None if tensor is None else on_cpu(tensor).detach()
        part = experience.part
        if part is not None:
            part = vars(part) | {"normalizer": vars(part.normalizer)}
        return {"tensors": tensors, "info": experience.info, "part": part}

    contents = {
        batches_name: batches and [plain(experience) for experience in batches]
        for batches_name, batches in vars(minibatch).items()
    }
    torch.save(
        {**contents, "texts": [tuple(row_texts) for row_texts in texts], "facts": facts}, batch_path
    )


def load_batch(batch_path: Path) -> tuple[Minibatch, list[tuple[str, str]], dict[str, Any]]:
    """Read what :func:`save_batch` wrote, on the CPU: optimizer step, texts of its rows, facts; no code of it runs."""
    saved = tensor_file.read(batch_path)

    def experience(plain: dict[str, Any]) -> Experience:
        part = plain["part"]
        if part is not None:
            for name in ("pretrain", "own_losses"):  # of an older lightppo
                part.pop(name, None)
            part = StepPart(**part | {"normalizer": LossNormalizer(**part["normalizer"])})
        tensors = plain["tensors"]
        extra_names = tensors.keys() - {field.name for field in fields(Experience)}
        extra = {name: tensors.pop(name) for name in extra_names}
        extra = {name: tensor for name, tensor in extra.items() if tensor is not None}
        return Experience(**tensors, extra=extra, info=plain["info"], part=part)

    minibatch = Minibatch(
        *(
            saved[name] and [experience(plain) for plain in saved[name]]
            for name in ("micro_batches", "critic_micro_batches")
        )
    )
    return minibatch, saved["texts"], saved["facts"]
