"""The relations between options that a declaration cannot say: facts that follow from several of them, what ``None``
stands for, and which combinations cannot work.

Pure functions of a ``PPOConfig``. Whatever can be known from the options alone is refused here, before anything loads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    POLICY_LOSSES,
    EstimatorEntry,
    PolicyLossEntry,
)
from lightppo.errors import ConfigError
from lightppo.http import check_url, is_loopback, shown_url
from lightppo.option import Option, nearest

if TYPE_CHECKING:
    from lightppo.config.options import PPOConfig

# -- facts -----------------------------------------------------------------------------------------------------------


def estimator_entry(config: PPOConfig) -> EstimatorEntry:
    """What the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)


def policy_loss_name(config: PPOConfig) -> str:
    """``--policy_loss``, or what belongs to the estimator."""
    return _or(config.loss.policy_loss, estimator_entry(config).policy_loss)


def policy_loss_entry(config: PPOConfig) -> PolicyLossEntry:
    return POLICY_LOSSES.find(policy_loss_name(config))


def needs_critic(config: PPOConfig) -> bool:
    """Whether this run trains a critic."""
    return estimator_entry(config).needs_critic


def whitens(config: PPOConfig) -> bool:
    """Whether this run whitens advantages."""
    return _or(config.algorithm.adv_norm, estimator_entry(config).whiten)


def moves_reference(config: PPOConfig) -> bool:
    """Whether the reference changes during the run, and so belongs to its checkpoints."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None


def uses_adapters(config: PPOConfig) -> bool:
    """Whether actor and critic train adapters."""
    return config.adapter.lora_rank > 0


def reference_is_actor(config: PPOConfig) -> bool:
    """Whether the reference is the actor with its adapters off, and no model of its own."""
    m = config.model
    return uses_adapters(config) and config.algorithm.init_kl_coef > 0 and m.ref_pretrain in (None, m.pretrain)


def _greedy(config: PPOConfig) -> bool:
    return config.rollout.temperature == 0 or not config.rollout.do_sample


def _samples(config: PPOConfig) -> int:
    """Samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# What ``only_with`` may name beside options: the fact, and what to set for it.
ALGORITHM_FACTS: dict[str, tuple[Callable[[PPOConfig], bool], str]] = {
    "critic": (needs_critic, "a critic, as of --advantage_estimator gae"),
    "whitening": (whitens, "whitening of advantages, --adv_norm"),
    "discounting": (lambda c: estimator_entry(c).discounted, "an --advantage_estimator that discounts"),
    "group_deviation": (
        lambda c: estimator_entry(c).divides_by_std,
        "an --advantage_estimator that divides by the standard deviation of a group",
    ),
    "clipping": (lambda c: policy_loss_entry(c).eps_clip is not None, "a --policy_loss that clips"),
}
SOURCE_FACTS: dict[str, tuple[Callable[[PPOConfig], bool], str]] = {
    "math": (lambda c: "math" in reward_sources(c), "--reward_source math"),
    "format": (lambda c: "format" in reward_sources(c), "--reward_source format"),
    "code": (lambda c: "code" in reward_sources(c), "--reward_source code"),
    "reward_function": (lambda c: "function" in reward_sources(c), "a reward function, --reward_fn"),
    "reward_server": (lambda c: "server" in reward_sources(c), "a reward server, --remote_rm_url http(s)://..."),
}
FACTS = ALGORITHM_FACTS | SOURCE_FACTS


# -- micro batches ---------------------------------------------------------------------------------------------------

SCORING_CALLS = ("actor", "reference", "critic", "reward")
CALLS = (*SCORING_CALLS, "actor_train", "critic_train")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """``("actor=16", "actor_train=4096t")`` → call → spec.

    Raises:
        ConfigError: another form, an unknown call, or one that is named twice.
    """
    specs: dict[str, MicroBatchSpec] = {}
    for text in texts:
        form = re.fullmatch(r"(\w+)=([1-9]\d*)(t?)", text)
        if form is None or form[1] not in CALLS:
            raise ConfigError(
                f"--micro_batch_specs {text!r}: write CALL=SAMPLES or CALL=TOKENSt, such as reference=64 or "
                f"actor_train=4096t; the calls: {', '.join(CALLS)}{nearest(text.partition('=')[0], CALLS)}"
            )
        if form[1] in specs:
            raise ConfigError(f"--micro_batch_specs names {form[1]} twice")
        specs[form[1]] = MicroBatchSpec(int(form[2]), "tokens" if form[3] else "samples")
    return specs


def micro_batch_spec(config: PPOConfig, call: str) -> MicroBatchSpec:
    """What holds for one of ``CALLS``: its own spec, else the token budget, else the number of samples."""
    if (own := parse_specs(config.training.micro_batch_specs).get(call)) is not None:
        return own
    if config.training.max_tokens_per_micro_batch is not None:
        return MicroBatchSpec(config.training.max_tokens_per_micro_batch, "tokens")
    scores = call in SCORING_CALLS
    return MicroBatchSpec(config.rollout.micro_rollout_batch_size if scores else config.training.micro_train_batch_size)


# -- old log probs ---------------------------------------------------------------------------------------------------


def old_log_probs_from(config: PPOConfig, exact_rollout: bool) -> Literal["training", "rollout", "forward"]:
    """Where a run takes its log probs before an update from: as few passes as the algorithm allows.

    - ``"training"``: the training pass itself, with one optimizer step per rollout;
    - ``"rollout"``: those recorded while sampling;
    - ``"forward"``: a pass of the actor over the rollout.

    Args:
        config: resolved.
        exact_rollout: the engine samples with the actor's own weights and forward, so that what it records is what a
            pass would give.
    """
    asked = config.loss.old_log_probs
    if asked != "auto":
        return asked
    if takes_old_from_training(config):
        return "training"
    # Groups left over may be trained on in a later step, when the policy is another.
    s = config.sampling
    stale = s.skip_rollout is not None or s.dynamic_sampling
    stale = stale or (s.gen_batch_size or 0) > config.rollout.rollout_batch_size
    recorded = exact_rollout and not config.model.bf16 and not stale and not _needs_pass(config)
    return "rollout" if recorded else "forward"


def takes_old_from_training(config: PPOConfig) -> bool:
    """Whether the training pass itself can give the old log probs: one optimizer step, and nothing else needs them.

    Then the policy of that pass is the one that sampled, and a forward pass is saved. ``config`` is resolved.
    """
    a, o, t = config.algorithm, config.loss, config.training
    one_step = t.max_epochs == 1 and t.train_batch_size == _samples(config)
    needed_before = (
        (a.init_kl_coef > 0 and a.use_kl_in_reward)
        or config.correction.rollout_correction != "none"
        or o.high_entropy_token_ratio is not None
        or policy_loss_entry(config).selection is not None
        or a.freezing_actor_steps > 0
    )
    return o.old_log_probs == "auto" and one_step and not needed_before


def _needs_pass(config: PPOConfig) -> list[str]:
    """Why recorded log probs would not do."""
    a, r, correction = config.algorithm, config.rollout, config.correction.rollout_correction
    reasons = {
        f"--rollout_correction {correction} compares them with the log probs of a pass": correction != "none",
        "--high_entropy_token_ratio needs the entropy that a pass gives": (
            config.loss.high_entropy_token_ratio is not None
        ),
        "--kl_estimator full needs the distributions that a pass gives": (
            a.init_kl_coef > 0 and a.kl_estimator == "full" and a.use_kl_in_reward
        ),
        f"greedy rollouts record those at temperature 1, and the loss has --temperature {r.temperature:g}": (
            not r.do_sample and r.temperature not in (0, 1)
        ),
    }
    return [reason for reason, is_so in reasons.items() if is_so]


# -- reward sources --------------------------------------------------------------------------------------------------

BUILT_IN = ("math", "format", "code")
OWN = {"function": "reward_fn", "server": "remote_rm_url", "model": "reward_pretrain"}  # name → the flag it stands for
ANY_ROUTE = "*"

Plan = dict[str, dict[str, float]]  # route → source → weight


def reward_plan(config: PPOConfig) -> Plan | None:
    """The sources of ``--reward_source`` or ``--reward_routes``; ``None`` where one of the other flags is the source.

    Raises:
        ConfigError: not of the form, an unknown source, or a weight that is no number.
    """
    v = config.verifier
    if v.reward_routes is not None:
        return _routes(v.reward_routes)
    if v.reward_source:
        named = (text.partition("=") for text in v.reward_source)
        weights = {name.strip(): weight if equals else 1.0 for name, equals, weight in named}
        return {ANY_ROUTE: _weights("--reward_source", weights)}
    return None


def sources_of(plan: Plan | None) -> set[str]:
    """Names of all sources of a plan."""
    return {name for weights in (plan or {}).values() for name in weights}


def reward_sources(config: PPOConfig) -> set[str]:
    """Names of all sources of a run, whichever flags they come from: ``BUILT_IN`` and the keys of ``OWN``."""
    plan, r = reward_plan(config), config.reward
    if plan is not None:
        return sources_of(plan)
    of_file = len(r.remote_rm_url) == 1 and "://" not in r.remote_rm_url[0]
    given = {
        "function": of_file or (bool(r.reward_fn) and not config.model.reward_pretrain),
        "server": any("://" in url for url in r.remote_rm_url),
        "model": bool(config.model.reward_pretrain),
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
    if not isinstance(routes, dict) or not routes or not all(isinstance(w, dict) and w for w in routes.values()):
        raise ConfigError('--reward_routes must be an object of objects: {"gsm8k": {"math": 1}, "*": {"model": 1}}')
    return {route: _weights(f"--reward_routes {route!r}", weights) for route, weights in routes.items()}


def _weights(where: str, weights: dict[str, Any]) -> dict[str, float]:
    known = (*BUILT_IN, *OWN)
    found: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown source {name!r}{nearest(name, known)}; known are {', '.join(known)}")
        try:
            found[name] = float(weight)
        except (TypeError, ValueError):
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise ConfigError(f"{where}: the weight of {name} must be a number, got {weight!r}")
    return found


# -- what None stands for --------------------------------------------------------------------------------------------


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What every "None means …" option stands for. Options of a part that the run lacks stay None."""
    m, a, o, t, s, r = config.model, config.algorithm, config.loss, config.training, config.strategy, config.rollout
    estimator, loss, correction = estimator_entry(config), policy_loss_entry(config), _correction_entry(config)
    frozen_stage = 3 if s.zero_stage == 3 else 0

    meant: dict[str, Any] = {
        "train_batch_size": _samples(config) // t.ppo_n_minibatches if t.ppo_n_minibatches else 128,
        "ref_zero_stage": frozen_stage,
        "reward_zero_stage": _or(s.ref_zero_stage, frozen_stage),
        "generation_size": r.n_samples_per_prompt,
        "gen_batch_size": r.rollout_batch_size,
        "adv_norm": estimator.whiten,
        "use_kl_in_reward": not a.use_kl_loss,
        "kl_estimator": "k2" if a.use_kl_loss else "k1",
        "policy_loss": estimator.policy_loss,
        "loss_agg_mode": _or(estimator.loss_agg_mode, loss.loss_agg_mode),
        "correction_low": correction.low,
        "correction_high": correction.high,
        **estimator.defaults,
        **loss.defaults,
    }
    if a.init_kl_coef > 0:
        meant["ref_pretrain"] = m.pretrain
    if needs_critic(config):
        reward_model = m.reward_pretrain[0] if m.reward_pretrain and not m.init_critic_from_actor else None
        stage = _or(s.critic_zero_stage, s.zero_stage)
        meant |= {
            "critic_pretrain": reward_model or m.pretrain,
            "critic_zero_stage": stage,
            "critic_adam_offload": s.adam_offload and stage > 0,
            "critic_param_offload": s.param_offload and stage == 3,
        }
    if estimator.divides_by_std and a.group_std_norm:
        meant["grpo_std_eps"] = 1e-6
    if whitens(config):
        meant["adv_norm_eps"] = 1e-5 if a.adv_norm_scope == "group" else 1e-8
    if loss.eps_clip is not None:
        low, high = loss.eps_clip if o.eps_clip is None else (o.eps_clip, o.eps_clip)
        meant |= {"eps_clip_low": low, "eps_clip_high": high}
    if o.value_norm is not None:
        meant["value_norm_eps"] = 1e-5
    if o.value_norm == "exp":
        meant["value_norm_beta"] = 0.99995
    if uses_adapters(config):
        meant |= {"lora_alpha": 16.0, "lora_dropout": 0.0}
    if config.sampling.fire_sampling:
        meant["fire_temperature"] = 10.0
    if config.reward.overlong_buffer_len is not None:
        meant["overlong_penalty_factor"] = 1.0

    given = config.flat()
    resolved = {name: _or(given[name], value) for name, value in meant.items()}
    return resolved | {
        "attn_implementation": "flash_attention_2" if m.flash_attn else m.attn_implementation,
        "resume": config.checkpoint.resume if config.checkpoint.load_checkpoint else "never",
    }


def _correction_entry(config: PPOConfig) -> Any:
    return CORRECTIONS.find(config.correction.rollout_correction)


# -- what cannot work ------------------------------------------------------------------------------------------------

# The sections of a trainer whose models, data and reward were made by hand.
_OF_TRAINER = {"rollout", "training", "sampling", "engine", "algorithm", "loss", "correction", "reward"}

# Options that cannot be set together, and why.
_PAIRS = (
    ("use_kl_loss", "use_kl_in_reward", "would count the KL twice"),
    ("ref_ema_eta", "ref_reset_steps", "both move the reference"),
    ("input_template", "apply_chat_template", "both render the prompt"),
    ("reward_source", "reward_routes", "both name the sources"),
    ("sandbox_fusion_url", "function_call_url", "both run the programs"),
    ("mask_too_long", "mask_no_eos_with_zero", "each say what becomes of a response cut by the limit"),
    ("mask_too_long", "stop_properly_penalty", "each say what becomes of a response cut by the limit"),
    ("mask_no_eos_with_zero", "stop_properly_penalty", "each say what becomes of a response cut by the limit"),
    ("use_dense_reward", "reward_running_norm", "are of token scores, and of the one score of a response"),
    ("use_dense_reward", "mask_no_eos_with_zero", "are of token scores, and of the one score of a response"),
    ("use_dense_reward", "stop_properly_penalty", "are of token scores, and of the one score of a response"),
    ("lora_rank", "enable_ema", "are of adapters, and of an average of all weights"),
    ("lora_rank", "ref_ema_eta", "cannot go together: with adapters the reference is the actor without them"),
    ("lora_rank", "ref_reset_steps", "cannot go together: with adapters the reference is the actor without them"),
    ("async_rewards", "skip_rollout", "cannot go together: replayed samples are not generated"),
    ("async_rewards", "reward_pretrain", "cannot go together: a reward model does not run beside generation"),
    ("aux_loss_coef", "gradient_checkpointing_use_reentrant", "give no gradient together"),
    (
        "torch_compile",
        "gradient_checkpointing_use_reentrant",
        "cannot go together: a compiled layer needs the checkpointing without re-entrance",
    ),
)


def contradictions(config: PPOConfig, world_size: int, by_hand: bool = False) -> list[str]:
    """One message per option without effect, and per combination of options that cannot work.

    Args:
        config: values of the right type and in range.
        world_size: number of ranks.
        by_hand: models, data and rewards were made by hand: only what concerns the trainer.
    """
    found = [
        *_unused(config, by_hand),
        *_pairs(config, by_hand),
        *_batches(config, world_size),
        *_sampling(config, world_size),
        *_engine(config, world_size),
        *_servers(config),
        *_algorithm(config),
        *_old_log_probs(config),
    ]
    if by_hand:
        return found
    return [
        *_required(config),
        *found,
        *_micro_batches(config),
        *_models(config),
        *_rewards(config),
        *_data_and_evaluation(config),
        *_strategy(config, world_size),
        *_checkpoints(config),
    ]


def condition_text(condition: str) -> str:
    """An ``only_with`` in words.

    ``"dynamic_sampling"`` (given or true), ``"zero_stage=2|3"``, ``"rollout_check!=off"``, ``"lora_rank>0"``, one of
    ``FACTS``, or several of these with ``" or "`` between.
    """
    return " or ".join(map(_simple_text, condition.split(" or ")))


def _simple_text(condition: str) -> str:
    name, sign, value = _parts(condition)
    if name in FACTS:
        return FACTS[name][1]
    words = {"": "", "=": f" {value.replace('|', ' or ')}", "!=": f" other than {value}", ">": f" above {value}"}
    return f"--{name}{words[sign]}"


def _parts(condition: str) -> tuple[str, str, str]:
    name, sign, value = re.fullmatch(r"(\w+)(!=|=|>|)(.*)", condition).groups()
    return name, sign, value


def _holds(condition: str, values: dict[str, Any], config: PPOConfig) -> bool:
    if " or " in condition:
        return any(_holds(part, values, config) for part in condition.split(" or "))
    name, sign, wanted = _parts(condition)
    if name in FACTS:
        return FACTS[name][0](config)
    value = values[name]
    if sign == ">":
        return value > float(wanted)
    if sign:
        return (str(value) in wanted.split("|")) == (sign == "=")
    return value is not None and value is not False and value != ()


def _options(config: PPOConfig) -> dict[str, Option]:
    return {name: option for section in vars(config).values() for name, option in section.options().items()}


def _unused(config: PPOConfig, by_hand: bool) -> Iterator[str]:
    """Options without what they act with."""
    given, options = config.flat(), _options(config)
    values = given | resolutions(config)
    known = {name for name, option in options.items() if not by_hand or option.owner in _OF_TRAINER}
    facts = ALGORITHM_FACTS if by_hand or _plan_problems(config) else FACTS
    for name, option in options.items():
        if name not in known or not option.is_set(given[name]):
            continue
        for condition in option.only_with:
            names = {_parts(part)[0] for part in condition.split(" or ")}
            if names <= known | facts.keys() and not _holds(condition, values, config):
                flag = f"--no_{name}" if given[name] is False else f"--{name}"
                yield f"{flag} has no effect without {condition_text(condition)}: set that, or leave {flag} out"
                break


def _pairs(config: PPOConfig, by_hand: bool) -> Iterator[str]:
    given, options = config.flat(), _options(config)
    on = {n for n, option in options.items() if option.is_set(given[n]) and given[n] is not False}
    on -= {n for n in on if by_hand and options[n].owner not in _OF_TRAINER}
    for one, other, reason in _PAIRS:
        if one in on and other in on:
            yield f"--{one} and --{other} {reason}: set one of them"


def _batches(config: PPOConfig, world_size: int) -> Iterator[str]:
    r, t, samples = config.rollout, config.training, _samples(config)
    product = f"(--rollout_batch_size {r.rollout_batch_size} × --n_samples_per_prompt {r.n_samples_per_prompt})"
    batch = resolutions(config)["train_batch_size"]
    if t.ppo_n_minibatches and samples % t.ppo_n_minibatches:
        yield f"--ppo_n_minibatches {t.ppo_n_minibatches} does not divide the {samples} samples of a rollout {product}"
    elif t.ppo_n_minibatches and t.train_batch_size and t.train_batch_size * t.ppo_n_minibatches != samples:
        yield (
            f"--train_batch_size {t.train_batch_size} and --ppo_n_minibatches {t.ppo_n_minibatches} disagree for "
            f"{samples} samples per rollout: set one of them"
        )
    elif samples % batch:
        yield (
            f"--train_batch_size {batch} does not divide the {samples} samples of a rollout {product}; "
            f"set it to a divisor such as {math.gcd(samples, batch)}, or set --ppo_n_minibatches"
        )
    elif batch % world_size:
        yield f"--train_batch_size {batch} is not divisible by the {world_size} ranks"
    if r.rollout_batch_size % world_size:
        yield (
            f"--rollout_batch_size {r.rollout_batch_size} is not divisible by the {world_size} ranks; "
            f"set it to a multiple of {world_size}"
        )
    if r.min_new_tokens > r.generate_max_len:
        yield f"--min_new_tokens {r.min_new_tokens} exceeds --generate_max_len {r.generate_max_len}"
    if 0 < t.buffer_limit < samples // world_size:
        yield (
            f"--buffer_limit {t.buffer_limit} would lose samples: one rollout has {samples // world_size} per rank; "
            "set 0 or at least that"
        )
    if t.shuffle == "groups" and r.n_samples_per_prompt == 1:
        yield (
            "--shuffle groups keeps the samples of a prompt together, and --n_samples_per_prompt 1 has no two: set it "
            "to at least 2, or leave --shuffle out"
        )
    for flag, has_empty in {"stop": "" in r.stop, "bad_words": not all(map(str.strip, r.bad_words))}.items():
        if has_empty:
            yield f"--{flag} has an empty text: leave it out"


def _sampling(config: PPOConfig, world_size: int) -> Iterator[str]:
    s, r, limit = config.sampling, config.rollout, config.training.buffer_limit
    n, resolved, samples = r.n_samples_per_prompt, resolutions(config), _samples(config)
    size = resolved["generation_size"]
    if size < n:
        yield (
            f"--generation_size {size} samples fewer than --n_samples_per_prompt {n} are trained on: set it to at "
            f"least {n}"
        )
    if size == n and s.best_of_n_tie != "shorter":
        yield f"--best_of_n_tie chooses nothing unless --generation_size is above --n_samples_per_prompt {n}"
    if size > n and _greedy(config):
        yield f"greedy rollouts give the same answer {size} times: leave --generation_size out or set a --temperature"

    size = resolved["gen_batch_size"]
    if size % world_size and size != r.rollout_batch_size:  # another rule speaks of that
        yield f"--gen_batch_size {size} is not divisible by the {world_size} ranks"
    if size < r.rollout_batch_size and not s.dynamic_sampling:
        yield (
            f"--gen_batch_size {size} is less than --rollout_batch_size {r.rollout_batch_size}, and only "
            "--dynamic_sampling samples several batches for a step: raise it or leave it out"
        )
    if 0 < limit < samples and (s.dynamic_sampling or size > r.rollout_batch_size):
        yield (
            f"--buffer_limit {limit} could lose samples: with --dynamic_sampling or --gen_batch_size one rank may "
            f"hold all {samples} of a step; set 0 or at least that"
        )

    if s.dynamic_sampling and s.filter_range is None and n < 2:
        yield (
            "--dynamic_sampling keeps groups whose samples differ, and a group of one never does: set "
            "--n_samples_per_prompt to at least 2, or --filter_range"
        )
    if s.dynamic_sampling and s.filter_range is not None and s.filter_range[0] >= s.filter_range[1]:
        yield f"--filter_range {s.filter_range[0]:g} {s.filter_range[1]:g} is empty: give the lower end first"
    if not s.filter_metric.strip():
        yield "--filter_metric is empty: name score, acc or another number of the reward source"
    if s.on_exhausted != "train_short" and s.max_num_gen_batches == 0:
        yield f"--on_exhausted {s.on_exhausted} never acts with --max_num_gen_batches 0: set a limit"
    if s.fire_sampling and _greedy(config):
        yield "--fire_sampling heats the first token, and greedy rollouts have no temperature: set a --temperature"
    if s.skip_rollout_reuse and (s.dynamic_sampling or size != r.rollout_batch_size):
        yield (
            "--skip_rollout_reuse gives every generation batch the same groups: leave out --dynamic_sampling and "
            "--gen_batch_size"
        )


_COLDEST = 0.01  # vLLM raises a lower temperature to this without an error


def _engine(config: PPOConfig, world_size: int) -> Iterator[str]:
    """What vLLM cannot sample, and what an engine in the training processes needs."""
    e, m = config.engine, config.model
    if e.rollout_engine == "hf":
        return
    temperatures = {"temperature": config.rollout.temperature, "eval_temperature": config.evaluation.eval_temperature}
    for flag, value in temperatures.items():
        if 0 < value < _COLDEST:
            yield f"--{flag} {value:g}: vLLM samples at {_COLDEST} or above; set 0 (greedy) or at least that"
    if config.sampling.fire_sampling:
        yield (
            f"--fire_sampling needs --rollout_engine hf: {e.rollout_engine} has one temperature for all tokens of a "
            "response"
        )
    if e.rollout_engine != "vllm":
        return
    if world_size % e.tensor_parallel_size:
        yield (
            f"--tensor_parallel_size {e.tensor_parallel_size} does not divide the {world_size} ranks: every engine is "
            "shared by so many of them"
        )
    longest = config.data.prompt_max_len + config.rollout.generate_max_len
    if e.max_model_len is not None and e.max_model_len < longest:
        yield (
            f"--max_model_len {e.max_model_len} is less than --prompt_max_len {config.data.prompt_max_len} + "
            f"--generate_max_len {config.rollout.generate_max_len}: set it to at least {longest}, or leave it out"
        )
    if m.override_config is not None and e.load_format == "auto":
        yield "--load_format auto reads --pretrain without --override_config: leave it out"
    if m.override_config is not None and m.trust_remote_code:
        yield "--rollout_engine vllm with --trust_remote_code reads --pretrain without --override_config"
    if m.pretrain is None and (e.load_format == "auto" or m.trust_remote_code):
        yield "--load_format auto and --trust_remote_code read --pretrain, which is not set"
    if m.init_from_scratch and e.load_format == "auto":
        yield "--load_format auto reads weights that --init_from_scratch does not have: leave it out"


def _servers(config: PPOConfig) -> Iterator[str]:
    """Addresses of vLLM servers, how weights get there, and how long they may take."""
    e, dist_timeout = config.engine, config.strategy.dist_timeout
    if e.rollout_engine != "vllm_server":
        return
    if not e.vllm_server_url:
        yield "--rollout_engine vllm_server needs --vllm_server_url: start a server by examples/serve_vllm.py"
    is_bad = False
    for url in e.vllm_server_url:
        try:
            check_url(url, "--vllm_server_url", "--vllm_server_api_key_env")
            if "?" in url or "#" in url:
                raise ValueError(
                    f"--vllm_server_url {shown_url(url)}: give http://HOST:PORT, with nothing behind ? or #"
                )
        except ValueError as error:
            is_bad = True
            yield str(error)
    if is_bad:
        return
    addresses = [url.rstrip("/") for url in e.vllm_server_url]
    for url in sorted({url for url in addresses if addresses.count(url) > 1}):
        yield f"--vllm_server_url has {url} twice"
    remote = [url for url in addresses if not is_loopback(urlsplit(url).hostname or "")]
    by_files = e.vllm_server_sync == "disk" and e.vllm_server_sync_dir is not None
    by_broadcast = e.vllm_server_sync == "collective" and not is_loopback(e.vllm_server_sync_address)
    if remote and not by_files and not by_broadcast:
        yield (
            f"--vllm_server_url {remote[0]} is on another machine: set --vllm_server_sync collective and "
            "--vllm_server_sync_address to this machine's address there, or --vllm_server_sync disk and "
            "--vllm_server_sync_dir to a folder that both see under the same path"
        )
    if e.vllm_server_sync_address in ("", "0.0.0.0", "::"):
        yield (
            f"--vllm_server_sync_address {e.vllm_server_sync_address!r}: servers cannot connect to that: give one "
            "address of this machine"
        )
    waits = {
        "vllm_server_timeout": 2 * e.vllm_server_timeout + 90,
        "vllm_server_start_timeout": e.vllm_server_start_timeout,
    }
    for flag, wait in waits.items():
        if wait >= 60 * dist_timeout:
            yield (
                f"--{flag} {getattr(e, flag):g}: the other ranks wait for the one that asks servers, up to {wait:g} s, "
                f"but no longer than --dist_timeout {dist_timeout:g} minutes: lower it, or raise --dist_timeout"
            )


def _algorithm(config: PPOConfig) -> Iterator[str]:
    a, o, r, n = config.algorithm, config.loss, config.reward, config.rollout.n_samples_per_prompt
    estimator, loss, correction, name = (
        estimator_entry(config),
        policy_loss_entry(config),
        _correction_entry(config),
        a.advantage_estimator,
    )
    resolved = resolutions(config)
    if n < estimator.min_group_size:
        yield (
            f"--advantage_estimator {name} compares samples of one prompt: "
            f"set --n_samples_per_prompt to at least {estimator.min_group_size}, not {n}"
        )
    if n > 1 and _greedy(config):
        yield "greedy rollouts give the same answer n times: set --n_samples_per_prompt 1 or a --temperature"
    elif estimator.needs_greedy_baseline and _greedy(config):
        yield (
            f"--advantage_estimator {name} compares with the greedy answer, and the rollouts are greedy themselves: "
            "set a --temperature above 0"
        )
    if whitens(config) and a.adv_norm_scope == "group" and n < 2:
        yield "--adv_norm_scope group compares samples of one prompt: set --n_samples_per_prompt to at least 2"
    if whitens(config) and a.adv_norm_scope == "batch" and not a.adv_shift_mean and not a.adv_std_norm:
        yield "--no_adv_shift_mean with --no_adv_std_norm leaves nothing of whitening: set --no_adv_norm"

    if a.init_kl_coef > 0 and not a.use_kl_loss and a.use_kl_in_reward is False:
        yield "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
    if a.kl_target is not None and 0.2 * _samples(config) >= a.kl_horizon:
        yield (
            f"--kl_horizon {a.kl_horizon} is too short for {_samples(config)} samples per rollout: the coefficient "
            f"could change sign; set it above {0.2 * _samples(config):g}"
        )

    if None not in (o.eps_clip_low, o.eps_clip_high) and o.eps_clip not in (None, o.eps_clip_low, o.eps_clip_high):
        yield "--eps_clip has no effect beside --eps_clip_low and --eps_clip_high: leave it out"
    for option in (*estimator.options, *loss.options):
        if option.below is not None and not resolved[option.name] < resolved[option.below]:
            yield f"--{option.name} {resolved[option.name]:g} must be below --{option.below} {resolved[option.below]:g}"
    if (name := config.correction.rollout_correction) != "none":
        for side in ("low", "high"):
            if getattr(correction, side) is None and getattr(config.correction, f"correction_{side}") is not None:
                yield f"--correction_{side}: --rollout_correction {name} has no such bound; leave it out"
        low, high = resolved["correction_low"], resolved["correction_high"]
        if None not in (low, high) and low >= high:
            yield f"--correction_low {low:g} must be below --correction_high {high:g}"

    if r.reward_clip_range and r.reward_clip_range[0] >= r.reward_clip_range[1]:
        low, high = r.reward_clip_range
        yield f"--reward_clip_range {low} {high}: the first must be below the second"
    if r.stop_properly_penalty is not None and r.stop_properly_penalty > 1:
        yield f"--stop_properly_penalty {r.stop_properly_penalty:g} would reward truncated responses: set at most 1"
    limit = config.rollout.generate_max_len
    if r.overlong_buffer_len is not None and r.overlong_buffer_len > limit:
        yield f"--overlong_buffer_len {r.overlong_buffer_len} exceeds --generate_max_len {limit}: make it smaller"
    if r.use_dense_reward and estimator.needs_greedy_baseline:
        yield (
            f"--advantage_estimator {a.advantage_estimator} acts on the one score of a response, not on "
            "--use_dense_reward's token scores: leave one out"
        )


def _old_log_probs(config: PPOConfig) -> Iterator[str]:
    if config.loss.old_log_probs == "rollout":
        for reason in _needs_pass(config):
            yield f"--old_log_probs rollout: {reason}; set it to auto or forward"


def advice(config: PPOConfig) -> list[str]:
    """What works but is seldom meant; of a resolved config."""
    a = config.algorithm
    found = []
    if a.use_kl_loss and a.kl_estimator in ("k1", "abs"):
        what = (
            "has an expected gradient of 0" if a.kl_estimator == "k1" else "pulls by the sign of the difference alone"
        )
        found.append(f"--kl_estimator {a.kl_estimator} as a loss {what}: k2 has the gradient of the KL")
    if a.init_kl_coef > 0 and a.use_kl_in_reward and a.kl_estimator in ("k2", "k3", "k3+"):
        found.append(
            f"--kl_estimator {a.kl_estimator} in the reward hardly pulls near the reference: "
            "k1 has the gradient of the KL"
        )
    return found


def _required(config: PPOConfig) -> Iterator[str]:
    given = config.flat()
    for name, option in _options(config).items():
        if option.required and not given[name]:
            yield f"--{name} is required: {option.help}"


def _micro_batches(config: PPOConfig) -> Iterator[str]:
    """Specs that cannot be read, or of calls that the run does not make."""
    try:
        specs = parse_specs(config.training.micro_batch_specs)
    except ConfigError as error:
        yield str(error)
        return
    absent = {}
    if not needs_critic(config):
        reason = f"--advantage_estimator {config.algorithm.advantage_estimator} has no critic"
        absent = dict.fromkeys(("critic", "critic_train"), reason)
    if config.algorithm.init_kl_coef == 0:
        absent["reference"] = "--init_kl_coef 0 needs no reference"
    if not config.model.reward_pretrain:
        absent["reward"] = "it needs --reward_pretrain"
    for call in specs.keys() & absent.keys():
        yield f"--micro_batch_specs {call}=…: {absent[call]}; leave it out"


def _models(config: PPOConfig) -> Iterator[str]:
    m, s, resolved = config.model, config.strategy, resolutions(config)
    if needs_critic(config) and m.init_critic_from_actor and m.critic_pretrain not in (None, m.pretrain):
        yield "--init_critic_from_actor and --critic_pretrain name two starts for the critic: set one"
    if m.flash_attn and m.attn_implementation not in ("auto", "flash_attention_2"):
        yield f"--flash_attn contradicts --attn_implementation {m.attn_implementation}: set one of them"
    if m.torch_compile and 3 in (s.zero_stage, resolved["ref_zero_stage"], s.critic_zero_stage):
        yield "--torch_compile cannot see through ZeRO-3's hooks: use a lower --zero_stage, or leave it out"
    if m.override_config is not None:
        try:
            is_object = isinstance(json.loads(m.override_config), dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            yield f"--override_config must be a JSON object, not {m.override_config!r}"
    if reference_is_actor(config):
        usual = 3 if s.zero_stage == 3 else 0
        of_reference = {"ref_offload": s.ref_offload, "ref_zero_stage": s.ref_zero_stage not in (None, usual)}
        for flag, is_set in of_reference.items():
            if is_set:
                yield (
                    f"--{flag} has no effect: with --lora_rank the reference is the actor without its adapters, no "
                    "model of its own; leave it out, or set another --ref_pretrain"
                )


def _plan_problems(config: PPOConfig) -> list[str]:
    try:
        reward_plan(config)
    except ConfigError as error:
        return [str(error)]
    return []


def _rewards(config: PPOConfig) -> Iterator[str]:
    """Which sources there are, and what they need."""
    if problems := _plan_problems(config):
        yield from problems
        return
    models, r, v, plan = config.model.reward_pretrain, config.reward, config.verifier, reward_plan(config)
    given = {"function": bool(r.reward_fn), "server": bool(r.remote_rm_url), "model": bool(models)}
    named = sources_of(plan)
    if plan is None:
        if not any(given.values()):
            yield (
                "no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL or a built-in "
                f"--reward_source ({', '.join(BUILT_IN)})"
            )
        if given["server"] and (given["model"] or given["function"]):
            other = "--reward_pretrain" if given["model"] else "--reward_fn"
            yield (
                f"--remote_rm_url and {other} are two sources of reward: set one, or say how they add up by "
                "--reward_source"
            )
    else:
        by = "--reward_routes" if v.reward_routes is not None else "--reward_source"
        for name, flag in OWN.items():
            if name in named and not given[name]:
                yield f"{by} names {name!r}, which is what --{flag} gives: set --{flag}"
            if given[name] and name not in named and not (name == "function" and len(models) > 1):
                yield f"--{flag} is set, but {by} does not name {name!r}: add it, or leave --{flag} out"
    if len(models) > 1 and not r.reward_fn:
        yield f"{len(models)} models in --reward_pretrain need --reward_fn path.py:name to combine their scores"
    if len(models) > 1 and "function" in named:
        yield "--reward_fn combines the scores of several --reward_pretrain: it cannot be a source itself too"
    if v.reward_manager == "prime" and v.reward_timeout is None:
        yield "--reward_manager prime kills a call at its limit: set --reward_timeout"
    if models and len(r.reward_input_tokenizer) not in (0, 1, len(models)):
        yield (
            f"--reward_input_tokenizer has {len(r.reward_input_tokenizer)} for {len(models)} models in "
            "--reward_pretrain: give one for all, or one each"
        )
    if (any(len(weights) > 1 for weights in (plan or {}).values()) or len(plan or {}) > 1) and v.reward_minimum is None:
        for flag in ("check_verifier_status", "check_xml_format"):
            if getattr(v, flag):
                yield f"--{flag} with several sources cannot know their lowest sum: set --reward_minimum"
    for url in r.remote_rm_url:
        if "@" in url:  # not shown: what stands before it may be a password
            yield "--remote_rm_url with a user or password: give a token by --remote_rm_token_env instead"
        elif not url.startswith(("http://", "https://")) and not url.split(":")[0].endswith(".py"):
            yield f"--remote_rm_url {url!r} is neither an http(s) URL nor a .py file"


def _data_and_evaluation(config: PPOConfig) -> Iterator[str]:
    template, e = config.data.input_template, config.evaluation
    if template is not None and template.count("{}") != 1:
        yield f"--input_template {template!r} needs exactly one {{}} for the prompt"
    if e.eval_n_samples > 1 and e.eval_temperature == 0:
        yield "--eval_n_samples > 1 with --eval_temperature 0 gives the same answer n times: set a temperature"


def _strategy(config: PPOConfig, world_size: int) -> Iterator[str]:
    s = config.strategy
    trained = {"": s.zero_stage}
    if needs_critic(config):
        trained["critic_"] = resolutions(config)["critic_zero_stage"]
    for role, stage in trained.items():
        if stage == 0 and config.model.bf16:
            yield f"--bf16 keeps fp32 master weights in ZeRO, which needs --{role}zero_stage 1, 2 or 3, not 0"
    if s.critic_adam_offload and trained.get("critic_") == 0:
        yield "--critic_adam_offload moves sharded optimizer states: it needs --critic_zero_stage 1, 2 or 3, not 0"
    if s.critic_param_offload and trained.get("critic_", 3) != 3:
        yield "--critic_param_offload offloads ZeRO-3 shards: it needs --critic_zero_stage 3"
    if s.grad_accum_dtype == "bf16" and not config.model.bf16:
        yield "--grad_accum_dtype bf16 needs --bf16"
    if s.zero_stage == 3 and world_size % s.zpg:
        yield f"--zpg {s.zpg} does not divide the {world_size} ranks"


def _checkpoints(config: PPOConfig) -> Iterator[str]:
    c = config.checkpoint
    if not c.load_checkpoint and c.resume not in ("auto", "never"):
        yield "--no_load_checkpoint contradicts --resume PATH: set one of them"
    saves = c.save_steps > 0 or c.save_epochs or c.save_seconds
    if saves and c.disable_ds_ckpt and not c.save_hf_ckpt:
        yield "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save at --save_steps/epochs/seconds"
