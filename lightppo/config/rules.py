"""Options together: what follows from several of them, what ``None`` stands for, and which cannot work.

Whatever can be known from the options alone is refused here, before anything loads. :class:`PPOConfig` is at the end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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
from lightppo.option import is_object, out_of_order
from lightppo.plugin import (
    ADVANTAGE_TERMS,
    FROZEN_MODELS,
    MICRO_BATCHES,
    REWARDS,
    ROLLOUT_PASSES,
    TOKEN_WEIGHTS,
    FrozenModel,
)
from lightppo.shown import shown_value
from lightppo.suggestions import nearest

# -- facts -----------------------------------------------------------------------------------------------------------


def estimator_entry(config: Options) -> EstimatorEntry:
    """What the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)


def policy_loss_entry(config: Options) -> PolicyLossEntry:
    """The entry of ``--policy_loss``, or of the loss that belongs to the estimator."""
    return POLICY_LOSSES.find(_or(config.loss.policy_loss, estimator_entry(config).policy_loss))


def token_weights(config: Options, in_training: bool) -> dict[str, Callable[..., Any]]:
    """The functions of ``TOKEN_WEIGHTS`` that this run needs in training, or before the update."""
    functions = {
        name: entry.fn(config)
        for name, entry in TOKEN_WEIGHTS.items()
        if entry.in_training == in_training
    }
    return {name: function for name, function in functions.items() if function is not None}


def needs_critic(config: Options) -> bool:
    """Whether this run trains a critic."""
    return estimator_entry(config).needs_critic and not config.evaluation.val_only


def needs_reference(config: Options) -> bool:
    """Whether this run compares with a reference, be it the actor itself without adapters."""
    return config.algorithm.init_kl_coef > 0 and not config.evaluation.val_only


def frozen_models(config: Options) -> dict[str, FrozenModel]:
    """The further models of ``FROZEN_MODELS`` that this run loads."""
    if config.evaluation.val_only:
        return {}
    models = {name: entry.fn(config) for name, entry in FROZEN_MODELS.items()}
    return {name: model for name, model in models.items() if model is not None}


def advantage_terms(config: Options) -> list[Callable[..., Any]]:
    """The functions of ``ADVANTAGE_TERMS`` that this run needs."""
    return list(filter(None, (entry.fn(config) for entry in ADVANTAGE_TERMS.values())))


def moves_reference(config: Options) -> bool:
    """Whether the reference changes during the run, and so belongs to its checkpoints."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None


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
    return ("actor", "reference", *ROLLOUT_PASSES, "critic", "reward")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def micro_batch_spec(config: Options, call: str) -> MicroBatchSpec:
    """What one pass takes in one of :func:`scoring_calls` or a training: as a plugin says, else so many samples."""
    asked = (entry.fn(config, call) for entry in MICRO_BATCHES.values())
    is_scoring = call in scoring_calls()
    rows = rollout_rows(config) if is_scoring else config.training.micro_train_batch_size
    return next(filter(None, asked), MicroBatchSpec(rows))


def rollout_rows(config: Options) -> int:
    """``--micro_rollout_batch_size``; 8 where it is left to the GPU's memory, which only generation follows."""
    return _or(config.rollout.micro_rollout_batch_size, 8)


# -- old log probs ---------------------------------------------------------------------------------------------------


def old_log_probs_from(
    config: Options, exact_rollout: bool
) -> Literal["training", "rollout", "forward"]:
    """Where a run takes its log probs before an update from: as few passes as the algorithm allows.

    - ``"training"``: the training pass itself, with one optimizer step per rollout;
    - ``"rollout"``: those recorded while sampling;
    - ``"forward"``: a pass of the actor over the rollout.

    Args:
        config: resolved.
        exact_rollout: the engine samples with the actor's own weights and forward, so that what it records is what a
            pass would give.
    """
    algorithm, training = config.algorithm, config.training
    if config.loss.old_log_probs != "auto":
        return config.loss.old_log_probs
    if token_weights(config, in_training=False):
        return "forward"
    needed_before = (
        (algorithm.init_kl_coef > 0 and algorithm.use_kl_in_reward)
        or bool(advantage_terms(config))
        or policy_loss_entry(config).selection is not None
        or estimator_entry(config).needs_score_norms
        or algorithm.freezing_actor_steps > 0
    )
    if (
        training.max_epochs == 1
        and training.train_batch_size == _samples(config)
        and not needed_before
    ):
        return "training"
    is_stale = any(part.is_stale(config) for part in config.parts())
    needs_pass = is_stale or _needs_pass(config.flat())
    recorded = exact_rollout and compute_dtype(config) == "float32" and not needs_pass
    return "rollout" if recorded else "forward"


def _needs_pass(values: Mapping[str, Any]) -> list[str]:
    """Why recorded log probs would not do."""
    options = SimpleNamespace(**values)
    reasons = {
        f"--advantage_estimator {shown_value(options.advantage_estimator)} needs the distributions of a pass": (
            ADVANTAGE_ESTIMATORS.find(options.advantage_estimator).needs_score_norms
        ),
        "--kl_estimator full needs the distributions of a pass": (
            options.init_kl_coef > 0 and options.kl_estimator == "full" and options.use_kl_in_reward
        ),
        f"greedy rollouts record them at temperature 1, not --temperature {options.temperature:g}": (
            not options.do_sample and options.temperature not in (0, 1)
        ),
    }
    of_sections = [reason for part in Options.parts() for reason in part.passes(options)]
    return of_sections + [reason for reason, is_so in reasons.items() if is_so]


# -- reward sources --------------------------------------------------------------------------------------------------

ANY_ROUTE = "*"

Plan = dict[str, dict[str, float]]  # route → source → weight


def built_in() -> list[str]:
    """The sources that their names alone stand for."""
    return [name for name, entry in REWARDS.items() if not entry.flag]


def sources_by_flag() -> dict[str, str]:
    """The sources that another flag gives, and the flag."""
    return {name: entry.flag for name, entry in REWARDS.items() if entry.flag}


def reward_plan(config: Options, flag: str = "--reward_source") -> Plan | None:
    """The sources of ``--reward_source`` or ``--reward_routes``; ``None`` where one of the other flags is the source.

    Raises:
        ConfigError: not of the form, an unknown source, or a weight that is no number.
    """
    verifier = config.verifier
    if verifier.reward_routes is not None:
        return _routes(verifier.reward_routes)
    if verifier.reward_source:
        named = (text.partition("=") for text in verifier.reward_source)
        weights = {name.strip(): weight if equals else 1.0 for name, equals, weight in named}
        return {ANY_ROUTE: _weights(flag, weights)}
    return None


def evaluation_config(config: Options) -> Options | None:
    """The config whose rewards score evaluations: ``--eval_reward_source``; ``None``: those of training do."""
    evaluation = config.evaluation
    if not evaluation.eval_reward_source and evaluation.eval_reward_fn is None:
        return None
    sources = evaluation.eval_reward_source or ("function",)
    function = _or(evaluation.eval_reward_fn, config.reward.reward_fn)
    of_training = {"reward_routes": None, "check_xml_format": False, "reward_minimum": None}
    there = {name: value for name, value in of_training.items() if name in config.flat()}
    return config.with_options(reward_source=sources, reward_fn=function, **there)


def reward_sources(config: Options) -> set[str]:
    """Names of all sources of a run, whichever flags they come from; they are in ``REWARDS``."""
    plan, urls = reward_plan(config), config.reward.remote_rm_url
    models = config.model.reward_pretrain
    if plan is not None:
        return {name for weights in plan.values() for name in weights}
    is_file = len(urls) == 1 and "://" not in urls[0]
    given = {
        "function": is_file or (config.reward.reward_fn and not models),
        "server": any("://" in url for url in urls),
        "model": models,
    }
    return {name for name, is_given in given.items() if is_given}


def _routes(text: str) -> Plan:
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ConfigError(f"--reward_routes {text!r} is neither a JSON object nor a file")
        text = path.read_text()
    try:
        routes = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--reward_routes is not JSON: {error}") from None
    if (
        not isinstance(routes, dict)
        or not routes
        or not all(isinstance(w, dict) and w for w in routes.values())
    ):
        raise ConfigError(
            '--reward_routes must be an object of objects: {"gsm8k": {"math": 1}, "*": {"model": 1}}'
        )
    return {
        route: _weights(f"--reward_routes {route!r}", weights) for route, weights in routes.items()
    }


def _weights(where: str, weights: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in REWARDS:
            known = ", ".join((*built_in(), *sources_by_flag()))
            raise ConfigError(
                f"{where}: unknown source {name!r}{nearest(name, REWARDS)}; known are {known}"
            )
        try:
            found[name] = float(weight)
        except (TypeError, ValueError):
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise ConfigError(f"{where}: the weight of {name} must be a number, got {weight!r}")
    return found


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
        "eval_temperature": 1.0 if config.evaluation.eval_n_samples > 1 else 0.0,
        **estimator.defaults,
        **loss.defaults,
    }
    if algorithm.init_kl_coef > 0:
        meant["ref_pretrain"] = model.pretrain
    if estimator.needs_critic:
        meant |= _critic_resolutions(config)
    if estimator.divides_by_std and algorithm.group_std_norm:
        meant["grpo_std_eps"] = 1e-6
    if _or(algorithm.adv_norm, estimator.whiten):
        meant["adv_norm_eps"] = 1e-5 if algorithm.adv_norm_scope == "group" else 1e-8
    if loss.eps_clip is not None:
        low, high = (
            loss.eps_clip
            if loss_options.eps_clip is None
            else (loss_options.eps_clip, loss_options.eps_clip)
        )
        meant |= {"eps_clip_low": low, "eps_clip_high": high}
    if loss_options.value_norm is not None:
        meant |= {
            "value_norm_eps": 1e-5,
            "value_norm_beta": 0.99995 if loss_options.value_norm == "exp" else None,
        }
    if config.sampling.fire_sampling:
        meant["fire_temperature"] = 10.0
    if config.reward.overlong_buffer_len is not None:
        meant["overlong_penalty_factor"] = 1.0

    for part in config.parts():
        meant |= part.meant(config)
    given = config.flat()
    resolved = {name: _or(given[name], value) for name, value in meant.items()}
    return resolved | {
        "attn_implementation": "flash_attention_2"
        if model.flash_attn
        else model.attn_implementation,
        "reward_manager": {"dapo": "auto"}.get(manager := config.verifier.reward_manager, manager),
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


# -- what an option needs --------------------------------------------------------------------------------------------


def _with(trait: str) -> str:
    names = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if getattr(entry, trait)]
    return f"--advantage_estimator {' or '.join(names)}"


# What ``needs`` may name beside options: the fact (see ``_facts``), and what to set for it.
FACTS = {
    "sampling": "a --temperature above 0 (and no --no_do_sample)",
    "critic": f"a critic ({_with('needs_critic')})",
    "whitening": "whitening of advantages (--adv_norm)",
    "discounting": _with("discounted"),
    "group_deviation": _with("divides_by_std"),
    "clipping": "a --policy_loss that clips",
    "one_source": "a single source of rewards",
    "function": "a reward function (--reward_fn)",
    "server": "a reward server (--remote_rm_url)",
}


def conditions() -> dict[str, str]:
    """``FACTS``, the sources of rewards, and the conditions of all sections."""
    known = FACTS | {name: f"--reward_source {name}" for name in built_in()}
    known["trained_scores"] = f"scores that are trained on (not {_with('ignores_scores')})"
    for part in Options.parts():
        known |= part.conditions
    return known


def facts_of(config: Options) -> dict[str, bool]:
    """Which of ``FACTS`` hold, except for those of reward sources."""
    estimator = estimator_entry(config)
    facts = {
        "sampling": config.rollout.do_sample and config.rollout.temperature > 0,
        "critic": estimator.needs_critic,
        "whitening": _or(config.algorithm.adv_norm, estimator.whiten),
        "discounting": estimator.discounted,
        "group_deviation": estimator.divides_by_std,
        "clipping": policy_loss_entry(config).eps_clip is not None,
        "trained_scores": not estimator.ignores_scores,
    }
    for part in config.parts():
        facts |= part.facts(config)
    return facts


def _judges(config: Options) -> set[str]:
    """Names of the sources that score evaluations alone."""
    judge = evaluation_config(config)
    return set() if judge is None else set(reward_plan(judge, "--eval_reward_source")[ANY_ROUTE])


def _source_facts(plan: Plan | None, sources: set[str], judges: set[str]) -> dict[str, bool]:
    """Which of the ``FACTS`` of reward sources hold, those that judge evaluations included."""
    one_source = plan is None or len(plan) == len(sources) == 1
    used = {name: name in sources | judges for name in REWARDS}
    return used | {"one_source": one_source}


def condition_text(condition: str) -> str:
    """One of an option's ``needs`` in words.

    ``"dynamic_sampling"`` (given or true), ``"zero_stage=2|3"``, ``"rollout_check!=off"``, ``"lora_rank>0"``, one of
    ``FACTS``, or several of these with ``" or "`` between.
    """
    texts, known = [], conditions()
    for name, sign, value in map(_parts, condition.split(" or ")):
        words = {
            "": "",
            "=": f" {value.replace('|', ' or ')}",
            "!=": f" other than {value}",
            ">": f" above {value}",
        }
        texts.append(known.get(name, f"--{name}{words[sign]}"))
    return " or ".join(texts)


def _parts(condition: str) -> tuple[str, str, str]:
    name, sign, value = re.fullmatch(r"(\w+)(!=|=|>|)(.*)", condition).groups()
    return name, sign, value


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition holds, or is of something unknown."""

    def is_so(name: str, sign: str, wanted: str) -> bool:
        if name not in values:
            return True
        value = values[name]
        if sign == ">":
            return value > float(wanted)
        if sign:
            return (str(value) in wanted.split("|")) == (sign == "=")
        return value is not None and value is not False and value != ()

    return any(is_so(*_parts(part)) for part in condition.split(" or "))


# -- what cannot work ------------------------------------------------------------------------------------------------


_CUT = "both say what becomes of a response cut by the limit"
# An option, others that cannot be set beside it, and why.
_EXCLUSIVE = (
    ("use_kl_loss", "use_kl_in_reward", "would count the KL twice"),
    ("ref_ema_eta", "ref_reset_steps", "both move the reference"),
    ("no_adv_shift_mean", "no_adv_std_norm", "leave nothing of whitening, as --no_adv_norm does"),
    ("input_template", "apply_chat_template", "both render the prompt"),
    ("flash_attn", "attn_implementation", "contradict each other"),
    ("bf16", "fp16", "contradict each other"),
    ("resume", "no_load_checkpoint", "contradict each other"),
    ("reward_source", "reward_routes", "both name the sources"),
    ("mask_too_long", "stop_properly_penalty", _CUT),
    ("stop_properly_penalty", "mask_no_eos_with_zero", _CUT),
    (
        "use_dense_reward",
        "reward_running_norm mask_no_eos_with_zero stop_properly_penalty",
        "are of token scores, and of the one score of a response",
    ),
    ("lr_warmup_ratio", "lr_warmup_steps", "both say how long the warm-up is"),
    ("gradient_checkpointing_use_reentrant", "aux_loss_coef torch_compile", "do not work together"),
)


def idle_flags(config: OptionSet, given: Container[str]) -> dict[str, list[str]]:
    """Options that were ``given`` and change nothing, which no error says because they are off or the default.

    Returns:
        what they need, in words → their names.
    """
    flat, found = config.flat(), {}
    idle = [
        one
        for one in config.all_options()
        if one.needs and one.name in given and not one.is_set(flat[one.name])
    ]
    values = config.known() if idle else {}
    for one in idle:
        if unmet := [condition for condition in one.needs if not holds(condition, values)]:
            found.setdefault(condition_text(unmet[0]), []).append(one.name)
    return found


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
    options = SimpleNamespace(**config.flat() | resolutions(config))
    options.config, options.ranks, options.samples, options.facts = (
        config,
        world_size,
        _samples(config),
        facts_of(config),
    )
    options.unfed = unfed
    rules = [_batches, _sampling, _algorithm]
    if not by_hand:
        rules = [
            _required,
            *rules,
            _models,
            _rewards,
            templates,
            _strategy,
            _warm_up,
        ]
        options.plan_problem = None
        try:
            options.plan, options.sources, options.judges = (
                reward_plan(config),
                reward_sources(config),
                _judges(config),
            )
            options.facts |= _source_facts(options.plan, options.sources, options.judges)
        except ConfigError as error:
            options.plan_problem = str(error)
    sections = config.sections()
    rules += [
        part.problems
        for part in config.parts()
        if not by_hand or sections[part._owner].of in ("trainer", "training")
    ]
    return first_of_each(
        [*relations(options, by_hand), *(message for rule in rules for message in rule(options))]
    )


# What an evaluation samples by, in place of what a training samples by.
_OF_EVALUATION = {
    "temperature": "--eval_temperature",
    "top_p": "--eval_top_p",
    "top_k": "--eval_top_k",
    "n_samples_per_prompt": "--eval_n_samples",
    "do_sample": "--eval_temperature 0, or a number above it",
}


def without_effect_on_evaluation(config: OptionSet, given: Iterable[str]) -> list[str]:
    """Messages about options on the command line of an evaluation that only the rollouts of a training follow."""
    flat = config.flat()
    if not flat.get("val_only"):
        return []
    found = [name for name in given if name in _OF_EVALUATION]
    return [
        f"--{'' if flat[name] is not False else 'no_'}{name} has no effect on an evaluation: set {_OF_EVALUATION[name]}"
        for name in found
    ]


def first_of_each(messages: Iterable[str]) -> list[str]:
    """The first message of each flag, which messages begin with."""
    found: dict[str, str] = {}
    for message in messages:
        found.setdefault(message.split()[0].strip(":,"), message)
    return list(found.values())


def relations(options: SimpleNamespace, by_hand: bool = False) -> Iterator[str]:
    """Options without what they need, and such as exclude each other; ``options`` has ``config`` and ``facts``, too."""
    config, given = options.config, options.config.flat()
    of_trainer = {
        name for name, kind in config.sections().items() if kind.of in ("trainer", "training")
    }
    declared = {
        option.name: option
        for option in config.all_options()
        if not by_hand or option.owner in of_trainer
    }
    values = {name: getattr(options, name) for name in declared} | options.facts
    if by_hand:
        values["enable_ema"] = True  # the script brings its ema_model
    is_set = {
        f"no_{name}" if given[name] is False else name: option
        for name, option in declared.items()
        if option.is_set(given[name])
    }
    for flag, option in is_set.items():
        for condition in option.needs:
            if not holds(condition, values):
                yield f"--{flag} needs {condition_text(condition)}: set that, or leave --{flag} out"
    exclusive = [*_EXCLUSIVE, *(one for part in config.parts() for one in part.exclusive)]
    for flag, others, reason in exclusive:
        for other in others.split():
            if {flag, other} <= is_set.keys():
                yield f"--{flag} and --{other} {reason}: leave one out"


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
    for name in ("min_new_tokens", "overlong_buffer_len"):
        if (length := getattr(options, name) or 0) > options.generate_max_len:
            yield f"--{name} {length} exceeds --generate_max_len {options.generate_max_len}"


def _sampling(options: SimpleNamespace) -> Iterator[str]:
    if (ends := options.reward_clip_range) is not None and ends[0] >= ends[1]:
        yield f"--reward_clip_range {ends[0]:g} {ends[1]:g} is empty: give the lower end first"
    empty = {
        "stop": "" in options.stop,
        "bad_words": not all(map(str.strip, options.bad_words)),
    }
    yield from (
        f"--{name} has an empty text: leave it out" for name, is_empty in empty.items() if is_empty
    )


def _algorithm(options: SimpleNamespace) -> Iterator[str]:
    samples, estimator = options.n_samples_per_prompt, estimator_entry(options.config)
    name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
    least = estimator.min_group_size
    if samples < least:
        yield f"{name} compares samples of one prompt: set --n_samples_per_prompt to at least {least}"
    if estimator.needs_greedy_baseline and not options.facts["sampling"]:
        yield f"{name} compares with the greedy answer, which every sample is: set a --temperature above 0"
    if estimator.needs_greedy_baseline and options.use_dense_reward:
        yield f"{name} acts on the one score of a response, --use_dense_reward on token scores: leave one out"
    if options.init_kl_coef > 0 and not options.use_kl_loss and not options.use_kl_in_reward:
        yield "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
    if options.kl_target is not None and 0.2 * options.samples >= options.kl_horizon:
        shortest = f"set it above {0.2 * options.samples:g}, a fifth of the samples of a rollout"
        yield f"--kl_horizon {options.kl_horizon} is so short that the coefficient could change sign: {shortest}"
    if options.eps_clip not in (None, options.eps_clip_low, options.eps_clip_high):
        yield "--eps_clip has no effect beside --eps_clip_low and --eps_clip_high: leave it out"
    if options.reward_scaling == 0:
        yield "--reward_scaling 0 makes all scores the same: set another factor"
    yield from out_of_order(all_options(), vars(options))
    if options.old_log_probs == "rollout":
        try:
            yield from (
                f"--old_log_probs rollout: {why}; set auto or forward"
                for why in _needs_pass(vars(options))
            )
        except ConfigError:  # of a value that its section refuses
            return


def _required(options: SimpleNamespace) -> Iterator[str]:
    without_prompts = options.val_only or options.unfed
    yield from (
        line
        for line in options.config.missing()
        if not (without_prompts and line.startswith("--prompt_data "))
    )
    if options.val_only and options.eval_data is None:
        yield "--eval_data is required: the prompts whose answers an evaluation scores"


def _models(options: SimpleNamespace) -> Iterator[str]:
    if options.init_critic_from_actor and options.critic_pretrain not in (None, options.pretrain):
        yield "--init_critic_from_actor and --critic_pretrain name two starts for the critic: leave one out"
    if options.override_config is not None:
        try:
            values = json.loads(options.override_config)
            is_object = isinstance(values, dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            yield f"--override_config must be a JSON object, not {options.override_config!r}"
        else:
            yield from _wrong_dropouts(values)


def _wrong_dropouts(overrides: dict[str, Any]) -> Iterator[str]:
    """Rates of ``--override_config``, those of its parts too, that are none."""
    for name, value in overrides.items():
        if isinstance(value, dict):
            yield from _wrong_dropouts(value)
        elif value is None or isinstance(value, bool) or not ("drop" in name or "jitter" in name):
            continue
        elif not (isinstance(value, int | float) and 0 <= value < 1):
            yield f"--override_config {name!r}: a rate is a number of at least 0 and below 1, not {value!r}"


def _rewards(options: SimpleNamespace) -> Iterator[str]:
    """Which sources there are, and what they need."""
    for name in ("reward_fn", "eval_reward_fn"):
        given = getattr(options, name)
        usable = not isinstance(given, type) and (
            callable(given) or callable(getattr(given, "score", None))
        )
        if is_object(given) and not usable:
            yield f"--{name}: {given!r} scores nothing: give a function, or an object with name and score(rollouts)"
    if options.plan_problem:
        yield options.plan_problem
        return
    own = sources_by_flag()
    given = [name for name, flag in own.items() if getattr(options, flag)]
    models = len(options.reward_pretrain)
    if options.plan is None:
        if not given and not options.facts["trained_scores"]:
            if options.eval_data and not options.judges:
                yield "--eval_data: nothing scores the answers: set --eval_reward_source, or --eval_reward_fn path.py"
        elif not given and not options.unfed and not (options.val_only and options.judges):
            named = f"a built-in --reward_source ({', '.join(built_in())})"
            yield f"no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL or {named}"
        for other in ("model", "function"):
            if {"server", other} <= set(given):
                yield f"--remote_rm_url and --{own[other]}: leave one out, or add them up by --reward_source"
    else:
        by = "--reward_source" if options.reward_routes is None else "--reward_routes"
        combines = ["function"] if models > 1 else []
        for name, flag in own.items():
            if name in options.sources and name not in given:
                yield f"{by} names {name!r}, which is what --{flag} gives: set --{flag}"
            if name in given and name not in [*options.sources, *combines, *options.judges]:
                yield f"--{flag} is set, but {by} does not name {name!r}: add it, or leave --{flag} out"
        if options.sources & set(combines):
            yield "--reward_fn combines the scores of several --reward_pretrain: it cannot be a source itself too"
    flags = own | {"function": "eval_reward_fn"}
    has = {
        n: getattr(options, flag) or (n == "function" and models < 2 and options.reward_fn)
        for n, flag in flags.items()
    }
    for name in options.judges & flags.keys():
        if not has[name]:
            yield f"--eval_reward_source names {name!r}, which is what --{flags[name]} gives: set --{flags[name]}"
    if options.eval_reward_fn and "function" not in options.judges:
        yield "--eval_reward_fn is set, but --eval_reward_source does not name 'function': add it, or leave one out"
    if models > 1 and not options.reward_fn:
        yield f"--reward_pretrain has {models} models: --reward_fn path.py:name must combine their scores"
    if models and (tokenizers := len(options.reward_input_tokenizer)) not in (0, 1, models):
        yield f"--reward_input_tokenizer has {tokenizers} for {models} --reward_pretrain: give one for all, or one each"


def templates(options: SimpleNamespace) -> Iterator[str]:
    """The template around prompts."""
    if options.input_template is not None and options.input_template.count("{}") != 1:
        yield f"--input_template {options.input_template!r} needs exactly one {{}} for the prompt"


def _strategy(options: SimpleNamespace) -> Iterator[str]:
    if options.critic_adam_offload and options.critic_zero_stage == 0:
        yield "--critic_adam_offload moves sharded optimizer states: it needs --critic_zero_stage 1, 2 or 3"
    if options.critic_param_offload and options.critic_zero_stage != 3:
        yield "--critic_param_offload offloads ZeRO-3 shards: it needs --critic_zero_stage 3"
    if options.ranks % options.zpg:
        yield f"--zpg {options.zpg} does not divide the {options.ranks} ranks"


def _warm_up(options: SimpleNamespace) -> Iterator[str]:
    """Of the critic, whose values follow the actor's in a resolved config."""
    given = options.config.training
    own_ratio = given.critic_lr_warmup_ratio not in (None, given.lr_warmup_ratio)
    if own_ratio and given.critic_lr_warmup_steps is not None:
        yield "--critic_lr_warmup_ratio and --critic_lr_warmup_steps both say how long the warm-up is: leave one out"


def check_positions(config: Any, positions: int | None) -> None:
    """Prompt and response must fit; ``None``: a model without a limit."""
    prompt, response = config.data.prompt_max_len, config.rollout.generate_max_len
    if positions is not None and prompt + response > positions:
        raise ConfigError(
            f"--prompt_max_len {prompt} + --generate_max_len {response} = {prompt + response} tokens, but "
            f"{config.model.pretrain} has {positions} positions: lower one of them to fit"
        )


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
        """What conditions of options are about: their values, and facts."""
        facts = _source_facts(reward_plan(self), reward_sources(self), _judges(self))
        return self.flat() | resolutions(self) | facts_of(self) | facts

    def resolved(self) -> Self:
        """A copy with every "None means …" replaced by what it means. ConfigError for a value out of range."""
        conformed = self.with_options(**self.flat())
        return conformed.with_options(**resolutions(conformed))
