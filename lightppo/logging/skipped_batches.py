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
        name = f"nonfinite/step{step}_rank{rank}.pt"
        path = local_folder(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write = getattr(run, "write_batch", partial(write_batch, run.tokenizer))
        rows_not_finite = write(path, skipped.batch, {"step": step, "rank": rank, "models": models})
        files_in_use().publish(folder, name)
        of_ranks = strategy.all_gather_object(rows_not_finite)
        first = next((i for i, of_rank in enumerate(of_ranks) if of_rank), 0)
        if skipped.why:
            why = skipped.why
        elif rows := non_finite_text(of_ranks):
            why = f"Not finite: {rows}"
        else:
            why = "All numbers of the batch are finite: look at the weights and the loss; with --fp16 set --bf16 instead"
        batch = f"{folder}/nonfinite/step{step}_rank{first}.pt"
        again = f"To run the batch again: lightppo replay {folder} --step {step} --batch {batch}"
        if hasattr(run, "run_again"):
            again = run.run_again(folder, batch)
        raise TrainingError(
            f"step {step}: no finite gradient of the {models} in {self.limit} steps in a row (--max_skipped_steps). "
            f"{why}. {again}"
        )


def skipped_in_a_row(run: Any) -> SkippedInARow | None:
    """Of a run with a limit."""
    limit = run.config.flat().get("max_skipped_steps")
    return SkippedInARow(limit) if limit else None


def write_batch(
    tokenizer: Any, path: Path, batch: Any, facts: Mapping[str, Any]
) -> Mapping[str, int]:
    """Keep this rank's part of a step of PPO; returns its rows that are not finite, by name."""
    minibatch = batch if isinstance(batch, Minibatch) else Minibatch([_experience(batch)])
    parts = minibatch.micro_batches
    save_batch(
        path, minibatch, [text for part in parts for text in part.texts(tokenizer.decode)], **facts
    )
    return sum((Counter(part.non_finite()) for part in parts), Counter())


def _experience(batch: Experience | Sequence[Rollout]) -> Experience:
    """Return what a step that was left out was to train on: experience, or rollouts with their scores."""
    if isinstance(batch, Experience):
        return batch
    batch = [rollout for rollout in batch if rollout.response_ids]  # a failed episode has none
    made = Experience.from_rollouts(batch) if batch else Experience.placeholder()
    made.info["reward"] = torch.tensor([rollout.reward for rollout in batch])
    return made


def save_batch(
    path: Path, minibatch: Minibatch, texts: Sequence[Sequence[str]], **facts: Any
) -> None:
    """Write this rank's part of an optimizer step, for :func:`load_batch`.

    Args:
        texts: prompt and response of each row, for people.
        **facts: numbers and texts, such as the step and the rank.
    """

    def plain(part: Experience) -> dict[str, Any]:
        tensors = {**vars(part), **part.extra}
        for name in ("extra", "info", "part"):
            del tensors[name]
        for name, tensor in tensors.items():
            tensors[name] = None if tensor is None else on_cpu(tensor).detach()
        step = part.part and vars(part.part) | {"normalizer": vars(part.part.normalizer)}
        return {"tensors": tensors, "info": part.info, "part": step}

    kinds = {
        "micro_batches": minibatch.micro_batches,
        "critic_micro_batches": minibatch.critic_micro_batches,
    }
    parts = {name: batches and [plain(part) for part in batches] for name, batches in kinds.items()}
    torch.save({**parts, "texts": [tuple(row) for row in texts], "facts": facts}, path)


def load_batch(path: Path) -> tuple[Minibatch, list[tuple[str, str]], dict[str, Any]]:
    """Read what :func:`save_batch` wrote, on the CPU: optimizer step, texts of its rows, facts; no code of it runs."""
    saved = tensor_file.read(path)

    def experience(plain: dict[str, Any]) -> Experience:
        if (part := plain["part"]) is not None:
            for name in ("pretrain", "own_losses"):  # of an older lightppo
                part.pop(name, None)
            part = StepPart(**part | {"normalizer": LossNormalizer(**part["normalizer"])})
        tensors = plain["tensors"]
        own = {field.name for field in fields(Experience)}
        extra = {name: tensors.pop(name) for name in tensors.keys() - own}
        extra = {name: values for name, values in extra.items() if values is not None}
        return Experience(**tensors, extra=extra, info=plain["info"], part=part)

    kinds = [
        saved[name] and [experience(p) for p in saved[name]]
        for name in ("micro_batches", "critic_micro_batches")
    ]
    return Minibatch(*kinds), saved["texts"], saved["facts"]
