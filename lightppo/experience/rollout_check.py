"""The engine's log probs against the trainer's, at the first rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightppo.config import PPOConfig
from lightppo.config.rules import logp_diff_tolerance, rollout_rows
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RolloutMismatchError
from lightppo.experience.experience import Experience
from lightppo.ranks import Ranks
from lightppo.rollout.engine import RolloutEngine, capabilities_of

logger = logging.getLogger(__name__)

CHECKED_ROWS = 8
NAMED_WEIGHTS = 5


class RolloutCheck:
    """Compare log probs at the first rollouts of an engine with weights of its own, which says ``keeps_weights``; those
    that an adapter alone was pushed to (``engine.adapter`` is its name) also at the first rollouts of each adapter.

    Rollouts can be compared only while the actor has the weights that sampled them. With ``--max_staleness 1`` it is
    trained before they are there, unless the step waits for them: it does for those that are :meth:`is_due`.
    """

    def __init__(
        self, actor: Any, engine: RolloutEngine, strategy: Ranks, config: PPOConfig
    ) -> None:
        self.actor = actor
        self.engine = engine
        self.strategy = strategy
        self.mode = config.engine.rollout_check
        self.tolerance = logp_diff_tolerance(config, strategy.device.type)
        self.rows = min(CHECKED_ROWS, rollout_rows(config))  # one forward pass that fits
        self.greedy = config.rollout.temperature == 0 or not config.rollout.do_sample
        self.pending = self.mode != "off" and capabilities_of(engine).keeps_weights
        self.checks_adapters = self.pending
        self.checked: str | None = None  # the adapter
        self.is_ahead = config.rollout.max_staleness > 0
        self.compared = 0  # batches

    def is_due(self) -> bool:
        """Tell whether the next rollouts are worth a wait: the first ones, and those of the second adapter.

        The first adapter of a run adds nothing to the model, so only the second one shows whether adapters arrive.
        """
        return self.pending or (self._is_new_adapter() and self.compared < 2)

    def _is_new_adapter(self) -> bool:
        return self.checks_adapters and getattr(self.engine, "adapter", None) != self.checked

    def rollouts(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]:
        """Return the rollouts from ``sample``, compared where they are the first. Collective."""
        rollouts = sample()
        self.first(rollouts)
        return rollouts

    @torch.no_grad()
    def first(self, rollouts: Sequence[Rollout]) -> None:
        """Compare on the first call, and on the first of each adapter. Collective: a rank may have no rollouts."""
        adapter = getattr(self.engine, "adapter", None)
        is_first = self.pending
        if not is_first and not self._is_new_adapter():
            return
        # An episode whose environment failed has none.
        with_tokens = [rollout for rollout in rollouts if rollout.response_ids]
        mean, largest, tokens = self.difference(with_tokens[: self.rows])
        if not tokens:
            return  # on any rank: the next batch is compared
        self.pending = False
        self.checked = adapter
        self.compared += 1
        if mean <= self.tolerance:
            if is_first:
                later = ""
                if self.is_ahead and adapter is not None:
                    later = (
                        "; with --max_staleness 1 the next adapter is compared too, but no later one, as training would "
                        "wait for its samples"
                    )
                self.strategy.print(
                    f"rollout check: log probs differ by {mean:.2g} on average, {largest:.2g} at most{later}"
                )
            return
        adapter_text = "" if adapter is None else f", with adapter {adapter}"
        message = (
            f"the rollout engine's log probs are not the trainer's{adapter_text}: {mean:.3g} nats apart on average, "
            f"{largest:.3g} at most, and --logp_diff_tolerance is {self.tolerance:g}. {self._suspects()}"
        )
        if self.mode == "error":
            raise RolloutMismatchError(f"{message}. With --rollout_check warn the run continues")
        if self.strategy.is_rank_0():
            logger.warning("%s", message)

    def difference(self, rollouts: Sequence[Rollout]) -> tuple[float, float, int]:
        r"""Return (mean, max) of \|engine's log prob - trainer's\| over the tokens of all ranks, in nats, and their number.
        Collective."""
        batch = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
        batch.to_device(self.strategy.device)
        temperature = self.actor.temperature
        training = self.actor.training
        self.actor.eval()
        try:
            if self.greedy:
                self.actor.temperature = 1.0  # what greedy rollouts record
            replayed = {} if batch.experts is None else {"experts": batch.experts}
            scores = self.actor.score_actions(
                batch.sequences, batch.num_actions, batch.attention_mask, **replayed
            )
        finally:
            self.actor.temperature = temperature
            self.actor.train(training)
        # NaN would pass every comparison. A placeholder has no trained token.
        # (B, A)
        differences = (scores.log_probs.float() - batch.rollout_log_probs).abs()
        differences = differences.nan_to_num(torch.inf)[batch.action_mask].double()
        sums = {"total": differences.sum().item(), "count": differences.numel()}
        sums = self.strategy.all_reduce(sums, "sum")
        largest = self.strategy.all_reduce(differences.max().item() if rollouts else 0.0, "max")
        tokens = int(sums["count"])
        return (sums["total"] / tokens if tokens else 0.0), largest, tokens

    def _suspects(self) -> str:
        """Say which weights differ. Collective."""
        if not capabilities_of(self.engine).compares_weights:
            return "This engine cannot say which weights differ"
        differing, unknown = self.engine.differing_weights()
        if differing:
            names = ", ".join(differing[:NAMED_WEIGHTS])
            unnamed = len(differing) - NAMED_WEIGHTS
            return f"Weights that differ: {names}{f' and {unnamed} more' if unnamed > 0 else ''}"
        if unknown:
            return f"No weight was seen to differ, but {len(unknown)} could not be compared, first {unknown[0]}"
        return (
            "All weights are the same, so the two compute differently: check the types (--vllm_dtype, --bf16, --fp16), "
            "and whether vLLM and transformers agree on this model"
        )
