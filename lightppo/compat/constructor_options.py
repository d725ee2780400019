"""Options of a trainer that a script builds: ``strategy.args``, and keywords of LightRFT's constructor."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.contradictions import condition_text, facts_of
from lightppo.config.options import all_options
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.suggestions import nearest

# What the constructor means where it is given nothing; the command line has defaults of its own.
CONSTRUCTOR_DEFAULTS: dict[str, Any] = {
    "ema_beta": 0.992,
    "init_kl_coef": 0.001,
    "kl_target": None,
    "kl_horizon": 10_000,
    "ptx_coef": 0.0,
    "micro_train_batch_size": 8,
    "buffer_limit": 0,
    "buffer_cpu_offload": True,
    "eps_clip": 0.2,
    "value_clip": 0.2,
    "micro_rollout_batch_size": 8,
    "gradient_checkpointing": False,
    "max_epochs": 1,
    "max_norm": 1.0,
    "prompt_max_len": 128,
    "dataloader_pin_memory": True,
    "save_hf_ckpt": False,
    "disable_ds_ckpt": False,
}

# Generation options, some by the name that Hugging Face's generate gives them.
_RENAMED = {"max_new_tokens": "generate_max_len"}
_SPECIAL = ("max_length", "eos_token_id", "pad_token_id")
_GENERATION = [
    "max_new_tokens",
    "generate_max_len",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "gamma",
    "lambd",
]
_GENERATION += _SPECIAL
# What else the constructor takes by name: for the hint at a misspelt one.
_PARAMETERS = (
    "config",
    "tokenizer",
    "reward_fn",
    "remote_rm_url",
    "reward_source",
    "rollout_engine",
    "evaluator",
)


def constructor_config(
    config: PPOConfig | None, strategy: Any, options: Mapping[str, Any], tokenizer: Any
) -> PPOConfig:
    """Return the resolved config of a trainer: the one given, or one from ``strategy.args`` and keyword options.

    Raises:
        ConfigError: both were given, an option is unknown, or options contradict each other or the strategy.
    """
    if config is None:
        if options.get("max_norm", strategy.max_norm) != strategy.max_norm:
            max_norm = options["max_norm"]
            raise ConfigError(
                f"max_norm {max_norm} is not the strategy's ({strategy.max_norm}): set it there"
            )
        args = getattr(strategy, "args", None)
        return config_from_options(
            args, options, tokenizer, strategy.world_size, say=strategy.print
        )
    if options:
        raise ConfigError(f"options {sorted(options)} beside config: put them into the config")
    config.validate(strategy.world_size, by_hand=True)
    return config.resolved()


def config_from_options(
    args: Any,
    options: Mapping[str, Any],
    tokenizer: Any = None,
    world_size: int = 1,
    say: Callable[[str], None] = print,
) -> PPOConfig:
    """Return the resolved config of a trainer that is built by hand.

    It tells what a script hands over in vain, such as settings of a critic that is not there. Options win over
    ``args``; the options of ``CONSTRUCTOR_DEFAULTS`` have their default also where ``args`` names
    them, as in the seed. Attributes of ``args`` that are no option of lightppo belong to the script.

    Raises:
        ConfigError: on an unknown option (the nearest known one is named), or options that contradict each other.
    """
    _refuse_unknown(
        "PPOTrainer", options, [*CONSTRUCTOR_DEFAULTS, *_GENERATION], parameter_names=_PARAMETERS
    )
    values = options_of_args(args, all_options()) | CONSTRUCTOR_DEFAULTS
    if "eps_clip" in options:
        values |= {"eps_clip_low": None, "eps_clip_high": None}
    elif {"policy_loss", "advantage_estimator", "eps_clip_low", "eps_clip_high"} & values.keys():
        values["eps_clip"] = None  # then what belongs to the loss: 0.2 for PPO's
    if values.get("advantage_estimator") == "rloo" and values.get("adv_norm") is None:
        # The seed's fit whitens whatever is not group_norm; so does OpenRLHF's of that time.
        values["adv_norm"] = True
    config = _with_options(PPOConfig(), values | options, tokenizer)
    if idle_conditions := idle_options(config):
        say(
            "without effect here: "
            + "; ".join(f"{name} needs {condition}" for name, condition in idle_conditions.items())
        )
        defaults = PPOConfig().flat()
        config = config.with_options(**{name: defaults[name] for name in idle_conditions})
    config.validate(world_size, by_hand=True)
    return config.resolved()


def idle_options(config: PPOConfig) -> dict[str, str]:
    """Return what scripts hand over whatever they train, and this run has no use for: {name: what it needs}."""
    values = config.flat()
    facts = facts_of(config)
    return {
        option.name: condition_text(condition)
        for option in all_options()
        for condition in option.needs
        if condition in ("critic", "discounting", "clipping")
        and option.is_set(values[option.name])
        and not facts[condition]
    }


def with_generation(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> PPOConfig:
    """Return the config with generation options as ``make_experience_list(prompts, labels, **options)`` takes them.

    Raises:
        ConfigError: an option that does not say how to sample, or a value out of range.
    """
    _refuse_unknown("generation", options, _GENERATION)
    return _with_options(config, options, tokenizer)


def take_schedule(config: PPOConfig, args: Any, steps_per_episode: int) -> PPOConfig:
    """Return the config with the schedule of ``fit(args, ...)``; ``args`` gets what the seed's ``fit`` puts there."""
    values = options_of_args(args, all_options())
    names = (
        "num_episodes",
        "save_steps",
        "eval_steps",
        "logging_steps",
        "ckpt_path",
        "max_ckpt_num",
        "max_ckpt_mem",
    )
    fill_schedule(args, steps_per_episode)
    return config.with_options(**{name: values[name] for name in names if name in values})


def fill_schedule(args: Any, steps_per_episode: int) -> None:
    """Put into ``args`` what the seed's ``fit`` puts there for -1."""
    for name, replacement in (("eval_steps", steps_per_episode), ("save_steps", float("inf"))):
        if getattr(args, name, None) == -1:
            setattr(args, name, replacement)


def script_args(strategy: Any, config: PPOConfig) -> Any:
    """Return ``strategy.args``, or a namespace of all options, which overrides in the seed's style read."""
    args = getattr(strategy, "args", None)
    if args is None:
        return argparse.Namespace(**config.flat())
    return args


def generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's options that say how to sample: the seed's ``generate_kwargs``."""
    return {name: value for name, value in options.items() if name in _GENERATION}


def _refuse_unknown(
    receiver: str,
    options: Iterable[str],
    known_names: Sequence[str],
    parameter_names: Sequence[str] = (),
) -> None:
    for name in options:
        if name not in known_names:
            # A slip in a name of the constructor itself comes before names that mean the same.
            names = get_close_matches(name, known_names, cutoff=0.9) or [
                *known_names,
                *parameter_names,
            ]
            flags = [f"--{known_name}" for known_name in names]
            suggestion = nearest(f"--{name}", flags, "flag").replace("'--", "'")
            raise ConfigError(f"{receiver} got an unknown option {name!r}{suggestion}")


def options_of_args(args: Any, options: Iterable[Option]) -> dict[str, Any]:
    """Return those attributes of a namespace that are options, in our types; None counts only where it is a value."""
    optional = {option.name: option.may_be_none for option in options}
    values = {
        name: value
        for name, value in ({} if args is None else vars(args)).items()
        if name in optional and (value is not None or optional[name])
    }
    for name in ("reward_pretrain", "remote_rm_url"):  # the seed separates them by commas
        if isinstance(values.get(name), str):
            values[name] = tuple(part for part in values[name].split(",") if part)
    # The seed passes the key here; wandb takes it from the environment.
    if isinstance(values.get("use_wandb"), str):
        values["use_wandb"] = bool(values["use_wandb"])
    for name in ("save_steps", "eval_steps"):
        if values.get(name) == float("inf"):
            values[name] = -1
    return values


def _with_options(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> PPOConfig:
    """Make options of ours of ``max_new_tokens``, ``max_length``, ``eos_token_id`` and ``pad_token_id``."""
    config = config.with_options(
        **{
            _RENAMED.get(name, name): value
            for name, value in options.items()
            if name not in _SPECIAL
        }
    )
    changes: dict[str, Any] = {}
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        prompt_length = config.data.prompt_max_len
        changes["generate_max_len"] = options["max_length"] - prompt_length
        if changes["generate_max_len"] < 1:
            max_length = options["max_length"]
            raise ConfigError(
                f"max_length {max_length} leaves no room after prompt_max_len {prompt_length}: set max_new_tokens"
            )
    eos_token_id = options.get("eos_token_id")
    if eos_token_id is None:
        eos_ids = ()
    elif isinstance(eos_token_id, (list, tuple)):
        eos_ids = tuple(eos_token_id)
    else:
        eos_ids = (eos_token_id,)
    tokenizer_eos_id = getattr(tokenizer, "eos_token_id", None)
    changes["stop_token_ids"] = (
        *config.rollout.stop_token_ids,
        *(token_id for token_id in eos_ids if token_id != tokenizer_eos_id),
    )
    pad_token_id = options.get("pad_token_id")
    if (
        pad_token_id is not None
        and tokenizer is not None
        and pad_token_id != (tokenizer_pad_id := tokenizer.pad_token_id)
    ):
        raise ConfigError(
            f"pad_token_id {pad_token_id} is not the tokenizer's ({tokenizer_pad_id}): set tokenizer.pad_token"
        )
    return config.with_options(**changes)
