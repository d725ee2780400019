"""Parts of a trainer that a script builds by hand, where the script leaves them out; its prompts as texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightppo.compat.constructor_options import with_generation
from lightppo.compat.script_members import as_prompts
from lightppo.compat.script_names import check_actor
from lightppo.config import PPOConfig
from lightppo.config.rules import (
    estimator_entry,
    micro_batch_spec,
    needs_critic,
    needs_reference,
    needs_teacher,
)
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, RewardError
from lightppo.rewards.function import function_source
from lightppo.rewards.registry import build_reward_source
from lightppo.rewards.reward_source import NoReward, RewardSource
from lightppo.trainer.build import sampling_params
from lightppo.trainer.loop import TrainerState
from lightppo.zero3 import find_engine


def reward_source_of(
    config: PPOConfig,
    strategy: Any,
    tokenizer: Any,
    reward_model: Any,
    reward_fn: Any,
    remote_rm_url: str | Sequence[str] | None,
) -> RewardSource:
    """Make the reward source of a constructor's reward models, function or servers."""
    is_given = reward_model or reward_fn or remote_rm_url
    if estimator_entry(config).ignores_scores and not is_given:
        return NoReward()
    models = [] if reward_model is None else [reward_model]
    return build_reward_source(
        remote_rm_url=remote_rm_url,
        reward_fn=reward_fn,
        reward_models=list(reward_model) if isinstance(reward_model, (list, tuple)) else models,
        remote_options={"ranks": strategy},
        model_options={
            "device": strategy.device,
            "pad_token_id": tokenizer.pad_token_id,
            "ranks": strategy,
            "micro_batch_size": micro_batch_spec(config, "reward"),
        },
    )


def judge_of(eval_reward_fn: Any, source: RewardSource) -> RewardSource:
    """Return what scores the answers to a constructor's ``eval_prompts``."""
    if eval_reward_fn is None:
        return source
    return function_source(eval_reward_fn, "--eval_reward_fn")


def refuse_pieces(strategy: Any) -> None:
    """Raise ConfigError for a script whose ranks would hold rows together: its models and data know nothing of it."""
    if strategy.sequence_group is not None:
        raise ConfigError(
            "sequence_parallel_size above 1 is for lightppo's own commands and from_config: leave it out of a script"
        )


def check_models(
    config: PPOConfig, actor: Any, critic: Any, initial_model: Any, tokenizer: Any, teacher: Any
) -> None:
    """Raise ConfigError where the options need what the constructor was not given."""
    check_actor(config, actor)
    algorithm = config.algorithm
    if tokenizer is None:
        raise ConfigError("PPOTrainer needs the actor's tokenizer: pass tokenizer=")
    if critic is None and needs_critic(config):
        raise ConfigError(
            f"--advantage_estimator {algorithm.advantage_estimator} needs a critic, but critic is None"
        )
    if initial_model is None and needs_reference(config):
        raise ConfigError(
            f"init_kl_coef {algorithm.init_kl_coef} needs a reference: pass initial_model, or set init_kl_coef=0"
        )
    if (teacher is not None) != needs_teacher(config):
        raise ConfigError(
            "pass teacher=, and name it by --teacher_pretrain: one without the other does nothing"
        )


def check_moving_reference(initial_model: Any) -> None:
    """Raise ConfigError for a reference that cannot move."""
    if not hasattr(initial_model, "parameters"):
        raise ConfigError(
            "--ref_ema_eta and --ref_reset_steps need a reference with weights of its own, and this one is the actor "
            "without its adapters: leave them out, or pass another initial_model"
        )


def state_after(
    consumed_samples: int, steps_per_episode: int, rollout_batch_size: int
) -> TrainerState:
    """Return the state after ``consumed_samples`` prompts, counted as the seed does: steps × rollout_batch_size."""
    step = consumed_samples // rollout_batch_size
    episode, step_in_episode = divmod(step, steps_per_episode)
    return TrainerState(
        global_step=step, episode=episode, consumed_prompts=step_in_episode * rollout_batch_size
    )


def sample_texts(
    trainer: Any, prompts: Sequence[str], labels: Sequence[Any] | None = None, **options: Any
) -> list[Rollout]:
    """Return scored rollouts of prompts as texts, for ``experience_maker.make_experience_list``. Collective."""
    # Between the steps of a script nothing else brings the engine up to date.
    engine = find_engine(trainer.actor)
    if engine is None or engine.global_steps != trainer.synced:
        trainer.rollout_engine.sync_weights(trainer.actor)
        trainer.synced = 0 if engine is None else engine.global_steps
    if trainer.recorder is None and trainer.overrides("fit"):
        trainer.start_callbacks()
    trainer.text_step = max(trainer.text_step, trainer.state.global_step) + 1
    config = trainer.config
    tokenizer = trainer.tokenizer
    if options:
        config = with_generation(config, options, tokenizer)
    batch = list(prompts) if labels is None else (list(prompts), list(labels))
    records = as_prompts(batch, tokenizer, config.data.prompt_max_len)
    sampler = trainer.sampler.sampler
    sampler = replace(sampler, sampling=replace(sampling_params(config), n=sampler.sampling.n))
    sampled = sampler.score(sampler.generate(records, trainer.text_step))
    if sampled.not_finite is not None:
        raise RewardError(sampled.not_finite)
    return sampled.rollouts
