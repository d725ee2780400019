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

    def __init__(self, run: Any) -> None:
        pass

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        samples = getattr(run.evaluator, "samples", None)
        folder = local_folder(run.config.checkpoint.save_path) / "eval"
        metrics = {name: value for name, value in result.items() if name.startswith("eval/")}

        def write() -> None:
            if samples:
                write_evaluation(folder, step, samples, metrics)

        run.strategy.on_rank_0(write, f"write the evaluation of step {step}")

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is None and run.only_evaluates:
            for line in table(run.evaluation.result):
                run.strategy.print(line)


def write_evaluation(
    folder: Path, step: int, samples: Sequence[EvalSample], metrics: Mapping[str, float]
) -> None:
    """Write both files of an evaluation."""
    lines = [json.dumps(vars(sample), default=str) + "\n" for sample in samples]
    files = files_in_use()
    with files.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / f"step{step}.jsonl", "".join(lines))
        files.write_text(
            folder / f"step{step}.json", json.dumps(by_source(metrics), indent=1) + "\n"
        )


def by_source(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of :func:`eval_metrics` by data source; "all": of all samples."""
    sources = [
        name.removeprefix("eval/").removesuffix("/samples")
        for name in metrics
        if name.endswith("/samples") and name != "eval/samples"
    ]
    tables: dict[str, dict[str, float]] = {source: {} for source in ("all", *sorted(sources))}
    for full_name, value in metrics.items():
        name = full_name.removeprefix("eval/")
        # The name of a source may begin with the name of another one.
        matches = [source for source in sources if name.startswith(f"{source}/")]
        source = max(matches, key=len, default="all")
        tables[source][name.removeprefix(f"{source}/") if matches else name] = value
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
        {name: value for name, value in metrics.items() if name.startswith("eval/")}
    )
    names = [
        name
        for column in _COLUMNS
        for name in sources["all"]
        if re.fullmatch(rf"{column}(?<=@)\d+|{column}", name)
    ]
    cells = [["", *names]]
    for source, values in sources.items():
        texts = [f"{values[name]:.4g}" if name in values else "" for name in names]
        cells.append([plain(source), *texts])
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells]
