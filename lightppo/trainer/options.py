"""The seed's way of making a trainer: ``strategy.args`` and keyword options → one typed config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightppo.config import PPOConfig, rules
from lightppo.config.algorithm_rules import moves_reference, needs_critic
from lightppo.config.fields import nearest
from lightppo.config.ppo import all_options
from lightppo.config.values import alternatives, kind_of
from lightppo.errors import ConfigError
from lightppo.http import shown_url
from lightppo.models.lora import AdaptersOff
from lightppo.rollout.engine import SamplingParams

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

# Generation options by the name that Hugging Face's generate gives them.
_GENERATION_NAMES = {"max_new_tokens": "generate_max_len"}
_GENERATION_OPTIONS = (
    "generate_max_len",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "gamma",
    "lambd",
)
_SPECIAL = ("max_length", "eos_token_id", "pad_token_id")
# What else the constructor takes by name: for the hint at a misspelt one.
_PARAMETERS = ("config", "tokenizer", "reward_fn", "remote_rm_url", "reward_source", "rollout_engine", "evaluator")


def config_from_options(args: Any, options: Mapping[str, Any], tokenizer: Any = None, world_size: int = 1) -> PPOConfig:
    """Config of a trainer that is built by hand.

    Options win over ``args``; the options of ``CONSTRUCTOR_DEFAULTS`` have their default also where ``args`` names
    them, as in the seed. Attributes of ``args`` that are no option of lightppo belong to the script and are left alone.

    Args:
        args: namespace of the script (``strategy.args``), or ``None``.
        options: keyword options of the constructor.
        tokenizer: its special tokens are checked against ``eos_token_id`` and ``pad_token_id``.
        world_size: number of ranks, for the batch sizes.

    Raises:
        ConfigError: on an unknown option (the nearest known one is named), or options that contradict each other.
    """
    known = [*CONSTRUCTOR_DEFAULTS, *_GENERATION_NAMES, *_GENERATION_OPTIONS, *_SPECIAL]
    for name in options:
        if name not in known:
            raise ConfigError(f"PPOTrainer got an unknown option {name!r}{nearest(name, [*known, *_PARAMETERS])}")
    values = _options_of(args) | CONSTRUCTOR_DEFAULTS
    if "eps_clip" in options:
        values |= {"eps_clip_low": None, "eps_clip_high": None}
    elif {"policy_loss", "advantage_estimator", "eps_clip_low", "eps_clip_high"} & values.keys():
        values["eps_clip"] = None  # then what belongs to the loss: 0.2 for PPO's
    values |= {_GENERATION_NAMES.get(n, n): v for n, v in options.items() if n not in _SPECIAL}
    config = PPOConfig().with_options(**values)
    config = config.with_options(**_special_tokens(config, options, tokenizer))
    if problems := rules.trainer_contradictions(config, world_size):
        raise ConfigError("\n".join(problems))
    return config.resolved()


def constructor_config(
    config: PPOConfig | None, strategy: Any, options: Mapping[str, Any], tokenizer: Any
) -> PPOConfig:
    """The config of a trainer: the one given, or that of ``strategy.args`` and keyword options; resolved.

    Raises:
        ConfigError: both were given, an option is unknown, or options contradict each other or the strategy.
    """
    if config is not None and options:
        raise ConfigError(f"options {sorted(options)} beside config: put them into the config")
    if config is not None:
        return checked_config(config, strategy.world_size)
    config = config_from_options(getattr(strategy, "args", None), options, tokenizer, strategy.world_size)
    if options.get("max_norm", strategy.max_norm) != strategy.max_norm:
        raise ConfigError(f"max_norm {options['max_norm']} is not the strategy's ({strategy.max_norm}): set it there")
    return config


def checked_config(config: PPOConfig, world_size: int) -> PPOConfig:
    """A config made in code, resolved.

    Raises:
        ConfigError: options out of range, or that contradict each other.
    """
    if problems := config.value_problems() or rules.trainer_contradictions(config, world_size):
        raise ConfigError("\n".join(problems))
    return config.resolved()


def check_models(config: PPOConfig, critic: Any, initial_model: Any, tokenizer: Any) -> None:
    """Whether a trainer built by hand has what its options need.

    Raises:
        ConfigError: no tokenizer, critic or reference model where one is needed; a reference that cannot move, to be
            moved.
    """
    a = config.algorithm
    if tokenizer is None:
        raise ConfigError("PPOTrainer needs the actor's tokenizer: pass tokenizer=")
    if critic is None and needs_critic(config):
        raise ConfigError(f"--advantage_estimator {a.advantage_estimator} needs a critic, but critic is None")
    if initial_model is None and (a.init_kl_coef > 0 or a.use_kl_loss):
        raise ConfigError(
            f"the KL coefficient {a.init_kl_coef} needs a reference model, but initial_model is None: pass one, or set "
            "init_kl_coef to 0"
        )
    if isinstance(initial_model, AdaptersOff) and moves_reference(config):
        raise ConfigError(
            "--ref_ema_eta and --ref_reset_steps need a reference with weights of its own, and this one is the actor "
            "without its adapters: leave them out, or pass another initial_model"
        )


def check_engine(config: PPOConfig, engine: Any) -> None:
    """Whether the rollout engine can sample as the options ask.

    Raises:
        ConfigError: it cannot.
    """
    if config.sampling.fire_sampling and not getattr(engine, "heats_first_token", False):
        raise ConfigError(
            f"--fire_sampling needs an engine that samples the first token at a temperature of its own, and "
            f"{type(engine).__name__} does not: leave it out, or use Hugging Face generation"
        )


def public_options(config: PPOConfig) -> dict[str, Any]:
    """All options by flag name, for logs, files and checkpoints: without what a reward URL carries in its query."""
    values = config.flat()
    shown = (shown_url(url) if url.startswith(("http://", "https://")) else url for url in values["remote_rm_url"])
    return values | {"remote_rm_url": tuple(shown)}


def sampling_params(config: PPOConfig) -> SamplingParams:
    """How training rollouts are sampled."""
    r, s = config.rollout, config.sampling
    return SamplingParams(
        max_new_tokens=r.generate_max_len,
        min_new_tokens=r.min_new_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        repetition_penalty=r.repetition_penalty,
        n=s.generation_size or r.n_samples_per_prompt,
        stop=r.stop,
        stop_token_ids=r.stop_token_ids,
        bad_words=r.bad_words,
        do_sample=r.do_sample,
        ignore_eos=r.ignore_eos,
        seed=config.strategy.seed,
        first_token_temperature=s.fire_temperature if s.fire_sampling else None,
    )


def eval_sampling_params(config: PPOConfig) -> SamplingParams:
    """How evaluation samples: as training, but for temperature, top-p and the number of samples."""
    e = config.evaluation
    return replace(
        sampling_params(config),
        n=e.eval_n_samples,
        temperature=e.eval_temperature,
        top_p=e.eval_top_p,
        do_sample=True,
        first_token_temperature=None,
    )


def overlay_args(config: PPOConfig, args: Any) -> PPOConfig:
    """The config with the schedule options that ``fit(args, ...)`` reads taken from ``args``."""
    given = _options_of(args)
    schedule = (
        "num_episodes",
        "save_steps",
        "eval_steps",
        "logging_steps",
        "ckpt_path",
        "max_ckpt_num",
        "max_ckpt_mem",
    )
    return config.with_options(**{name: given[name] for name in schedule if name in given})


def _options_of(args: Any) -> dict[str, Any]:
    """Those attributes of a namespace that are options, in our types; None counts only where it is a value."""
    optional = {f.name: type(None) in alternatives(kind_of(f)) for _, f in all_options()}
    given = vars(args) if args is not None else {}
    values = {n: v for n, v in given.items() if n in optional and (v is not None or optional[n])}
    for name in ("reward_pretrain", "remote_rm_url"):  # the seed separates them by commas
        if isinstance(values.get(name), str):
            values[name] = tuple(part for part in values[name].split(",") if part)
    if isinstance(values.get("use_wandb"), str):  # the seed passes the key; wandb takes it from the environment
        values["use_wandb"] = bool(values["use_wandb"])
    for name in ("save_steps", "eval_steps"):
        if values.get(name) == float("inf"):
            values[name] = -1
    return values


def _special_tokens(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """``max_length``, ``eos_token_id`` and ``pad_token_id`` in our options."""
    values: dict[str, Any] = {}
    if "max_length" in options and "max_new_tokens" not in options:
        values["generate_max_len"] = options["max_length"] - config.data.prompt_max_len
        if values["generate_max_len"] < 1:
            raise ConfigError(
                f"max_length {options['max_length']} leaves no room after prompt_max_len {config.data.prompt_max_len}: "
                "set max_new_tokens"
            )
    eos = options.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    known_eos = getattr(tokenizer, "eos_token_id", None)
    values["stop_token_ids"] = (*config.rollout.stop_token_ids, *(i for i in eos_ids if i != known_eos))
    pad = options.get("pad_token_id")
    if pad is not None and tokenizer is not None and pad != tokenizer.pad_token_id:
        raise ConfigError(
            f"pad_token_id {pad} is not the tokenizer's ({tokenizer.pad_token_id}): set tokenizer.pad_token"
        )
    return values
