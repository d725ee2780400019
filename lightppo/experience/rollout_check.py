"""Whether an engine with weights of its own samples from the actor: its log probs against the trainer's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.errors import RolloutMismatchError
from lightppo.experience.experience import Experience
from lightppo.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)

CHECKED_ROWS = 8
NAMED_WEIGHTS = 5


class RolloutCheck:
    """Compares log probs at the first rollouts, and watches ``rollout/logp_diff_mean`` from then on.

    Engines that sample with the actor itself are only watched: what makes a copy says ``keeps_weights = True``.

    Args:
        actor: prepared.
        engine: sampled the rollouts; may have ``differing_weights()`` → (names, names that cannot be compared).
        strategy: reduces over ranks.
        config: resolved; read are ``--rollout_check``, ``--logp_diff_tolerance`` and the types.
    """

    def __init__(self, actor: Any, engine: RolloutEngine, strategy: Any, config: PPOConfig) -> None:
        e = config.engine
        self.actor, self.engine, self.strategy = actor, engine, strategy
        self.mode = e.rollout_check
        self.tolerance = e.logp_diff_tolerance or default_tolerance(config)
        self.rows = min(CHECKED_ROWS, config.rollout.micro_rollout_batch_size)  # one forward pass that fits
        self.greedy = config.rollout.temperature == 0 or not config.rollout.do_sample
        self.pending = self.mode != "off" and getattr(engine, "keeps_weights", False)
        self._warned_at = self.tolerance

    @torch.no_grad()
    def first(self, rollouts: Sequence[Rollout]) -> None:
        """Compare on the first call, and do nothing on later ones. Collective: a rank may have no rollouts.

        Raises:
            RolloutMismatchError: the mean difference is above the tolerance, with ``--rollout_check error``.
        """
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
            raise RolloutMismatchError(f"{message}. --rollout_check warn goes on all the same")
        if self.strategy.is_rank_0():
            logger.warning("%s", message)

    def difference(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """(mean, max) over all ranks' tokens of \\|engine's log prob - trainer's\\|, in nats. Collective."""
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
        total = count = largest = 0.0
        if rollouts:
            # NaN would pass every comparison
            diff = (scores.log_probs.float() - batch.rollout_log_probs).abs().nan_to_num(torch.inf)  # (B, A)
            diff = diff[batch.action_mask].double()
            total, count, largest = diff.sum().item(), float(diff.numel()), diff.max().item()
        sums = self.strategy.all_reduce({"total": total, "count": count}, "sum")
        largest = self.strategy.all_reduce(largest, "max")
        return (sums["total"] / sums["count"] if sums["count"] else 0.0), largest

    def watch(self, status: Mapping[str, float], step: int) -> None:
        """Warn where a step's ``logp_diff_mean`` is above the tolerance, and again when it has doubled."""
        mean = status.get("logp_diff_mean", 0.0)
        if self.mode == "off" or not mean > self._warned_at:
            return
        self._warned_at = 2 * mean
        if self.strategy.is_rank_0():
            logger.warning(
                "step %d: the rollout engine's log probs drift from the trainer's: rollout/logp_diff_mean is %.3g, "
                "--logp_diff_tolerance %g; see docs/rollouts.md",
                step,
                mean,
                self.tolerance,
            )

    def _suspects(self) -> str:
        """Collective."""
        if not hasattr(self.engine, "differing_weights"):
            return "This engine cannot say which weights differ"
        differing, unknown = self.engine.differing_weights()
        if differing:
            names, more = ", ".join(differing[:NAMED_WEIGHTS]), len(differing) - NAMED_WEIGHTS
            return f"Weights that differ: {names}{f' and {more} more' if more > 0 else ''}"
        if unknown:
            return f"No weight was seen to differ, but {len(unknown)} could not be compared, first {unknown[0]}"
        return (
            "All weights are the same, so the two compute differently: check the types (--vllm_dtype, --bf16), and "
            "whether vLLM and transformers agree on this model"
        )


def default_tolerance(config: PPOConfig) -> float:
    """0.001 where trainer and engine are fp32, 0.1 where one of them is not: well above what rounding makes."""
    return 0.1 if config.model.bf16 or config.engine.vllm_dtype in ("bfloat16", "float16") else 0.001
