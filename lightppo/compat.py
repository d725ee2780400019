"""What only scripts in the style of the seed (OpenRLHF's and LightRFT's launcher era) need.

Their positional constructor, ``strategy.args`` and keyword options, public attributes, and call forms of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from lightppo.algorithms.kl import approx_kl
from lightppo.algorithms.masking import zero_where_masked
from lightppo.config import PPOConfig
from lightppo.config.options import all_options
from lightppo.config.rules import idle_options, rollout_rows
from lightppo.errors import ConfigError
from lightppo.models import actor as actors
from lightppo.models import critic as critics
from lightppo.models import loading
from lightppo.models.loading import use_liger_kernels
from lightppo.models.lora import LoraOptions, add_adapters
from lightppo.strategy.distributed import RankSampler as DistributedSampler  # noqa: F401
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
_GENERATION = (
    *("max_new_tokens", "generate_max_len", "min_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "bad_words", "ignore_eos", "gamma", "lambd"),
    *_SPECIAL,
)
# What else the constructor takes by name: for the hint at a misspelt one.
_PARAMETERS = ("config", "tokenizer", "reward_fn", "remote_rm_url", "reward_source", "rollout_engine", "evaluator")


# -- options ---------------------------------------------------------------------------------------------------------


def constructor_config(
    config: PPOConfig | None, strategy: Any, options: Mapping[str, Any], tokenizer: Any
) -> PPOConfig:
    """The config of a trainer, resolved: the one given, or one from ``strategy.args`` and keyword options.

    Raises:
        ConfigError: both were given, an option is unknown, or options contradict each other or the strategy.
    """
    if config is None:
        if options.get("max_norm", strategy.max_norm) != strategy.max_norm:
            given = options["max_norm"]
            raise ConfigError(f"max_norm {given} is not the strategy's ({strategy.max_norm}): set it there")
        args = getattr(strategy, "args", None)
        return config_from_options(args, options, tokenizer, strategy.world_size, say=strategy.print)
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
    """Config of a trainer that is built by hand, resolved.

    What a script hands over in vain, such as settings of a critic that is not there, is said. Options win over
    ``args``; the options of ``CONSTRUCTOR_DEFAULTS`` have their default also where ``args`` names
    them, as in the seed. Attributes of ``args`` that are no option of lightppo belong to the script.

    Raises:
        ConfigError: on an unknown option (the nearest known one is named), or options that contradict each other.
    """
    _refuse_unknown("PPOTrainer", options, [*CONSTRUCTOR_DEFAULTS, *_GENERATION], hints=_PARAMETERS)
    values = _options_of(args) | CONSTRUCTOR_DEFAULTS
    if "eps_clip" in options:
        values |= {"eps_clip_low": None, "eps_clip_high": None}
    elif {"policy_loss", "advantage_estimator", "eps_clip_low", "eps_clip_high"} & values.keys():
        values["eps_clip"] = None  # then what belongs to the loss: 0.2 for PPO's
    config = _with_options(PPOConfig(), values | options, tokenizer)
    if idle := idle_options(config):
        say("without effect here: " + "; ".join(f"{name} needs {condition}" for name, condition in idle.items()))
        defaults = PPOConfig().flat()
        config = config.with_options(**{name: defaults[name] for name in idle})
    config.validate(world_size, by_hand=True)
    return config.resolved()


def with_generation(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> PPOConfig:
    """The config with generation options as ``make_experience_list(prompts, labels, **options)`` takes them.

    Raises:
        ConfigError: an option that does not say how to sample, or a value out of range.
    """
    _refuse_unknown("generation", options, _GENERATION)
    return _with_options(config, options, tokenizer)


def take_schedule(config: PPOConfig, args: Any, steps_per_episode: int) -> PPOConfig:
    """The config with the schedule that ``fit(args, ...)`` brings; ``args`` gets what the seed's ``fit`` puts there."""
    given = _options_of(args)
    names = ("num_episodes", "save_steps", "eval_steps", "logging_steps", "ckpt_path", "max_ckpt_num", "max_ckpt_mem")
    for name, never in (("eval_steps", steps_per_episode), ("save_steps", float("inf"))):
        if getattr(args, name, None) == -1:
            setattr(args, name, never)
    return config.with_options(**{name: given[name] for name in names if name in given})


def generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's options that say how to sample: the seed's ``generate_kwargs``."""
    return {name: value for name, value in options.items() if name in _GENERATION}


def _refuse_unknown(who: str, options: Iterable[str], known: Sequence[str], hints: Sequence[str] = ()) -> None:
    for name in options:
        if name not in known:
            flags = [f"--{one}" for one in (*known, *hints)]
            meant = nearest(f"--{name}", flags, "flag").replace("'--", "'")
            raise ConfigError(f"{who} got an unknown option {name!r}{meant}")


def _options_of(args: Any) -> dict[str, Any]:
    """Those attributes of a namespace that are options, in our types; None counts only where it is a value."""
    optional = {option.name: option.may_be_none for option in all_options()}
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


def _with_options(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> PPOConfig:
    """``max_new_tokens``, ``max_length``, ``eos_token_id`` and ``pad_token_id`` become options of ours."""
    config = config.with_options(**{_RENAMED.get(n, n): v for n, v in options.items() if n not in _SPECIAL})
    values: dict[str, Any] = {}
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        prompt = config.data.prompt_max_len
        values["generate_max_len"] = options["max_length"] - prompt
        if values["generate_max_len"] < 1:
            length = options["max_length"]
            raise ConfigError(f"max_length {length} leaves no room after prompt_max_len {prompt}: set max_new_tokens")
    eos = options.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    known_eos = getattr(tokenizer, "eos_token_id", None)
    values["stop_token_ids"] = (*config.rollout.stop_token_ids, *(i for i in eos_ids if i != known_eos))
    pad = options.get("pad_token_id")
    if pad is not None and tokenizer is not None and pad != (own := tokenizer.pad_token_id):
        raise ConfigError(f"pad_token_id {pad} is not the tokenizer's ({own}): set tokenizer.pad_token")
    return config.with_options(**values)


# -- attributes ------------------------------------------------------------------------------------------------------


class SeedAttributes:
    """The seed's public attributes that can only be read. What can be replaced, the trainer holds itself."""

    micro_train_batch_size = property(attrgetter("config.training.micro_train_batch_size"))
    micro_rollout_batch_size = property(lambda trainer: rollout_rows(trainer.config))
    prompt_max_len = property(attrgetter("config.data.prompt_max_len"))
    dataloader_pin_memory = property(attrgetter("config.data.dataloader_pin_memory"))
    max_norm = property(attrgetter("config.training.max_norm"))
    kl_target = property(attrgetter("config.algorithm.kl_target"))
    gradient_checkpointing = property(attrgetter("config.model.gradient_checkpointing"))
    save_hf_ckpt = property(attrgetter("config.checkpoint.save_hf_ckpt"))
    disable_ds_ckpt = property(attrgetter("config.checkpoint.disable_ds_ckpt"))
    aux_loss = property(lambda self: self.config.loss.aux_loss_coef > 0)
    # Of rank 0, from the first step on: the Weights & Biases run, the TensorBoard writer.
    _wandb = property(lambda self: self.recorder and self.recorder.wandb_run)
    _tensorboard = property(lambda self: self.recorder and self.recorder.tensorboard_writer)


# -- models ----------------------------------------------------------------------------------------------------------


class Actor(actors.Actor):
    """An :class:`lightppo.models.actor.Actor`, with its adapters and kernels where it is made, as the seed has it.

    With ``lora_rank`` above 0 adapters train, beside frozen weights.
    """

    def __init__(
        self,
        pretrain_or_model: Any,
        *,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: str | Sequence[str] | None = "all-linear",
        use_liger_kernel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pretrain_or_model, **_with_attention(options))
        _adapt(self, lora_rank, lora_alpha, lora_dropout, target_modules)
        if use_liger_kernel:
            use_liger_kernels(self.hf_model)


def get_llm_for_sequence_regression(
    path: str,
    model_type: Literal["critic", "reward"],
    *,
    lora_rank: int = 0,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] | None = "all-linear",
    **options: Any,
) -> critics.Critic | critics.RewardModel:
    """A critic or a reward model, by the seed's name and arguments; see their classes and :class:`Actor`."""
    classes = {"critic": critics.Critic, "reward": critics.RewardModel}
    if model_type not in classes:
        raise ValueError(f"model_type must be 'critic' or 'reward', not {model_type!r}")
    model = classes[model_type](path, **_with_attention(options))
    _adapt(model, lora_rank, lora_alpha, lora_dropout, target_modules)
    return model


def _with_attention(options: Mapping[str, Any]) -> dict[str, Any]:
    """Scripts switch FlashAttention 2 on wherever they pack, as theirs packs by nothing else: here what there is."""
    if options.get("packing_samples") and options.get("use_flash_attention_2"):
        return dict(options) | {"use_flash_attention_2": False, "attn_implementation": "auto"}
    return dict(options)


def _adapt(model: Any, rank: int, alpha: float, dropout: float, targets: str | Sequence[str] | None) -> None:
    if rank > 0:
        names = (targets,) if isinstance(targets, str) else tuple(targets or ("all-linear",))
        add_adapters(model, LoraOptions(rank, alpha, dropout, names))


def get_tokenizer(
    pretrain: str,
    model: nn.Module | None = None,
    padding_side: Literal["left", "right"] = "left",
    strategy: Any = None,
    use_fast: bool = True,
    **options: Any,
) -> Any:
    """See :func:`lightppo.models.loading.get_tokenizer`; ``strategy`` stands in the seed's fourth place, unused."""
    if isinstance(strategy, bool):  # use_fast in the place that it has in models.loading
        strategy, use_fast = None, strategy
    return loading.get_tokenizer(pretrain, model, padding_side, use_fast, **options)


class ActorLanguage(Actor):
    """LightRFT's name of the actor.

    ``high_entropy_token_ratio`` is an option of the loss, read from ``strategy.args``; :class:`PPOTrainer` refuses an
    actor that was given another one than that.
    """

    def __init__(
        self,
        pretrain_or_model: Any,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        *,
        device_map: None = None,
        high_entropy_token_ratio: float = 0.0,
        **options: Any,
    ) -> None:
        if device_map is not None:
            raise ConfigError(f"device_map {device_map!r}: leave it out, the launcher gives each process its device")
        kinds = {"use_flash_attention_2": use_flash_attention_2, "bf16": bf16}
        if not isinstance(pretrain_or_model, str):  # a model that is built already has its type
            kinds = {name: value for name, value in kinds.items() if value and name != "bf16"}
        super().__init__(pretrain_or_model, **kinds, **options)
        self.high_entropy_token_ratio = high_entropy_token_ratio


def check_actor(config: PPOConfig, actor: Any) -> None:
    """ConfigError for an actor with a share of tokens that the loss does not have."""
    of_actor, of_loss = getattr(actor, "high_entropy_token_ratio", 0.0), config.loss.high_entropy_token_ratio
    if of_actor and of_actor != of_loss:
        name = "high_entropy_token_ratio"
        raise ConfigError(
            f"ActorLanguage has {name} {of_actor}, strategy.args {of_loss}: set args.{name} to {of_actor}"
        )


# -- functions and classes by the seed's names -------------------------------------------------------------------------


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """The mean over ``dim``, by default over everything, of the elements whose mask is not 0; without a mask of all.

    0 where no element counts (the seed has NaN there). Masked elements may hold anything.
    """
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim)
    kept, counts = zero_where_masked(tensor, mask), mask.bool()
    if dim is None:
        return kept.sum() / counts.sum().clamp(min=1)
    return kept.sum(dim) / counts.sum(dim).clamp(min=1)


def unpacking_samples(values: Tensor, packed_seqlens: Sequence[int]) -> list[Tensor]:
    """(1, T) or (T,) → one tensor per length; what stands after the last one is left out."""
    lengths = [int(length) for length in packed_seqlens]
    values = values.squeeze(0)
    if sum(lengths) > len(values):
        raise ValueError(f"packed_seqlens sum to {sum(lengths)}, but there are {len(values)} values")
    return list(values[: sum(lengths)].split(lengths))


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_estimator: str | bool = "k1",
    use_kl_estimator_k3: bool = False,
) -> Tensor:
    """See :func:`lightppo.algorithms.kl.approx_kl`: ``k1``, ``k2`` or ``k3`` of each token, 0 where it is masked.

    OpenRLHF until 0.5 has ``use_kl_estimator_k3`` in the place of ``kl_estimator``.
    """
    if isinstance(kl_estimator, bool):
        kl_estimator, use_kl_estimator_k3 = "k1", kl_estimator
    return approx_kl(log_probs, log_probs_base, "k3" if use_kl_estimator_k3 else kl_estimator, action_mask=action_mask)
