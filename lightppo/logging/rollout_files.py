"""``--skip_rollout``: rollouts in files, which a later run takes in place of sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout, from_plain, group_by_prompt, to_plain
from lightppo.errors import ConfigError
from lightppo.logging.samples import write_whole
from lightppo.ranks import Ranks
from lightppo.rollout.sampler import AroundSampling


def replay(config: PPOConfig, strategy: Ranks) -> AroundSampling | None:
    """Return what takes rollouts from files in place of sampling; None without ``--skip_rollout``."""
    options = config.sampling
    if options.skip_rollout is None:
        return None
    return RolloutReplay(options.skip_rollout, strategy, options.skip_rollout_reuse).rollouts


@dataclass
class RolloutReplay:
    """Saves what the engine samples, and returns it in a later run instead of sampling; for debugging.

    A file holds a generation batch of one rank, without rewards. If any rank lacks its file, all ranks sample and save.
    """

    folder: str | Path
    strategy: Ranks
    reuse: bool = False  # every step gets the first saved batch, whatever its prompts are

    def rollouts(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]:
        """Return the saved rollouts of this generation batch, or else the rollouts from ``sample``. Collective."""
        key = "first" if self.reuse else f"step{step}_batch{batch}"
        path = (
            Path(self.folder)
            / f"{key}_rank{self.strategy.get_rank()}of{self.strategy.world_size}.json"
        )
        if self.strategy.all_reduce(int(path.is_file()), "min"):
            groups = [from_plain(values) for values in json.loads(path.read_text())]
            if not self.reuse and [g[0].prompt.token_ids for g in groups] != [
                p.token_ids for p in prompts
            ]:
                raise ConfigError(
                    f"--skip_rollout {self.folder}: {path.name} holds other prompts than step {step} has; run with the "
                    "data, --seed and batch sizes it was saved with, name another folder, or set --skip_rollout_reuse"
                )
            return [rollout for group in groups for rollout in group]
        rollouts = sample()
        try:
            text = json.dumps([to_plain(group) for group in group_by_prompt(rollouts)])
        except TypeError as error:
            raise ConfigError(
                f"--skip_rollout {self.folder}: the prompts of step {step} cannot be written as JSON: {error}"
            ) from error
        write_whole(path, text)
        return rollouts
