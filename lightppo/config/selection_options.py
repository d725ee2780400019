"""Options of the selection of groups, and of balanced ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.config.reward_plan import names_rewards
from lightppo.config.rules import estimator_entry
from lightppo.option import Section, option

dynamic = partial(option, needs="dynamic_sampling")


class SelectionConfig(Section, adds_to="sampling"):
    """Which groups are trained on."""

    generation_size: int | None = option(
        None,
        "Responses generated per prompt; only the best are trained on. None: --n_samples_per_prompt.",
        "samples per prompt",
        ge=1,
    )
    best_of_n_tie: Literal["shorter", "longer"] = option(
        "shorter", "Which response best of n takes if scores are equal."
    )
    gen_batch_size: int | None = option(
        None,
        "Prompts sampled at once; the surplus waits for the next step. None: --rollout_batch_size.",
        "prompts over all ranks",
        ge=1,
    )
    dynamic_sampling: bool = option(
        False,
        "Replace groups without a learning signal with new prompts.",
        needs="n_samples_per_prompt>1 or filter_range",
    )
    filter_metric: str = dynamic(
        "score",
        "Metric that groups are selected by: score, acc, seq_reward, seq_final_reward or a metric of the reward "
        "source.",
    )
    filter_range: tuple[float, float] | None = dynamic(
        None,
        "Keep groups whose mean is inside, bounds excluded. None: groups whose samples are not all equal.",
    )
    max_num_gen_batches: int = dynamic(
        10,
        "Maximum number of generation batches per step; 0: no limit.",
        "batches",
        ge=0,
        resume_safe=True,
    )
    on_exhausted: Literal["train_short", "raise", "reuse"] = option(
        "train_short",
        "If groups are missing after --max_num_gen_batches: train on fewer, stop the run, or train on some twice.",
        needs="dynamic_sampling and max_num_gen_batches>0",
        resume_safe=True,
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        return {
            "generation_size": config.rollout.n_samples_per_prompt,
            "gen_batch_size": config.rollout.rollout_batch_size,
        }

    @staticmethod
    def is_stale(config: Any) -> bool:
        """Groups left over may be trained on in a later step, when the policy is another."""
        size = config.sampling.gen_batch_size or 0
        return config.sampling.dynamic_sampling or size > config.rollout.rollout_batch_size

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        samples, size, batch = (
            options.n_samples_per_prompt,
            options.generation_size,
            options.gen_batch_size,
        )
        if size < samples:
            yield f"--generation_size {size} is below --n_samples_per_prompt {samples}: raise it, or leave it out"
        if size == samples and options.best_of_n_tie != "shorter":
            yield f"--best_of_n_tie chooses nothing unless --generation_size is above --n_samples_per_prompt {samples}"
        if size > samples and not (options.do_sample and options.temperature > 0):
            yield f"--generation_size {size}: greedy samples are all the same; leave it out, or set a --temperature"
        if batch != options.rollout_batch_size and batch % options.ranks:
            yield f"--gen_batch_size {batch} is not divisible by the {options.ranks} ranks"
        if batch < options.rollout_batch_size and not options.dynamic_sampling:
            few = f"--gen_batch_size {batch} is below --rollout_batch_size {options.rollout_batch_size}"
            yield f"{few}, and only --dynamic_sampling samples several batches: raise it, or leave it out"
        if (ends := options.filter_range) is not None and ends[0] >= ends[1]:
            yield f"--filter_range {ends[0]:g} {ends[1]:g} is empty: give the lower end first"
        if not options.filter_metric.strip():
            yield "--filter_metric has an empty text: leave it out"
        has_reward = options.by_hand or names_rewards(options)
        if not has_reward and estimator_entry(options.config).ignores_scores:
            picks = {
                "dynamic_sampling": options.dynamic_sampling,
                "generation_size": size > samples,
            }
            for name in filter(picks.get, picks):
                yield f"--{name} chooses by scores, and this run has no reward: leave it out"


class BalancingConfig(Section, adds_to="training"):
    """Ranks with about as many tokens each."""

    balance_ranks: bool = option(
        True,
        "Swap groups of samples between ranks so that all train on about as many tokens.",
        resume_safe=True,
    )
