"""Accuracy with `--max_staleness 1`, with and without the correction, beside the synchronous run.

    python benchmarks/asynchronous.py && python benchmarks/staleness.py [--quick]

The quickstart's task, its model after the supervised steps and its PPO settings, with fewer steps. No server is needed:
a run with ``--max_staleness 1`` equals, to the last bit, one that samples batch t + 1 before it trains step t, and
``tests/support/engines_ahead.py`` has an engine that does so. Equal time comes from the steps of ``asynchronous.json``.
Writes ``runs/bench/staleness.json``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import runpy
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import REPO, run

QUICKSTART = REPO / "examples" / "quickstart"
ENGINE = REPO / "tests" / "support" / "engines_ahead.py"
TIMED = "plain"  # the workload of benchmarks/asynchronous.py whose steps give the times
STEPS = 20
SHARES = (0.25, 0.5, 1.0)  # of the steps, where accuracies are shown
SETTINGS = {
    "the quickstart's": (),
    "learning rate × 3": ("--actor_learning_rate", "3e-3"),
}
SIDES = {
    "synchronous": ("--max_staleness", "0"),
    "ahead": ("--max_staleness", "1"),
    "ahead, not corrected": ("--max_staleness", "1", "--rollout_correction", "none"),
}

Curve = list[float]  # accuracy before the first step, then after equal numbers of steps


def make_model(folder: Path) -> None:
    """Write the quickstart's data into ``folder`` and its model after the supervised steps, unless they are there."""
    if (folder / "sft" / "config.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    assets = folder / "assets"
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}
    words: list[object] = [sys.executable, QUICKSTART / "make_assets.py", "--output_dir", assets]
    run(words, log=folder.with_name("assets.log"), timeout=600, **variables)
    options = runpy.run_path(str(QUICKSTART / "run.py"))["sft_options"](1, "none")
    words = [sys.executable, "examples/train_sft.py", *options, "--zero_stage", 0, "--seed", 1]
    words += ["--pretrain", assets / "model", "--dataset", assets / "sft.jsonl"]
    words += ["--save_path", folder / "sft"]
    run(words, log=folder.with_name("sft.log"), timeout=1800, **variables)


def train(model: Path, output: Path, flags: Sequence[str], *, steps: int, seed: int) -> Curve:
    """Train in this process, whose process group exists.

    Args:
        model: folder of :func:`make_model`.
        output: folder of the run, made anew.
        flags: of the setting and of the side.
        steps: PPO steps; a quarter of them lies between evaluations.
        seed: of all sampling.
    """
    from lightppo import PPOTrainer
    from lightppo.config import parse_args

    shutil.rmtree(output, ignore_errors=True)
    words: list[object] = [
        "--config",
        QUICKSTART / "ppo.yaml",
        "--rollout_engine",
        f"{ENGINE}:AtOnce",
    ]
    words += ["--reward_fn", QUICKSTART / "reward.py", "--pretrain", model / "sft"]
    words += ["--prompt_data", model / "assets" / "prompts.jsonl"]
    words += ["--eval_data", model / "assets" / "eval.jsonl"]
    words += ["--save_path", output, "--ckpt_path", output / "checkpoints", "--save_steps", -1]
    words += ["--total_training_steps", steps, "--eval_steps", max(1, steps // 4)]
    words += ["--zero_stage", 0, "--seed", seed, *flags]
    trainer = PPOTrainer.from_config(parse_args([str(word) for word in words]))
    trainer.keeps = False  # no model, no report
    trainer.fit()
    curve = curve_of(output, steps)
    assert curve is not None
    return curve


def curve_of(output: Path, steps: int) -> Curve | None:
    """Return the curve of a run of that many steps, or nothing if it has not finished."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [row for row in map(json.loads, lines) if "eval/accuracy" in row]
    return [row["eval/accuracy"] for row in rows] if rows and rows[-1]["step"] == steps else None


def accuracy_at(curve: Curve, share: float) -> float:
    """Return the accuracy after that share of the steps, on the line between the evaluations around it."""
    place = min(share, 1.0) * (len(curve) - 1)
    i = min(int(place), len(curve) - 2)
    return curve[i] + (place - i) * (curve[i + 1] - curve[i])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def side_result(
    curves: Sequence[Curve], synchronous: Sequence[Curve], steps_per_step: float
) -> dict[str, Any]:
    """Return a side's accuracy at equal samples, its difference from the synchronous run, and that at equal time.

    Args:
        curves: of the side, one a seed.
        synchronous: those of the same seeds.
        steps_per_step: how many steps the side makes while the synchronous run makes one.
    """
    ends = zip(curves, synchronous, strict=True)
    return {
        "samples": [of_all(curves, share) for share in SHARES],
        "seeds": len(curves),
        "difference": mean_and_error([one[-1] - other[-1] for one, other in ends]),
        "time": [of_all(curves, share * steps_per_step) for share in SHARES[:2]],
    }


def of_all(curves: Sequence[Curve], share: float) -> tuple[float, float]:
    """Return mean and standard error over the seeds after that share of the steps."""
    return mean_and_error([accuracy_at(curve, share) for curve in curves])


def results(curves: dict[str, dict[str, list[Curve]]], ratio: float) -> dict[str, Any]:
    """Return those of each setting and side; ``ratio`` is a step's time ahead / a synchronous step's."""
    return {
        setting: {
            side: side_result(
                of_side, sides["synchronous"], 1 if side == "synchronous" else 1 / ratio
            )
            for side, of_side in sides.items()
        }
        for setting, sides in curves.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run, a multiple of 4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--resume", action="store_true", help="keep what has finished of these steps"
    )
    parser.add_argument("--quick", action="store_true", help="4 steps, one seed: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 4, 1
    if "synchronous" not in options.sides:
        parser.error("--sides: the others are compared with synchronous")
    folder = options.run_dir.resolve()
    timed = folder / "asynchronous.json"
    if not timed.is_file():
        parser.error(
            f"{timed} is missing: its steps give the times; run benchmarks/asynchronous.py"
        )
    ratio = json.loads(timed.read_text())["workloads"][TIMED]["sides"]["ahead"]["ratio"]
    model = folder / "staleness" / "model"
    make_model(model)

    from lightppo.distributed.deepspeed import DeepspeedStrategy

    DeepspeedStrategy(zero_stage=0).setup_distributed()
    file = folder / "staleness.json"
    before = json.loads(file.read_text()) if options.resume and file.is_file() else {}
    curves: dict[str, dict[str, list[Curve]]] = {}
    if before.get("steps") == options.steps:
        curves = before["curves"]
    for setting in options.settings:
        sides = curves[setting] = {side: [] for side in options.sides}
        for seed, side in itertools.product(range(1, options.seeds + 1), sides):
            output = folder / "staleness" / f"{setting}, {side}, {seed}"
            curve = curve_of(output, options.steps) if options.resume else None
            if curve is None:
                flags = [*SETTINGS[setting], *SIDES[side]]
                curve = train(model, output, flags, steps=options.steps, seed=seed)
            print(f"{setting}, {side}, seed {seed}: {curve}", flush=True)
            sides[side].append(curve)
    result = {
        "date": datetime.date.today().isoformat(),
        "steps": options.steps,
        "ratio": ratio,
        "curves": curves,
        "settings": results(curves, ratio),
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{file}; the table: python benchmarks/report.py --write")


if __name__ == "__main__":
    main()
