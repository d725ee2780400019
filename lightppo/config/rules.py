"""The relations between options: what ``None`` stands for, and which combinations cannot work.

Pure functions of a ``PPOConfig``. Whatever can be known from the options alone is refused here, before anything loads.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from lightppo.config import (
    adapter_rules,
    algorithm_rules,
    engine_rules,
    micro_batches,
    old_log_probs,
    reward_rules,
    sampling_rules,
)
from lightppo.config.algorithm_rules import needs_critic, no_critic

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What every "None means …" option stands for. Those of a model that the run does not have stay None."""
    m, a, t, s, c = config.model, config.algorithm, config.training, config.strategy, config.checkpoint
    frozen_stage = _or(s.ref_zero_stage, 3 if s.zero_stage == 3 else 0)
    resolved = algorithm_rules.resolutions(config) | sampling_rules.resolutions(config)
    resolved |= adapter_rules.resolutions(config)
    resolved |= {
        "attn_implementation": "flash_attention_2" if m.flash_attn else m.attn_implementation,
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
        *_shared_prompts(config),
        *micro_batches.problems(config, _absent_calls(config)),
        *_stop_texts(config),
        *sampling_rules.problems(config, world_size),
        *engine_rules.problems(config, world_size),
        *algorithm_rules.problems(config),
        *old_log_probs.problems(config),
        *adapter_rules.problems(config),
        *_critic(config),
        *_models(config),
        *reward_rules.problems(config),
        *_data_and_evaluation(config),
        *_strategy(config, world_size),
        *_checkpoints(config),
    ]


def trainer_contradictions(config: PPOConfig, world_size: int = 1) -> list[str]:
    """Those that concern a trainer whose models and data were made by hand."""
    return [
        *_batch_sizes(config, world_size),
        *_shared_prompts(config),
        *_stop_texts(config),
        *sampling_rules.problems(config, world_size),
        *engine_rules.problems(config, world_size),
        *algorithm_rules.problems(config),
        *old_log_probs.problems(config),
    ]


def _samples(config: PPOConfig) -> int:
    """Samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _absent_calls(config: PPOConfig) -> dict[str, str]:
    """Calls of --micro_batch_specs that the run does not make → why."""
    absent = {}
    if not needs_critic(config):
        absent |= dict.fromkeys(
            ("critic", "critic_train"), f"--advantage_estimator {config.algorithm.advantage_estimator} has no critic"
        )
    if config.algorithm.init_kl_coef == 0:
        absent["reference"] = "--init_kl_coef 0 needs no reference"
    if not config.model.reward_pretrain:
        absent["reward"] = "it needs --reward_pretrain"
    return absent


def _missing(config: PPOConfig) -> list[str]:
    problems = []
    if not config.model.pretrain:
        problems.append("--pretrain is required: the path or hub name of the causal LM to train")
    if not config.data.prompt_data:
        problems.append("--prompt_data is required: a file, folder or hub name with prompts")
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


def _shared_prompts(config: PPOConfig) -> list[str]:
    t, problems = config.training, []
    if not t.share_prompts and not t.packing_samples:
        problems.append("--no_share_prompts has no effect without --packing_samples: no prompt is shared; leave it out")
    if t.shuffle == "groups" and config.rollout.n_samples_per_prompt == 1:
        problems.append(
            "--shuffle groups keeps the samples of a prompt together, and --n_samples_per_prompt 1 has no two: set it "
            "to at least 2, or leave --shuffle out"
        )
    return problems


def _stop_texts(config: PPOConfig) -> list[str]:
    r = config.rollout
    empty = {"stop": not all(r.stop), "bad_words": not all(text.strip() for text in r.bad_words)}
    return [f"--{flag} has an empty text: leave it out" for flag, is_empty in empty.items() if is_empty]


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
    return [no_critic(flag, config.algorithm.advantage_estimator) for flag, is_set in flags.items() if is_set]


def _models(config: PPOConfig) -> list[str]:
    m = config.model
    problems = []
    if m.flash_attn and m.attn_implementation not in ("auto", "flash_attention_2"):
        problems.append(f"--flash_attn contradicts --attn_implementation {m.attn_implementation}: set one of them")
    if m.gradient_checkpointing_use_reentrant and not m.gradient_checkpointing:
        problems.append("--gradient_checkpointing_use_reentrant has no effect without --gradient_checkpointing")
    stages = (config.strategy.zero_stage, resolutions(config)["ref_zero_stage"], config.strategy.critic_zero_stage)
    if m.torch_compile and 3 in stages:
        problems.append("--torch_compile cannot see through ZeRO-3's hooks: use a lower --zero_stage, or leave it out")
    if m.torch_compile and m.gradient_checkpointing_use_reentrant:
        problems.append("--torch_compile needs non-reentrant gradient checkpointing: leave one out")
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
    if s.overlap_comm and s.zero_stage < 2:
        problems.append(f"--overlap_comm reduces shards of gradients: it needs --zero_stage 2 or 3, not {s.zero_stage}")
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
