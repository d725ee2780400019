"""The relations between options: what ``None`` stands for, and which combinations cannot work.

Pure functions of a ``PPOConfig``. Whatever can be known from the options alone is refused here, before anything loads.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from lightppo.algorithms.traits import ESTIMATOR_TRAITS

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What every "None means …" option stands for."""
    m, a, t, s, c = config.model, config.algorithm, config.training, config.strategy, config.checkpoint
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    reward_model = m.reward_pretrain[0] if m.reward_pretrain and not m.init_critic_from_actor else None
    frozen_stage = _or(s.ref_zero_stage, 3 if s.zero_stage == 3 else 0)
    return {
        "ref_pretrain": _or(m.ref_pretrain, m.pretrain),
        "critic_pretrain": _or(m.critic_pretrain, reward_model or m.pretrain),
        "attn_implementation": "flash_attention_2" if m.flash_attn else m.attn_implementation,
        "adv_norm": _or(a.adv_norm, ESTIMATOR_TRAITS[a.advantage_estimator].whiten),
        "eps_clip_low": _or(a.eps_clip_low, a.eps_clip),
        "eps_clip_high": _or(a.eps_clip_high, a.eps_clip),
        "use_kl_in_reward": _or(a.use_kl_in_reward, not a.use_kl_loss),
        "train_batch_size": _or(t.train_batch_size, samples // t.ppo_n_minibatches if t.ppo_n_minibatches else 128),
        "critic_zero_stage": _or(s.critic_zero_stage, s.zero_stage),
        "ref_zero_stage": frozen_stage,
        "reward_zero_stage": _or(s.reward_zero_stage, frozen_stage),
        "critic_adam_offload": _or(s.critic_adam_offload, s.adam_offload),
        "critic_param_offload": _or(s.critic_param_offload, s.param_offload),
        "resume": c.resume if c.load_checkpoint else "never",
    }


def contradictions(config: PPOConfig, world_size: int) -> list[str]:
    """One message per combination of options that cannot work."""
    return [
        *_missing(config),
        *_batch_sizes(config, world_size),
        *_algorithm(config),
        *_models_and_rewards(config),
        *_strategy_and_checkpoints(config),
    ]


def trainer_contradictions(config: PPOConfig, world_size: int = 1) -> list[str]:
    """Those that concern a trainer whose models and data were made by hand."""
    return [*_batch_sizes(config, world_size), *_algorithm(config)]


def needs_critic(config: PPOConfig) -> bool:
    """Whether this run trains a critic."""
    return ESTIMATOR_TRAITS[config.algorithm.advantage_estimator].needs_critic


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _missing(config: PPOConfig) -> list[str]:
    problems = []
    if not config.model.pretrain:
        problems.append("--pretrain is required: the path or hub name of the causal LM to train")
    if not config.data.prompt_data:
        problems.append("--prompt_data is required: a file, folder or hub name with prompts")
    r = config.reward
    if not (config.model.reward_pretrain or r.remote_rm_url or r.reward_fn):
        problems.append("no reward: set --reward_fn path.py, --remote_rm_url URL or --reward_pretrain MODEL")
    return problems


def _batch_sizes(config: PPOConfig, world_size: int) -> list[str]:
    r, t = config.rollout, config.training
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    problems = []
    if t.ppo_n_minibatches and samples % t.ppo_n_minibatches:
        problems.append(
            f"--ppo_n_minibatches {t.ppo_n_minibatches} does not divide the {samples} samples of a rollout "
            f"(--rollout_batch_size {r.rollout_batch_size} × --n_samples_per_prompt {r.n_samples_per_prompt})"
        )
    elif t.ppo_n_minibatches and t.train_batch_size and t.train_batch_size * t.ppo_n_minibatches != samples:
        problems.append(
            f"--train_batch_size {t.train_batch_size} and --ppo_n_minibatches {t.ppo_n_minibatches} disagree for "
            f"{samples} samples per rollout: set one of them"
        )
    else:
        batch = resolutions(config)["train_batch_size"]
        if samples % batch:
            fitting = math.gcd(samples, batch)
            problems.append(
                f"--train_batch_size {batch} does not divide the {samples} samples of a rollout "
                f"(--rollout_batch_size {r.rollout_batch_size} × --n_samples_per_prompt {r.n_samples_per_prompt}); "
                f"set it to a divisor such as {fitting}, or set --ppo_n_minibatches"
            )
        elif batch % world_size:
            problems.append(f"--train_batch_size {batch} is not divisible by the {world_size} ranks")
    if r.rollout_batch_size % world_size:
        problems.append(
            f"--rollout_batch_size {r.rollout_batch_size} is not divisible by the {world_size} ranks; "
            f"set it to a multiple of {world_size}"
        )
    if r.min_new_tokens > r.generate_max_len:
        problems.append(f"--min_new_tokens {r.min_new_tokens} exceeds --generate_max_len {r.generate_max_len}")
    if 0 < t.buffer_limit < samples // world_size:
        problems.append(
            f"--buffer_limit {t.buffer_limit} would lose samples: one rollout has {samples // world_size} per rank; "
            "set 0 or at least that"
        )
    return problems


def _algorithm(config: PPOConfig) -> list[str]:
    a, n = config.algorithm, config.rollout.n_samples_per_prompt
    traits = ESTIMATOR_TRAITS[a.advantage_estimator]
    problems = []
    if n < traits.min_group_size:
        problems.append(
            f"--advantage_estimator {a.advantage_estimator} compares samples of one prompt: "
            f"set --n_samples_per_prompt to at least {traits.min_group_size}, not {n}"
        )
    if not traits.needs_critic:
        critic_flags = {
            "critic_pretrain": config.model.critic_pretrain is not None and not _is_resolved_default(config),
            "init_critic_from_actor": config.model.init_critic_from_actor,
            "bootstrap_truncated": a.bootstrap_truncated,
            "save_value_network": config.checkpoint.save_value_network,
            "freezing_actor_steps": a.freezing_actor_steps > 0,
        }
        problems += [
            f"--{flag} needs a critic, which --advantage_estimator {a.advantage_estimator} does not have: "
            "leave it out or use --advantage_estimator gae"
            for flag, is_set in critic_flags.items()
            if is_set
        ]
    if a.use_kl_loss and a.use_kl_in_reward:
        problems.append("--use_kl_loss and --use_kl_in_reward would count the KL twice: set one of them")
    resolved = resolutions(config)
    if a.init_kl_coef > 0 and not a.use_kl_loss and not resolved["use_kl_in_reward"]:
        problems.append(
            "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
        )
    if a.init_kl_coef == 0 and (a.use_kl_loss or a.kl_target is not None):
        flag = "--use_kl_loss" if a.use_kl_loss else "--kl_target"
        problems.append(f"{flag} has no effect with --init_kl_coef 0: set a coefficient above 0")
    if config.reward.reward_clip_range and config.reward.reward_clip_range[0] >= config.reward.reward_clip_range[1]:
        problems.append(f"--reward_clip_range {config.reward.reward_clip_range}: the first must be below the second")
    if config.rollout.n_samples_per_prompt > 1 and (config.rollout.temperature == 0 or not config.rollout.do_sample):
        problems.append("greedy rollouts give the same answer n times: set --n_samples_per_prompt 1 or a temperature")
    if a.enable_ema and config.checkpoint.save_path == config.checkpoint.ckpt_path:
        problems.append("--save_path and --ckpt_path must differ")
    return problems


def _is_resolved_default(config: PPOConfig) -> bool:
    """A resolved config carries the critic's default path even where no critic is trained."""
    m = config.model
    return m.critic_pretrain in (m.pretrain, *m.reward_pretrain[:1])


def _models_and_rewards(config: PPOConfig) -> list[str]:
    m, r = config.model, config.reward
    problems = []
    if m.flash_attn and m.attn_implementation not in ("auto", "flash_attention_2"):
        problems.append(f"--flash_attn contradicts --attn_implementation {m.attn_implementation}: set one of them")
    if m.gradient_checkpointing_use_reentrant and not m.gradient_checkpointing:
        problems.append("--gradient_checkpointing_use_reentrant has no effect without --gradient_checkpointing")
    if m.init_critic_from_actor and m.critic_pretrain not in (None, m.pretrain):
        problems.append("--init_critic_from_actor and --critic_pretrain name two starts for the critic: set one")
    if m.override_config is not None:
        try:
            valid = isinstance(json.loads(m.override_config), dict)
        except json.JSONDecodeError:
            valid = False
        if not valid:
            problems.append(f"--override_config must be a JSON object, not {m.override_config!r}")
    if len(m.reward_pretrain) > 1 and not r.reward_fn:
        problems.append(
            f"{len(m.reward_pretrain)} models in --reward_pretrain need --reward_fn path.py:name to combine their scores"
        )
    if r.remote_rm_url and (m.reward_pretrain or r.reward_fn):
        other = "--reward_pretrain" if m.reward_pretrain else "--reward_fn"
        problems.append(f"--remote_rm_url and {other} are two sources of reward: set one")
    if r.normalize_reward and not m.reward_pretrain:
        problems.append("--normalize_reward acts on reward models: it needs --reward_pretrain")
    for url in r.remote_rm_url:
        if not (url.startswith(("http://", "https://")) or url.split(":")[0].endswith(".py")):
            problems.append(f"--remote_rm_url {url!r} is neither an http(s) URL nor a .py file")
    if config.data.input_template is not None and "{}" not in config.data.input_template:
        problems.append(f"--input_template {config.data.input_template!r} has no {{}} for the prompt")
    if config.data.input_template is not None and config.data.apply_chat_template:
        problems.append("--input_template and --apply_chat_template both render the prompt: set one")
    return problems


def _strategy_and_checkpoints(config: PPOConfig) -> list[str]:
    s, c, resolved = config.strategy, config.checkpoint, resolutions(config)
    problems = []
    trained = {"zero_stage": s.zero_stage}
    if needs_critic(config):
        trained["critic_zero_stage"] = resolved["critic_zero_stage"]
    for flag, stage in trained.items():
        if stage == 0 and config.model.bf16:
            problems.append(f"--bf16 keeps fp32 master weights in ZeRO, which needs --{flag} 1, 2 or 3, not 0")
    for flag, stage in (("adam_offload", s.zero_stage), ("critic_adam_offload", resolved["critic_zero_stage"])):
        if getattr(s, flag) and stage == 0:
            problems.append(f"--{flag} moves sharded optimizer states: it needs ZeRO stage 1, 2 or 3, not 0")
    if s.grad_accum_dtype == "bf16" and not config.model.bf16:
        problems.append("--grad_accum_dtype bf16 needs --bf16")
    for flag, stage in (("param_offload", s.zero_stage), ("critic_param_offload", resolved["critic_zero_stage"])):
        if getattr(s, flag) and stage != 3:
            problems.append(f"--{flag} offloads ZeRO-3 shards: it needs --zero_stage 3, not {stage}")
    for flag, stage in (("ref_offload", "ref_zero_stage"), ("reward_offload", "reward_zero_stage")):
        if getattr(s, flag) and resolved[stage] != 3:
            problems.append(f"--{flag} offloads ZeRO-3 shards: it needs --{stage} 3")
    if s.zpg > 1 and s.zero_stage != 3:
        problems.append(f"--zpg {s.zpg} partitions ZeRO-3 parameters: it needs --zero_stage 3")
    if not c.load_checkpoint and c.resume not in ("auto", "never"):
        problems.append("--no_load_checkpoint contradicts --resume PATH: set one of them")
    saves = c.save_steps > 0 or c.save_epochs or c.save_seconds
    if saves and c.disable_ds_ckpt and not c.save_hf_ckpt:
        problems.append(
            "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save at --save_steps/epochs/seconds"
        )
    e, d = config.evaluation, config.data
    if e.val_only and not d.eval_data:
        problems.append("--val_only needs --eval_data")
    if e.eval_n_samples > 1 and e.eval_temperature == 0:
        problems.append(
            "--eval_n_samples > 1 with --eval_temperature 0 gives the same answer n times: set a temperature"
        )
    return problems
