"""``--old_log_probs``; ``auto`` makes as few passes over the rollout as the algorithm allows. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.algorithms.option_values import Rejection
from lightppo.config.rules import (
    adds_teacher,
    compute_dtype,
    estimator_entry,
    policy_loss_entry,
)
from lightppo.plugin import TOKEN_WEIGHTS
from lightppo.redaction import shown_value


def old_log_probs_from(
    config: Any, exact_rollout: bool
) -> Literal["training", "rollout", "forward"]:
    """Return where a run takes its log probs before an update from.

    - ``"training"``: the training pass itself, with one optimizer step per rollout;
    - ``"rollout"``: those recorded while sampling;
    - ``"forward"``: a pass of the actor over the rollout.

    Args:
        config: resolved.
        exact_rollout: the engine samples with the actor's own weights and forward, so that what it records is what a
            pass would give.
    """
    if config.loss.old_log_probs != "auto":
        return config.loss.old_log_probs
    if _weighs_tokens_before(config):
        return "forward"
    if _takes_one_step(config) and not _needed_before(config):
        return "training"
    is_stale = any(part.is_stale(config) for part in config.parts())
    needs_pass = is_stale or any(
        reasons_for_a_pass(SimpleNamespace(**config.flat() | {"config": config}))
    )
    recorded = exact_rollout and compute_dtype(config) == "float32" and not needs_pass
    return "rollout" if recorded else "forward"


def _weighs_tokens_before(config: Any) -> bool:
    """Whether factors of the policy loss are made before there is a training pass."""
    rejections = map(Rejection.parse, config.correction.rollout_rejection)
    return (
        config.correction.rollout_correction != "none"
        or any(not rejection.entry.in_training for rejection in rejections)
        or config.loss.high_entropy_token_ratio is not None
        or any(
            not entry.in_training and entry.fn(config) is not None
            for entry in TOKEN_WEIGHTS.values()
        )
    )


def _takes_one_step(config: Any) -> bool:
    """Whether each rollout is trained on in one optimizer step."""
    training = config.training
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return training.max_epochs == 1 and training.train_batch_size == samples


def _needed_before(config: Any) -> bool:
    """Whether something asks for the log probs before there is a training pass."""
    algorithm = config.algorithm
    return (
        (algorithm.init_kl_coef > 0 and algorithm.use_kl_in_reward)
        or adds_teacher(config)
        or policy_loss_entry(config).selection is not None
        or estimator_entry(config).needs_score_norms
        or algorithm.freezing_actor_steps > 0
    )


def reasons_for_a_pass(options: Any) -> Iterator[str]:
    """Why recorded log probs would not do; ``options`` as of :meth:`Section.problems`."""
    for part in options.config.parts():
        yield from part.passes(options)
    if ADVANTAGE_ESTIMATORS.find(options.advantage_estimator).needs_score_norms:
        name = shown_value(options.advantage_estimator)
        yield f"--advantage_estimator {name} needs the distributions of a pass"
    if not options.do_sample and options.temperature not in (0, 1):
        yield f"greedy rollouts record them at temperature 1, not --temperature {options.temperature:g}"
