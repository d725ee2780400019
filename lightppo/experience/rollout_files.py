"""Rollouts in files: what each step trained on, for people; and saved rollouts that another run replays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError
from lightppo.experience.filters import group_by_prompt
from lightppo.experience.rollout_records import from_plain, to_plain
from lightppo.ranks import Ranks


def write_step(folder: str | Path, step: int, rollouts: Sequence[Rollout], strategy: Ranks) -> None:
    """Write ``stepN.jsonl``: one line per sample of all ranks, by prompt and sample number. Collective.

    Args:
        folder: made if missing; the file of the same step of an earlier run is replaced.
        step: number of the PPO step.
        rollouts: scored samples of this rank.
        strategy: gathers, and lets rank 0 write.
    """
    rows = [row for part in strategy.all_gather_object([_row(r, step) for r in rollouts]) for row in part]
    rows.sort(key=lambda row: (row["index"], row["sample_index"]))
    path = Path(folder) / f"step{step}.jsonl"
    strategy.on_rank_0(lambda: _write(path, "".join(json.dumps(row, default=str) + "\n" for row in rows)), f"{path}")


def _row(rollout: Rollout, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "index": rollout.prompt.index,
        "sample_index": rollout.sample_index,
        "data_source": rollout.prompt.data_source,
        "input": rollout.prompt.text,
        "output": rollout.response_text,
        "ground_truth": rollout.prompt.label,
        "score": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "response_length": len(rollout.response_ids),
        "extras": rollout.extras,
    }


class RolloutReplay:
    """Saves what the engine samples, and gives it back in a later run instead of sampling; for debugging.

    A file holds one generation batch of one rank, keyed by step, batch and rank. Rewards are not kept: they are
    computed again. Where any rank lacks its file, all ranks sample and save.

    Args:
        folder: made if missing.
        strategy: rank and agreement.
        reuse: the first batch that was saved is that of every step, whatever the prompts are.
    """

    def __init__(self, folder: str | Path, strategy: Ranks, *, reuse: bool = False) -> None:
        self.folder = Path(folder)
        self.strategy = strategy
        self.reuse = reuse

    def rollouts(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]:
        """The saved rollouts of this generation batch, or those that ``sample`` gives. Collective.

        Raises:
            ConfigError: the saved ones are of other prompts, or the prompts cannot be saved.
        """
        key = "first" if self.reuse else f"step{step}_batch{batch}"
        path = self.folder / f"{key}_rank{self.strategy.get_rank()}of{self.strategy.world_size}.json"
        if self.strategy.all_reduce(int(path.is_file()), "min"):
            groups = [from_plain(values) for values in json.loads(path.read_text())]
            if not self.reuse and [g[0].prompt.token_ids for g in groups] != [p.token_ids for p in prompts]:
                raise ConfigError(
                    f"--skip_rollout {self.folder}: {path.name} is of other prompts than those of step {step}; run "
                    "with the data, --seed and batch sizes it was saved with, name another folder, or set "
                    "--skip_rollout_reuse"
                )
            return [rollout for group in groups for rollout in group]
        rollouts = sample()
        try:
            text = json.dumps([to_plain(group) for group in group_by_prompt(rollouts)])
        except TypeError as error:
            raise ConfigError(
                f"--skip_rollout {self.folder}: the prompts of step {step} are no JSON: {error}"
            ) from error
        _write(path, text)
        return rollouts


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
