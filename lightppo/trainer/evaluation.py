"""Evaluation on held-out prompts: accuracy, mean@n, pass@k, maj@n, per data source; when it is due, and its files."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from lightppo.callbacks import Callback, numbers_of
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import NonFiniteError, NonFiniteRewardError, RewardError
from lightppo.files import files_in_use, local_folder
from lightppo.logging.performance import PhaseTimer
from lightppo.ranks import Ranks
from lightppo.redaction import plain
from lightppo.rewards.reward_source import RewardSource, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalSample:
    """One scored answer, as it travels between ranks and stands in the sample file."""

    prompt: str
    response: str
    label: object
    score: float | None
    data_source: str
    response_length: int
    finish_reason: str
    index: int
    # what the reward source says beside the score
    extras: dict[str, float | str] = field(default_factory=dict)

    @classmethod
    def of(cls, rollout: Rollout) -> EvalSample:
        return cls(
            prompt=rollout.prompt.text,
            response=rollout.response_text,
            label=rollout.prompt.label,
            score=rollout.reward,
            data_source=rollout.prompt.data_source,
            response_length=rollout.trained_length,
            finish_reason=rollout.finish_reason,
            index=rollout.prompt.index,
            extras=rollout.extras | rollout.texts,
        )

    def correct(self, threshold: float) -> float:
        """Return the source's ``acc`` or ``accuracy``; without one, 1 for a score of at least ``threshold``, else 0."""
        for name in ("acc", "accuracy"):
            if isinstance(accuracy := self.extra(name), float):
                return accuracy
        return float(self.score >= threshold)

    def extra(self, name: str) -> Any:
        """Return an extra by its name, also that of a source among several, ``<source>/<name>``; ``None`` without one."""
        values = [value for key, value in self.extras.items() if key.endswith(f"/{name}")]
        return self.extras.get(name, values[0] if len(values) == 1 else None)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the chance that at least one of k ≤ n answers is right, from n answers.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_correct(answers: Sequence[tuple[str | None, float]]) -> float:
    """Return how correct the most frequent answer is; the mean over those that are most frequent alike, 0 without an answer.

    ``answers``: (answer or ``None``, its correctness); equal texts are one answer.
    """
    votes = Counter(answer for answer, _ in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    return fmean(correct for answer, correct in answers if votes[answer] == most)


def eval_metrics(samples: Sequence[EvalSample], threshold: float) -> dict[str, float]:
    """Return metrics of one evaluation; with several data sources also ``eval/<source>/...``.

    What is correct: :meth:`EvalSample.correct`. Unscored samples count nowhere but in ``eval/unscored``.
    """
    if all(sample.score is None for sample in samples):
        raise RewardError(
            f"evaluation: none of the {len(samples)} samples was scored; check the reward source"
        )
    sources = sorted({sample.data_source for sample in samples})
    metrics = _metrics_of(samples, threshold, "eval")
    for source in sources if len(sources) > 1 else ():
        source_samples = [sample for sample in samples if sample.data_source == source]
        if any(sample.score is not None for sample in source_samples):
            metrics |= _metrics_of(source_samples, threshold, f"eval/{source}")
    return metrics


def _metrics_of(samples: Sequence[EvalSample], threshold: float, prefix: str) -> dict[str, float]:
    scored = [sample for sample in samples if sample.score is not None]
    scores: dict[int, list[float]] = defaultdict(list)  # of the samples of each prompt
    accuracies: dict[int, list[float]] = defaultdict(list)
    answers: dict[int, list[tuple[str | None, float]]] = defaultdict(list)
    for sample in scored:
        accuracy = sample.correct(threshold)
        scores[sample.index].append(sample.score)
        accuracies[sample.index].append(accuracy)
        answers[sample.index].append((sample.extra("pred"), accuracy))
    n = min(map(len, scores.values()))  # fewest samples of a prompt
    metrics = _extras_of(samples) | {
        "accuracy": fmean(sample.correct(threshold) for sample in scored),
        "reward": fmean(sample.score for sample in scored),
        "response_length": fmean(sample.response_length for sample in samples),
        "truncated": fmean(sample.finish_reason == "length" for sample in samples),
        "samples": float(len(samples)),
        f"mean@{n}": fmean(map(fmean, scores.values())),
    }
    if len(scored) < len(samples):
        metrics["unscored"] = float(len(samples) - len(scored))
    if n > 1:
        right = [(len(group), sum(x >= 0.5 for x in group)) for group in accuracies.values()]
        for k in sorted({*(2**i for i in range(n.bit_length())), n}):
            metrics[f"pass@{k}"] = fmean(pass_at_k(count, correct, k) for count, correct in right)
        metrics[f"best@{n}"] = fmean(map(max, scores.values()))
        metrics[f"worst@{n}"] = fmean(map(min, scores.values()))
        metrics[f"std@{n}"] = fmean(map(pstdev, scores.values()))
        if any(sample.extra("pred") is not None for sample in scored):
            metrics[f"maj@{n}"] = fmean(map(majority_correct, answers.values()))
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _extras_of(samples: Sequence[EvalSample]) -> dict[str, float]:
    """Return means of the reward source's numbers, each over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.extras.items():
            if not isinstance(value, str):
                values[name].append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


@dataclass
class Evaluator:
    """Samples and scores the held-out prompts, shared out over ranks."""

    engine: RolloutEngine
    reward_source: RewardSource
    prompts: Sequence[Prompt]  # the same on every rank
    sampling: SamplingParams  # the same random numbers at every evaluation
    strategy: Ranks
    threshold: float = 0.5  # a score of at least this is correct, where the source gives no acc
    samples: list[EvalSample] = field(default_factory=list)  # of the last evaluation, on rank 0

    def __post_init__(self) -> None:
        # Apart from every training step's seed: evaluation prompt i does not get the samples of training prompt i.
        self.sampling = replace(self.sampling, seed=-1 - self.sampling.seed)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return metrics of the current weights, the same on every rank; NonFiniteError where a score is not. Collective."""
        rows = range(self.strategy.get_rank(), len(self.prompts), self.strategy.world_size)
        rollouts = self.engine.generate([self.prompts[row] for row in rows], self.sampling)
        problem = None
        try:
            score_rollouts(self.reward_source, rollouts)
        except NonFiniteRewardError as error:
            problem = str(error)
        samples = [EvalSample.of(rollout) for rollout in rollouts]
        gathered = self.strategy.gather_object((problem, samples))
        metrics: dict[str, float] = {}
        self.strategy.on_rank_0(lambda: metrics.update(self._metrics(*zip(*gathered))), "evaluate")
        return self.strategy.broadcast_object(metrics)

    def _metrics(
        self, problems: Sequence[str | None], samples: Sequence[Sequence[EvalSample]]
    ) -> dict[str, float]:
        """Return metrics of the samples of all ranks."""
        if any(problems):
            raise NonFiniteError("; ".join(filter(None, problems)))
        self.samples = sorted(chain(*samples), key=lambda sample: sample.index)
        return eval_metrics(self.samples, self.threshold)


# -- when a run is evaluated ------------------------------------------------------------------------------------------

_PRINTED = ("loss", "accuracy", "reward", "margin")


class Evaluation(Callback):
    """Asks ``run.evaluator``: ``evaluate(step)`` returns metrics ``eval/<name>``. It is ``run.evaluation``.

    The loop says when. Here is what precedes the first step.

    A checkpoint keeps the last evaluation: a resumed run need not do it again.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        run.evaluation = self
        self.step: int | None = None  # of the last evaluation
        self.result: Mapping[str, float] | None = None  # None where a score was not finite
        run.register_state("evaluation", self)

    def before_steps(self, run: Any) -> None:
        """Do the evaluation that a resumed run lacks, or that before training. Collective."""
        if run.evaluator is None:
            return
        step = run.state.global_step
        if step == 0:
            is_due = run.config.evaluation.val_before_train
        else:
            is_due = run.owns_parts and run.evaluation_is_due()
        if run.only_evaluates or is_due:
            self.evaluate_step(step)

    def evaluate_step(self, step: int) -> Mapping[str, float]:
        """Evaluate the current weights, once per step at most. Collective."""
        run = self.run
        if self.step == step:
            return {}
        timer = PhaseTimer()
        try:
            with timer("eval"):
                result = run.evaluator.evaluate(step)
        except NonFiniteError as error:
            if run.only_evaluates:
                raise
            self.step = step
            self.result = None
            if run.strategy.is_rank_0():
                logger.warning("the evaluation after step %d is left out: %s", step, error)
            return {}
        self.step = step
        self.result = result
        names = [name for name in _PRINTED if f"eval/{name}" in result]
        numbers = ", ".join(f"{name} {result[f'eval/{name}']:.3f}" for name in names)
        run.strategy.print(f"[step {step}] evaluation: {numbers}")
        seconds = {f"perf/{name}": value for name, value in timer.reset().items()}
        # Each callback gets what those before it have added, too.
        added: dict[str, float] = {}
        for callback in run.callbacks:
            numbers_added = callback.on_evaluation(run, step, {**result, **seconds, **added})
            if callback in run.callbacks.of_users:
                numbers_added = numbers_of(callback, "on_evaluation", numbers_added)
            added |= numbers_added or {}
        self.result = dict(result) | added
        return self.result

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "result": self.result}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.result = state["result"]


# -- evaluations in files and as a table -----------------------------------------------------------------------------


class EvaluationFiles(Callback):
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
