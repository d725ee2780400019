"""From a config to the loaded models of a run, each under the ZeRO configuration of its role."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from lightppo.config import PPOConfig
from lightppo.config.adapter_rules import reference_is_actor, uses_adapters
from lightppo.config.algorithm_rules import moves_reference, needs_critic
from lightppo.data.readers import stage_to_local
from lightppo.models.acceleration import check_activation_offload, compile_layers, use_liger_kernels
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.lora import LoraOptions, add_adapters
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.guards import check_lengths, check_router


@dataclass
class Models:
    """The models of a run, not yet in engines. No reference also where the actor itself is it, adapters off."""

    actor: Actor
    critic: Critic | None
    reference: Actor | None
    reward_models: list[RewardModel]
    ema: Actor | None


def build_models(config: PPOConfig, strategy: DeepspeedStrategy) -> Models:
    """Load all models, each under the ZeRO configuration of its role."""
    m, s, a = config.model, config.strategy, config.algorithm
    override = json.loads(m.override_config) if m.override_config else None
    shared = {
        "attn_implementation": m.attn_implementation,
        "trust_remote_code": m.trust_remote_code,
        "external_lib": m.external_lib,
        "seed": s.seed,
    }
    own = {**shared, "override_config": override, "init_from_scratch": m.init_from_scratch}
    # The reference too, so that it is what the actor without adapters would be; scores of reward models stay exact.
    own["load_in_4bit"] = config.adapter.load_in_4bit
    several = config.rollout.n_samples_per_prompt > 1
    rows = {
        "packing_samples": config.training.packing_samples,
        "share_prompts": config.training.share_prompts and several,
    }
    policy = {"temperature": config.rollout.temperature or 1.0, **rows}

    actor_ds = strategy.get_ds_train_config(is_actor=True)
    actor = Actor(stage_to_local(m.pretrain), bf16=m.bf16, ds_config=actor_ds, **policy, **own)
    check_lengths(config, actor.hf_model.config)
    check_router(config, actor)
    critic = None
    if needs_critic(config):
        critic = Critic(
            stage_to_local(m.critic_pretrain),
            bf16=m.bf16,
            ds_config=strategy.get_ds_train_config(
                zero_stage=s.critic_zero_stage,
                adam_offload=s.critic_adam_offload,
                param_offload=s.critic_param_offload,
            ),
            **rows,
            value_head_prefix=m.value_head_prefix,
            init_value_head=True if m.init_critic_from_actor else None,
            **own,
        )
    add_lora(config, actor, critic)
    reference = None
    if a.init_kl_coef > 0 and not reference_is_actor(config):
        # One that moves is fp32: small steps would vanish in bf16.
        bf16 = m.bf16 and not moves_reference(config)
        frozen = strategy.get_ds_eval_config(s.ref_offload, zero_stage=s.ref_zero_stage, bf16=bf16)
        reference = Actor(
            stage_to_local(m.ref_pretrain), bf16=bf16, ds_config=frozen, flag="--ref_pretrain", **policy, **own
        )
    reward_models = [
        RewardModel(
            stage_to_local(path),
            bf16=m.bf16,
            ds_config=strategy.get_ds_eval_config(s.reward_offload, zero_stage=s.reward_zero_stage),
            normalize_reward=config.reward.normalize_reward,
            value_head_prefix=m.value_head_prefix,
            **shared,
        )
        for path in m.reward_pretrain
    ]
    ema = None
    if a.enable_ema:
        # fp32: at a decay near 1 the steps of the average would vanish in bf16
        ema_ds = strategy.get_ds_eval_config(s.ref_offload, zero_stage=s.ref_zero_stage, bf16=False)
        ema = Actor(stage_to_local(m.pretrain), ds_config=ema_ds, **own)
    models = Models(actor, critic, reference, reward_models, ema)
    accelerate(models, config, strategy.device)
    return models


def accelerate(models: Models, config: PPOConfig, device: torch.device) -> None:
    """Gradient checkpointing, offloaded activations, other kernels, compiled layers: as the options ask.

    Raises:
        ModelLoadError: one that this machine or model cannot do.
    """
    m, trained = config.model, [model for model in (models.actor, models.critic) if model is not None]
    scoring = [*trained, *([models.reference] if models.reference is not None else [])]
    if m.activation_offload:
        check_activation_offload(device)
    for model in trained:
        if m.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": m.gradient_checkpointing_use_reentrant})
        model.activation_offload = m.activation_offload
    for model in scoring:
        if m.use_liger_kernel:
            use_liger_kernels(model.hf_model)
        if m.torch_compile:
            compile_layers(model.hf_model)


def add_lora(config: PPOConfig, *models: Actor | Critic | None) -> None:
    """Adapters for actor and critic, where ``--lora_rank`` asks for them; from here on only these train."""
    a = config.adapter
    if uses_adapters(config):
        options = LoraOptions(a.lora_rank, a.lora_alpha, a.lora_dropout, a.target_modules)
        for model in models:
            if model is not None:
                add_adapters(model, options, config.strategy.seed)
