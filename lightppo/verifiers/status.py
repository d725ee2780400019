"""``--check_verifier_status``: whether the verifier may be broken, rather than the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, RewardError
from lightppo.ranks import Ranks
from lightppo.rewards.reward_source import RewardSource, describe_sample, shown


def status_check(
    config: PPOConfig, strategy: Ranks, source: RewardSource
) -> Callable[[Sequence[Rollout]], None]:
    """Return the check of each scored batch of training."""
    minimum = config.verifier.reward_minimum
    if minimum is None:
        minimum = getattr(source, "minimum", None)
    if minimum is None:
        raise ConfigError(
            f"--check_verifier_status: {source.name} does not say its lowest score; set --reward_minimum"
        )
    return partial(check_verifier_status, minimum=minimum, source_name=source.name, ranks=strategy)


def check_verifier_status(
    rollouts: Sequence[Rollout], *, minimum: float, source_name: str, ranks: Ranks
) -> None:
    """Raise if all scores of a batch, before shaping, are missing or at the source's minimum. Collective.

    The verifier is then more likely broken than the model. Source: AReaL, ``check_verifier_status`` (of the mean).
    """
    scores = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    above = sum(not score <= minimum for score in scores)  # NaN says nothing of a minimum
    counts = {"samples": len(rollouts), "scored": len(scores), "above": above}
    totals = ranks.all_reduce({name: float(count) for name, count in counts.items()}, "sum")
    if totals["samples"] == 0 or totals["above"] > 0:
        return
    problem = f"every one of the {totals['scored']:g} scores is at the minimum of {minimum:g}"
    if totals["scored"] == 0:
        problem = f"none of the {totals['samples']:g} samples has a score"
    example = "this rank has no sample to show"
    if rollouts:
        i = next((i for i, rollout in enumerate(rollouts) if rollout.reward is not None), 0)
        rollout = rollouts[i]
        label = shown(rollout.prompt.label)
        ending = rollout.response_text[-300:]
        example = f"{describe_sample(rollouts, i)}: label {label!r}, score {rollout.reward}, end {ending!r}"
    raise RewardError(
        f"--check_verifier_status: {problem} ({source_name}). Does the prompt ask for the form that it looks for, and "
        f"--label_key name the right column? For example: {example}"
    )
