"""What only scripts in the style of the seed (OpenRLHF's and LightRFT's launcher era) need.

Their positional constructor, ``strategy.args`` and keyword options, attributes that are read and set, the forms in
which they call models and losses, the batches of a ``fit`` of their own, and overrides of the methods of the trainer.
"""

from __future__ import annotations

import argparse
import inspect
import random
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
from lightppo.config.options import all_options
from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.rank_samples import RankSampler as DistributedSampler
from lightppo.errors import ConfigError
from lightppo.experience import batching, maker
from lightppo.experience.batching import StepPart, normalizer_of
from lightppo.experience.experience import Experience
from lightppo.models import actor as actors
from lightppo.models import critic as critics
from lightppo.models import loading
from lightppo.models.preparation import prepare_model
from lightppo.models.wrapper import Role
from lightppo.ranks import Ranks
from lightppo.suggestions import nearest
from lightppo.zero3 import is_engine

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


def idle_options(config: PPOConfig) -> dict[str, str]:
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


class ExperienceMaker(maker.ExperienceMaker):
    """The core's, which also takes prompts as texts, in the seed's style."""

    # (prompts, labels, generation options) → scored rollouts
    sample: Callable[..., list[Rollout]] | None = None
    # The seed has this attribute. Here it stays empty: times are in the logs, under perf/.
    perf_stats: dict[str, float] | None = None

    def make_experience_list(
        self,
        rollouts: Sequence[Rollout] | Sequence[str],
        all_labels: Sequence[Any] | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience]:
        """Of rollouts; or of prompts as texts, with labels and sampling options: they are sampled and scored first."""
        as_texts = any(isinstance(rollout, str) for rollout in rollouts)
        if as_texts or (not rollouts and (all_labels is not None or generate_kwargs)):
            if self.sample is None:
                raise ValueError(
                    "this ExperienceMaker has nothing to sample prompts with: pass scored rollouts"
                )
            rollouts = self.sample(rollouts, all_labels, **generate_kwargs)
        return super().make_experience_list(rollouts)


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


class PolicyLoss(losses.PolicyLoss):
    """A :class:`lightppo.algorithms.losses.PolicyLoss` that can also be called as the seed's.

    In the seed's form, without a ``normalizer``, it takes ``entropy_mask`` and returns the loss of the micro batch
    alone; :meth:`get_last_stats` then has its metrics. One epsilon, by position or as ``clip_eps``, is of both sides.
    """

    def __init__(self, *eps: float | None, horizon: float = 1.0, **options: Any) -> None:
        clip_eps = (options.pop("clip_eps"),) if "clip_eps" in options else eps
        super().__init__(*(clip_eps * 2 if len(clip_eps) == 1 else clip_eps), **options)
        object.__setattr__(self, "horizon", horizon)  # of seq-mean-token-sum-norm, in tokens
        object.__setattr__(self, "_stats", {})

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        normalizer: LossNormalizer | Tensor | None = None,
        *,
        entropy_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Metrics]:
        """All (B, A). Only tokens of ``entropy_mask`` have a loss, which is divided as without it."""
        if isinstance(normalizer, Tensor):  # the seed has its entropy_mask in the fifth place
            normalizer, entropy_mask = None, normalizer
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask
        if entropy_mask is not None:
            kept = entropy_mask.to(log_probs.dtype)
            inputs["weights"] = kept if inputs.get("weights") is None else inputs["weights"] * kept
        if normalizer is not None:
            return super().__call__(
                log_probs, old_log_probs, advantages, mask, normalizer, **inputs
            )
        alone = LossNormalizer.from_masks([mask], scale=self.horizon)
        loss, metrics = super().__call__(
            log_probs, old_log_probs, advantages, mask, alone, **inputs
        )
        self._stats.clear()
        self._stats.update(metrics)
        return loss

    def get_last_stats(self) -> dict[str, float]:
        """Metrics of the last call in the seed's form, such as ``clip_ratio``, ``ratio`` and ``approx_kl``."""
        return {name: float(value) for name, value in self._stats.items()}


class ValueLoss(losses.ValueLoss):
    """A :class:`lightppo.algorithms.losses.ValueLoss` that returns the loss alone without a ``normalizer``.

    ``clip_eps`` is the seed's name of ``value_clip``.
    """

    def __init__(self, *eps: float | None, horizon: float = 1.0, **options: Any) -> None:
        clip_eps = (options.pop("clip_eps"),) if "clip_eps" in options else eps
        super().__init__(*clip_eps, **options)
        object.__setattr__(self, "horizon", horizon)  # as in PolicyLoss

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        normalizer: LossNormalizer | None = None,
    ) -> Tensor | tuple[Tensor, Metrics]:
        """All (B, A)."""
        mask = torch.ones_like(values, dtype=torch.bool) if action_mask is None else action_mask
        if normalizer is not None:
            return super().__call__(values, old_values, returns, mask, normalizer)
        alone = LossNormalizer.from_masks([mask], scale=self.horizon)
        return super().__call__(values, old_values, returns, mask, alone)[0]


def of_whole_step(
    loss: losses.PolicyLoss | losses.ValueLoss, horizon: float
) -> PolicyLoss | ValueLoss:
    """The same loss, which can also be called in the seed's form."""
    kind = PolicyLoss if isinstance(loss, losses.PolicyLoss) else ValueLoss
    return kind(
        **{field.name: getattr(loss, field.name) for field in fields(loss) if field.init},
        horizon=horizon,
    )


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


def accept_seed_calls(model: nn.Module) -> None:
    """Lets a model be called with what OpenRLHF passes for sequences that are split over ranks, which is nothing here.

    Afterwards ``ring_attn_group=None``, ``logps_allgather`` and ``values_allgather`` change nothing.
    """
    module = model.module if is_engine(model) else model
    if not getattr(module, "accepts_seed_calls", False):
        module.register_forward_pre_hook(_without_ring, with_kwargs=True)
        module.accepts_seed_calls = True


def _without_ring(
    module: nn.Module, values: tuple, named: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if named.get("ring_attn_group") is not None:
        raise ConfigError("ring_attn_group: sequences are not split over ranks here; leave it out")
    return values, {name: value for name, value in named.items() if name not in _RING}


def give_router_loss(actor: actors.Actor) -> None:
    """A pass with ``return_output`` also gives ``output.aux_loss`` from now on."""

    def switch(on: bool) -> None:
        actor.hf_model.config.output_router_logits = on

    before = actor.hf_model.config.output_router_logits
    actor.register_forward_pre_hook(
        lambda _, values, named: switch(bool(named.get("return_output"))), with_kwargs=True
    )
    actor.register_forward_hook(lambda *_: switch(before), always_call=True)


_RING = ("ring_attn_group", "logps_allgather", "values_allgather")


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
        accept_seed_calls(self)
        adapters = _adapters(lora_rank, lora_alpha, lora_dropout, target_modules)
        _prepare(self, "actor", use_liger_kernel=use_liger_kernel, **adapters)


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
    accept_seed_calls(model)
    _prepare(model, "critic", **_adapters(lora_rank, lora_alpha, lora_dropout, target_modules))
    return model


def _with_attention(options: Mapping[str, Any]) -> dict[str, Any]:
    """Scripts switch FlashAttention 2 on wherever they pack, as theirs packs by nothing else: here what there is."""
    if options.get("packing_samples") and options.get("use_flash_attention_2"):
        return dict(options) | {"use_flash_attention_2": False, "attn_implementation": "auto"}
    return dict(options)


def _adapters(
    rank: int, alpha: float, dropout: float, targets: str | Sequence[str] | None
) -> dict[str, Any]:
    """Their options; none without adapters."""
    if rank <= 0:
        return {}
    names = (targets,) if isinstance(targets, str) else tuple(targets or ("all-linear",))
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": names,
    }


def _prepare(model: Any, role: Role, **options: Any) -> None:
    """As a run with these options does, where they ask for anything."""
    if any(options.values()):
        prepare_model(model, role, PPOConfig.from_flat(options).resolved(), torch.device("cpu"))


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


class ReplayBuffer(batching.ReplayBuffer):
    """Has the last ``limit`` rows, or all if it is 0, and gives ``sample_batch_size`` of them."""

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        super().__init__(cpu_offload, device, pin_memory)
        self.sample_batch_size, self.limit = sample_batch_size, limit

    def append(self, experience: Experience) -> None:
        super().append(experience)
        if self.limit > 0:
            self.items = self.items[-self.limit :]

    def extend(self, experiences: Iterable[Experience]) -> None:
        """Adds several batches."""
        self.fill(experiences)

    def sample(self) -> Experience:
        """``sample_batch_size`` different rows as one batch."""
        if len(self) < self.sample_batch_size:
            raise ValueError(
                f"the replay buffer holds {len(self)} samples, fewer than {self.sample_batch_size}"
            )
        return self.collate_fn(random.sample(self.items, self.sample_batch_size))

    def __getitem__(self, index: int) -> Experience:
        return self.items[index]

    def normalize(
        self, attribute: str, strategy: Ranks, divide_std: bool = True, **options: Any
    ) -> None:
        """Whitens the advantages (the only ``attribute``) over the trained tokens of all ranks; see ``whiten``."""
        if attribute != "advantages":
            raise ValueError(f"only 'advantages' can be normalised, not {attribute!r}")
        self.whiten(strategy, divide_std=divide_std, **options)


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
