"""What only scripts in the style of the seed (OpenRLHF's and LightRFT's launcher era) need.

Their positional constructor, ``strategy.args`` and keyword options, attributes that are read and set, the forms in
which they call models and losses, the batches of a ``fit`` of their own, and overrides of the methods of the trainer.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightppo.algorithms import losses
from lightppo.algorithms.kl import approx_kl, make_kl_controller
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss, zero_where_masked
from lightppo.config import PPOConfig
from lightppo.config.options import all_options
from lightppo.config.rules import SCORING_CALLS, idle_options, micro_batch_spec, of_role, rollout_rows
from lightppo.data.records import Prompt
from lightppo.errors import ConfigError
from lightppo.models import actor as actors
from lightppo.models import critic as critics
from lightppo.models import loading
from lightppo.models.preparation import Role, prepare_model
from lightppo.strategy.distributed import RankSampler as DistributedSampler
from lightppo.strategy.zero3 import find_engine, is_engine
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


# -- losses ----------------------------------------------------------------------------------------------------------

Metrics = dict[str, Tensor]
_SEED_INFO = ("kl", "reward", "return", "response_length", "total_length")
# What only a micro batch that ends an optimizer step can say.
_OUTCOMES = {
    f"{model}_{name}"
    for model in ("actor", "critic")
    for name in ("grad_norm", "skipped", "overflow", "loss_scale", "stopped")
}


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
            return super().__call__(log_probs, old_log_probs, advantages, mask, normalizer, **inputs)
        alone = LossNormalizer.from_masks([mask], scale=self.horizon)
        loss, metrics = super().__call__(log_probs, old_log_probs, advantages, mask, alone, **inputs)
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


def of_whole_step(loss: losses.PolicyLoss | losses.ValueLoss, horizon: float) -> PolicyLoss | ValueLoss:
    """The same loss, which can also be called in the seed's form."""
    kind = PolicyLoss if isinstance(loss, losses.PolicyLoss) else ValueLoss
    return kind(**vars(loss), horizon=horizon)


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # of built-in functions
        return {}


def _knows_the_step(fn: Callable[..., Any]) -> bool:
    """Whether a loss takes a ``normalizer``; if its signature does not tell, it does."""
    parameters = _parameters(fn)
    return "normalizer" in parameters or not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


def sample_share(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """Share of a micro batch in its optimizer step, by samples with a trained token; times the number of ranks."""
    return mask.bool().any(dim=1).sum() * (normalizer.dp_size / max(normalizer.sequences, 1.0))


def _mean_of(fn: Callable[..., Any], name: str, tensors: Sequence[Tensor], mask: Tensor, **named: Any) -> Any:
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
        tensors = (zero_where_masked(x.detach(), mask) for x in (log_probs, old_log_probs, advantages))
        seen = losses.LossInputs(*tensors, action_mask=mask.bool()).metrics()
        seen.pop("clip_ratio")  # which only the loss knows
        metrics = {name: aggregate_loss(x, mask, "token-mean", normalizer) for name, x in seen.items()}
        stats = fn.get_last_stats() if hasattr(fn, "get_last_stats") and mask.any() else {}
        metrics |= {name: torch.as_tensor(value, device=mask.device) * share for name, value in stats.items()}
        return mean * share, metrics

    return loss


def value_loss_of(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """``critic_loss_fn`` as the trainer calls it; see :func:`policy_loss_of`."""
    if _knows_the_step(fn):
        return fn

    def loss(
        values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        mean = _mean_of(fn, "critic_loss_fn", (values, old_values, returns), mask)
        return mean * sample_share(mask, normalizer), {}

    return loss


class _PretrainLoss(losses.GPTLMLoss):
    """A ``ptx_loss_fn`` in the seed's form, as the trainer calls it: its mean counts by the labelled tokens."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(
        self, logits: Tensor, labels: Tensor, normalizer_tokens: float | None = None, dp_size: int = 1
    ) -> Tensor:
        if normalizer_tokens is None:
            return self.fn(logits, labels)
        tokens = self.num_tokens(labels)
        return self.fn(logits, labels) * (tokens * dp_size / normalizer_tokens) if tokens else logits.sum() * 0.0


def pretrain_loss_of(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``ptx_loss_fn`` as the trainer calls it."""
    return fn if hasattr(fn, "num_tokens") else _PretrainLoss(fn)


# -- batches ---------------------------------------------------------------------------------------------------------


class PromptText(str):
    """The text of a prompt, which also knows the :class:`Prompt`: its token ids, row number and further columns."""

    prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        text = cls(prompt.text)
        text.prompt = prompt
        return text


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
        return _Episodes(batches) if hasattr(batches, "set_epoch") else getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, list) and all(isinstance(prompt, Prompt) for prompt in batch):
                batch = [[PromptText.of(prompt) for prompt in batch], [prompt.label for prompt in batch]]
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


def _pretrain_batches(batches: Iterator) -> Iterator:
    for batch in batches:
        yield PretrainBatch(batch) if isinstance(batch, Mapping) else batch


def _own_fit(fit: Callable[..., None]) -> Callable[..., None]:
    """A ``fit`` of a subclass's own: its loader gives the seed's batches, and the records end with it.

    What its caller leaves out comes from the trainer.
    """
    signature = inspect.signature(fit)
    ordinary = {n: p.default for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}

    @wraps(fit)
    def run(self: Any, *values: Any, **named: Any) -> None:
        if self.is_complete():
            self._tell_complete()
            return self.close()
        bound = signature.bind_partial(self, *values, **named)
        for name, value in self._fit_arguments().items():
            missing = name not in bound.arguments and (self.owns_parts or ordinary.get(name) is inspect.Parameter.empty)
            if name in ordinary and (missing or bound.arguments.get(name, ...) is None):
                bound.arguments[name] = value
        loader = bound.arguments.get("prompts_dataloader")
        if loader is not None and not isinstance(loader, SeedLoader):
            bound.arguments["prompts_dataloader"] = SeedLoader(loader)
        fit(*bound.args, **bound.kwargs)
        if self.recorder is not None:
            self.recorder.close()

    return run


# -- attributes ------------------------------------------------------------------------------------------------------


class _KLState:
    """State of a ``kl_ctl`` that has only ``value`` and ``update``."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self.controller).__name__, "value": float(self.controller.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != (own := type(self.controller).__name__):
            raise ValueError(
                f"the checkpoint's kl_ctl is {state['kind']}, here {own}: set the one that it was made with"
            )
        self.controller.value = float(state["value"])


class _GivenTracker:
    """A Weights & Biases run (or module), or a TensorBoard writer, that a script has set; the script ends it."""

    def __init__(self, name: str, given: Any) -> None:
        self.replaces, self.given = name, given

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.replaces == "_wandb":
            return self.given.log({"global_step": step, **metrics})
        for name, value in metrics.items():
            self.given.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing to do."""


def _is_tracker(sink: Any, name: str) -> bool:
    if isinstance(sink, _GivenTracker):
        return sink.replaces == name
    return getattr(sink, "name", None) == "wandb" if name == "_wandb" else hasattr(sink, "writer")


def _setting(path: str, apply: str | None = None) -> property:
    """An attribute of the seed's trainer that is an option here; when it is set, the trainer works with it."""
    name, read = path.rpartition(".")[2], attrgetter(f"config.{path}")

    def write(trainer: Any, value: Any) -> None:
        trainer._set_options(**{name: value})
        if apply is not None:
            getattr(trainer, apply)()

    return property(read, write)


def _tracker(name: str, of_recorder: str) -> property:
    """Of rank 0: what a script has set, else the recorder's, from the first step on."""

    def read(trainer: Any) -> Any:
        return trainer._trackers.get(name) or (trainer.recorder and getattr(trainer.recorder, of_recorder))

    def write(trainer: Any, value: Any) -> None:
        trainer._trackers = trainer._trackers | {name: value}
        if trainer.recorder is not None:
            trainer.use_given_trackers(trainer.recorder)

    return property(read, write)


class SeedAttributes:
    """The seed's public attributes that are options or need more than to be held; and what overrides need."""

    _trackers: Mapping[str, Any] = {}  # that a script has set
    _aux_loss: bool | None = None  # as a script has set it
    _text_step = 0  # number of the last step whose prompts came as texts
    _synced = 0  # optimizer steps of the weights that the engine has
    _outcomes: Sequence[Mapping[str, float]] = ()  # of optimizer steps that a loop of a script's own has taken

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overrides_fit = "fit" in vars(cls) and any("fit" in vars(base) for base in cls.__mro__[1:])
        if overrides_fit:  # the trainer's own is none
            cls.fit = _own_fit(vars(cls)["fit"])

    micro_train_batch_size = _setting("training.micro_train_batch_size", "_resize_training")
    prompt_max_len = _setting("data.prompt_max_len")
    dataloader_pin_memory = _setting("data.dataloader_pin_memory", "_pin_buffer")
    kl_target = _setting("algorithm.kl_target", "_make_kl_controller")
    gradient_checkpointing = _setting("model.gradient_checkpointing", "_checkpoint_gradients")
    save_hf_ckpt = _setting("checkpoint.save_hf_ckpt")
    disable_ds_ckpt = _setting("checkpoint.disable_ds_ckpt")
    _wandb = _tracker("_wandb", "wandb_run")
    _tensorboard = _tracker("_tensorboard", "tensorboard_writer")

    @property
    def micro_rollout_batch_size(self) -> int:
        return rollout_rows(self.config)

    @micro_rollout_batch_size.setter
    def micro_rollout_batch_size(self, value: int) -> None:
        self._set_options(micro_rollout_batch_size=value)
        self.experience_maker.micro_rollout_batch_size = value
        self.experience_maker.micro_batches = {call: micro_batch_spec(self.config, call) for call in SCORING_CALLS}
        for part in (self.rollout_engine, self.sampler.sampler.engine):
            if hasattr(part, "micro_rollout_batch_size"):
                part.micro_rollout_batch_size = value

    @property
    def max_norm(self) -> float:
        return self.config.training.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        roles = {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}
        same = {role: of_role(self.config, role).max_norm == self.max_norm for role in roles}
        self._set_options(max_norm=value, **({"critic_max_norm": value} if same.get("critic") else {}))
        self.strategy.max_norm = value
        for role, model in roles.items():
            if same[role]:  # a norm of the critic's own stays
                self.strategy.set_max_norm(model, value)

    @property
    def aux_loss(self) -> bool:
        return self.config.loss.aux_loss_coef > 0 if self._aux_loss is None else self._aux_loss

    @aux_loss.setter
    def aux_loss(self, value: bool) -> None:
        self._aux_loss = bool(value)
        if not value:
            self._set_options(aux_loss_coef=0.0)

    # -- what can be replaced ------------------------------------------------------------------------------------

    @property
    def actor_loss_fn(self) -> Callable[..., Any]:
        return self._actor_loss_fn

    @actor_loss_fn.setter
    def actor_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._actor_loss_fn, self.policy_loss = fn, policy_loss_of(fn)

    @property
    def critic_loss_fn(self) -> Callable[..., Any]:
        return self._critic_loss_fn

    @critic_loss_fn.setter
    def critic_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._critic_loss_fn, self.value_loss = fn, value_loss_of(fn)

    @property
    def ptx_loss_fn(self) -> Callable[..., Any]:
        return self._ptx_loss_fn

    @ptx_loss_fn.setter
    def ptx_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._ptx_loss_fn, self.pretrain_loss = fn, pretrain_loss_of(fn)

    @property
    def kl_ctl(self) -> Any:
        return self._kl_ctl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self._kl_ctl = controller
        self.kl_state = controller if hasattr(controller, "state_dict") else _KLState(controller)
        if (maker := vars(self).get("experience_maker")) is not None:
            getattr(maker, "maker", maker).kl_ctl = controller  # also inside a script's NaiveExperienceMaker

    @property
    def prompts_dataloader(self) -> Any:
        """In a subclass with a ``fit`` of its own it gives the seed's batches."""
        if self.own_prompts is None or not self._overrides("fit"):
            return self.own_prompts
        return SeedLoader(self.own_prompts)

    @prompts_dataloader.setter
    def prompts_dataloader(self, loader: Any) -> None:
        self.own_prompts = loader.loader if isinstance(loader, SeedLoader) else loader

    @property
    def pretrain_dataloader(self) -> Any:
        return self._pretrain_batches

    @pretrain_dataloader.setter
    def pretrain_dataloader(self, batches: Any) -> None:
        self._pretrain_batches = _pretrain_batches(batches) if isinstance(batches, Iterator) else batches

    # -- what setting an attribute changes -----------------------------------------------------------------------

    def _set_options(self, **options: Any) -> None:
        """Work with other options from now on."""
        config = self.config.with_options(**options)
        config.validate(self.strategy.world_size, by_hand=True)
        self.config, self.checkpointer.config = config, config.checkpoint
        if self.recorder is not None:
            self.recorder.config = config

    def _resize_training(self) -> None:
        self.replay_buffer.sample_batch_size = self.strategy.micro_train_batch_size = self.micro_train_batch_size
        self._accumulate_alone()

    def _pin_buffer(self) -> None:
        self.replay_buffer.pin_memory = self.dataloader_pin_memory and self.replay_buffer.device.type == "cuda"

    def _make_kl_controller(self) -> None:
        a = self.config.algorithm
        self.kl_ctl = make_kl_controller(self.kl_ctl.value, a.kl_target, a.kl_horizon)

    def _checkpoint_gradients(self) -> None:
        for model in (self.actor, self.critic):
            if model is not None and self.gradient_checkpointing:
                model.gradient_checkpointing_enable()
            elif model is not None:
                model.gradient_checkpointing_disable()

    def use_given_trackers(self, recorder: Any) -> None:
        """What a script has set takes the place of the recorder's own run or writer."""
        for name, given in self._trackers.items() if self.strategy.is_rank_0() else ():
            replaced = [sink for sink in recorder.sinks if _is_tracker(sink, name)]
            for sink in replaced:
                sink.close()
            recorder.sinks = [sink for sink in recorder.sinks if sink not in replaced]
            if given is not None:
                recorder.sinks.append(_GivenTracker(name, given))

    # -- what overrides need -------------------------------------------------------------------------------------

    def _accept_seed_calls(self, *methods: str) -> None:
        """Overrides of these methods may call the models as OpenRLHF's do."""
        for model in (self.actor, self.critic) if self._overrides(*methods) else ():
            if model is not None:
                accept_seed_calls(model)
        if self.aux_loss and self._overrides("training_step_actor"):  # the seed reads output.aux_loss
            self.actor.check_router()
            give_router_loss(self.actor)

    def _script_args(self) -> Any:
        """The namespace for overrides that read options from ``args``, where ``fit`` gets none."""
        if self.own_prompts is not None:
            fill_schedule(self.args, self._steps_per_episode())
        return self.args

    def _fit_arguments(self) -> dict[str, Any]:
        """What a ``fit`` of a subclass's own gets where its caller leaves it out."""
        found = {"args": self._script_args(), "prompts_dataloader": self.own_prompts}
        found["pretrain_dataloader"] = self.pretrain_dataloader
        if self.owns_parts and self.own_prompts is not None:
            r, t = self.config.rollout, self.config.training
            samples = self._steps_per_episode() * r.rollout_batch_size * r.n_samples_per_prompt * t.max_epochs
            found["num_update_steps_per_episodes"] = math.ceil(samples / t.train_batch_size)
            found["consumed_samples"] = self.state.global_step * r.rollout_batch_size
        return found

    def _before_texts(self) -> int:
        """Brings the engine up to date before prompts come as texts; the number of the step. Collective."""
        engine = find_engine(self.actor)
        if engine is None or engine.global_steps != self._synced:
            self.rollout_engine.sync_weights(self.actor)
            self._synced = 0 if engine is None else engine.global_steps
        if self.recorder is None and self._overrides("fit"):
            self.recorder = self._new_recorder()
        self._text_step = max(self._text_step, self.state.global_step) + 1
        return self._text_step

    def _weigh(self, weight: float | Tensor) -> None:
        """What an override gives to ``strategy.backward`` counts by this factor."""
        for model in (self.actor, self.critic):
            if (engine := find_engine(model)) is not None:
                self.strategy.loss_weights[engine] = weight

    def _backward(self, loss: Tensor, model: Any, optim: Any) -> None:
        """Of a loss that is its micro batch's share of the step already."""
        engine, weights = find_engine(model), getattr(self.strategy, "loss_weights", {})
        weight = None if engine is None else weights.pop(engine, None)
        self.strategy.backward(loss, model, optim)
        if weight is not None:
            weights[engine] = weight

    def _for_overrides(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Micro batches of a step; what an override does with one counts by its share of the step's samples."""
        for experience in micro_batches:
            self._weigh(sample_share(experience.action_mask, experience.part.normalizer))
            if not experience.part.has_samples:  # a placeholder, from which the seed's status is read as well
                ones = torch.ones(1, device=experience.action_mask.device)
                experience = replace(experience, info=dict.fromkeys(_SEED_INFO, ones))
            yield experience

    def _of_micro_batch(self, status: dict[str, float], experience: Any) -> dict[str, float]:
        """The status for a loop of a script's own: the same names from every micro batch, as the seed's.

        What only a micro batch that ends an optimizer step can say is kept for :meth:`save_logs_and_checkpoints`.
        """
        if experience.part is not None:
            return status
        outcome = {name: x for name, x in status.items() if name in _OUTCOMES}
        if outcome:
            self._outcomes = [*self._outcomes, outcome]
        return {name: x for name, x in status.items() if name not in outcome}

    def _take_outcomes(self) -> list[Mapping[str, float]]:
        """Those that no log has, and begins anew."""
        found, self._outcomes = list(self._outcomes), ()
        return found

    def _measured_kl(self, status: Mapping[str, float]) -> tuple[float, int]:
        """KL and number of samples for ``kl_ctl``; NaN: no token is trained."""
        if self._overrides("ppo_train") and "policy_kl" not in status:
            r = self.config.rollout
            return status.get("kl", math.nan), r.rollout_batch_size * r.n_samples_per_prompt
        kl = status.get("policy_kl", 0.0)
        return math.nan if math.isnan(status.get("advantage_mean", 0.0)) else kl, int(status.get("samples", 0))


# -- models ----------------------------------------------------------------------------------------------------------


def accept_seed_calls(model: nn.Module) -> None:
    """Lets a model be called with what OpenRLHF passes for sequences that are split over ranks, which is nothing here.

    Afterwards ``ring_attn_group=None``, ``logps_allgather`` and ``values_allgather`` change nothing.
    """
    module = model.module if is_engine(model) else model
    if not getattr(module, "accepts_seed_calls", False):
        module.register_forward_pre_hook(_without_ring, with_kwargs=True)
        module.accepts_seed_calls = True


def _without_ring(module: nn.Module, values: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if named.get("ring_attn_group") is not None:
        raise ConfigError("ring_attn_group: sequences are not split over ranks here; leave it out")
    return values, {name: value for name, value in named.items() if name not in _RING}


def give_router_loss(actor: actors.Actor) -> None:
    """A pass with ``return_output`` also gives ``output.aux_loss`` from now on."""

    def switch(on: bool) -> None:
        actor.hf_model.config.output_router_logits = on

    before = actor.hf_model.config.output_router_logits
    actor.register_forward_pre_hook(lambda _, values, named: switch(bool(named.get("return_output"))), with_kwargs=True)
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


def _adapters(rank: int, alpha: float, dropout: float, targets: str | Sequence[str] | None) -> dict[str, Any]:
    """Their options; none without adapters."""
    if rank <= 0:
        return {}
    names = (targets,) if isinstance(targets, str) else tuple(targets or ("all-linear",))
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": names}


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
