"""``--old_log_probs auto``: as few passes over the rollout as the algorithm allows. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.config.options import Options
from lightppo.config.rules import (
    advantage_terms,
    compute_dtype,
    estimator_entry,
    policy_loss_entry,
    token_weights,
)
from lightppo.redaction import shown_value


def fewest_passes(
    config: Options, exact_rollout: bool
) -> Literal["training", "rollout", "forward"]:
    """See :data:`lightppo.plugin.OLD_LOG_PROBS`."""
    if token_weights(config, in_training=False):
        return "forward"
    if _takes_one_step(config) and not _needed_before(config):
        return "training"
    is_stale = any(part.is_stale(config) for part in config.parts())
    needs_pass = is_stale or any(reasons_for_a_pass(SimpleNamespace(**config.flat())))
    recorded = exact_rollout and compute_dtype(config) == "float32" and not needs_pass
    return "rollout" if recorded else "forward"


def _takes_one_step(config: Options) -> bool:
    """Whether each rollout is trained on in one optimizer step."""
    training, rollout = config.training, config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return training.max_epochs == 1 and training.train_batch_size == samples


def _needed_before(config: Options) -> bool:
    """Whether something asks for the log probs before there is a training pass."""
    algorithm = config.algorithm
    return (
        (algorithm.init_kl_coef > 0 and algorithm.use_kl_in_reward)
        or bool(advantage_terms(config))
        or policy_loss_entry(config).selection is not None
        or estimator_entry(config).needs_score_norms
        or algorithm.freezing_actor_steps > 0
    )


def reasons_for_a_pass(options: Any) -> Iterator[str]:
    """Why recorded log probs would not do; ``options`` by name."""
    for part in Options.parts():
        yield from part.passes(options)
    if ADVANTAGE_ESTIMATORS.find(options.advantage_estimator).needs_score_norms:
        name = shown_value(options.advantage_estimator)
        yield f"--advantage_estimator {name} needs the distributions of a pass"
    if not options.do_sample and options.temperature not in (0, 1):
        yield f"greedy rollouts record them at temperature 1, not --temperature {options.temperature:g}"
