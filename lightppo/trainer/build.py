"""From a config to a trainer: strategy, models, data, optimizers, in this order."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch.utils.data import DataLoader
from transformers import get_scheduler

from lightppo.config import PPOConfig
from lightppo.config.adapter_rules import reference_is_actor, uses_adapters
from lightppo.config.algorithm_rules import advice, moves_reference
from lightppo.data.datasets import PromptDataset, RolloutBatchSampler, SFTDataset
from lightppo.data.readers import blending_datasets, stage_to_local
from lightppo.errors import ConfigError
from lightppo.models.actor import Actor
from lightppo.models.loading import get_tokenizer, valid_vocab_size
from lightppo.models.lora import AdaptersOff
from lightppo.rewards.build import build_reward
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.strategy.zero3 import parameter_count
from lightppo.trainer.build_models import build_models
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.guards import check_before_loading, check_disk_space
from lightppo.trainer.options import eval_sampling_params, public_options
from lightppo.trainer.ppo_trainer import PPOTrainer
from lightppo.trainer.prompts import endless
from lightppo.trainer.schedule import steps_per_episode

TrainerT = TypeVar("TrainerT", bound=PPOTrainer)


def build_trainer(config: PPOConfig, trainer_class: type[TrainerT] = PPOTrainer) -> TrainerT:
    """Build everything a run needs, and resume where there is a checkpoint. Collective.

    Args:
        config: as from ``parse_args``; checked and resolved here once more, for configs made in code.
        trainer_class: ``PPOTrainer`` or a subclass.

    Raises:
        ConfigError: options that cannot work, or do not fit the model or the disk.
        ModelLoadError, DataError, CheckpointError: naming the flag, path and row.
    """
    strategy = build_strategy(config)
    strategy.setup_distributed()
    config.validate(strategy.world_size)
    config = config.resolved()
    check_before_loading(config)
    strategy.print(described(config))
    for line in advice(config):
        strategy.print(f"note: {line}")

    models = build_models(config, strategy)
    tokenizer = build_tokenizer(config, models.actor)
    models.actor.valid_vocab_size = valid_vocab_size(tokenizer)
    if models.reference is not None:
        models.reference.valid_vocab_size = models.actor.valid_vocab_size
    saved = {"actor": models.actor, "critic": models.critic, "ema": models.ema}
    saved |= {"reference": models.reference} if moves_reference(config) else {}
    sizes = {part: parameter_count(model, uses_adapters(config)) for part, model in saved.items() if model is not None}
    check_disk_space(config, sizes, exported=parameter_count(models.actor))

    prompts = build_prompts(config, tokenizer, strategy, config.data.prompt_data, config.data.prompt_split)
    loader = prompts_dataloader(config, prompts, strategy)
    pretrain = build_pretrain(config, tokenizer, strategy)

    steps = optimizer_steps(config, steps_per_episode(config, loader))
    actor_parts = with_optimizer(models.actor, config.training.actor_learning_rate, steps, config, strategy)
    critic_parts = with_optimizer(models.critic, config.training.critic_learning_rate, steps, config, strategy)
    (actor, actor_optim, actor_scheduler), (critic, critic_optim, critic_scheduler) = strategy.prepare(
        actor_parts, critic_parts, is_rlhf=True
    )
    # None stays None; the list keeps prepare's return type the same for any number of reward models
    reference, ema, *reward_models = strategy.prepare(models.reference, models.ema, *models.reward_models)
    if reference_is_actor(config):
        reference = AdaptersOff(actor)

    trainer = trainer_class(
        strategy,
        actor,
        critic,
        reward_models,
        reference,
        ema,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        config=config,
        tokenizer=tokenizer,
        reward_source=build_reward(config, reward_models, tokenizer, strategy),
    )
    trainer.prompts_dataloader = loader
    trainer.update.pretrain_batches = endless(pretrain) if pretrain is not None else None
    trainer.evaluator = build_evaluator(config, tokenizer, strategy, trainer)
    trainer.saves_at_end = True
    trainer.resume()
    save_run_config(config, strategy)  # only now: a refused resume leaves the run's own options in place
    return trainer


def build_strategy(config: PPOConfig) -> DeepspeedStrategy:
    """The strategy of a config; no process group yet.

    Raises:
        ConfigError: ZeRO options that exclude each other.
    """
    s, t = config.strategy, config.training
    options = {
        "seed": s.seed,
        "max_norm": t.max_norm,
        "micro_train_batch_size": t.micro_train_batch_size,
        "train_batch_size": config.resolved().training.train_batch_size,
        "zero_stage": s.zero_stage,
        "bf16": config.model.bf16,
        "zpg": s.zpg,
        "adam_offload": s.adam_offload,
        "param_offload": s.param_offload,
        "grad_accum_dtype": s.grad_accum_dtype,
        "overlap_comm": s.overlap_comm,
        "full_determinism": s.full_determinism,
        "timeout_minutes": s.dist_timeout,
    }
    try:
        return DeepspeedStrategy(**options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_tokenizer(config: PPOConfig, actor: Actor) -> Any:
    """The actor's tokenizer, checked against its embedding."""
    return get_tokenizer(
        stage_to_local(config.model.pretrain),
        actor,
        use_fast=not config.model.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_prompts(
    config: PPOConfig, tokenizer: Any, strategy: DeepspeedStrategy, paths: str, split: str, evaluation: bool = False
) -> PromptDataset:
    """Prompts of ``--prompt_data`` or ``--eval_data``, checked and tokenised."""
    d = config.data
    rows = blending_datasets(
        paths,
        None if evaluation else d.prompt_data_probs,
        strategy,
        config.strategy.seed,
        train_split=split,
        flag="--eval_data" if evaluation else "--prompt_data",
    )
    rows = rows.select(range(min(len(rows), d.eval_max_samples if evaluation else d.max_samples)))
    dataset = PromptDataset(
        rows,
        tokenizer,
        input_template=d.input_template,
        input_key=d.input_key,
        label_key=d.label_key,
        apply_chat_template=d.apply_chat_template,
        prompt_max_len=d.prompt_max_len,
        truncation=d.truncation,
        system_prompt=d.system_prompt,
        on_bad_row=d.on_bad_row,
        filter_overlong=d.filter_overlong_prompts,
        num_workers=d.data_num_workers,
    )
    strategy.print(f"{'--eval_data' if evaluation else '--prompt_data'} {paths}: {dataset.report}")
    return dataset


def prompts_dataloader(config: PPOConfig, prompts: PromptDataset, strategy: DeepspeedStrategy) -> DataLoader:
    """This rank's share of every generation batch."""
    sampler = RolloutBatchSampler(
        len(prompts),
        config.sampling.gen_batch_size or config.rollout.rollout_batch_size,
        rank=strategy.get_rank(),
        world_size=strategy.world_size,
        seed=config.strategy.seed,
    )
    # A generator of its own, so that beginning an episode, as a resumed run does, draws no number of the global one.
    generator = torch.Generator()
    return DataLoader(prompts, batch_sampler=sampler, collate_fn=PromptDataset.collate_fn, generator=generator)


def build_pretrain(config: PPOConfig, tokenizer: Any, strategy: DeepspeedStrategy) -> DataLoader | None:
    """Batches for the PTX loss."""
    d = config.data
    if d.pretrain_data is None or config.algorithm.ptx_coef == 0:
        return None
    rows = blending_datasets(
        d.pretrain_data,
        d.pretrain_data_probs,
        strategy,
        config.strategy.seed,
        train_split=d.pretrain_split,
        flag="--pretrain_data",
    )
    dataset = SFTDataset(
        rows,
        tokenizer,
        d.prompt_max_len + config.rollout.generate_max_len,
        pretrain_mode=d.output_key is None,
        input_key=d.input_key,
        output_key=d.output_key,
        on_bad_row=d.on_bad_row,
        num_workers=d.data_num_workers,
    )
    return strategy.setup_dataloader(
        dataset,
        config.training.micro_train_batch_size,
        pin_memory=d.dataloader_pin_memory,
        collate_fn=dataset.collate_fn,
    )


def build_evaluator(
    config: PPOConfig, tokenizer: Any, strategy: DeepspeedStrategy, trainer: PPOTrainer
) -> Evaluator | None:
    """Evaluation on ``--eval_data`` with the trainer's engine and rewards."""
    if config.data.eval_data is None:
        return None
    prompts = build_prompts(config, tokenizer, strategy, config.data.eval_data, config.data.eval_split, evaluation=True)
    return Evaluator(
        trainer.rollout_engine,
        trainer.reward_source,
        prompts,
        eval_sampling_params(config),
        strategy,
        threshold=config.evaluation.eval_correct_threshold,
        folder=Path(config.checkpoint.save_path) / "eval",
    )


def optimizer_steps(config: PPOConfig, rollouts_per_episode: int) -> int:
    """Optimizer steps of the whole run: what the learning-rate schedules stretch over."""
    r, t = config.rollout, config.training
    rollouts = t.total_training_steps or t.num_episodes * rollouts_per_episode
    per_rollout = math.ceil(r.rollout_batch_size * r.n_samples_per_prompt / t.train_batch_size) * t.max_epochs
    return rollouts * per_rollout


def with_optimizer(
    model: Any, learning_rate: float, steps: int, config: PPOConfig, strategy: DeepspeedStrategy
) -> tuple[Any, Any, Any]:
    """(model, optimizer, scheduler) for ``strategy.prepare``; three times ``None`` without a model."""
    if model is None:
        return None, None, None
    t = config.training
    optimizer = strategy.create_optimizer(model, lr=learning_rate, betas=t.adam_betas, weight_decay=t.l2)
    warmup = t.lr_warmup_steps if t.lr_warmup_steps is not None else math.ceil(steps * t.lr_warmup_ratio)
    name = "constant_with_warmup" if t.lr_scheduler == "constant" else t.lr_scheduler
    specific = {"min_lr_rate": t.min_lr_ratio} if name == "cosine_with_min_lr" else {}
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=specific
    )
    return model, optimizer, scheduler


def described(config: PPOConfig) -> str:
    """All options, one line per section."""
    public = public_options(config)
    lines = []
    for home in dataclasses.fields(config):
        names = [f.name for f in dataclasses.fields(getattr(config, home.name))]
        lines.append(f"{home.name}: " + " ".join(f"{name}={public[name]!r}" for name in names))
    return "\n".join(lines)


def save_run_config(config: PPOConfig, strategy: DeepspeedStrategy) -> None:
    """Keep the resolved options in ``save_path/run_config.yaml``, which ``--config`` reads. Collective.

    Raises:
        ConfigError: the folder cannot be written; on every rank.
    """
    problem = write_run_config(config) if strategy.is_rank_0() else None
    if problem := strategy.broadcast_object(problem):
        raise ConfigError(problem)


def write_run_config(config: PPOConfig) -> str | None:
    """Write run_config.yaml whole or not at all; returns what went wrong."""
    options = {n: list(v) if isinstance(v, tuple) else v for n, v in public_options(config).items() if n != "config"}
    folder = Path(config.checkpoint.save_path)
    temporary = folder / ".run_config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        os.replace(temporary, folder / "run_config.yaml")
    except OSError as error:
        return f"--save_path {folder}: cannot be written ({error.strerror})"
    return None
