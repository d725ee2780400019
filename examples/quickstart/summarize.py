"""What the quickstart's PPO run did: a table, sample answers before and after, ``plot.png`` and ``summary.json``.

    python examples/quickstart/summarize.py --run_dir runs/quickstart

Reads ``ppo/metrics.jsonl``, ``ppo/eval/step{N}.jsonl`` and ``seconds.json`` of the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tyro

from lightppo.errors import ReportError
from lightppo.logging.report_page import (
    INSTALL,
    Row,
    evaluations,
    plot_training,
    read_jsonl,
    read_metrics,
)

PHASES = ("install", "sft", "ppo")
TABLE = (  # metric of an evaluation, its name in the table and in summary.json
    ("eval/accuracy", "accuracy"),
    ("eval/reward", "reward"),
    ("eval/response_length", "response_length"),
    ("eval/turns", "turns"),
)


def read_seconds(path: Path) -> dict[str, float]:
    """Seconds of each phase.

    Raises:
        ReportError: no such file, or a phase is missing.
    """
    (seconds,) = read_jsonl(path)[:1]
    if missing := [phase for phase in PHASES if phase not in seconds]:
        raise ReportError(f"{path} lacks {', '.join(missing)}; `make quickstart` writes it")
    return {phase: float(seconds[phase]) for phase in PHASES}


def table(before: Row, after: Row) -> str:
    """The evaluations' metrics side by side."""
    lines = [f"{'held-out prompts':<20}{'before PPO':>12}{'after PPO':>12}"]
    for metric, name in TABLE:
        if metric in before and metric in after:
            lines.append(
                f"{name.replace('_', ' '):<20}{before[metric]:>12.3f}{after[metric]:>12.3f}"
            )
    return "\n".join(lines)


def sample_answers(before: Sequence[Row], after: Sequence[Row], count: int = 3) -> str:
    """Answers to the same prompts, evenly spread over the evaluation data, not picked by how they came out.

    Raises:
        ReportError: the evaluations were on different prompts.
    """
    if [row["prompt"] for row in before] != [row["prompt"] for row in after]:
        raise ReportError("the evaluations before and after PPO have different prompts")
    picked = [len(before) * (2 * i + 1) // (2 * count) for i in range(count)]
    lines = [f"{'prompt':<12}{'before PPO':<16}{'after PPO':<16}label"]
    for i in dict.fromkeys(picked):
        answers = [
            f"{row['response']} {'✓' if _is_right(row) else '✗'}" for row in (before[i], after[i])
        ]
        lines.append(
            f"{before[i]['prompt']:<12}{answers[0]:<16}{answers[1]:<16}{before[i]['label']}"
        )
    return "\n".join(lines)


def _is_right(row: Row) -> bool:
    """By what the environment says, otherwise by the score."""
    return row.get("extras", {}).get("accuracy", row["score"]) == 1


def summarize(run_dir: Path) -> str:
    """Write ``plot.png``, where matplotlib is installed, and ``summary.json`` into ``run_dir``.

    Returns:
        The text to show.

    Raises:
        ReportError: a file of the run is missing or damaged; the message names it.
    """
    rows = read_metrics(run_dir / "ppo" / "metrics.jsonl")
    found = evaluations(rows)
    before, after = found[0], found[-1]
    seconds = read_seconds(run_dir / "seconds.json")
    steps = max(row["step"] for row in rows)
    samples = [
        read_jsonl(run_dir / "ppo" / "eval" / f"step{row['step']}.jsonl") for row in (before, after)
    ]

    plot = run_dir / "plot.png"
    try:
        plot_training(rows, plot, title=f"quickstart, {steps} steps")
    except ModuleNotFoundError:
        plot = f"no plot: {INSTALL}"
    summary = {
        "eval_before": {name: before[metric] for metric, name in TABLE if metric in before},
        "eval_after": {name: after[metric] for metric, name in TABLE if metric in after},
        "steps": steps,
        "seconds": seconds,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    # `lightppo quickstart` does not know how long the installation took
    phases = ", ".join(f"{phase} {seconds[phase]:.0f} s" for phase in PHASES if seconds[phase])
    return "\n\n".join(
        [
            table(before, after),
            sample_answers(*samples),
            f"{steps} PPO steps; {phases}\n{plot}, {run_dir / 'summary.json'}",
        ]
    )


def main(run_dir: Path = Path("runs/quickstart")) -> None:
    """Summarise a quickstart run.

    Args:
        run_dir: folder of the run.
    """
    try:
        text = summarize(run_dir)
    except ReportError as error:
        raise SystemExit(f"summarize.py: error: {error}") from error
    print(f"\n{text}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
