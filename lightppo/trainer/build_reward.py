"""From a config to the reward source of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.micro_batches import micro_batch_spec
from lightppo.config.reward_rules import reward_plan
from lightppo.data.readers import stage_to_local
from lightppo.errors import ConfigError
from lightppo.http import read_token
from lightppo.models.critic import RewardModel
from lightppo.rewards.build import build_reward_source
from lightppo.rewards.named import function_options, planned_source, with_format_check
from lightppo.rewards.retemplate import Retemplated, RewardInputs, SameIds, check_same_ids
from lightppo.rewards.source import RewardSource
from lightppo.strategy.deepspeed import DeepspeedStrategy


def build_reward(
    config: PPOConfig, reward_models: list[RewardModel], tokenizer: Any, strategy: DeepspeedStrategy
) -> RewardSource:
    """Where rewards come from: servers, a Python file, the prepared reward models, built-in verifiers, or a sum.

    Raises:
        ConfigError: a reward file that fails when run or has no such function, a token that is missing, a verifier
            that cannot run on this machine.
    """
    r, v, plan = config.reward, config.verifier, reward_plan(config)
    function = {"reward_fn": r.reward_fn, "function_options": function_options(v)}
    server = {
        "remote_rm_url": r.remote_rm_url,
        "remote_timeout": r.remote_rm_timeout,
        "remote_retries": r.remote_rm_retries,
        "on_remote_failure": v.on_reward_failure or "error",
    }
    model = {
        "reward_models": reward_models,
        "device": strategy.device,
        "pad_token_id": tokenizer.pad_token_id,
        "micro_batch_size": micro_batch_spec(config, "reward"),
        "same_count": strategy.same_count,
    }
    try:
        if reward_models:
            model["model_options"] = {
                "inputs": reward_inputs(config, tokenizer),
                "reward_max_length": r.reward_max_length,
                "reward_truncation": r.reward_truncation,
            }
        server["remote_token"] = read_token(env=r.remote_rm_token_env)
        if plan is None:
            source = build_reward_source(**function, **server, **model)
        else:
            combine = {"reward_fn": r.reward_fn} if len(reward_models) > 1 else {}
            own = {
                "function": lambda: build_reward_source(**function),
                "server": lambda: build_reward_source(**server, function_options=function_options(v)),
                "model": lambda: build_reward_source(**model, **combine),
            }
            source = planned_source(plan, v, own)
        return with_format_check(source, v)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def reward_inputs(config: PPOConfig, tokenizer: Any) -> list[RewardInputs]:
    """What reward models read: the actor's ids, or the chat in the template and ids of their own tokenizers.

    Raises:
        ValueError: a reward model whose own tokenizer reads the actor's ids as other words.
    """
    from transformers import AutoTokenizer

    m = config.model
    options = {"trust_remote_code": m.trust_remote_code, "use_fast": not m.disable_fast_tokenizer}
    if config.reward.reward_input_tokenizer:
        folders = map(stage_to_local, config.reward.reward_input_tokenizer)
        return [Retemplated(AutoTokenizer.from_pretrained(folder, **options)) for folder in folders]
    for path in m.reward_pretrain:
        folder = stage_to_local(path)
        if Path(folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, AutoTokenizer.from_pretrained(folder, **options), path)
    return [SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id)]
