"""Time per real token of lightppo over batch, length and vocabulary; where it is flat, nothing but real work is paid.

    python benchmarks/scaling.py [--quick]

Runs ``examples/train_ppo.py`` with PPO, critic and reference once for each point and writes
``runs/bench/scaling.json``. One axis changes at a time; the others stay as in W1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands import run, tail
from results import lightppo_iterations
from workloads import SCALES, WORKLOADS, lightppo_flags

# Axis → its values; a batch is a number of samples, a length the most tokens of prompt (a half) and of response.
AXES = {"batch": (16, 64, 256), "length": (64, 128, 256), "vocabulary": (1024, 8192, 32768)}
QUICK_AXES = {"batch": (16, 64), "length": (64, 128), "vocabulary": (1024, 8192)}


def settings(axis: str, value: int) -> tuple[int, dict[str, Any]]:
    """Prompts, and what changes in the scale."""
    base = SCALES["cpu"]
    if axis == "length":
        return WORKLOADS["W1"].prompts, {
            "new_tokens": value,
            "prompt_tokens": (8, value // 2),
            "end_probability": base.end_probability * base.new_tokens / value,
        }
    return (value, {}) if axis == "batch" else (WORKLOADS["W1"].prompts, {axis: value})


def measure(axis: str, value: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One point."""
    prompts, changes = settings(axis, value)
    name = f"scaling-{axis}-{value}"
    assets, output, log = (
        folder / name / "assets",
        folder / name / "run",
        folder / "logs" / f"{name}.log",
    )
    shutil.rmtree(folder / name, ignore_errors=True)
    run([sys.executable, "benchmarks/make_assets.py", "--output_dir", assets, "--prompts", prompts,
         "--changes", json.dumps(changes)], log=log, timeout=600)  # fmt: skip
    workload = replace(WORKLOADS["W1"], prompts=prompts)
    flags = lightppo_flags(
        workload, replace(SCALES["cpu"], **changes), assets, output, options.iterations + 1
    )
    run([sys.executable, "examples/train_ppo.py", *flags], log=log, timeout=options.timeout,
        OMP_NUM_THREADS=str(options.threads), DS_ACCELERATOR="cpu")  # fmt: skip
    rows = lightppo_iterations(output / "metrics.jsonl")
    shutil.rmtree(folder / name)

    def total(column: str) -> float:
        return sum(row[column] for row in rows)

    tokens = total("prompt_tokens") + total("generated_tokens")
    return {
        "value": value,
        "real_tokens": tokens / len(rows),
        "generation_us_per_token": 1e6 * total("generation") / total("generated_tokens"),
        "experience_us_per_token": 1e6 * total("experience") / tokens,
        "training_us_per_token": 1e6 * total("training") / tokens / workload.epochs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument(
        "--iterations", type=int, default=2, help="measured ones, after one to warm up"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two values of each axis, one measured iteration"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="OMP_NUM_THREADS"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one run")
    options = parser.parse_args()
    options.iterations = 1 if options.quick else options.iterations
    folder = options.run_dir.resolve()
    log = folder / "logs" / "machine.log"
    run(
        [sys.executable, "benchmarks/machine.py"],
        log=log,
        timeout=300,
        OMP_NUM_THREADS=str(options.threads),
    )
    result: dict[str, Any] = {
        "machine": json.loads(tail(log, 1)),
        "date": datetime.date.today().isoformat(),
    }
    result |= {"load": os.getloadavg()[0], "axes": {}}
    for axis in options.axes:
        values = (QUICK_AXES if options.quick else AXES)[axis]
        result["axes"][axis] = [measure(axis, value, folder, options) for value in values]
        for point in result["axes"][axis]:
            print(
                f"{axis} {point['value']}: training {point['training_us_per_token']:.0f} µs per real token"
            )
        (folder / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
