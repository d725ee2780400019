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
    """What every "None means …" option stands for. Those of a model that the run does not have stay None."""
    m, a, t, s, c = config.model, config.algorithm, config.training, config.strategy, config.checkpoint
    frozen_stage = _or(s.ref_zero_stage, 3 if s.zero_stage == 3 else 0)
    resolved = {
        "attn_implementation": "flash_attention_2" if m.flash_attn else m.attn_implementation,
        "adv_norm": whitens(config),
        "eps_clip_low": _or(a.eps_clip_low, a.eps_clip),
        "eps_clip_high": _or(a.eps_clip_high, a.eps_clip),
        "use_kl_in_reward": _or(a.use_kl_in_reward, not a.use_kl_loss),
        "train_batch_size": _or(
            t.train_batch_size, _samples(config) // t.ppo_n_minibatches if t.ppo_n_minibatches else 128
        ),
        "ref_zero_stage": frozen_stage,
        "reward_zero_stage": _or(s.reward_zero_stage, frozen_stage),
        "resume": c.resume if c.load_checkpoint else "never",
    }
    if a.init_kl_coef > 0:
        resolved["ref_pretrain"] = _or(m.ref_pretrain, m.pretrain)
    if needs_critic(config):
        reward_model = m.reward_pretrain[0] if m.reward_pretrain and not m.init_critic_from_actor else None
        stage = _or(s.critic_zero_stage, s.zero_stage)
        resolved |= {
            "critic_pretrain": _or(m.critic_pretrain, reward_model or m.pretrain),
            "critic_zero_stage": stage,
            "critic_adam_offload": _or(s.critic_adam_offload, s.adam_offload and stage > 0),
            "critic_param_offload": _or(s.critic_param_offload, s.param_offload and stage == 3),
        }
    return resolved


def contradictions(config: PPOConfig, world_size: int) -> list[str]:
    """One message per combination of options that cannot work."""
    return [
        *_missing(config),
        *_batch_sizes(config, world_size),
        *_algorithm(config),
        *_critic(config),
        *_models(config),
        *_rewards(config),
        *_data_and_evaluation(config),
        *_strategy(config, world_size),
        *_checkpoints(config),
    ]


def trainer_contradictions(config: PPOConfig, world_size: int = 1) -> list[str]:
    """Those that concern a trainer whose models and data were made by hand."""
    return [*_batch_sizes(config, world_size), *_algorithm(config)]


def needs_critic(config: PPOConfig) -> bool:
    """Whether this run trains a critic."""
    return ESTIMATOR_TRAITS[config.algorithm.advantage_estimator].needs_critic


def whitens(config: PPOConfig) -> bool:
    """Whether this run whitens advantages."""
    return _or(config.algorithm.adv_norm, ESTIMATOR_TRAITS[config.algorithm.advantage_estimator].whiten)


def _samples(config: PPOConfig) -> int:
    """Samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


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
    samples = _samples(config)
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
        problems += [
            _no_critic(flag, a.advantage_estimator)
            for flag, is_set in {
                "bootstrap_truncated": a.bootstrap_truncated,
                "freezing_actor_steps": a.freezing_actor_steps > 0,
            }.items()
            if is_set
        ]
    if not a.adv_std_norm and not whitens(config):
        problems.append(
            f"--no_adv_std_norm acts on whitening, which --advantage_estimator {a.advantage_estimator} does not do "
            "here: leave it out or set --adv_norm"
        )
    if a.use_kl_loss and a.use_kl_in_reward:
        problems.append("--use_kl_loss and --use_kl_in_reward would count the KL twice: set one of them")
    if a.init_kl_coef > 0 and not a.use_kl_loss and a.use_kl_in_reward is False:
        problems.append(
            "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
        )
    if a.init_kl_coef == 0 and (a.use_kl_loss or a.kl_target is not None):
        flag = "--use_kl_loss" if a.use_kl_loss else "--kl_target"
        problems.append(f"{flag} has no effect with --init_kl_coef 0: set a coefficient above 0")
    samples = config.rollout.rollout_batch_size * n
    if a.kl_target is not None and 0.2 * samples >= a.kl_horizon:
        problems.append(
            f"--kl_horizon {a.kl_horizon} is too short for {samples} samples per rollout: the coefficient could change "
            f"sign; set it above {0.2 * samples:g}"
        )
    clip = config.reward.reward_clip_range
    if clip and clip[0] >= clip[1]:
        problems.append(f"--reward_clip_range {clip[0]} {clip[1]}: the first must be below the second")
    if n > 1 and (config.rollout.temperature == 0 or not config.rollout.do_sample):
        problems.append("greedy rollouts give the same answer n times: set --n_samples_per_prompt 1 or a temperature")
    for flag in ("stop", "bad_words"):
        if not all(text.strip() if flag == "bad_words" else text for text in getattr(config.rollout, flag)):
            problems.append(f"--{flag} has an empty text: leave it out")
    return problems


def _no_critic(flag: str, estimator: str) -> str:
    return (
        f"--{flag} needs a critic, which --advantage_estimator {estimator} does not have: "
        "leave it out or use --advantage_estimator gae"
    )


def _critic(config: PPOConfig) -> list[str]:
    m, s = config.model, config.strategy
    if needs_critic(config):
        if m.init_critic_from_actor and m.critic_pretrain not in (None, m.pretrain):
            return ["--init_critic_from_actor and --critic_pretrain name two starts for the critic: set one"]
        return []
    flags = {
        "critic_pretrain": m.critic_pretrain is not None,
        "init_critic_from_actor": m.init_critic_from_actor,
        "critic_zero_stage": s.critic_zero_stage is not None,
        "critic_adam_offload": s.critic_adam_offload is not None,
        "critic_param_offload": s.critic_param_offload is not None,
        "save_value_network": config.checkpoint.save_value_network,
    }
    return [_no_critic(flag, config.algorithm.advantage_estimator) for flag, is_set in flags.items() if is_set]


def _models(config: PPOConfig) -> list[str]:
    m = config.model
    problems = []
    if m.flash_attn and m.attn_implementation not in ("auto", "flash_attention_2"):
        problems.append(f"--flash_attn contradicts --attn_implementation {m.attn_implementation}: set one of them")
    if m.gradient_checkpointing_use_reentrant and not m.gradient_checkpointing:
        problems.append("--gradient_checkpointing_use_reentrant has no effect without --gradient_checkpointing")
    if m.ref_pretrain is not None and config.algorithm.init_kl_coef == 0:
        problems.append("--ref_pretrain has no effect with --init_kl_coef 0: set a coefficient above 0 or leave it out")
    if m.override_config is not None and not _is_json_object(m.override_config):
        problems.append(f"--override_config must be a JSON object, not {m.override_config!r}")
    return problems


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _rewards(config: PPOConfig) -> list[str]:
    models, r = config.model.reward_pretrain, config.reward
    problems = []
    if len(models) > 1 and not r.reward_fn:
        problems.append(
            f"{len(models)} models in --reward_pretrain need --reward_fn path.py:name to combine their scores"
        )
    if r.remote_rm_url and (models or r.reward_fn):
        other = "--reward_pretrain" if models else "--reward_fn"
        problems.append(f"--remote_rm_url and {other} are two sources of reward: set one")
    if r.normalize_reward and not models:
        problems.append("--normalize_reward acts on reward models: it needs --reward_pretrain")
    servers = [url for url in r.remote_rm_url if url.startswith(("http://", "https://"))]
    for url in r.remote_rm_url:
        if "@" in url:  # not shown: what stands before it may be a password
            problems.append("--remote_rm_url with a user or password: give a token by --remote_rm_token_env instead")
        elif url not in servers and not url.split(":")[0].endswith(".py"):
            problems.append(f"--remote_rm_url {url!r} is neither an http(s) URL nor a .py file")
    if r.remote_rm_token_env is not None and not servers:
        problems.append("--remote_rm_token_env is for reward servers: it needs --remote_rm_url http(s)://...")
    return problems


def _data_and_evaluation(config: PPOConfig) -> list[str]:
    d, e = config.data, config.evaluation
    problems = []
    if d.input_template is not None and d.input_template.count("{}") != 1:
        problems.append(f"--input_template {d.input_template!r} needs exactly one {{}} for the prompt")
    if d.input_template is not None and d.apply_chat_template:
        problems.append("--input_template and --apply_chat_template both render the prompt: set one")
    if d.pretrain_data is not None and config.algorithm.ptx_coef == 0:
        problems.append("--pretrain_data has no effect with --ptx_coef 0: set a weight above 0 or leave it out")
    for flag in ("pretrain_data_probs", "output_key"):
        if getattr(d, flag) is not None and d.pretrain_data is None:
            problems.append(f"--{flag} describes --pretrain_data: set it, or leave --{flag} out")
    evaluates = {"eval_steps": e.eval_steps > 0, "eval_seconds": e.eval_seconds is not None, "val_only": e.val_only}
    evaluates |= {"eval_epochs": e.eval_epochs is not None, "best_metric": e.best_metric is not None}
    problems += [f"--{flag} needs --eval_data" for flag, is_set in evaluates.items() if is_set and not d.eval_data]
    if e.eval_n_samples > 1 and e.eval_temperature == 0:
        problems.append(
            "--eval_n_samples > 1 with --eval_temperature 0 gives the same answer n times: set a temperature"
        )
    return problems


def _strategy(config: PPOConfig, world_size: int) -> list[str]:
    s, resolved = config.strategy, resolutions(config)
    problems = []
    trained = {"": s.zero_stage}
    if needs_critic(config):
        trained["critic_"] = resolved["critic_zero_stage"]
    for role, stage in trained.items():
        if stage == 0 and config.model.bf16:
            problems.append(
                f"--bf16 keeps fp32 master weights in ZeRO, which needs --{role}zero_stage 1, 2 or 3, not 0"
            )
        if stage == 0 and getattr(s, f"{role}adam_offload"):
            problems.append(
                f"--{role}adam_offload moves sharded optimizer states: it needs --{role}zero_stage 1, 2 or 3, not 0"
            )
        if stage != 3 and getattr(s, f"{role}param_offload"):
            problems.append(f"--{role}param_offload offloads ZeRO-3 shards: it needs --{role}zero_stage 3, not {stage}")
    for role in ("ref", "reward"):
        if getattr(s, f"{role}_offload") and resolved[f"{role}_zero_stage"] != 3:
            problems.append(f"--{role}_offload offloads ZeRO-3 shards: it needs --{role}_zero_stage 3")
    if s.grad_accum_dtype == "bf16" and not config.model.bf16:
        problems.append("--grad_accum_dtype bf16 needs --bf16")
    if s.zpg > 1 and s.zero_stage != 3:
        problems.append(f"--zpg {s.zpg} partitions ZeRO-3 parameters: it needs --zero_stage 3")
    elif world_size % s.zpg:
        problems.append(f"--zpg {s.zpg} does not divide the {world_size} ranks")
    return problems


def _checkpoints(config: PPOConfig) -> list[str]:
    c = config.checkpoint
    problems = []
    if not c.load_checkpoint and c.resume not in ("auto", "never"):
        problems.append("--no_load_checkpoint contradicts --resume PATH: set one of them")
    saves = c.save_steps > 0 or c.save_epochs or c.save_seconds
    if saves and c.disable_ds_ckpt and not c.save_hf_ckpt:
        problems.append(
            "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save at --save_steps/epochs/seconds"
        )
    return problems
