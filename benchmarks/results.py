"""The form of compare.json, and how it is made of what both sides say. Standard library only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

from workloads import Scale, Workload, iteration_flops, training_flops

PHASES = ("generation", "experience", "training")

# Numbers of one side of one workload.
_SIDE = {
    "seconds": "median of the measured iterations, wall clock",
    "iterations": "seconds of each",
    "phases": "median seconds of each phase; experience holds rewards, log probs, values and advantages",
    "generated_tokens_per_second": "response tokens / seconds of generation",
    "trained_tokens_per_second": "prompt and response tokens, each epoch counted / seconds of training",
    "peak_memory_bytes": "largest resident set of the process; on a GPU machine the most in use on the GPU",
    "mfu": "useful floating-point operations of an iteration / seconds / matrix peak",
    "mfu_training": "the same of the training phase",
    "optimizer_steps": "per iteration",
    "prompt_tokens": "per iteration, each sample's",
    "generated_tokens": "per iteration, mean",
    "load": "load average before and after",
    "version": "of the trainer and below",
    "command": "as it was run",
}


def side_result(
    iterations: list[dict[str, float]],
    workload: Workload,
    scale: Scale,
    peak_flops: float,
    *,
    shares_prompts: bool = False,
    **about: Any,
) -> dict[str, Any]:
    """One side's entry.

    Args:
        iterations: measured ones, without the warm-up: ``seconds``, the phases, ``optimizer_steps``,
            ``prompt_tokens``, ``generated_tokens``.
        workload: what was run.
        scale: its sizes.
        peak_flops: matrix peak of the machine, operations per second.
        shares_prompts: this side runs a prompt once for all its samples: no more is counted as needed for MFU.
        **about: the other fields of ``_SIDE``.

    Raises:
        ValueError: no iteration was measured, or the optimizer steps are not the workload's.
    """
    if not iterations:
        raise ValueError(f"{workload.name}: no iteration was measured after the warm-up")
    steps = {int(row["optimizer_steps"]) for row in iterations}
    if steps != {workload.optimizer_steps}:
        raise ValueError(
            f"{workload.name}: {steps} optimizer steps per iteration, not {workload.optimizer_steps}"
        )

    def total(name: str) -> float:
        return sum(row[name] for row in iterations)

    prompt, generated = (
        total("prompt_tokens") / len(iterations),
        total("generated_tokens") / len(iterations),
    )
    tokens = [(row["prompt_tokens"], row["generated_tokens"]) for row in iterations]
    rate = sum(iteration_flops(workload, scale, *pair, shared=shares_prompts) for pair in tokens)
    training = sum(training_flops(workload, scale, *pair, shared=shares_prompts) for pair in tokens)
    return {
        "seconds": median(row["seconds"] for row in iterations),
        "iterations": [row["seconds"] for row in iterations],
        "phases": {phase: median(row[phase] for row in iterations) for phase in PHASES},
        "generated_tokens_per_second": total("generated_tokens") / total("generation"),
        "trained_tokens_per_second": (
            workload.epochs
            * (total("prompt_tokens") + total("generated_tokens"))
            / total("training")
        ),
        "mfu": rate / total("seconds") / peak_flops,
        "mfu_training": training / total("training") / peak_flops,
        "optimizer_steps": workload.optimizer_steps,
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        **about,
    }


def lightppo_iterations(metrics: Path) -> list[dict[str, float]]:
    """All iterations of a ``metrics.jsonl`` but the first: from one row's time to the next one's."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "perf/time_step" in row]
    return [
        _iteration(row, row["time"] - before["time"]) for before, row in itertools.pairwise(rows)
    ]


def _iteration(row: dict[str, float], seconds: float) -> dict[str, float]:
    samples = row["rollout/samples"]
    return {
        "seconds": seconds,
        # with the push before it, which TRL's generation has, too
        "generation": row["perf/time_rollout"] + row.get("perf/time_sync", 0.0),
        "experience": row["perf/time_reward"] + row["perf/time_experience"],
        "training": row["perf/time_train"],
        "optimizer_steps": row["train/optimizer_steps"],
        "prompt_tokens": round(
            samples * (row["rollout/total_length"] - row["rollout/response_length"])
        ),
        "generated_tokens": round(samples * row["rollout/response_length"]),
    }


def compared(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A workload's entry: both sides and their ratio.

    Raises:
        ValueError: the sides did not get the same prompts.
    """
    tokens = {name: side["prompt_tokens"] for name, side in sides.items()}
    if len(set(tokens.values())) != 1:
        raise ValueError(f"the sides did not have the same prompts: tokens {tokens}")
    return {**sides, "ratio": sides["trl"]["seconds"] / sides["lightppo"]["seconds"]}


def check_compare(data: dict[str, Any]) -> list[str]:
    """What is wrong with the form of a compare.json, one line each; empty: nothing."""
    problems = [
        f"{name} is missing" for name in ("workloads", "machine", "date") if name not in data
    ]
    for name, entry in data.get("workloads", {}).items():
        if set(entry) != {"trl", "lightppo", "ratio"}:
            problems.append(f"{name} has {sorted(entry)}, not lightppo, ratio, trl")
            continue
        for side in ("trl", "lightppo"):
            problems += [
                f"{name}.{side}.{key} is missing" for key in _SIDE if key not in entry[side]
            ]
            problems += [
                f"{name}.{side}.phases.{p} is missing"
                for p in PHASES
                if p not in entry[side]["phases"]
            ]
        if (
            not problems
            and entry["ratio"] != entry["trl"]["seconds"] / entry["lightppo"]["seconds"]
        ):
            problems.append(f"{name}.ratio is not TRL's seconds / lightppo's seconds")
    return problems
