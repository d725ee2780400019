"""What only scripts in the style of the seed (OpenRLHF's and LightRFT's launcher era) need.

Their positional constructor, ``strategy.args`` and keyword options, attributes that are read and set, the forms in
which they call models and losses, the batches of a ``fit`` of their own, and overrides of the methods of the trainer.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightppo.algorithms import losses
from lightppo.algorithms.kl import approx_kl
from lightppo.algorithms.lm_loss import GPTLMLoss
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss, zero_where_masked
from lightppo.compat.prompt_batches import PromptText
from lightppo.config import PPOConfig
from lightppo.config.option_needs import condition_text, facts_of
from lightppo.config.options import Options, all_options
from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.rank_samples import RankSampler as DistributedSampler
from lightppo.errors import ConfigError
from lightppo.experience.batching import ReplayBuffer, StepPart, normalizer_of
from lightppo.experience.experience import Experience
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.wrapper import adapter_options, prepare_alone
from lightppo.ranks import Ranks
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
            raise ConfigError(
                f"max_norm {given} is not the strategy's ({strategy.max_norm}): set it there"
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
    if values.get("advantage_estimator") == "rloo" and values.get("adv_norm") is None:
        # The seed's fit whitens whatever is not group_norm; so does OpenRLHF's of that time.
        values["adv_norm"] = True
    config = _with_options(PPOConfig(), values | options, tokenizer)
    if idle := idle_options(config):
        say(
            "without effect here: "
            + "; ".join(f"{name} needs {condition}" for name, condition in idle.items())
        )
        defaults = PPOConfig().flat()
        config = config.with_options(**{name: defaults[name] for name in idle})
    config.validate(world_size, by_hand=True)
    return config.resolved()


def idle_options(config: Options) -> dict[str, str]:
    """What scripts hand over whatever they train, and this run has no use for: {name: what it needs}."""
    given, facts = config.flat(), facts_of(config)
    return {
        one.name: condition_text(condition)
        for one in all_options()
        for condition in one.needs
        if condition in ("critic", "discounting", "clipping")
        and one.is_set(given[one.name])
        and not facts[condition]
    }


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
    return config.with_options(**{name: given[name] for name in names if name in given})


def fill_schedule(args: Any, steps_per_episode: int) -> None:
    """Puts into ``args`` what the seed's ``fit`` puts there for -1."""
    for name, never in (("eval_steps", steps_per_episode), ("save_steps", float("inf"))):
        if getattr(args, name, None) == -1:
            setattr(args, name, never)


def script_args(strategy: Any, config: PPOConfig) -> Any:
    """``strategy.args``; where there is none, a namespace of all options, which overrides in the seed's style read."""
    args = getattr(strategy, "args", None)
    return argparse.Namespace(**config.flat()) if args is None else args


def generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's options that say how to sample: the seed's ``generate_kwargs``."""
    return {name: value for name, value in options.items() if name in _GENERATION}


def _refuse_unknown(
    who: str, options: Iterable[str], known: Sequence[str], hints: Sequence[str] = ()
) -> None:
    for name in options:
        if name not in known:
            # A slip in a name of the constructor itself comes before names that mean the same.
            names = get_close_matches(name, known, cutoff=0.9) or [*known, *hints]
            flags = [f"--{one}" for one in names]
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
    # The seed passes the key here; wandb takes it from the environment.
    if isinstance(values.get("use_wandb"), str):
        values["use_wandb"] = bool(values["use_wandb"])
    for name in ("save_steps", "eval_steps"):
        if values.get(name) == float("inf"):
            values[name] = -1
    return values


def _with_options(config: PPOConfig, options: Mapping[str, Any], tokenizer: Any) -> PPOConfig:
    """``max_new_tokens``, ``max_length``, ``eos_token_id`` and ``pad_token_id`` become options of ours."""
    config = config.with_options(
        **{_RENAMED.get(n, n): v for n, v in options.items() if n not in _SPECIAL}
    )
    values: dict[str, Any] = {}
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        prompt = config.data.prompt_max_len
        values["generate_max_len"] = options["max_length"] - prompt
        if values["generate_max_len"] < 1:
            length = options["max_length"]
            raise ConfigError(
                f"max_length {length} leaves no room after prompt_max_len {prompt}: set max_new_tokens"
            )
    eos = options.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    known_eos = getattr(tokenizer, "eos_token_id", None)
    values["stop_token_ids"] = (
        *config.rollout.stop_token_ids,
        *(i for i in eos_ids if i != known_eos),
    )
    pad = options.get("pad_token_id")
    if pad is not None and tokenizer is not None and pad != (own := tokenizer.pad_token_id):
        raise ConfigError(
            f"pad_token_id {pad} is not the tokenizer's ({own}): set tokenizer.pad_token"
        )
    return config.with_options(**values)


# -- losses ----------------------------------------------------------------------------------------------------------

Metrics = dict[str, Tensor]
SEED_INFO = ("kl", "reward", "return", "response_length", "total_length")
# What only a micro batch that ends an optimizer step can say.
OUTCOMES = {
    f"{model}_{name}"
    for model in ("actor", "critic")
    for name in ("grad_norm", "skipped", "overflow", "loss_scale", "stopped")
}


def seed_means(experience: Experience) -> dict[str, Tensor]:
    """The means over samples that the seed's ``training_step`` gives."""
    device = experience.action_mask.device
    known = {name: experience.info[name] for name in SEED_INFO if name in experience.info}
    # The seed puts plain numbers in.
    info = {name: torch.as_tensor(x, device=device).float() for name, x in known.items()}
    means = {name: values.mean() for name, values in info.items()}
    if "kl" in info:  # per token, as far as lengths tell
        means["kl"] = (info["kl"] * info["response_length"]).sum() / info["response_length"].sum()
    return means


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # of built-in functions
        return {}


def _knows_the_step(fn: Callable[..., Any]) -> bool:
    """Whether a loss takes a ``normalizer``; if its signature does not tell, it does."""
    parameters = _parameters(fn)
    return (
        "normalizer" in parameters
        or not parameters
        or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    )


def sample_share(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """Share of a micro batch in its optimizer step, by samples with a trained token; times the number of ranks."""
    return mask.bool().any(dim=1).sum() * (normalizer.dp_size / max(normalizer.sequences, 1.0))


def _mean_of(
    fn: Callable[..., Any], name: str, tensors: Sequence[Tensor], mask: Tensor, **named: Any
) -> Any:
    """What a loss in the seed's form says of the rows with a trained token; a 0 with a gradient if there are none."""
    rows = mask.bool().any(dim=1)
    if not rows.any():
        return zero_where_masked(tensors[0], mask).sum()
    if not rows.all():
        tensors, mask = [tensor[rows] for tensor in tensors], mask[rows]
        named = {key: value[rows] for key, value in named.items()}
    loss = fn(*tensors, action_mask=mask, **named)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise ConfigError(
            f"{name} returned {type(loss).__name__} instead of a scalar tensor: return the loss alone, or take a "
            "normalizer and return (loss, metrics)"
        )
    return loss


def policy_loss_of(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """``actor_loss_fn`` as the trainer calls it; one in the seed's form counts by its share of the step's samples."""
    if _knows_the_step(fn):
        return fn
    takes_entropy_mask = "entropy_mask" in _parameters(fn)

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        normalizer: LossNormalizer,
        *,
        weights: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Metrics]:
        named = {}
        if weights is not None:
            if not takes_entropy_mask or not ((weights == 0) | (weights == 1)).all():
                raise ConfigError(
                    "actor_loss_fn takes no weights of tokens, and the options make such: leave out "
                    "--rollout_correction, --rollout_rejection and --high_entropy_token_ratio, or let it take a "
                    "normalizer and weights"
                )
            named["entropy_mask"] = weights.bool()
        share = sample_share(mask, normalizer)
        mean = _mean_of(fn, "actor_loss_fn", (log_probs, old_log_probs, advantages), mask, **named)
        tensors = (
            zero_where_masked(x.detach(), mask) for x in (log_probs, old_log_probs, advantages)
        )
        seen = losses.LossInputs(*tensors, action_mask=mask.bool()).metrics()
        seen.pop("clip_ratio")  # which only the loss knows
        metrics = {
            name: aggregate_loss(x, mask, "token-mean", normalizer) for name, x in seen.items()
        }
        stats = fn.get_last_stats() if hasattr(fn, "get_last_stats") and mask.any() else {}
        metrics |= {
            name: torch.as_tensor(value, device=mask.device) * share
            for name, value in stats.items()
        }
        return mean * share, metrics

    return loss


def value_loss_of(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """``critic_loss_fn`` as the trainer calls it; see :func:`policy_loss_of`."""
    if _knows_the_step(fn):
        return fn

    def loss(
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        mask: Tensor,
        normalizer: LossNormalizer,
    ) -> tuple[Tensor, Metrics]:
        mean = _mean_of(fn, "critic_loss_fn", (values, old_values, returns), mask)
        return mean * sample_share(mask, normalizer), {}

    return loss


class _PretrainLoss(GPTLMLoss):
    """A ``ptx_loss_fn`` in the seed's form, as the trainer calls it: its mean counts by the labelled tokens."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        normalizer_tokens: float | None = None,
        dp_size: int = 1,
    ) -> Tensor:
        if normalizer_tokens is None:
            return self.fn(logits, labels)
        tokens = self.num_tokens(labels)
        return (
            self.fn(logits, labels) * (tokens * dp_size / normalizer_tokens)
            if tokens
            else logits.sum() * 0.0
        )


def pretrain_loss_of(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``ptx_loss_fn`` as the trainer calls it."""
    return fn if hasattr(fn, "num_tokens") else _PretrainLoss(fn)


# -- batches ---------------------------------------------------------------------------------------------------------


class _Episodes(DistributedSampler):
    """A sampler of batches, in the place where the seed's ``fit`` looks for its sampler."""

    def __init__(self, sampler: Any) -> None:
        self.set_epoch = sampler.set_epoch


class SeedLoader:
    """A prompts dataloader in the seed's form: each batch is ``[texts, labels]``.

    Batches that are no list of :class:`Prompt` stay as they are, and every other attribute is the dataloader's.
    """

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """With ``set_epoch(epoch, consumed_samples)``, if the dataloader has such a one."""
        batches = getattr(self.loader, "batch_sampler", None)
        return (
            _Episodes(batches)
            if hasattr(batches, "set_epoch")
            else getattr(self.loader, "sampler", None)
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, list) and all(isinstance(prompt, Prompt) for prompt in batch):
                batch = [
                    [PromptText.of(prompt) for prompt in batch],
                    [prompt.label for prompt in batch],
                ]
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class PretrainBatch(dict):
    """A batch for the PTX loss; ids and mask also by the places that they have in the seed's, 1 and 2."""

    PLACES = {1: "input_ids", 2: "attention_mask"}

    def __missing__(self, key: Any) -> Any:
        if key not in self.PLACES:
            raise KeyError(key)
        return self[self.PLACES[key]]


def pretrain_batches_of(batches: Iterator) -> Iterator:
    for batch in batches:
        yield PretrainBatch(batch) if isinstance(batch, Mapping) else batch


# -- models ----------------------------------------------------------------------------------------------------------


def give_router_loss(actor: Actor) -> None:
    """A pass with ``return_output`` also gives ``output.aux_loss`` from now on."""

    def switch(on: bool) -> None:
        actor.hf_model.config.output_router_logits = on

    before = actor.hf_model.config.output_router_logits
    actor.register_forward_pre_hook(
        lambda _, values, named: switch(bool(named.get("return_output"))), with_kwargs=True
    )
    actor.register_forward_hook(lambda *_: switch(before), always_call=True)


def get_llm_for_sequence_regression(
    path: str,
    model_type: Literal["critic", "reward"],
    *,
    lora_rank: int = 0,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] | None = "all-linear",
    **options: Any,
) -> Critic | RewardModel:
    """A critic or a reward model, by the seed's name and arguments; see their classes and :class:`Actor`."""
    classes = {"critic": Critic, "reward": RewardModel}
    if model_type not in classes:
        raise ValueError(f"model_type must be 'critic' or 'reward', not {model_type!r}")
    model = classes[model_type](path, **options)
    adapters = adapter_options(lora_rank, lora_alpha, lora_dropout, target_modules)
    prepare_alone(model, "critic", **adapters)
    return model


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
            raise ConfigError(
                f"device_map {device_map!r}: leave it out, the launcher gives each process its device"
            )
        kinds = {"use_flash_attention_2": use_flash_attention_2, "bf16": bf16}
        if not isinstance(pretrain_or_model, str):  # a model that is built already has its type
            kinds = {name: value for name, value in kinds.items() if value and name != "bf16"}
        super().__init__(pretrain_or_model, **kinds, **options)
        self.high_entropy_token_ratio = high_entropy_token_ratio


def check_actor(config: PPOConfig, actor: Any) -> None:
    """ConfigError for an actor with a share of tokens that the loss does not have."""
    of_actor, of_loss = (
        getattr(actor, "high_entropy_token_ratio", 0.0),
        config.loss.high_entropy_token_ratio,
    )
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
        raise ValueError(
            f"packed_seqlens sum to {sum(lengths)}, but there are {len(values)} values"
        )
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
    return approx_kl(
        log_probs,
        log_probs_base,
        "k3" if use_kl_estimator_k3 else kl_estimator,
        action_mask=action_mask,
    )


# -- parts by the seed's names ---------------------------------------------------------------------------------------


def get_strategy(args: Any) -> DeepspeedStrategy:
    """A strategy from any object with attributes named like its arguments; ``dist_timeout`` is ``timeout_minutes``."""
    names = {f.name for f in fields(DeepspeedStrategy) if f.init} - {"args"}
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if hasattr(args, "dist_timeout"):
        options["timeout_minutes"] = args.dist_timeout
    return DeepspeedStrategy(args=args, **options)


class NaiveReplayBuffer(ReplayBuffer):
    """The seed's name and arguments; batches go to this process's device.

    ``packing_samples`` changes nothing here: rows are kept without padding and packed where a model runs.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
    ) -> None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        super().__init__(sample_batch_size, limit, cpu_offload, device)
        self.packing_samples, self.target_device = packing_samples, self.device


def lone_part(
    experience: Experience, ranks: Ranks, *, scale: float = 1.0, accumulation: int = 1
) -> StepPart:
    """The part of a micro batch outside a planned step, one of ``accumulation`` that weigh the same. Collective."""
    return StepPart(normalizer_of([experience], ranks, scale), loss_scale=1 / accumulation)
