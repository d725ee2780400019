"""How numbers of many samples, tokens, micro batches and ranks become one. ``lightppo.metric_names`` says what each is.

Of samples and tokens: means, ranges, deviations, the mismatch of engine and trainer. Of optimizer steps: means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.kl import mismatch_terms
from lightppo.experience.experience import Experience
from lightppo.metric_names import METRICS
from lightppo.ranks import Ranks


def with_namespace(
    status: Mapping[str, float], full_names: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return a status under its names in the logs, by ``full_names``; None: ``METRICS.by_short_name``.

    A name of the user's own is in ``train/``, or in ``rollout/`` if it begins with ``rollout_``, as LightRFT has it.
    """
    if full_names is None:
        full_names = METRICS.by_short_name
    full_status = {}
    for short_name, number in status.items():
        if "/" in short_name:
            full_name = short_name
        elif short_name in full_names:
            full_name = full_names[short_name]
        elif short_name.startswith("rollout_"):
            full_name = f"rollout/{short_name.removeprefix('rollout_')}"
        else:
            full_name = f"train/{short_name}"
        full_status[full_name] = number
    return full_status


# -- of a rollout ----------------------------------------------------------------------------------------------------


class SampleSummaries:
    """The numbers of docs/metrics.md in ``rollout/``, of the samples of a step over all ranks."""

    def __init__(self, update: Any) -> None:
        self.update = update  # :class:`lightppo.trainer.update.Update`
        self.summaries: dict[str, Summary] = {}  # of this rank's samples
        self.unread: list[tuple[Experience, Tensor]] = []  # those of an optimizer step

    def begin(self, items: Sequence[Experience]) -> None:
        """Take in this rank's samples of a new step, one each."""
        maker = self.update.experience_maker
        self.summaries = rollout_summaries(items, maker.sampled_kl, maker.measures)

    def add(self, experience: Experience, log_probs: Tensor) -> None:
        """Take a micro batch whose log probs only the training pass has made; they are read later."""
        self.unread.append((experience, log_probs))

    def read(self) -> None:
        """Take in what was added: a wait for a GPU."""
        maker = self.update.experience_maker
        summaries = [
            policy_summaries(experience, log_probs, maker.sampled_kl, maker.measures)
            for experience, log_probs in self.unread
        ]
        self.unread = []
        self.summaries = merge_summaries([self.summaries, *summaries])

    def status(self) -> dict[str, float]:
        """Return the numbers over all ranks, by their short names. Collective."""
        per_rank = self.update.ranks.all_gather_object(self.summaries)
        return rollout_status(merge_summaries(per_rank))


@dataclass
class Summary:
    """Count, sum, sum of squares, minimum and maximum of numbers; can be merged over ranks."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, numbers: Tensor) -> Summary:
        """Return the summary of all entries of a tensor; NaN marks a missing number and is skipped."""
        numbers = numbers.double()
        numbers = numbers[~numbers.isnan()]
        if numbers.numel() == 0:
            return cls()
        sums = torch.stack([numbers.sum(), numbers.square().sum(), numbers.min(), numbers.max()])
        return cls(numbers.numel(), *sums.tolist())

    def __add__(self, another: Summary) -> Summary:
        return Summary(
            self.count + another.count,
            self.total + another.total,
            self.squares + another.squares,
            min(self.low, another.low),
            max(self.high, another.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Biased."""
        if self.count:
            return max(0.0, self.squares / self.count - self.mean**2)
        return math.nan


def chi_square(ratios: Summary) -> float:
    """E[ρ²] - 1, the χ² divergence of π_old from π_rollout, from the ratios of tokens that π_rollout sampled."""
    if ratios.count:
        return ratios.squares / ratios.count - 1
    return math.nan


def effective_share(weights: Summary) -> float:
    """(Σw)² / (n·Σw²): Kish's effective sample size (1965) as a share of the n samples; 1 if all weigh the same."""
    if not weights.count:
        return math.nan
    if weights.squares:
        return weights.total**2 / (weights.count * weights.squares)
    return 0.0


def mismatch_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the metrics, from a summary over all ranks of each vector of :func:`.kl.mismatch_terms`."""
    token_ratios = summaries["ratio"]
    sequence_ratios = summaries["seq_ratio"]
    difference = summaries["logp_diff"]
    return {
        "kl": summaries["kl"].mean,
        "k3_kl": summaries["k3_kl"].mean,
        "logp_diff_max": difference.high if difference.count else math.nan,
        "ppl_ratio": summaries["ppl_ratio"].mean,
        "chi2_token": chi_square(token_ratios),
        "chi2_seq": chi_square(sequence_ratios),
        "ess_token": effective_share(token_ratios),
        "ess_seq": effective_share(sequence_ratios),
    }


# log probs of policy and reference → KL, all of one shape
SampledKL = Callable[[Tensor, Tensor], Tensor]
# of experience and log probs (B, A) of the policy: numbers (B, A) by name
Measure = Callable[[Experience, Tensor], Mapping[str, Tensor]]


def policy_summaries(
    experience: Experience,
    log_probs: Tensor,
    sampled_kl: SampledKL,
    measures: Sequence[Measure] = (),
) -> dict[str, Summary]:
    """Return the policy before the update against reference and rollout engine, per trained token.

    Args:
        experience: with what there is of reference, engine and KL; without a KL, ``sampled_kl`` makes it.
        log_probs: of the policy before the update (B, A).
        measures: further numbers.
    """
    terms: dict[str, Tensor] = {}
    reference_log_probs = experience.base_action_log_probs
    engine_log_probs = experience.rollout_log_probs
    # A step with NaN is skipped, and counted elsewhere.
    mask = experience.action_mask & ~log_probs.isnan()
    if reference_log_probs is not None:
        mask = mask & ~reference_log_probs.isnan()
        kl_terms = (
            sampled_kl(log_probs, reference_log_probs) if experience.kl is None else experience.kl
        )
        terms |= {"policy_kl": (log_probs - reference_log_probs)[mask], "kl": kl_terms[mask]}
    for measure in measures:
        measured = measure(experience, log_probs)
        terms |= {term_name: numbers[mask] for term_name, numbers in measured.items()}
    if engine_log_probs is not None:
        mismatch = mismatch_terms(log_probs, engine_log_probs, mask)
        terms |= {f"mismatch_{term_name}": numbers for term_name, numbers in mismatch.items()}
        on_policy = mismatch["logp_diff"]
        if (stale := experience.info.get("stale")) is not None:
            on_policy = on_policy[(stale == 0)[:, None].expand(mask.shape)[mask]]
        terms["mismatch_on_policy"] = on_policy
    return {term_name: Summary.of(numbers) for term_name, numbers in terms.items()}


def rollout_summaries(
    items: Sequence[Experience], sampled_kl: SampledKL = torch.sub, measures: Sequence[Measure] = ()
) -> dict[str, Summary]:
    """Return summaries of this rank's samples (one each): per sample for ``info``, per trained token for the rest.

    Samples without ``action_log_probs`` are compared with reference and engine where the training pass makes them.
    """
    if not items:
        return {}
    batch = Experience.collate(items)
    columns = {"advantage": batch.advantages, "return_token": batch.returns, "value": batch.values}
    mask = batch.action_mask
    tokens = {name: column[mask] for name, column in columns.items() if column is not None}
    if "value" in tokens:
        tokens["residual"] = tokens["return_token"] - tokens["value"]
    if batch.loss_weights is not None:
        weights = batch.loss_weights[mask]
        tokens |= {"loss_weight": weights, "loss_weight_zero": weights == 0}
    summaries = {
        metric: Summary.of(numbers)
        for metric, numbers in batch.info.items()
        if metric not in ("kl", "stale")
    }
    if {"total_length", "response_length"} <= batch.info.keys():
        prompt_lengths = batch.info["total_length"] - batch.info["response_length"]
        summaries["prompt_length"] = Summary.of(prompt_lengths)
    if batch.action_log_probs is not None:
        summaries |= policy_summaries(batch, batch.action_log_probs, sampled_kl, measures)
    return summaries | {metric: Summary.of(numbers) for metric, numbers in tokens.items()}


def merge_summaries(per_rank: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    """Return one summary per name over all ranks; a rank without samples brings none."""
    merged_summaries: dict[str, Summary] = {}
    for summaries in per_rank:
        for metric, summary in summaries.items():
            merged_summaries[metric] = merged_summaries.get(metric, Summary()) + summary
    return merged_summaries


_OF_TOKENS = ("advantage", "return_token", "value")
_WITH_RANGE = ("reward", "response_length", "prompt_length", *_OF_TOKENS)
_MEAN_NAMES = {"truncated": "response_clip_ratio"} | {name: f"{name}_mean" for name in _OF_TOKENS}


def rollout_status(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the flat status of a rollout, by its short names: ``reward``, ``kl``, ``response_length`` …"""
    status: dict[str, float] = {}
    mismatch: dict[str, Summary] = {}
    for metric, summary in summaries.items():
        if metric.startswith("mismatch_"):
            mismatch[metric.removeprefix("mismatch_")] = summary
        elif metric != "residual":
            status[_MEAN_NAMES.get(metric, metric)] = summary.mean
        if metric in _WITH_RANGE:
            status |= {f"{metric}_max": summary.high, f"{metric}_min": summary.low}
    if mismatch:
        on_policy = mismatch.pop("on_policy")
        if 0 < on_policy.count < mismatch["logp_diff"].count:
            status["logp_diff_on_policy"] = on_policy.mean
        numbers = mismatch_metrics(mismatch)
        status["logp_diff_mean"] = mismatch["logp_diff"].mean
        status["logp_diff_max"] = numbers.pop("logp_diff_max")
        status |= {f"mismatch_{metric}": value for metric, value in numbers.items()}
    if "response_length" in summaries:
        status["samples"] = summaries["response_length"].count
    if "reward" in summaries:
        status["reward_std"] = math.sqrt(summaries["reward"].variance)
    if "residual" in summaries:
        status["vf_explained_var"] = explained_variance(
            summaries["return_token"], summaries["residual"]
        )
    return status


def explained_variance(returns: Summary, residuals: Summary) -> float:
    """Return the share of the variance of the returns that the values explain: 1 - Var[R - V] / Var[R]."""
    if returns.variance > 0:
        return 1 - residuals.variance / returns.variance
    return math.nan


# -- of training -----------------------------------------------------------------------------------------------------


def micro_batch_status(metrics: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return what a micro batch says, on its device: its shares of the step's metrics, times ``StepPart.status_scale``."""
    values = torch.stack([share.detach().float() for share in metrics.values()])
    return dict(zip(metrics, (values.double() * scale).unbind()))


def checked_status(status: Mapping[str, Any] | None) -> dict[str, float]:
    """Return a status as numbers; an override may have added some of its own. Raises TypeError for an entry that is none."""
    status = dict(status or {})
    tensors = {
        metric: value.detach().double()
        for metric, value in status.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    for device in {tensor.device for tensor in tensors.values()}:  # one copy, one wait for a GPU
        names = [metric for metric, tensor in tensors.items() if tensor.device == device]
        status |= zip(names, torch.stack([tensors[metric] for metric in names]).tolist())
    numbers = {}
    for metric, value in status.items():
        try:
            numbers[metric] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"training_step returned status[{metric!r}] = {value!r}; a status holds numbers"
            ) from error
    return numbers


def optimizer_status(
    steps: Sequence[Sequence[Mapping[str, float]]], ranks: Ranks
) -> dict[str, float]:
    """Return the status of all optimizer steps of a PPO step: means over micro batches and ranks, then over steps.

    Collective.

    A name counts where a status has it. A step in which it is NaN is left out.

    Args:
        steps: for each optimizer step what ``training_step`` returned for this rank's micro batches with samples; all
            ranks have as many steps.
    """
    own_names = {metric for step_statuses in steps for status in step_statuses for metric in status}
    names = sorted(set().union(*ranks.all_gather_object(own_names)))
    if not names:
        return {}
    totals = torch.zeros(len(names), len(steps), 2, dtype=torch.float64)  # sums and counts
    for name_index, metric in enumerate(names):
        for step_index, step_statuses in enumerate(steps):
            values = [status[metric] for status in step_statuses if metric in status]
            totals[name_index, step_index, 0] = sum(values)
            totals[name_index, step_index, 1] = len(values)
    means = {}
    for metric, sums_and_counts in zip(names, ranks.all_reduce(totals, "sum").tolist()):
        step_means = [total / count for total, count in sums_and_counts if count]
        finite_means = [mean for mean in step_means if not math.isnan(mean)]
        means[metric] = sum(finite_means) / len(finite_means) if finite_means else math.nan
    return means
