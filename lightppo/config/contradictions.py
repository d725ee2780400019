"""What options cannot do together, or not without others: refused here, before anything loads."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.config.reward_options import (
    built_in,
    further_sources,
    reward_sources,
    source_problems,
)
from lightppo.config.rules import (
    estimator_entry,
    parse_specs,
    policy_loss_entry,
    resolutions,
    samples_per_rollout,
    template_kwargs,
    trains,
)
from lightppo.errors import ConfigError
from lightppo.option import SECTIONS, out_of_order
from lightppo.plugin import REWARDS
from lightppo.redaction import shown_value


def contradictions(
    config: Any, world_size: int, by_hand: bool = False, unfed: bool = False
) -> list[str]:
    """Return what cannot work: the first problem of each option.

    Args:
        config: values of the right type and in range.
        world_size: number of ranks.
        by_hand: models, data and rewards were made by hand: only what concerns the trainer.
        unfed: the run is only computed: it needs neither prompts nor a reward.
    """
    about_run = {"config": config, "ranks": world_size, "samples": samples_per_rollout(config)}
    about_run |= {"by_hand": by_hand, "unfed": unfed}
    options = SimpleNamespace(**config.flat() | resolutions(config) | about_run)
    rules = [unmet_needs, source_problems]
    rules += [_required] * (not by_hand)
    rules += [_batches, _sampling, _algorithm, _buffer]
    rules += [_models, _rewards, templates, _ranks, _micro_batches] * (not by_hand)
    of_trainer = config.of_trainer()
    rules += [
        section.problems
        for section in config.parts()
        if not by_hand or section._owner in of_trainer
    ]
    return first_of_each(message for rule in rules for message in rule(options))


def first_of_each(messages: Iterable[str]) -> list[str]:
    """Return the first message of each flag, which messages begin with."""
    first_messages: dict[str, str] = {}
    for message in messages:
        first_messages.setdefault(message.split()[0].strip(":,"), message)
    return list(first_messages.values())


def _batches(options: SimpleNamespace) -> Iterator[str]:
    batch = options.train_batch_size
    parts = options.ppo_n_minibatches
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
    samples = options.n_samples_per_prompt
    estimator = estimator_entry(options.config)
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
    yield from out_of_order(options.config.all_options(), vars(options))


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
    """Refuse a run whose samples nothing scores."""
    config = options.config
    try:
        scored_by = reward_sources(config) or (not trains(config) and further_sources(config))
    except ConfigError as error:
        yield str(error)
        return
    if not scored_by and not options.unfed and not estimator_entry(config).ignores_scores:
        source_names = ", ".join(built_in())
        built_in_advice = f" or a built-in --reward_source ({source_names})" if source_names else ""
        yield f"no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL{built_in_advice}"


def templates(options: SimpleNamespace) -> Iterator[str]:
    """Refuse templates around prompts that cannot be used."""
    if options.input_template is not None and options.input_template.count("{}") != 1:
        yield f"--input_template {options.input_template!r} needs exactly one {{}} for the prompt"
    try:
        template_kwargs(options.chat_template_kwargs, "--chat_template_kwargs")
    except ConfigError as error:
        yield str(error)


def _ranks(options: SimpleNamespace) -> Iterator[str]:
    if options.ranks % options.zpg:
        yield f"--zpg {options.zpg} does not divide the {options.ranks} ranks"

    yield from undividable(options, options.ranks)


# What models need to run pieces of rows, beside what is known only when they are there: option → its values.
_WITH_PIECES: dict[str, tuple[Any, ...]] = {
    "attn_implementation": ("auto", "sdpa"),
    "gradient_checkpointing_use_reentrant": (False,),
    "torch_compile": (False,),
    "batch_invariant": (False,),
    "aux_loss_coef": (0,),
}


def undividable(options: SimpleNamespace, ranks: int) -> Iterator[str]:
    """Refuse ``--sequence_parallel_size`` that does not fit the ranks, or beside what models cannot do in pieces."""
    size = options.sequence_parallel_size
    if size == 1:
        return
    if ranks % size:
        yield f"--sequence_parallel_size {size} does not divide the {ranks} ranks"
    for name, values in _WITH_PIECES.items():
        value = vars(options).get(name, values[0])
        if value not in values:
            yield f"--sequence_parallel_size {size} does not work with --{name} {shown_value(value)}: leave one out"


def _micro_batches(options: SimpleNamespace) -> Iterator[str]:
    """Refuse specs that cannot be read, or of calls that the run does not make."""
    try:
        specs = parse_specs(options.micro_batch_specs)
    except ConfigError as error:
        yield str(error)
        return
    needed = {
        "critic": "critic",
        "critic_train": "critic",
        "reference": "init_kl_coef>0",
        "reward": "reward_pretrain",
        "teacher": "teacher_pretrain",
    }
    values = vars(options) | facts_of(options.config)
    for call in specs:
        if call in needed and not holds(needed[call], values):
            words = condition_text(needed[call])
            yield f"--micro_batch_specs {call}=…: the call needs {words}; leave it out"


def _buffer(options: SimpleNamespace) -> Iterator[str]:
    """Refuse a buffer that forgets samples of the step that it trains on."""
    surplus = options.dynamic_sampling or options.gen_batch_size > options.rollout_batch_size
    groups = max(1, options.ranks // options.sequence_parallel_size)
    samples_held = options.samples if surplus else options.samples // groups
    if 0 < options.buffer_limit < samples_held:
        why = " with --dynamic_sampling or --gen_batch_size" if surplus else ""
        yield (
            f"--buffer_limit {options.buffer_limit} loses samples: a rank may hold {samples_held} of a step{why}; "
            "set 0 or as many"
        )


# -- what an option may need beside other options ----------------------------------------------------------------------


def _estimators_with(trait: str) -> str:
    names = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if getattr(entry, trait)]
    return f"--advantage_estimator {' or '.join(names)}"


def conditions() -> dict[str, str]:
    """Return what ``needs`` may name beside options, and what to set for it: facts, sources, those of sections."""
    condition_texts = {
        "sampling": "a --temperature above 0 (and no --no_do_sample)",
        "critic": f"a critic ({_estimators_with('needs_critic')})",
        "whitening": "whitening of advantages (--adv_norm)",
        "discounting": _estimators_with("discounted"),
        "group_deviation": _estimators_with("divides_by_std"),
        "clipping": "a --policy_loss that clips",
        "function": "a reward function (--reward_fn)",
        "server": "a reward server (--remote_rm_url)",
    }
    condition_texts |= {name: f"--reward_source {name}" for name in built_in()}
    condition_texts["trained_scores"] = (
        f"scores that are trained on (not {_estimators_with('ignores_scores')})"
    )
    condition_texts["own_reference"] = (
        "a reference model of its own (no --lora_rank, or another --ref_pretrain)"
    )
    condition_texts["one_source"] = "a single source of rewards"
    for place in SECTIONS.values():
        condition_texts |= place.kind.conditions
    return condition_texts


def facts_of(config: Any) -> dict[str, bool]:
    """Return which of these conditions hold, but for reward sources; of a command without a policy none is known."""
    if config.command != "ppo":
        return {}
    estimator = estimator_entry(config)
    whitens = config.algorithm.adv_norm
    facts = {
        "sampling": config.rollout.do_sample and config.rollout.temperature > 0,
        "critic": estimator.needs_critic,
        "whitening": estimator.whiten if whitens is None else whitens,
        "discounting": estimator.discounted,
        "group_deviation": estimator.divides_by_std,
        "clipping": policy_loss_entry(config).eps_clip is not None,
        "trained_scores": not estimator.ignores_scores,
    }
    for section in config.parts():
        facts |= section.facts(config)
    return facts


def source_facts(config: Any) -> dict[str, bool]:
    """Return which conditions of reward sources hold, for all sources of the run; ConfigError as reward_sources."""
    if config.command != "ppo":
        return {}
    used = {*reward_sources(config), *further_sources(config)}
    return {name: name in used for name in REWARDS}


def condition_text(condition: str) -> str:
    """Put one of an option's ``needs`` into words.

    ``"dynamic_sampling"`` (given or true), ``"zero_stage=2|3"``, ``"rollout_check!=off"``, ``"lora_rank>0"``, one of
    :func:`conditions`, or several of these with ``" or "`` between.
    """
    texts = []
    known_conditions = conditions()
    for name, sign, value in map(_split_condition, condition.split(" or ")):
        words = {
            "": "",
            "=": f" {value.replace('|', ' or ')}",
            "!=": f" other than {value}",
            ">": f" above {value}",
        }
        texts.append(known_conditions.get(name, f"--{name}{words[sign]}"))
    return " or ".join(texts)


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Tell whether a condition holds, or is of something unknown."""
    return any(
        _holds(*_split_condition(alternative), values) for alternative in condition.split(" or ")
    )


def _holds(name: str, sign: str, expected: str, values: Mapping[str, Any]) -> bool:
    if name not in values:
        return True
    value = values[name]
    if sign == ">":
        return value > float(expected)
    if sign:
        return (str(value) in expected.split("|")) == (sign == "=")
    return value is not None and value is not False and value != ()


def _split_condition(condition: str) -> tuple[str, str, str]:
    name, sign, value = re.fullmatch(r"(\w+)(!=|=|>|)(.*)", condition).groups()
    return name, sign, value


# -- what is refused, and what is told ---------------------------------------------------------------------------------


def unmet_needs(options: SimpleNamespace) -> Iterator[str]:
    """Refuse options without what they need, and such as exclude each other; ``options`` as of ``Section.problems``."""
    config = options.config
    flat = options.config.flat()
    options.facts = facts_of(config)
    of_trainer = config.of_trainer()
    declared = {
        option.name: option
        for option in config.all_options()
        if not options.by_hand or option.owner in of_trainer
    }
    values = {name: getattr(options, name) for name in declared}
    if options.by_hand:
        values["enable_ema"] = True  # the script brings its ema_model
    else:
        with suppress(ConfigError):  # which is told by itself
            options.facts |= source_facts(config)
    values |= options.facts
    is_set = {
        f"no_{name}" if flat[name] is False else name: option
        for name, option in declared.items()
        if option.is_set(flat[name])
    }
    for flag, option in is_set.items():
        for condition in option.needs:
            if not holds(condition, values):
                yield f"--{flag} needs {condition_text(condition)}: set that, or leave --{flag} out"
    for flag, others, reason in (rule for section in config.parts() for rule in section.exclusive):
        for other_flag in others.split():
            if {flag, other_flag} <= is_set.keys():
                yield f"--{flag} and --{other_flag} {reason}: leave one out"


def idle_flags(config: Any, given: Container[str]) -> dict[str, list[str]]:
    """Return options that were ``given`` and change nothing, which no error says because they are off or the default.

    Returns:
        what they need, in words → their names.
    """
    flat = config.flat()
    names_by_need = {}
    idle = [
        option
        for option in config.all_options()
        if option.needs and option.name in given and not option.is_set(flat[option.name])
    ]
    values = config.resolved().flat() | facts_of(config) | source_facts(config) if idle else {}
    for option in idle:
        if unmet := [condition for condition in option.needs if not holds(condition, values)]:
            names_by_need.setdefault(condition_text(unmet[0]), []).append(option.name)
    return names_by_need


def idle_notes(config: Any, given: Container[str]) -> Iterator[str]:
    """Yield a line for options on the command line that change nothing."""
    for needed, names in idle_flags(config, given).items():
        change = "changes" if len(names) == 1 else "change"
        flags = ", ".join(f"--{name}" for name in names)
        yield f"{flags} {change} nothing here: as by default, without {needed}"
