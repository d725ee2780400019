"""Options together: what follows from several of them, what ``None`` stands for, and which cannot work.

Whatever can be known from the options alone is refused here, before anything loads. :class:`PPOConfig` is at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorEntry,
    PolicyLossEntry,
)
from lightppo.config.options import Options, OptionSet, all_options
from lightppo.errors import ConfigError
from lightppo.files import join
from lightppo.option import out_of_order
from lightppo.plugin import (
    FOLLOWERS,
    MICRO_BATCHES,
    REWARD_NAMES,
    REWARDS,
    RULES,
)
from lightppo.redaction import shown_value

# -- facts -----------------------------------------------------------------------------------------------------------


def estimator_entry(config: Options) -> EstimatorEntry:
    """What the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)


def policy_loss_entry(config: Options) -> PolicyLossEntry:
    """The entry of ``--policy_loss``, or of the loss that belongs to the estimator."""
    return POLICY_LOSSES.find(_or(config.loss.policy_loss, estimator_entry(config).policy_loss))


def trains(config: OptionSet) -> bool:
    """Whether this run trains, as all its sections say."""
    return all(part.trains(config) for part in config.parts())


def needs_critic(config: Options) -> bool:
    """Whether this run trains a critic."""
    return estimator_entry(config).needs_critic and trains(config)


def needs_reference(config: Options) -> bool:
    """Whether this run compares with a reference, be it the actor itself without adapters."""
    return config.algorithm.init_kl_coef > 0 and trains(config)


def followers(config: Options) -> list[str]:
    """Names of the models of this run that follow the actor, and so belong to its checkpoints."""
    return [name for name, entry in FOLLOWERS.items() if entry.fn(config)]


def moves_reference(config: Options) -> bool:
    """Whether the reference changes during the run."""
    return "reference" in followers(config)


def compute_dtype(config: OptionSet) -> Literal["float32", "bfloat16", "float16"]:
    """Torch's name of the type that models are held and run in; fp32 master copies and averages are beside it."""
    return "bfloat16" if config.model.bf16 else "float16" if config.model.fp16 else "float32"


def of_role(config: OptionSet, role: Literal["actor", "critic"]) -> SimpleNamespace:
    """What the actor, or the critic, has of the options that are ``per_role``; of a resolved config."""
    flat, prefix = config.flat(), "" if role == "actor" else f"{role}_"
    return SimpleNamespace(
        **{one.name: flat[prefix + one.name] for one in config.all_options() if one.per_role}
    )


def _samples(config: Options) -> int:
    """Samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# -- micro batches ---------------------------------------------------------------------------------------------------


def scoring_calls() -> tuple[str, ...]:
    """The passes over a rollout, in the order in which they are made."""
    return ("actor", "reference", "teacher", "critic", "reward")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def micro_batch_spec(config: Options, call: str) -> MicroBatchSpec:
    """What holds for a pass: what a plugin says, else the token budget, else the number of samples."""
    training = config.training
    for entry in MICRO_BATCHES.values():
        if (own := entry.fn(config, call)) is not None:
            return own
    if training.max_tokens_per_micro_batch is not None:
        return MicroBatchSpec(training.max_tokens_per_micro_batch, "tokens")
    trains = call in ("actor_train", "critic_train")
    return MicroBatchSpec(training.micro_train_batch_size if trains else rollout_rows(config))


def rollout_rows(config: Options) -> int:
    """``--micro_rollout_batch_size``; 8 where it is left to the GPU's memory, which only generation follows."""
    return _or(config.rollout.micro_rollout_batch_size, 8)


# -- reward sources --------------------------------------------------------------------------------------------------


def built_in() -> list[str]:
    """The sources that their names alone stand for."""
    return [name for name, entry in REWARDS.items() if not entry.flag]


def given_sources(config: Options) -> list[str]:
    """The sources whose flags are set. The last one scores: beside models, ``--reward_fn`` combines their scores."""
    flat = config.flat()
    return [name for name, entry in REWARDS.items() if entry.flag and flat[entry.flag]]


def generation_batch(config: Options) -> int:
    """Return how many prompts are sampled at once, over all ranks."""
    return config.sampling.gen_batch_size or config.rollout.rollout_batch_size


def reward_sources(config: Options) -> list[str]:
    """Names in ``REWARDS`` of what scores training: those that options name, else the one that a flag gives.

    Raises:
        ConfigError: what options name is no source.
    """
    named = REWARD_NAMES.first(config)
    return given_sources(config)[-1:] if named is None else named


def further_sources(config: Options) -> set[str]:
    """Names of the sources that sections ask for, beside those that score training."""
    return {name for part in config.parts() for name in part.sources(config)}


# -- what None stands for --------------------------------------------------------------------------------------------


def resolutions(config: Options) -> dict[str, Any]:
    """What every "None means …" option stands for. Options of a part that the run lacks stay None."""
    model, algorithm, loss_options = config.model, config.algorithm, config.loss
    training, strategy = config.training, config.strategy
    estimator, loss = estimator_entry(config), policy_loss_entry(config)
    frozen_stage = 3 if strategy.zero_stage == 3 else 0
    use_kl_loss = _or(
        algorithm.use_kl_loss,
        estimator.kl_in_loss and algorithm.init_kl_coef > 0 and not algorithm.use_kl_in_reward,
    )

    meant: dict[str, Any] = {
        "train_batch_size": _samples(config) // training.ppo_n_minibatches
        if training.ppo_n_minibatches
        else 128,
        "ref_zero_stage": frozen_stage,
        "reward_zero_stage": _or(strategy.ref_zero_stage, frozen_stage),
        "adv_norm": estimator.whiten,
        "ckpt_path": str(join(config.checkpoint.save_path, "checkpoints_ppo")),
        "use_kl_loss": use_kl_loss,
        "use_kl_in_reward": not use_kl_loss and not estimator.ignores_scores,
        "kl_estimator": "k2" if use_kl_loss else "k1",
        "policy_loss": estimator.policy_loss,
        "loss_agg_mode": _or(estimator.loss_agg_mode, loss.loss_agg_mode),
        **estimator.defaults,
        **loss.defaults,
    }
    if algorithm.init_kl_coef > 0:
        meant["ref_pretrain"] = model.pretrain
    if estimator.needs_critic:
        meant |= _critic_resolutions(config)
    if estimator.divides_by_std and algorithm.group_std_norm:
        meant["grpo_std_eps"] = 1e-6
    if loss.eps_clip is not None:
        low, high = (
            loss.eps_clip
            if loss_options.eps_clip is None
            else (loss_options.eps_clip, loss_options.eps_clip)
        )
        meant |= {"eps_clip_low": low, "eps_clip_high": high}
    if config.sampling.fire_sampling:
        meant["fire_temperature"] = 10.0

    for part in config.parts():
        meant |= part.meant(config)
    given = config.flat()
    resolved = {name: _or(given[name], value) for name, value in meant.items()}
    return resolved | {
        "attn_implementation": "flash_attention_2"
        if model.flash_attn
        else model.attn_implementation,
        "resume": config.checkpoint.resume if config.checkpoint.load_checkpoint else "never",
    }


def _critic_resolutions(config: Options) -> dict[str, Any]:
    """The critic's options: as the actor's, but for where it starts."""
    model, strategy = config.model, config.strategy
    reward_model = (
        model.reward_pretrain[0]
        if model.reward_pretrain and not model.init_critic_from_actor
        else None
    )
    stage = _or(strategy.critic_zero_stage, strategy.zero_stage)
    meant = {
        "critic_pretrain": reward_model or model.pretrain,
        "critic_zero_stage": stage,
        "critic_adam_offload": strategy.adam_offload and stage > 0,
        "critic_param_offload": strategy.param_offload and stage == 3,
        **{f"critic_{name}": value for name, value in vars(of_role(config, "actor")).items()},
    }
    # a share wins over the actor's number of steps
    if config.training.critic_lr_warmup_ratio is not None:
        meant["critic_lr_warmup_steps"] = None
    return meant


# -- what cannot work ------------------------------------------------------------------------------------------------


def contradictions(
    config: Options, world_size: int, by_hand: bool = False, unfed: bool = False
) -> list[str]:
    """What cannot work: the first problem of each option.

    Args:
        config: values of the right type and in range.
        world_size: number of ranks.
        by_hand: models, data and rewards were made by hand: only what concerns the trainer.
        unfed: the run is only computed: it needs neither prompts nor a reward.
    """
    about_run = {"config": config, "ranks": world_size, "samples": _samples(config)}
    about_run |= {"by_hand": by_hand, "unfed": unfed}
    options = SimpleNamespace(**config.flat() | resolutions(config) | about_run)
    rules = [entry.fn for entry in RULES.values()]
    rules += [_required] * (not by_hand)
    rules += [_batches, _sampling, _algorithm]
    rules += [_models, _rewards, templates, _ranks] * (not by_hand)
    of_trainer = config.of_trainer()
    rules += [part.problems for part in config.parts() if not by_hand or part._owner in of_trainer]
    return first_of_each(message for rule in rules for message in rule(options))


def first_of_each(messages: Iterable[str]) -> list[str]:
    """The first message of each flag, which messages begin with."""
    found: dict[str, str] = {}
    for message in messages:
        found.setdefault(message.split()[0].strip(":,"), message)
    return list(found.values())


def _batches(options: SimpleNamespace) -> Iterator[str]:
    batch, parts = options.train_batch_size, options.ppo_n_minibatches
    samples = f"the {options.samples} samples of a rollout"
    product = f"(--rollout_batch_size {options.rollout_batch_size} × --n_samples_per_prompt {options.n_samples_per_prompt})"
    if parts and options.samples % parts:
        yield f"--ppo_n_minibatches {parts} does not divide {samples} {product}"
    elif parts and batch * parts != options.samples:
        yield f"--train_batch_size {batch} and --ppo_n_minibatches {parts} disagree for {samples}: leave one out"
    elif options.samples % batch:
        fitting = math.gcd(options.samples, batch)
        yield f"--train_batch_size {batch} does not divide {samples} {product}: set {fitting}, or --ppo_n_minibatches"
    of_all_ranks = {"rollout_batch_size": options.rollout_batch_size, "train_batch_size": batch}
    for name, size in of_all_ranks.items():
        if size % options.ranks:
            yield f"--{name} {size} is not divisible by the {options.ranks} ranks"
    if options.min_new_tokens > options.generate_max_len:
        limit = f"--generate_max_len {options.generate_max_len}"
        yield f"--min_new_tokens {options.min_new_tokens} exceeds {limit}"


def _is_sampled(options: SimpleNamespace) -> bool:
    return options.do_sample and options.temperature > 0


def _sampling(options: SimpleNamespace) -> Iterator[str]:
    if (ends := options.reward_clip_range) is not None and ends[0] >= ends[1]:
        yield f"--reward_clip_range {ends[0]:g} {ends[1]:g} is empty: give the lower end first"


def _algorithm(options: SimpleNamespace) -> Iterator[str]:
    samples, estimator = options.n_samples_per_prompt, estimator_entry(options.config)
    name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
    least = estimator.min_group_size
    if samples < least:
        yield f"{name} compares samples of one prompt: set --n_samples_per_prompt to at least {least}"
    if estimator.needs_greedy_baseline and not _is_sampled(options):
        yield f"{name} compares with the greedy answer, which every sample is: set a --temperature above 0"
    if options.init_kl_coef > 0 and not options.use_kl_loss and not options.use_kl_in_reward:
        yield "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
    if options.kl_target is not None and 0.2 * options.samples >= options.kl_horizon:
        shortest = f"set it above {0.2 * options.samples:g}, a fifth of the samples of a rollout"
        yield f"--kl_horizon {options.kl_horizon} is so short that the coefficient could change sign: {shortest}"
    if options.eps_clip not in (None, options.eps_clip_low, options.eps_clip_high):
        yield "--eps_clip has no effect beside --eps_clip_low and --eps_clip_high: leave it out"
    yield from out_of_order(all_options(), vars(options))


def _required(options: SimpleNamespace) -> Iterator[str]:
    needs_prompts = trains(options.config) and not options.unfed
    yield from (
        line
        for line in options.config.missing()
        if needs_prompts or not line.startswith("--prompt_data ")
    )


def _models(options: SimpleNamespace) -> Iterator[str]:
    if options.init_critic_from_actor and options.critic_pretrain not in (None, options.pretrain):
        yield "--init_critic_from_actor and --critic_pretrain name two starts for the critic: leave one out"


def _rewards(options: SimpleNamespace) -> Iterator[str]:
    """What scores the samples is there."""
    config = options.config
    try:
        scored_by = reward_sources(config) or (not trains(config) and further_sources(config))
    except ConfigError as error:
        yield str(error)
        return
    if not scored_by and not options.unfed and not estimator_entry(config).ignores_scores:
        named = ", ".join(built_in())
        more = f" or a built-in --reward_source ({named})" if named else ""
        yield f"no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL{more}"


def templates(options: SimpleNamespace) -> Iterator[str]:
    """The template around prompts."""
    if options.input_template is not None and options.input_template.count("{}") != 1:
        yield f"--input_template {options.input_template!r} needs exactly one {{}} for the prompt"
    try:
        template_kwargs(options.chat_template_kwargs, "--chat_template_kwargs")
    except ConfigError as error:
        yield str(error)


def template_kwargs(value: Mapping[str, Any] | str | None, where: str) -> dict[str, Any]:
    """Further variables of a chat template, from an object or its text in JSON; ConfigError names ``where``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{where} must be a JSON object, not {shown_value(value)}")
    if own := sorted(_NO_VARIABLES & set(value or ())):
        raise ConfigError(f"{where} has {own[0]!r}, which is no variable of a chat template")
    return dict(value or {})


# What apply_chat_template takes beside them: it is set by lightppo, or by a column of its own.
_NO_VARIABLES = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)


def _ranks(options: SimpleNamespace) -> Iterator[str]:
    if options.ranks % options.zpg:
        yield f"--zpg {options.zpg} does not divide the {options.ranks} ranks"


# -- the options of a run --------------------------------------------------------------------------------------------


class PPOConfig(Options):
    """Everything a PPO run needs: ``config.algorithm.gamma``; ``config.flat()["gamma"]``.

    ``PPOConfig.from_flat(pretrain="...", prompt_data="...")`` builds one in code, ``parse_args`` from the command line.
    """

    def validate(self, world_size: int = 1, by_hand: bool = False, unfed: bool = False) -> None:
        """Check values, then combinations; ConfigError with a line for each option that has a problem.

        Arguments as of :func:`contradictions`.
        """
        self.with_options(**self.flat())
        if problems := contradictions(self, world_size, by_hand, unfed):
            raise ConfigError("\n".join(problems))

    def known(self) -> dict[str, Any]:
        """Values by flag name, with what None stands for."""
        return self.flat() | resolutions(self)

    def resolved(self) -> Self:
        """A copy with every "None means …" replaced by what it means. ConfigError for a value out of range."""
        conformed = self.with_options(**self.flat())
        return conformed.with_options(**resolutions(conformed))
