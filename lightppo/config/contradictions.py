"""What options cannot do together: whatever can be known from them alone is refused here, before anything loads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from lightppo.config import option_needs
from lightppo.config.reward_plan import (
    built_in,
    further_sources,
    reward_sources,
    source_problems,
)
from lightppo.config.rules import (
    estimator_entry,
    parse_specs,
    resolutions,
    samples_per_rollout,
    template_kwargs,
    trains,
)
from lightppo.errors import ConfigError
from lightppo.option import out_of_order
from lightppo.redaction import shown_value


def contradictions(
    config: Any, world_size: int, by_hand: bool = False, unfed: bool = False
) -> list[str]:
    """What cannot work: the first problem of each option.

    Args:
        config: values of the right type and in range.
        world_size: number of ranks.
        by_hand: models, data and rewards were made by hand: only what concerns the trainer.
        unfed: the run is only computed: it needs neither prompts nor a reward.
    """
    about_run = {"config": config, "ranks": world_size, "samples": samples_per_rollout(config)}
    about_run |= {"by_hand": by_hand, "unfed": unfed}
    options = SimpleNamespace(**config.flat() | resolutions(config) | about_run)
    rules = [option_needs.problems, source_problems]
    rules += [_required] * (not by_hand)
    rules += [_batches, _sampling, _algorithm, _buffer]
    rules += [_models, _rewards, templates, _ranks, _micro_batches] * (not by_hand)
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


def _ranks(options: SimpleNamespace) -> Iterator[str]:
    if options.ranks % options.zpg:
        yield f"--zpg {options.zpg} does not divide the {options.ranks} ranks"


def _micro_batches(options: SimpleNamespace) -> Iterator[str]:
    """Specs that cannot be read, or of calls that the run does not make."""
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
    values = vars(options) | option_needs.facts_of(options.config)
    for call in specs:
        if call in needed and not option_needs.holds(needed[call], values):
            words = option_needs.condition_text(needed[call])
            yield f"--micro_batch_specs {call}=…: the call needs {words}; leave it out"


def _buffer(options: SimpleNamespace) -> Iterator[str]:
    """A buffer that forgets samples of the step that it trains on."""
    surplus = options.dynamic_sampling or options.gen_batch_size > options.rollout_batch_size
    held = options.samples if surplus else options.samples // options.ranks
    if 0 < options.buffer_limit < held:
        why = " with --dynamic_sampling or --gen_batch_size" if surplus else ""
        yield (
            f"--buffer_limit {options.buffer_limit} loses samples: a rank may hold {held} of a step{why}; "
            "set 0 or as many"
        )
