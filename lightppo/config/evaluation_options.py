"""Options of evaluations, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from lightppo.config.reward_options import (
    named_weights,
    names_rewards,
    sources_by_flag,
    wrong_reward,
)
from lightppo.config.rules import estimator_entry
from lightppo.errors import ConfigError
from lightppo.option import Section, option

evaluated = partial(option, needs="eval_data")


class EvaluationTimes(Section, name="evaluation", resume_safe=True):
    """Evaluation on --eval_data."""

    eval_steps: int = evaluated(
        -1,
        "Evaluate every N steps; -1: once per episode; 0: before and after training.",
        "PPO steps",
        ge=-1,
        off=(0,),
    )
    val_before_train: bool = evaluated(True, "Evaluate before the first step.")


# What an evaluation samples by, in place of what a training samples by.
_OF_EVALUATION = {
    "temperature": "--eval_temperature",
    "top_p": "--eval_top_p",
    "top_k": "--eval_top_k",
    "n_samples_per_prompt": "--eval_n_samples",
    "do_sample": "--eval_temperature 0, or a number above it",
}


class EvaluationConfig(EvaluationTimes, resume_safe=True):
    """Evaluation on --eval_data."""

    eval_n_samples: int = evaluated(
        1,
        "Samples per prompt, for mean@n and pass@k.",
        "samples per prompt",
        ge=1,
        also="eval_temperature>0",
    )
    eval_temperature: float | None = evaluated(
        None,
        "Sampling temperature; 0: greedy. None: 0, or 1 if --eval_n_samples is above 1.",
        ge=0,
        off=(0, 1),
    )
    eval_top_p: float = evaluated(1.0, "Nucleus sampling.", gt=0, le=1, also="eval_temperature>0")
    eval_top_k: int = evaluated(
        -1, "Sample only from the k most likely tokens; -1: all.", ge=-1, also="eval_temperature>0"
    )
    eval_correct_threshold: float = evaluated(
        0.5, "Scores of at least this are correct, if the source gives no acc."
    )
    eval_reward_source: tuple[str, ...] = evaluated(
        (),
        "Scorers for evaluation, as --reward_source. None: the training scorer, or --eval_reward_fn.",
    )
    eval_reward_fn: str | None = evaluated(
        None, "Reward function for evaluation, path.py[:name].", takes_object=True
    )
    val_only: bool = option(False, "Evaluate and stop; needs no prompts, critic or reference.")
    best_metric: str | None = option(
        None,
        "Keep the actor with the highest value of this metric in --ckpt_path/best_hf, e.g. eval/accuracy.",
        needs="eval_data",
    )

    @staticmethod
    def trains(config: Any) -> bool:
        return not config.evaluation.val_only

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        return {"eval_temperature": 1.0 if config.evaluation.eval_n_samples > 1 else 0.0}

    @staticmethod
    def sources(config: Any) -> Iterable[str]:
        return named_weights("--eval_reward_source", _judges(config.evaluation))

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.val_only and options.eval_data is None:
            yield "--eval_data is required: the prompts whose answers an evaluation scores"
        yield from wrong_reward("eval_reward_fn", options.eval_reward_fn)
        try:
            judges = set(EvaluationConfig.sources(options.config))
        except ConfigError as error:
            yield str(error)
            return
        yield from _unscored(options, judges)

    @staticmethod
    def without_effect(config: Any, given: Iterable[str]) -> Iterator[str]:
        """Refuse options that only the rollouts of a training follow."""
        flat = config.flat()
        for name, is_default in _of_rollouts(config, given).items():
            if not is_default:
                flag = f"--{'' if flat[name] is not False else 'no_'}{name}"
                yield f"{flag} has no effect on an evaluation: set {_OF_EVALUATION[name]}"


def notes(config: Any, given: Iterable[str]) -> Iterator[str]:
    """Yield a line for options of rollouts that an evaluation does not follow, where they are at their defaults."""
    for name, is_default in _of_rollouts(config, given).items():
        if is_default:
            yield f"--{name} has no effect on an evaluation: set {_OF_EVALUATION[name]}"


def _of_rollouts(config: Any, given: Iterable[str]) -> dict[str, bool]:
    """Return options of rollouts that were given for an evaluation; and whether each is at its default."""
    flat = config.flat()
    options = {option.name: option for option in config.all_options()}
    names = [name for name in given if name in _OF_EVALUATION] if flat.get("val_only") else []
    return {name: not options[name].is_set(flat[name]) for name in names}


def _unscored(options: Any, judges: set[str]) -> Iterator[str]:
    """Refuse an evaluation whose answers nothing scores."""
    has_source = judges or names_rewards(options)
    if options.eval_data and not has_source and estimator_entry(options.config).ignores_scores:
        yield "--eval_data: nothing scores the answers: set --eval_reward_source, or --eval_reward_fn path.py"
    flags = sources_by_flag() | {"function": "eval_reward_fn"}
    for name in judges & flags.keys():
        is_given = getattr(options, flags[name])
        if name == "function" and len(options.reward_pretrain) < 2:
            is_given = is_given or options.reward_fn
        if not is_given:
            yield f"--eval_reward_source names {name!r}, which is what --{flags[name]} gives: set --{flags[name]}"
    if options.eval_reward_fn and "function" not in judges:
        yield "--eval_reward_fn is set, but --eval_reward_source does not name 'function': add it, or leave one out"


def _judges(evaluation: Any) -> tuple[str, ...]:
    """Return what scores evaluations, as texts of ``--reward_source``; none: those of training do."""
    only_function = () if evaluation.eval_reward_fn is None else ("function",)
    return evaluation.eval_reward_source or only_function


def evaluation_config(config: Any) -> Any | None:
    """Return the config whose rewards score evaluations: ``--eval_reward_source``; ``None``: those of training do."""
    if not (sources := _judges(config.evaluation)):
        return None
    given = config.evaluation.eval_reward_fn
    function = config.reward.reward_fn if given is None else given
    of_training = {"reward_routes": None, "check_xml_format": False, "reward_minimum": None}
    there = {name: value for name, value in of_training.items() if name in config.flat()}
    return config.with_options(reward_source=sources, reward_fn=function, **there)
