"""What a GPU's memory can hold: rows of decoding, tokens of a pass; and what would make a run fit that does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from lightppo.config import PPOConfig, rules
from lightppo.errors import ConfigError, UserError
from lightppo.preflight.budget import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    SAMPLER_BYTES,
    SCORING,
    Estimate,
    Machine,
    estimate,
    gigabytes,
    shapes,
    table,
)

SPARE = 0.2  # of a GPU: gaps of the allocator, a buffer of the cache beside its wider copy
MOST_ROWS = 512
# Larger passes hardly go faster, and what a token costs is the same.
TOKENS_OF_PASS = (16384, 8192, 4096, 2048, 1024)


def with_fitting_passes(
    options: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> PPOConfig:
    """Return the options resolved, and ``--max_tokens_per_micro_batch`` by the memory of a GPU, if they give no size of
    micro batches, and no ``--pretrain_data``, of which a step trains on a batch for each micro batch.

    That is the largest of ``TOKENS_OF_PASS`` with which training and scoring leave ``SPARE`` of what weights and the
    like do not take, else the smallest: a longer row is alone. It depends on the size of the GPU, not on what is free
    at the time, so that a resumed run takes the same.
    """
    config = options.resolved()
    given = options.flat()
    sizes = ("max_tokens_per_micro_batch", "micro_train_batch_size", "micro_rollout_batch_size")
    is_given = any(given[name] is not None for name in (*sizes, "pretrain_data"))
    if is_given or not machine.gpus or machine.device_bytes is None:
        return config
    for tokens in TOKENS_OF_PASS:
        fitting = config.with_options(max_tokens_per_micro_batch=tokens)
        estimated = estimate(fitting, machine, configs)
        if all(_leaves_spare(estimated, phase) for phase in (SCORING, ACTOR, CRITIC)):
            break
    return fitting


def _leaves_spare(estimated: Estimate, phase: str) -> bool:
    certain_bytes = estimated.of_phase(phase, sure=True)[0]
    passing_bytes = estimated.of_phase(phase)[0] - certain_bytes
    return passing_bytes <= (1 - SPARE) * (estimated.machine.device_bytes - certain_bytes)


def passes_note(options: PPOConfig, fitting: PPOConfig) -> Iterator[str]:
    """Yield what was chosen for options that leave it open."""
    tokens = fitting.training.max_tokens_per_micro_batch
    if tokens != options.training.max_tokens_per_micro_batch:
        yield (
            f"training and scoring: up to {tokens} tokens at a time, by the GPU's memory (--max_tokens_per_micro_batch "
            "sets it)"
        )


def decoding_rows(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> int:
    """Return the rows that the HF engine can decode together beside all that a run holds then: a multiple of 8, at least 8.

    A step of decoding launches the same kernels for any number of rows.
    """
    engine_bytes = 0
    other_bytes = 0
    for memory_part in estimate(config, machine, configs).parts:
        if memory_part.owner == "HF engine":
            engine_bytes += memory_part.gpu
        elif ROLLOUT in memory_part.phases:
            other_bytes += memory_part.gpu
    samples = max(1, rules.samples_per_rollout(config) // machine.world_size)
    vocabulary = shapes(config, configs or {})["actor"].config.get_text_config().vocab_size
    row_bytes = engine_bytes / min(rules.rollout_rows(config), samples) + SAMPLER_BYTES * vocabulary
    fitting_rows = int((1 - SPARE) * machine.device_bytes - other_bytes) // int(row_bytes)
    return max(8, min(fitting_rows, samples, MOST_ROWS) // 8 * 8)


def rows_that_fit(config: PPOConfig, strategy: Any) -> int:
    """Return :func:`decoding_rows` on the GPU with least room, and say so. Collective."""
    # What other processes hold is not there for this one.
    free_bytes, _ = torch.cuda.mem_get_info(strategy.device)
    available = free_bytes + torch.cuda.memory_reserved(strategy.device)
    try:
        row_count = decoding_rows(config, Machine(strategy.world_size, device_bytes=available))
    except Exception as error:  # of the model's own code, on a device that holds no data
        strategy.print(
            f"note: the memory of decoding cannot be computed: {type(error).__name__}: {error}"
        )
        row_count = rules.rollout_rows(config)
    row_count = strategy.all_reduce(row_count, "min")
    strategy.print(
        f"HF engine: {row_count} rows at a time, by the GPU's memory (--micro_rollout_batch_size sets it)"
    )
    return row_count


# the cheapest for a run first; those of parts that it lacks are left out
REMEDIES: tuple[dict[str, Any], ...] = (
    {"bf16": True},
    {"gradient_checkpointing": True},
    {"max_tokens_per_micro_batch": None, "micro_train_batch_size": 1},
    {"micro_rollout_batch_size": 1},
    dict.fromkeys(("zero_stage", "critic_zero_stage", "ref_zero_stage"), 3),
    {"sequence_parallel_size": 2},
    {"sequence_parallel_size": 4},
    {"adam_offload": True},
    {"ref_offload": True},
    {"param_offload": True},
    {"lora_rank": 16},
    {"lora_rank": 16, "load_in_4bit": True},
)


def advice(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> list[str]:
    """Say of a run that does not fit what each remedy saves, and the first ones that are enough together."""
    original_options = config.flat()
    has_frozen = rules.needs_reference(config) or config.model.reward_pretrain

    def peak(base_config: PPOConfig, remedy: Mapping[str, Any]) -> tuple[float, PPOConfig]:
        """Return the peak with a remedy; infinite where it does nothing, or is not for this run or model."""
        options = base_config.flat()
        changes = {
            option_name: value
            for option_name, value in remedy.items()
            if options[option_name] != value
        }
        if not has_frozen:
            changes.pop("ref_zero_stage", None)
        if not rules.needs_critic(base_config):
            changes.pop("critic_zero_stage", None)
        if not changes:
            return math.inf, base_config
        try:
            changed = base_config.with_options(**changes)
            changed.validate(machine.world_size, unfed=True)
            return estimate(changed.resolved(), machine, configs).peak()[1], changed
        except UserError:
            return math.inf, base_config

    def flags(changed: PPOConfig) -> str:
        return " ".join(
            f"--{option_name}" if value is True else f"--{option_name} {value}"
            for option_name, value in changed.flat().items()
            if original_options[option_name] != value
        )

    original_peak = estimate(config, machine, configs).peak()[1]
    lowest_peak = original_peak
    combined = config
    lines = []
    for remedy in REMEDIES:
        remedy_peak, changed = peak(config, remedy)
        if remedy_peak < 0.99 * original_peak:
            lines.append(f"  {flags(changed)}: {gigabytes(original_peak - remedy_peak)} less")
        if lowest_peak > 0.9 * machine.limit:  # the estimate may be 10% off
            combined_peak, changed = peak(combined, remedy)
            if combined_peak < 0.99 * lowest_peak:
                combined = changed
                lowest_peak = combined_peak
    verdict = "fits"
    if lowest_peak > machine.limit:
        resource = "GPUs" if machine.gpus else "memory"
        verdict = f"does not fit either: more {resource}, or a smaller model"
    summary = f"together {flags(combined)}"
    if combined is config:
        summary = "no option saves enough"
    return [*lines, f"  {summary}: {gigabytes(lowest_peak)}, which {verdict}"]


def check_memory(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> list[str]:
    """Return what to print of a resolved config before anything loads.

    Raises:
        ConfigError: even what is certain does not fit into a GPU, or a host; the message says what would help.
    """
    estimated = estimate(config, machine, configs)
    lines = table(estimated)
    if estimated.fits:
        return lines
    limit = gigabytes(machine.limit)
    lines += [f"this does not fit into {limit}:", *advice(config, machine, configs)]
    phase, certain = estimated.peak(sure=True)
    if certain > machine.limit:
        device = "a GPU" if machine.gpus else "a host"
        problem = f"{gigabytes(certain)} of {device} are needed at least ({phase}), it has {limit}"
        raise ConfigError("\n".join([problem, *lines]))
    return lines
