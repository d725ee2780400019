"""Checks on rollouts: save and replay, and the engine's log probs against the trainer's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightppo.config import PPOConfig
from lightppo.config.rules import compute_dtype, rollout_rows
from lightppo.data.records import Prompt, Rollout, from_plain, group_by_prompt, to_plain
from lightppo.errors import ConfigError, RolloutMismatchError
from lightppo.experience.experience import Experience
from lightppo.plugins.records.samples import write_whole
from lightppo.ranks import Ranks
from lightppo.rollout.engine import RolloutEngine, capabilities_of

logger = logging.getLogger(__name__)


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
        """The saved rollouts of this generation batch, or else the rollouts from ``sample``. Collective."""
        key = "first" if self.reuse else f"step{step}_batch{batch}"
        path = Path(self.folder) / f"{key}_rank{self.strategy.get_rank()}of{self.strategy.world_size}.json"
        if self.strategy.all_reduce(int(path.is_file()), "min"):
            groups = [from_plain(values) for values in json.loads(path.read_text())]
            if not self.reuse and [g[0].prompt.token_ids for g in groups] != [p.token_ids for p in prompts]:
                raise ConfigError(
                    f"--skip_rollout {self.folder}: {path.name} holds other prompts than step {step} has; run with the "
                    "data, --seed and batch sizes it was saved with, name another folder, or set --skip_rollout_reuse"
                )
            return [rollout for group in groups for rollout in group]
        rollouts = sample()
        try:
            text = json.dumps([to_plain(group) for group in group_by_prompt(rollouts)])
        except TypeError as error:
            message = f"--skip_rollout {self.folder}: the prompts of step {step} cannot be written as JSON: {error}"
            raise ConfigError(message) from error
        write_whole(path, text)
        return rollouts


CHECKED_ROWS = 8
NAMED_WEIGHTS = 5
ROUNDING = {"float32": {"cpu": 0.001, "cuda": 0.01}, "float16": {"cuda": 0.02}, "bfloat16": {"cuda": 0.1}}
"""Largest mean difference of log probs, in nats, by the coarser type of the two and the device; other devices as CUDA.

Five times what was measured, or more (docs/rollouts.md). In float32 vLLM's attention on a GPU multiplies in TF32, whose
numbers have float16's 10 bits, and the rest in float32; bfloat16's have 7.
"""


class RolloutCheck:
    """Compares log probs at the first rollouts, and then watches ``rollout/logp_diff_mean``.

    An engine that samples with the actor itself is only watched; an engine with a copy says ``keeps_weights``.
    """

    def __init__(self, actor: Any, engine: RolloutEngine, strategy: Ranks, config: PPOConfig) -> None:
        self.actor, self.engine, self.strategy, self.mode = actor, engine, strategy, config.engine.rollout_check
        types = {compute_dtype(config), config.engine.vllm_dtype} - {"auto"}
        rounding = max(ROUNDING[t].get(strategy.device.type, ROUNDING[t]["cuda"]) for t in types)
        self.tolerance = config.engine.logp_diff_tolerance or rounding
        self.rows = min(CHECKED_ROWS, rollout_rows(config))  # one forward pass that fits
        self.greedy = config.rollout.temperature == 0 or not config.rollout.do_sample
        self.pending = self.mode != "off" and capabilities_of(engine).keeps_weights
        self._warned_at = self.tolerance

    @torch.no_grad()
    def first(self, rollouts: Sequence[Rollout]) -> None:
        """Compares on the first call and does nothing later. Collective: a rank may have no rollouts."""
        if not self.pending:
            return
        self.pending = False
        mean, largest = self.difference(rollouts[: self.rows])
        if mean <= self.tolerance:
            self.strategy.print(f"rollout check: log probs differ by {mean:.2g} on average, {largest:.2g} at most")
            return
        message = (
            f"the rollout engine's log probs are not the trainer's: {mean:.3g} nats apart on average, {largest:.3g} at "
            f"most, and --logp_diff_tolerance is {self.tolerance:g}. {self._suspects()}"
        )
        if self.mode == "error":
            raise RolloutMismatchError(f"{message}. With --rollout_check warn the run continues")
        if self.strategy.is_rank_0():
            logger.warning("%s", message)

    def difference(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        r"""(mean, max) of \|engine's log prob - trainer's\| over the tokens of all ranks, in nats. Collective."""
        batch = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
        batch.to_device(self.strategy.device)
        temperature, training = self.actor.temperature, self.actor.training
        self.actor.eval()
        try:
            if self.greedy:
                self.actor.temperature = 1.0  # what greedy rollouts record
            scores = self.actor.score_actions(batch.sequences, batch.num_actions, batch.attention_mask)
        finally:
            self.actor.temperature = temperature
            self.actor.train(training)
        # NaN would pass every comparison. A placeholder has no trained token.
        diff = (scores.log_probs.float() - batch.rollout_log_probs).abs().nan_to_num(torch.inf)  # (B, A)
        diff = diff[batch.action_mask].double()
        sums = self.strategy.all_reduce({"total": diff.sum().item(), "count": diff.numel()}, "sum")
        largest = self.strategy.all_reduce(diff.max().item() if rollouts else 0.0, "max")
        return (sums["total"] / sums["count"] if sums["count"] else 0.0), largest

    def watch(self, status: Mapping[str, float], step: int) -> None:
        """Warns if a step's ``logp_diff_mean`` exceeds the tolerance, and again when it has doubled.

        Samples of an older policy do not count: training has moved the actor away from them.
        """
        name = "logp_diff_on_policy" if "logp_diff_on_policy" in status else "logp_diff_mean"
        mean = status.get(name, 0.0)
        if self.mode == "off" or not mean > self._warned_at:
            return
        self._warned_at = 2 * mean
        if self.strategy.is_rank_0():
            logger.warning(
                "step %d: the rollout engine's log probs drift from the trainer's: rollout/%s is %.3g, "
                "--logp_diff_tolerance %g; see docs/rollouts.md",
                *(step, name, mean, self.tolerance),
            )

    def _suspects(self) -> str:
        """Says which weights differ. Collective."""
        if not capabilities_of(self.engine).compares_weights:
            return "This engine cannot say which weights differ"
        differing, unknown = self.engine.differing_weights()
        if differing:
            names, more = ", ".join(differing[:NAMED_WEIGHTS]), len(differing) - NAMED_WEIGHTS
            return f"Weights that differ: {names}{f' and {more} more' if more > 0 else ''}"
        if unknown:
            return f"No weight was seen to differ, but {len(unknown)} could not be compared, first {unknown[0]}"
        return (
            "All weights are the same, so the two compute differently: check the types (--vllm_dtype, --bf16, --fp16), "
            "and whether vLLM and transformers agree on this model"
        )
