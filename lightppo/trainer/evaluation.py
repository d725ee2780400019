"""Evaluation on held-out prompts: accuracy, mean@n, pass@k, maj@n, per data source; and when a run is evaluated."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from lightppo.callbacks import Callback, numbers_of
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import NonFiniteError, NonFiniteRewardError, RewardError
from lightppo.logging.performance import PhaseTimer
from lightppo.ranks import Ranks
from lightppo.rewards.reward_source import RewardSource, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.trainer.due_times import Cadence

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
        judged = (self.extra(name) for name in ("acc", "accuracy"))
        return next(
            (acc for acc in judged if isinstance(acc, float)), float(self.score >= threshold)
        )

    def extra(self, name: str) -> Any:
        """Return an extra by its name, also that of a source among several, ``<source>/<name>``; ``None`` without one."""
        found = [value for key, value in self.extras.items() if key.endswith(f"/{name}")]
        return self.extras.get(name, found[0] if len(found) == 1 else None)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the chance that at least one of k ≤ n answers is right, from n answers.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _pass_at(correctness: Sequence[float], k: int) -> float:
    """Return :func:`pass_at_k` of answers that are correct to these parts: one counts as right from half on."""
    return pass_at_k(len(correctness), sum(correct >= 0.5 for correct in correctness), k)


def majority_correct(answers: Sequence[tuple[str | None, float]]) -> float:
    """Return how correct the most frequent answer is; the mean over those that are most frequent alike, 0 without an answer.

    ``answers``: (answer or ``None``, its correctness); equal texts are one answer.
    """
    votes = Counter(answer for answer, _ in answers if answer is not None)
    most = max(votes.values(), default=0)
    return fmean(
        [correct for answer, correct in answers if most and votes[answer] == most] or [0.0]
    )


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
        of_source = [s for s in samples if s.data_source == source]
        if any(s.score is not None for s in of_source):
            metrics |= _metrics_of(of_source, threshold, f"eval/{source}")
    return metrics


def _metrics_of(samples: Sequence[EvalSample], threshold: float, prefix: str) -> dict[str, float]:
    scored = [s for s in samples if s.score is not None]
    groups: dict[int, list[EvalSample]] = defaultdict(list)
    for sample in scored:
        groups[sample.index].append(sample)
    smallest = min(len(group) for group in groups.values())

    def over_prompts(value: Callable[[list[Any]], float], of: Callable[[EvalSample], Any]) -> float:
        """Return mean over prompts of a value of their samples."""
        return fmean(value([of(sample) for sample in group]) for group in groups.values())

    def score(sample: EvalSample) -> float:
        return sample.score

    def right(sample: EvalSample) -> float:
        return sample.correct(threshold)

    metrics = _extras_of(samples) | {
        "accuracy": fmean(map(right, scored)),
        "reward": fmean(map(score, scored)),
        "response_length": fmean(s.response_length for s in samples),
        "truncated": fmean(s.finish_reason == "length" for s in samples),
        "samples": float(len(samples)),
        f"mean@{smallest}": over_prompts(fmean, score),
    }
    if len(scored) < len(samples):
        metrics["unscored"] = float(len(samples) - len(scored))
    if smallest > 1:
        for k in sorted({*(2**i for i in range(smallest.bit_length())), smallest}):
            metrics[f"pass@{k}"] = over_prompts(partial(_pass_at, k=k), right)
        metrics |= {
            f"best@{smallest}": over_prompts(max, score),
            f"worst@{smallest}": over_prompts(min, score),
        }
        metrics[f"std@{smallest}"] = over_prompts(pstdev, score)
        if any(s.extra("pred") is not None for s in scored):
            metrics[f"maj@{smallest}"] = over_prompts(
                majority_correct, lambda s: (s.extra("pred"), right(s))
            )
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _extras_of(samples: Sequence[EvalSample]) -> dict[str, float]:
    """Return means of the reward source's numbers, each over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.extras.items():
            if not isinstance(value, str):
                values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}


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
        mine = range(self.strategy.get_rank(), len(self.prompts), self.strategy.world_size)
        rollouts = self.engine.generate([self.prompts[i] for i in mine], self.sampling)
        not_finite = None
        try:
            score_rollouts(self.reward_source, rollouts)
        except NonFiniteRewardError as error:
            not_finite = str(error)
        gathered = self.strategy.gather_object((not_finite, [EvalSample.of(r) for r in rollouts]))
        metrics: dict[str, float] = {}
        self.strategy.on_rank_0(
            lambda: metrics.update(self._judge(step, *zip(*gathered))), "evaluate"
        )
        return self.strategy.broadcast_object(metrics)

    def _judge(
        self, step: int, not_finite: Sequence[str | None], gathered: Sequence[Sequence[EvalSample]]
    ) -> dict[str, float]:
        """Return metrics of the samples of all ranks."""
        if any(not_finite):
            raise NonFiniteError("; ".join(filter(None, not_finite)))
        self.samples = sorted((s for part in gathered for s in part), key=lambda s: s.index)
        return eval_metrics(self.samples, self.threshold)


# -- when a run is evaluated ------------------------------------------------------------------------------------------

_SHOWN = ("loss", "accuracy", "reward", "margin")


class Evaluation(Callback):
    """Asks ``run.evaluator``: ``evaluate(step)`` returns metrics ``eval/<name>``. It is ``run.evaluation``.

    A checkpoint keeps the last evaluation: a resumed run need not do it again.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        run.evaluation = self
        self.cadence: Cadence | None = None  # from the start of the run on
        self.step: int | None = None  # of the last evaluation
        self.result: Mapping[str, float] | None = None  # None where a score was not finite
        run.register_state("evaluation", self)

    def on_start(self, run: Any) -> None:
        """Start the clocks."""
        asked = run.config.evaluation
        self.cadence = Cadence(asked.eval_steps, epochs=1 if asked.eval_steps == -1 else None)

    def before_steps(self, run: Any) -> None:
        """Do the evaluation that a resumed run lacks, or that before training. Collective."""
        step = run.state.global_step
        if run.only_evaluates:
            self.evaluate(run, step)
        elif step > 0:
            if run.owns_parts and self.cadence.due(step, run.finished_episodes):
                self.evaluate(run, step)
        elif run.config.evaluation.val_before_train:
            self.evaluate(run, step)

    def votes(self, run: Any) -> Mapping[str, float]:
        is_due = self.cadence.due(run.state.global_step, run.finished_episodes)
        return {"evaluate": float(is_due)}

    def evaluate(self, run: Any, step: int) -> None:
        self.evaluate_step(step)

    def evaluate_step(self, step: int) -> Mapping[str, float]:
        """Evaluate the current weights, once per step at most; empty without an evaluator. Collective."""
        run = self.run
        if run.evaluator is None or self.step == step:
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
        shown = [name for name in _SHOWN if f"eval/{name}" in result]
        numbers = ", ".join(f"{name} {result[f'eval/{name}']:.3f}" for name in shown)
        run.strategy.print(f"[step {step}] evaluation: {numbers}")
        seconds = {f"perf/{name}": value for name, value in timer.reset().items()}
        self.result = dict(result) | self._told({**result, **seconds})
        return self.result

    def _told(self, result: Mapping[str, float]) -> dict[str, float]:
        """Return what the callbacks add; each gets what those before it have added, too."""
        added: dict[str, float] = {}
        for callback in self.run.callbacks:
            given = callback.on_evaluation(self.run, self.step, {**result, **added})
            added |= numbers_of(callback, "on_evaluation", given)
        return added

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "result": self.result}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.result = state["result"]
