"""Where the log probs before an update come from: as few passes as the algorithm allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightppo.algorithms.entries import POLICY_LOSSES

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig


def old_log_probs_from(config: PPOConfig, exact_rollout: bool) -> Literal["training", "rollout", "forward"]:
    """Which of the three gives a run its old log probs.

    - ``"training"``: the training pass itself, with one optimizer step per rollout;
    - ``"rollout"``: those recorded while sampling;
    - ``"forward"``: a pass of the actor over the rollout.

    Args:
        config: resolved.
        exact_rollout: the engine samples with the actor's own weights and forward, so that what it records is what a
            pass would give.
    """
    asked = config.loss.old_log_probs
    if asked != "auto":
        return asked
    if takes_old_from_training(config):
        return "training"
    stale = config.sampling.skip_rollout is not None or _keeps_surplus(config)
    recorded = exact_rollout and not config.model.bf16 and not stale and not _needs_pass(config)
    return "rollout" if recorded else "forward"


def takes_old_from_training(config: PPOConfig) -> bool:
    """Whether the training pass itself can give the old log probs: one optimizer step, and nothing else needs them.

    Then the policy of that pass is the one that sampled, and a forward pass is saved.
    """
    a, o, r, t = config.algorithm, config.loss, config.rollout, config.training
    one_step = t.max_epochs == 1 and t.train_batch_size == r.rollout_batch_size * r.n_samples_per_prompt
    kl_in_reward = a.init_kl_coef > 0 and a.use_kl_in_reward
    needed_before = (
        kl_in_reward
        or config.correction.rollout_correction != "none"
        or o.high_entropy_token_ratio is not None
        or POLICY_LOSSES[o.policy_loss].selection
        or a.freezing_actor_steps > 0
    )
    return o.old_log_probs == "auto" and one_step and not needed_before


def problems(config: PPOConfig) -> list[str]:
    """--old_log_probs rollout beside what needs a pass of the actor, or log probs of another temperature."""
    if config.loss.old_log_probs != "rollout":
        return []
    return [f"--old_log_probs rollout: {reason}; set it to auto or forward" for reason in _needs_pass(config)]


def _keeps_surplus(config: PPOConfig) -> bool:
    """Groups left over may be trained on in a later step, when the policy is another."""
    s = config.sampling
    return s.dynamic_sampling or (s.gen_batch_size or 0) > config.rollout.rollout_batch_size


def _needs_pass(config: PPOConfig) -> list[str]:
    a, r = config.algorithm, config.rollout
    reasons = {
        f"--rollout_correction {config.correction.rollout_correction} compares them with those of a pass": (
            config.correction.rollout_correction != "none"
        ),
        "--high_entropy_token_ratio needs the entropy that a pass gives": (
            config.loss.high_entropy_token_ratio is not None
        ),
        "--kl_estimator full needs the distributions that a pass gives": (
            a.init_kl_coef > 0 and a.kl_estimator == "full" and a.use_kl_in_reward
        ),
        f"greedy rollouts record those at temperature 1, and the loss has {r.temperature:g}": (
            not r.do_sample and r.temperature not in (0, 1)
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]
