"""Evaluation on held-out prompts: mean@n, pass@k, accuracy, per data source; every sample kept."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.ranks import Ranks
from lightppo.rewards.source import RewardSource, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams


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

    @classmethod
    def of(cls, rollout: Rollout) -> EvalSample:
        p, r = rollout.prompt, rollout
        text = (p.text, r.response_text, p.label)
        return cls(*text, r.reward, p.data_source, len(r.response_ids), r.finish_reason, p.index)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k ≤ n answers is right, from n answers.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def eval_metrics(samples: Sequence[EvalSample], threshold: float) -> dict[str, float]:
    """Metrics of one evaluation; with several data sources also ``eval/<source>/...``.

    A score of at least ``threshold`` is correct. Unscored samples count nowhere but in ``eval/unscored``.
    """
    if all(sample.score is None for sample in samples):
        raise RewardError(f"evaluation: none of the {len(samples)} samples was scored; check the reward source")
    sources = sorted({sample.data_source for sample in samples})
    metrics = _metrics_of(samples, threshold, "eval")
    for source in sources if len(sources) > 1 else ():
        of_source = [s for s in samples if s.data_source == source]
        if any(s.score is not None for s in of_source):
            metrics |= _metrics_of(of_source, threshold, f"eval/{source}")
    return metrics


def _metrics_of(samples: Sequence[EvalSample], threshold: float, prefix: str) -> dict[str, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.score is not None:
            groups[sample.index].append(sample.score)
    scored = [s for s in samples if s.score is not None]
    n = min(len(scores) for scores in groups.values())
    correct = {index: sum(score >= threshold for score in scores) for index, scores in groups.items()}

    def over_prompts(value: Callable[[int], float]) -> float:
        """Mean over prompts."""
        return sum(value(index) for index in groups) / len(groups)

    metrics = {
        "accuracy": sum(correct.values()) / len(scored),
        "reward": sum(s.score for s in scored) / len(scored),
        "response_length": sum(s.response_length for s in samples) / len(samples),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "samples": float(len(samples)),
        f"mean@{n}": over_prompts(lambda i: sum(groups[i]) / len(groups[i])),
    }
    if len(scored) < len(samples):
        metrics["unscored"] = float(len(samples) - len(scored))
    if n > 1:
        for k in (2**i for i in range(n.bit_length())):
            metrics[f"pass@{k}"] = over_prompts(lambda i, k=k: pass_at_k(len(groups[i]), correct[i], k))
        metrics[f"best@{n}"] = over_prompts(lambda i: max(groups[i]))
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


@dataclass
class Evaluator:
    """Samples and scores the held-out prompts, shared out over ranks."""

    engine: RolloutEngine
    reward_source: RewardSource
    prompts: Sequence[Prompt]  # the same on every rank
    sampling: SamplingParams  # the same random numbers at every evaluation
    strategy: Ranks
    threshold: float = 0.5  # a score of at least this is correct
    folder: Path | None = None  # rank 0 writes all samples to step{N}.jsonl in it

    def __post_init__(self) -> None:
        # Apart from every training step's seed: evaluation prompt i does not get the samples of training prompt i.
        self.sampling = replace(self.sampling, seed=-1 - self.sampling.seed)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the current weights, the same on every rank. Collective."""
        mine = range(self.strategy.get_rank(), len(self.prompts), self.strategy.world_size)
        rollouts = self.engine.generate([self.prompts[i] for i in mine], self.sampling)
        score_rollouts(self.reward_source, rollouts)
        gathered = self.strategy.all_gather_object([EvalSample.of(r) for r in rollouts])
        samples = sorted((s for part in gathered for s in part), key=lambda s: s.index)
        if self.folder is not None and self.strategy.is_rank_0():
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(vars(sample), default=str) + "\n" for sample in samples]
            (self.folder / f"step{step}.jsonl").write_text("".join(lines))
        return eval_metrics(samples, self.threshold)
