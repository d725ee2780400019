"""Evaluations in files, with every sample, and as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.callbacks import Callback
from lightppo.files import files_in_use, local_folder
from lightppo.redaction import plain

if TYPE_CHECKING:
    from lightppo.trainer.evaluation import EvalSample


class Evaluations(Callback):
    """Rank 0 writes all samples to ``eval/stepN.jsonl``, the metrics to ``eval/stepN.json``."""

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        samples = getattr(run.evaluator, "samples", None)
        folder = local_folder(run.config.checkpoint.save_path) / "eval"
        metrics = {metric: value for metric, value in result.items() if metric.startswith("eval/")}

        def write() -> None:
            if samples:
                write_evaluation(folder, step, samples, metrics)

        run.strategy.on_rank_0(write, f"write the evaluation of step {step}")

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is None and run.only_evaluates:
            for table_line in table(run.evaluation.result):
                run.strategy.print(table_line)


def write_evaluation(
    folder: Path, step: int, samples: Sequence[EvalSample], metrics: Mapping[str, float]
) -> None:
    """Write both files of an evaluation."""
    sample_lines = [json.dumps(vars(sample), default=str) + "\n" for sample in samples]
    files = files_in_use()
    with files.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / f"step{step}.jsonl", "".join(sample_lines))
        files.write_text(
            folder / f"step{step}.json", json.dumps(by_source(metrics), indent=1) + "\n"
        )


def by_source(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of :func:`eval_metrics` by data source; "all": of all samples."""
    sources = [
        short_name.removeprefix("eval/").removesuffix("/samples")
        for short_name in metrics
        if short_name.endswith("/samples") and short_name != "eval/samples"
    ]
    tables: dict[str, dict[str, float]] = {source: {} for source in ("all", *sorted(sources))}
    for full_name, number in metrics.items():
        short_name = full_name.removeprefix("eval/")
        # The name of a source may begin with the name of another one.
        matches = [source for source in sources if short_name.startswith(f"{source}/")]
        source = max(matches, key=len, default="all")
        tables[source][short_name.removeprefix(f"{source}/") if matches else short_name] = number
    return tables


_COLUMNS = (
    "accuracy",
    "reward",
    "mean@",
    "best@",
    "maj@",
    "pass@",
    "response_length",
    "truncated",
    "unscored",
    "samples",
)


def table(metrics: Mapping[str, float]) -> list[str]:
    """Return lines that show :func:`eval_metrics`, one per data source."""
    sources = by_source(
        {metric: number for metric, number in metrics.items() if metric.startswith("eval/")}
    )
    shown_metrics = [
        metric
        for column in _COLUMNS
        for metric in sources["all"]
        if re.fullmatch(rf"{column}(?<=@)\d+|{column}", metric)
    ]
    table_rows = [["", *shown_metrics]]
    for source, values in sources.items():
        number_texts = [
            f"{values[metric]:.4g}" if metric in values else "" for metric in shown_metrics
        ]
        table_rows.append([plain(source), *number_texts])
    widths = [max(map(len, column)) for column in zip(*table_rows)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(table_row, widths))
        for table_row in table_rows
    ]
