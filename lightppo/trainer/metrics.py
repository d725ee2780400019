"""How numbers of many samples, tokens, micro batches and ranks become one; their names are in ``metric_names``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightppo.algorithms.correction import mismatch_metrics, mismatch_terms
from lightppo.experience.experience import Experience


@dataclass
class Summary:
    """Count, sum, sum of squares, minimum and maximum of numbers, mergeable over ranks."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Summary:
        """Of all entries of a tensor; NaN marks a missing number and is left out."""
        values = values.double()
        values = values[~values.isnan()]
        if values.numel() == 0:
            return cls()
        return cls(
            values.numel(),
            values.sum().item(),
            values.square().sum().item(),
            values.min().item(),
            values.max().item(),
        )

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Biased."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else math.nan


def rollout_summaries(
    items: Sequence[Experience], sampled_kl: Callable[[Tensor, Tensor], Tensor] = torch.sub
) -> dict[str, Summary]:
    """Summaries of this rank's samples: per sample for ``info``, per trained token for the rest.

    Args:
        items: samples, one each.
        sampled_kl: (N,) log probs of actor and reference → KL, for samples whose log probs came with the training pass.
    """
    if not items:
        return {}
    mask = torch.cat([item.action_mask[0] for item in items])  # (ΣA,)

    def tokens(name: str) -> Tensor | None:
        """Trained tokens of all rows."""
        if getattr(items[0], name) is None:
            return None
        return torch.cat([getattr(item, name)[0] for item in items])[mask]

    values, returns, engine = tokens("values"), tokens("returns"), tokens("rollout_log_probs")
    old, reference = tokens("action_log_probs"), tokens("base_action_log_probs")
    per_token = {"kl": tokens("kl"), "advantage": tokens("advantages"), "return_token": returns, "value": values}
    if values is not None:
        per_token["residual"] = returns - values
    if reference is not None and old is not None:
        per_token["policy_kl"] = old - reference
        if per_token["kl"] is None:
            per_token["kl"] = sampled_kl(old, reference)
    if (weights := tokens("loss_weights")) is not None:
        per_token |= {"loss_weight": weights, "loss_weight_zero": weights == 0}
    if engine is not None and old is not None:
        per_token |= {f"mismatch_{name}": x for name, x in _mismatch_terms(items).items()}
    per_sample = {name: torch.cat([item.info[name] for item in items]) for name in items[0].info if name != "kl"}
    return {name: Summary.of(x) for name, x in (per_sample | per_token).items() if x is not None}


def _mismatch_terms(items: Sequence[Experience]) -> dict[str, Tensor]:
    names = ("action_log_probs", "rollout_log_probs", "action_mask")
    rows = ([getattr(item, name)[0] for item in items] for name in names)
    return mismatch_terms(*(torch.nn.utils.rnn.pad_sequence(row, batch_first=True) for row in rows))  # (B, A) each


def merge_summaries(per_rank: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    """One summary per name over all ranks; a rank without samples brings none."""
    merged: dict[str, Summary] = {}
    for summaries in per_rank:
        for name, summary in summaries.items():
            merged[name] = merged.get(name, Summary()) + summary
    return merged


def rollout_status(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The flat status of a rollout, by its short names: ``reward``, ``kl``, ``response_length`` …"""
    with_range = {"reward", "response_length", "advantage", "return_token", "value"}
    status: dict[str, float] = {}
    for name, s in summaries.items():
        if name == "residual" or name.startswith("mismatch_"):
            continue
        mean_name = {"advantage": "advantage_mean", "return_token": "return_token_mean", "value": "value_mean"}
        mean_name |= {"truncated": "response_clip_ratio"}
        status[mean_name.get(name, name)] = s.mean
        if name in with_range:
            status |= {f"{name}_max": s.high, f"{name}_min": s.low}
    mismatch = {name.removeprefix("mismatch_"): s for name, s in summaries.items() if name.startswith("mismatch_")}
    if mismatch:
        numbers = mismatch_metrics(mismatch)
        status |= {"logp_diff_mean": mismatch["logp_diff"].mean, "logp_diff_max": numbers.pop("logp_diff_max")}
        status |= {f"mismatch_{name}": value for name, value in numbers.items()}
    if "reward" in summaries:
        status["reward_std"] = math.sqrt(summaries["reward"].variance)
        status["samples"] = summaries["reward"].count
    if "residual" in summaries:
        spread = summaries["return_token"].variance
        status["vf_explained_var"] = 1 - summaries["residual"].variance / spread if spread > 0 else math.nan
    return status


class StepMetrics:
    """Sums of scalar tensors over the micro batches of one optimizer step."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro batch's share."""
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduce(self, strategy) -> dict[str, float]:
        """Mean over ranks of the sums: with shares scaled as losses are, the value over the whole step."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        reduced = strategy.all_reduce(torch.stack([self.sums[name] for name in names]), "mean")
        return dict(zip(names, reduced.tolist()))


def mean_status(statuses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the statuses that have it; NaN entries are left out."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for status in statuses for name in status):
        values = [s[name] for s in statuses if name in s and not math.isnan(s[name])]
        means[name] = sum(values) / len(values) if values else math.nan
    return means


def short_status(status: Mapping[str, float]) -> dict[str, float]:
    """What the progress bar shows."""
    names = {
        "pg": "policy_loss",
        "rm": "reward",
        "ret": "return",
        "glen": "response_length",
        "tlen": "total_length",
        "kl": "kl",
        "act_lr": "actor_lr",
        "cri": "critic_loss",
        "vals": "values",
        "cri_lr": "critic_lr",
    }
    return {short: status[name] for short, name in names.items() if name in status}


class PhaseTimer:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """The seconds since the last reset, as ``time_<phase>``."""
        seconds, self.seconds = self.seconds, {}
        return {f"time_{phase}": value for phase, value in seconds.items()}


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: int,
    world_size: int,
    parameters: int,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Speed of one step.

    Args:
        seconds: ``time_<phase>`` of :class:`PhaseTimer`.
        status: of the rollout: samples, generated_tokens, total_length.
        epochs: passes over the rollout.
        world_size: ranks.
        parameters: of all models trained.
        peak_tflops: peak of one device; ``None``: no MFU.
    """
    perf = dict(seconds)
    generated = status.get("generated_tokens", 0.0)
    trained = status.get("samples", 0.0) * status.get("total_length", 0.0) * epochs
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
    if trained and seconds.get("time_train"):
        train = seconds["time_train"]
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf
