"""Checks before anything large is loaded: lengths against the model, data paths, room on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.adapter_rules import uses_adapters
from lightppo.config.reward_rules import reward_plan
from lightppo.data.readers import check_data_paths
from lightppo.errors import ConfigError
from lightppo.http import read_token
from lightppo.models.actor import Actor
from lightppo.models.lora import check_peft
from lightppo.models.quantised import check_bitsandbytes
from lightppo.rewards.build import check_reward_options


def check_before_loading(config: PPOConfig) -> None:
    """Paths and addresses that can be looked at without loading anything.

    Raises:
        DataError: a data path that is missing or of no known form; names the flag.
        ConfigError: a reward address, file or token that is missing or of no known form; names the flag.
        ModelLoadError: ``--lora_rank`` without peft, ``--load_in_4bit`` without bitsandbytes.
    """
    if uses_adapters(config):
        check_peft()
    if config.adapter.load_in_4bit:
        check_bitsandbytes()
    d = config.data
    check_data_paths(d.prompt_data, d.prompt_data_probs, flag="--prompt_data")
    if d.eval_data:
        check_data_paths(d.eval_data, flag="--eval_data")
    if d.pretrain_data:
        check_data_paths(d.pretrain_data, d.pretrain_data_probs, flag="--pretrain_data")
    try:
        if reward_plan(config) is None:
            check_reward_options(
                remote_rm_url=config.reward.remote_rm_url,
                reward_fn=config.reward.reward_fn,
                n_reward_models=len(config.model.reward_pretrain),
            )
        read_token(env=config.reward.remote_rm_token_env)
        read_token(env=config.engine.vllm_server_api_key_env, option="--vllm_server_api_key_env")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_lengths(config: PPOConfig, model_config: Any) -> None:
    """Prompt and response must fit the model's positions.

    Raises:
        ConfigError: naming the flags and the model's limit.
    """
    limit = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompt, response = config.data.prompt_max_len, config.rollout.generate_max_len
    if limit is not None and prompt + response > limit:
        raise ConfigError(
            f"--prompt_max_len {prompt} + --generate_max_len {response} = {prompt + response} tokens, but "
            f"{config.model.pretrain} has {limit} positions: lower one of them to fit"
        )


def check_router(config: PPOConfig, actor: Actor) -> None:
    """``--aux_loss_coef`` needs a mixture of experts.

    Raises:
        ConfigError: the actor is none.
    """
    if config.loss.aux_loss_coef > 0:
        try:
            actor.check_router()
        except ValueError as error:
            raise ConfigError(str(error)) from error


def check_disk_space(config: PPOConfig, parameters: dict[str, int], exported: int | None = None) -> None:
    """Room for the checkpoints that will be kept, before the first one is lost to a full disk.

    Args:
        config: what is saved, and how many are kept.
        parameters: number of parameters per model that its checkpoints hold (with LoRA those that train). Trained ones
            have weights, fp32 master weights and two fp32 moments, the moving average (``ema``) and a moving
            ``reference`` fp32 weights.
        exported: number of parameters in an export of the actor; ``None``: those of its checkpoint.

    Raises:
        ConfigError: naming the folder, what is needed and what is free.
    """
    c = config.checkpoint
    exports = c.hf_save_steps > 0 or c.hf_save_epochs or c.hf_save_seconds or config.evaluation.best_metric
    saves = c.save_steps > 0 or c.save_epochs or c.save_seconds
    weight = 2 if config.model.bf16 else 4
    state = export = 0
    if saves and not c.disable_ds_ckpt:
        state = sum(n * (4 if part in ("ema", "reference") else weight + 12) for part, n in parameters.items())
    if (saves and c.save_hf_ckpt) or exports:
        export = (parameters["actor"] if exported is None else exported) * weight
    # One more than are kept: an old checkpoint goes only when the new one is whole.
    needed = min((c.max_ckpt_num + 1) * (state + export), c.max_ckpt_mem * 1e9 + state + export)
    folder = Path(c.ckpt_path)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--ckpt_path {c.ckpt_path}: {c.max_ckpt_num} checkpoints need about {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: lower --max_ckpt_num or --max_ckpt_mem, or choose another disk"
        )
