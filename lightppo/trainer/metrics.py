"""How numbers of many samples, tokens, micro batches and ranks become one. ``lightppo.meanings`` says what each is."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms.kl import mismatch_terms
from lightppo.experience.experience import Experience
from lightppo.meanings import METRICS, SHOWN, TIMED
from lightppo.ranks import Ranks, heartbeat


@dataclass
class Summary:
    """Count, sum, sum of squares, minimum and maximum of numbers; can be merged over ranks."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Summary:
        """Summary of all entries of a tensor; NaN marks a missing number and is skipped."""
        values = values.double()
        values = values[~values.isnan()]
        if values.numel() == 0:
            return cls()
        sums = torch.stack([values.sum(), values.square().sum(), values.min(), values.max()])
        return cls(values.numel(), *sums.tolist())

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


def chi_square(ratios: Summary) -> float:
    """E[ρ²] - 1, the χ² divergence of π_old from π_rollout, from the ratios of tokens that π_rollout sampled."""
    return ratios.squares / ratios.count - 1 if ratios.count else math.nan


def effective_share(weights: Summary) -> float:
    """(Σw)² / (n·Σw²): Kish's effective sample size (1965) as a share of the n samples; 1 if all weigh the same."""
    if not weights.count:
        return math.nan
    return weights.total**2 / (weights.count * weights.squares) if weights.squares else 0.0


def mismatch_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The metrics, from a summary over all ranks of each vector of :func:`.kl.mismatch_terms`."""
    tokens, rows, difference = summaries["ratio"], summaries["seq_ratio"], summaries["logp_diff"]
    return {
        "kl": summaries["kl"].mean,
        "k3_kl": summaries["k3_kl"].mean,
        "logp_diff_max": difference.high if difference.count else math.nan,
        "ppl_ratio": summaries["ppl_ratio"].mean,
        "chi2_token": chi_square(tokens),
        "chi2_seq": chi_square(rows),
        "ess_token": effective_share(tokens),
        "ess_seq": effective_share(rows),
    }


def with_namespace(
    status: Mapping[str, float], full_names: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Short names of a status → names in the logs, by ``full_names``; None: ``METRICS.by_short_name``.

    A name of the user's own is in ``train/``, or in ``rollout/`` if it begins with ``rollout_``, as LightRFT has it.
    """
    full_names = METRICS.by_short_name if full_names is None else full_names
    named = {}
    for name, value in status.items():
        if "/" in name:
            full_name = name
        elif name in full_names:
            full_name = full_names[name]
        elif name.startswith("rollout_"):
            full_name = f"rollout/{name.removeprefix('rollout_')}"
        else:
            full_name = f"train/{name}"
        named[full_name] = value
    return named


# -- of a rollout ----------------------------------------------------------------------------------------------------


# of experience and log probs (B, A) of the policy: numbers (B, A) by name
Measure = Callable[[Experience, Tensor], Mapping[str, Tensor]]


def policy_summaries(
    experience: Experience,
    log_probs: Tensor,
    sampled_kl: Callable[[Tensor, Tensor], Tensor],
    measures: Sequence[Measure] = (),
) -> dict[str, Summary]:
    """The policy before the update against reference and rollout engine, per trained token.

    Args:
        experience: with what there is of reference, engine and KL; without a KL, ``sampled_kl`` makes it.
        log_probs: of the policy before the update (B, A).
        sampled_kl: log probs of policy and reference → KL, all of one shape.
        measures: what else there is to say.
    """
    terms: dict[str, Tensor] = {}
    reference, engine = experience.base_action_log_probs, experience.rollout_log_probs
    # with NaN the optimizer step is skipped, and counted
    mask = experience.action_mask & ~log_probs.isnan()
    if reference is not None:
        mask = mask & ~reference.isnan()
        kl = sampled_kl(log_probs, reference) if experience.kl is None else experience.kl
        terms |= {"policy_kl": (log_probs - reference)[mask], "kl": kl[mask]}
    for measure in measures:
        found = measure(experience, log_probs)
        terms |= {name: numbers[mask] for name, numbers in found.items()}
    if engine is not None:
        mismatch = mismatch_terms(log_probs, engine, mask)
        terms |= {f"mismatch_{name}": numbers for name, numbers in mismatch.items()}
    summaries = {name: Summary.of(numbers) for name, numbers in terms.items()}
    if engine is not None:
        summaries["mismatch_on_policy"] = summaries["mismatch_logp_diff"]
        if (stale := experience.info.get("stale")) is not None:
            fresh = (stale == 0)[:, None].expand(mask.shape)[mask]
            summaries["mismatch_on_policy"] = Summary.of(terms["mismatch_logp_diff"][fresh])
    return summaries


def rollout_summaries(
    items: Sequence[Experience],
    sampled_kl: Callable[[Tensor, Tensor], Tensor] = torch.sub,
    measures: Sequence[Measure] = (),
) -> dict[str, Summary]:
    """Summaries of this rank's samples (one each): per sample for ``info``, per trained token for the rest.

    Samples without ``action_log_probs`` are compared with reference and engine where the training pass makes them.
    """
    if not items:
        return {}
    batch = Experience.collate(items)
    tokens = {"advantage": batch.advantages, "return_token": batch.returns, "value": batch.values}
    tokens = {
        name: tensor[batch.action_mask] for name, tensor in tokens.items() if tensor is not None
    }
    if "value" in tokens:
        tokens["residual"] = tokens["return_token"] - tokens["value"]
    if batch.loss_weights is not None:
        weights = batch.loss_weights[batch.action_mask]
        tokens |= {"loss_weight": weights, "loss_weight_zero": weights == 0}
    summaries = {
        name: Summary.of(numbers)
        for name, numbers in batch.info.items()
        if name not in ("kl", "stale")
    }
    if {"total_length", "response_length"} <= batch.info.keys():
        summaries["prompt_length"] = Summary.of(
            batch.info["total_length"] - batch.info["response_length"]
        )
    if batch.action_log_probs is not None:
        summaries |= policy_summaries(batch, batch.action_log_probs, sampled_kl, measures)
    return summaries | {name: Summary.of(numbers) for name, numbers in tokens.items()}


def merge_summaries(per_rank: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    """One summary per name over all ranks; a rank without samples brings none."""
    merged: dict[str, Summary] = {}
    for summaries in per_rank:
        for name, summary in summaries.items():
            merged[name] = merged.get(name, Summary()) + summary
    return merged


_OF_TOKENS = ("advantage", "return_token", "value")
_WITH_RANGE = ("reward", "response_length", "prompt_length", *_OF_TOKENS)
_MEAN_NAMES = {"truncated": "response_clip_ratio"} | {name: f"{name}_mean" for name in _OF_TOKENS}


def rollout_status(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The flat status of a rollout, by its short names: ``reward``, ``kl``, ``response_length`` …"""
    status: dict[str, float] = {}
    mismatch: dict[str, Summary] = {}
    for name, summary in summaries.items():
        if name.startswith("mismatch_"):
            mismatch[name.removeprefix("mismatch_")] = summary
        elif name != "residual":
            status[_MEAN_NAMES.get(name, name)] = summary.mean
        if name in _WITH_RANGE:
            status |= {f"{name}_max": summary.high, f"{name}_min": summary.low}
    if mismatch:
        on_policy = mismatch.pop("on_policy")
        if on_policy.count < mismatch["logp_diff"].count:
            status["logp_diff_on_policy"] = on_policy.mean
        numbers = mismatch_metrics(mismatch)
        status |= {
            "logp_diff_mean": mismatch["logp_diff"].mean,
            "logp_diff_max": numbers.pop("logp_diff_max"),
        }
        status |= {f"mismatch_{name}": value for name, value in numbers.items()}
    if "response_length" in summaries:
        status["samples"] = summaries["response_length"].count
    if "reward" in summaries:
        status["reward_std"] = math.sqrt(summaries["reward"].variance)
    if "residual" in summaries:
        spread = summaries["return_token"].variance
        status["vf_explained_var"] = (
            1 - summaries["residual"].variance / spread if spread > 0 else math.nan
        )
    return status


# -- of training -----------------------------------------------------------------------------------------------------


def micro_batch_status(metrics: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """What a micro batch says, on its device: its shares of the step's metrics, times ``StepPart.status_scale``."""
    values = torch.stack([share.detach().float() for share in metrics.values()])
    return dict(zip(metrics, (values.double() * scale).unbind()))


def checked_status(status: Mapping[str, Any] | None) -> dict[str, float]:
    """A status as numbers; an override may have added some of its own. Raises TypeError for an entry that is none."""
    status, numbers = dict(status or {}), {}
    tensors = {
        name: value.detach().double()
        for name, value in status.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    for device in {tensor.device for tensor in tensors.values()}:  # one copy, one wait for a GPU
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        status |= zip(names, torch.stack([tensors[name] for name in names]).tolist())
    for name, value in status.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"training_step returned status[{name!r}] = {value!r}; a status holds numbers"
            ) from error
    return numbers


def optimizer_status(
    steps: Sequence[Sequence[Mapping[str, float]]], ranks: Ranks
) -> dict[str, float]:
    """The status of all optimizer steps of a PPO step: means over micro batches and ranks, then over steps. Collective.

    A name counts where a status has it. A step in which it is NaN is left out.

    Args:
        steps: for each optimizer step what ``training_step`` returned for this rank's micro batches with samples; all
            ranks have as many steps.
    """
    own = {name for step in steps for status in step for name in status}
    names = sorted(set().union(*ranks.all_gather_object(own)))
    if not names:
        return {}
    totals = torch.zeros(len(names), len(steps), 2, dtype=torch.float64)  # sums and counts
    for row, name in enumerate(names):
        for column, step in enumerate(steps):
            values = [status[name] for status in step if name in status]
            totals[row, column, 0], totals[row, column, 1] = sum(values), len(values)
    means = {}
    for name, of_steps in zip(names, ranks.all_reduce(totals, "sum").tolist()):
        of_step = [total / count for total, count in of_steps if count]
        numbers = [mean for mean in of_step if not math.isnan(mean)]
        means[name] = sum(numbers) / len(numbers) if numbers else math.nan
    return means


def shown_status(status: Mapping[str, float]) -> str:
    """What the line of a step shows of its metrics: ``reward 0.61 · kl 0.04 · entropy 1.3 · len 3.4``."""
    shown = SHOWN | {"len": "rollout/response_length"}
    return " · ".join(
        f"{short} {round(status[name], 4) + 0.0:.3g}"
        for short, name in shown.items()
        if name in status
    )


# -- of time ---------------------------------------------------------------------------------------------------------


class Pace:
    """One line per step, with the time that the last steps took and that the others will."""

    def __init__(self, start_step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ends = deque([(start_step, clock())], maxlen=21)  # number and end of the last steps

    def line(self, step: int, total: int | None, status: Mapping[str, float]) -> str:
        """``step 12/100 · reward 0.61 · … · 0.9 s · ETA 1:20``; the time left counts evaluations and saving too."""
        (last, before), now = self.ends[-1], self.clock()
        self.ends.append((step, now))
        first, start = self.ends[0]
        parts = [f"step {step}" if total is None else f"step {step}/{total}", shown_status(status)]
        parts.append(f"{status.get('perf/time_step', (now - before) / max(step - last, 1)):.1f} s")
        if total is not None and step > first:
            minutes, seconds = divmod(round((now - start) / (step - first) * (total - step)), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(
                f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}"
            )
        return " · ".join(filter(None, parts))


@dataclass
class PhaseTimer:
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    passed: list[tuple[str, Any, Any]] = field(default_factory=list)  # phase, start and end

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # no marks where a run on the CPU of a GPU machine would only take its memory
        now = _mark if torch.cuda.is_initialized() else time.perf_counter
        start = now()
        with torch.profiler.record_function(phase), heartbeat.during(phase):  # its name in a trace
            yield
        self.passed.append((phase, start, now()))

    def reset(self) -> dict[str, float]:
        """The seconds since the last reset, as ``time_<phase>``. Waits for a GPU."""
        passed, self.passed, seconds = self.passed, [], Counter()
        for phase, start, end in passed:
            if not isinstance(end, float):
                end.synchronize()
            seconds[f"time_{phase}"] += (
                end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            )
        return dict(seconds)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def progress_bar(items: Iterable | None, desc: str, *, shown: bool = True, **options: Any) -> tqdm:
    """A bar of at most 80 columns on a terminal; silent elsewhere."""
    layout = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}"
    return tqdm(
        items, desc=desc, ncols=80, bar_format=layout, disable=None if shown else True, **options
    )


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: Mapping[str, int],
    world_size: int,
    parameters: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Speed of one step, beside the ``time_<phase>`` in ``seconds``.

    ``status`` is of the rollout (samples, generated_tokens, total_length), ``parameters`` of all models that an epoch
    trains, ``peak_tflops`` of one device; ``epochs`` by the part in ``TIMED``.
    """
    perf = dict(seconds)
    generated = status.get("generated_tokens", 0.0)
    tokens = status.get("samples", 0.0) * status.get("total_length", 0.0)
    trained = tokens * max(epochs.values())
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
        perf["rollout_ms_per_token"] = 1000 * seconds["time_rollout"] / generated
    for part in TIMED:
        if tokens and f"time_{part}" in seconds:
            passed = tokens * epochs.get(part, 1)
            perf[f"{part}_ms_per_token"] = 1000 * seconds[f"time_{part}"] / passed
    if trained and (train := seconds.get("time_train")):
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf
