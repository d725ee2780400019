"""The relations between options of sampling: what ``None`` stands for, and what cannot work or does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightppo.config.sampling_section import SamplingConfig

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

FIRE_TEMPERATURE = 10.0
_DEFAULTS = SamplingConfig()


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What the "None means …" options of sampling stand for."""
    s, r = config.sampling, config.rollout
    resolved = {
        "generation_size": r.n_samples_per_prompt if s.generation_size is None else s.generation_size,
        "gen_batch_size": r.rollout_batch_size if s.gen_batch_size is None else s.gen_batch_size,
    }
    if s.fire_sampling and s.fire_temperature is None:
        resolved["fire_temperature"] = FIRE_TEMPERATURE
    return resolved


def problems(config: PPOConfig, world_size: int) -> list[str]:
    """One message per combination that cannot work, or option that does nothing."""
    return [*_best_of_n(config), *_generation_batches(config, world_size), *_filter(config), *_others(config)]


def _best_of_n(config: PPOConfig) -> list[str]:
    s, n = config.sampling, config.rollout.n_samples_per_prompt
    size = resolutions(config)["generation_size"]
    if size < n:
        return [
            f"--generation_size {size} samples fewer than --n_samples_per_prompt {n} are trained on: set it to at "
            f"least {n}"
        ]
    if size == n and s.best_of_n_tie != _DEFAULTS.best_of_n_tie:
        return [f"--best_of_n_tie chooses nothing unless --generation_size is above --n_samples_per_prompt {n}"]
    if size > n and _greedy(config):
        return [f"greedy rollouts give the same answer {size} times: leave --generation_size out or set a temperature"]
    return []


def _generation_batches(config: PPOConfig, world_size: int) -> list[str]:
    s, r, limit = config.sampling, config.rollout, config.training.buffer_limit
    size, samples = resolutions(config)["gen_batch_size"], r.rollout_batch_size * r.n_samples_per_prompt
    found = []
    if size % world_size and size != r.rollout_batch_size:  # of that another rule speaks
        found.append(f"--gen_batch_size {size} is not divisible by the {world_size} ranks")
    if size < r.rollout_batch_size and not s.dynamic_sampling:
        found.append(
            f"--gen_batch_size {size} is less than --rollout_batch_size {r.rollout_batch_size}, and only "
            "--dynamic_sampling samples several batches for a step: raise it or leave it out"
        )
    if 0 < limit < samples and (s.dynamic_sampling or size > r.rollout_batch_size):
        found.append(
            f"--buffer_limit {limit} could lose samples: with --dynamic_sampling or --gen_batch_size one rank may "
            f"hold all {samples} of a step; set 0 or at least that"
        )
    return found


def _filter(config: PPOConfig) -> list[str]:
    s, n = config.sampling, config.rollout.n_samples_per_prompt
    if not s.dynamic_sampling:
        flags = ("filter_metric", "filter_range", "max_num_gen_batches", "on_exhausted")
        return [
            f"--{flag} has no effect without --dynamic_sampling"
            for flag in flags
            if getattr(s, flag) != getattr(_DEFAULTS, flag)
        ]
    found = []
    if s.filter_range is None and n < 2:
        found.append(
            "--dynamic_sampling keeps groups whose samples differ, and a group of one never does: set "
            "--n_samples_per_prompt to at least 2, or --filter_range"
        )
    if s.filter_range is not None and s.filter_range[0] >= s.filter_range[1]:
        low, high = s.filter_range
        found.append(f"--filter_range {low:g} {high:g} is empty: give the lower end first")
    if not s.filter_metric.strip():
        found.append("--filter_metric is empty: name score, acc or another number of the reward source")
    if s.on_exhausted != _DEFAULTS.on_exhausted and s.max_num_gen_batches == 0:
        found.append(f"--on_exhausted {s.on_exhausted} never acts with --max_num_gen_batches 0: set a limit")
    return found


def _others(config: PPOConfig) -> list[str]:
    s = config.sampling
    found = []
    share = "dataset_max_filter_percentage"
    if s.dataset_filter_threshold is None and getattr(s, share) != getattr(_DEFAULTS, share):
        found.append(f"--{share} has no effect without --dataset_filter_threshold")
    if s.fire_temperature is not None and not s.fire_sampling:
        found.append("--fire_temperature has no effect without --fire_sampling")
    if s.fire_sampling and _greedy(config):
        found.append("--fire_sampling heats the first token, and greedy rollouts have no temperature: set one")
    if s.skip_rollout_reuse and s.skip_rollout is None:
        found.append("--skip_rollout_reuse needs --skip_rollout DIR")
    whole_batch = s.gen_batch_size in (None, config.rollout.rollout_batch_size)
    if s.skip_rollout_reuse and (s.dynamic_sampling or not whole_batch):
        found.append(
            "--skip_rollout_reuse gives every generation batch the same groups: leave out --dynamic_sampling and "
            "--gen_batch_size"
        )
    return found


def _greedy(config: PPOConfig) -> bool:
    return config.rollout.temperature == 0 or not config.rollout.do_sample
