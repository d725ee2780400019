"""How numbers of many samples, tokens, micro batches and ranks become one. ``lightppo.meanings`` says what each is."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms.mismatch import Summary, mismatch_metrics, mismatch_terms
from lightppo.experience.experience import Experience
from lightppo.meanings import METRICS, TIMED
from lightppo.ranks import Ranks, heartbeat

# means that the seed's training_step gives
SEED_INFO = ("kl", "reward", "return", "response_length", "total_length")


def with_namespace(status: Mapping[str, float]) -> dict[str, float]:
    """Short names of a status → names in the logs.

    A name of the user's own is in ``train/``, or in ``rollout/`` if it begins with ``rollout_``, as LightRFT has it.
    """
    return {_full_name(name): value for name, value in status.items()}


def _full_name(name: str) -> str:
    if "/" in name:
        return name
    if name in METRICS.by_short_name:
        return METRICS.by_short_name[name]
    if name.startswith("rollout_"):
        return f"rollout/{name.removeprefix('rollout_')}"
    return f"train/{name}"


# -- of a rollout ----------------------------------------------------------------------------------------------------


def policy_summaries(
    experience: Experience, log_probs: Tensor, sampled_kl: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Summary]:
    """The policy before the update against reference and rollout engine, per trained token.

    Args:
        experience: with what there is of reference, engine and KL; without a KL, ``sampled_kl`` makes it.
        log_probs: of the policy before the update (B, A).
        sampled_kl: log probs of policy and reference → KL, all of one shape.
    """
    terms: dict[str, Tensor] = {}
    reference, engine = experience.base_action_log_probs, experience.rollout_log_probs
    # with NaN the optimizer step is skipped, and counted
    mask = experience.action_mask & ~log_probs.isnan()
    if reference is not None:
        mask = mask & ~reference.isnan()
        terms["policy_kl"] = (log_probs - reference)[mask]
        terms["kl"] = (
            sampled_kl(log_probs, reference) if experience.kl is None else experience.kl
        )[mask]
    if (teacher := experience.teacher_log_probs) is not None:
        terms |= {"teacher_kl": (log_probs - teacher)[mask], "teacher_log_prob": teacher[mask]}
    if engine is not None:
        terms |= {
            f"mismatch_{name}": x for name, x in mismatch_terms(log_probs, engine, mask).items()
        }
    summaries = {name: Summary.of(x) for name, x in terms.items()}
    if engine is not None:
        summaries["mismatch_on_policy"] = summaries["mismatch_logp_diff"]
        if (stale := experience.info.get("stale")) is not None:
            fresh = (stale == 0)[:, None].expand(mask.shape)[mask]
            summaries["mismatch_on_policy"] = Summary.of(terms["mismatch_logp_diff"][fresh])
    return summaries


def rollout_summaries(
    items: Sequence[Experience], sampled_kl: Callable[[Tensor, Tensor], Tensor] = torch.sub
) -> dict[str, Summary]:
    """Summaries of this rank's samples (one each): per sample for ``info``, per trained token for the rest.

    Samples without ``action_log_probs`` are compared with reference and engine where the training pass makes them.
    """
    if not items:
        return {}
    batch = Experience.collate(items)
    tokens = {"advantage": batch.advantages, "return_token": batch.returns, "value": batch.values}
    tokens = {name: x[batch.action_mask] for name, x in tokens.items() if x is not None}
    if "value" in tokens:
        tokens["residual"] = tokens["return_token"] - tokens["value"]
    if batch.loss_weights is not None:
        weights = batch.loss_weights[batch.action_mask]
        tokens |= {"loss_weight": weights, "loss_weight_zero": weights == 0}
    summaries = {
        name: Summary.of(x) for name, x in batch.info.items() if name not in ("kl", "stale")
    }
    if {"total_length", "response_length"} <= batch.info.keys():
        summaries["prompt_length"] = Summary.of(
            batch.info["total_length"] - batch.info["response_length"]
        )
    if batch.action_log_probs is not None:
        summaries |= policy_summaries(batch, batch.action_log_probs, sampled_kl)
    return summaries | {name: Summary.of(x) for name, x in tokens.items()}


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
    mismatch = {
        name.removeprefix("mismatch_"): s
        for name, s in summaries.items()
        if name.startswith("mismatch_")
    }
    for name, s in summaries.items():
        if name != "residual" and not name.startswith("mismatch_"):
            status[_MEAN_NAMES.get(name, name)] = s.mean
        if name in _WITH_RANGE:
            status |= {f"{name}_max": s.high, f"{name}_min": s.low}
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


def micro_batch_status(
    metrics: Mapping[str, Tensor], experience: Experience, scale: float
) -> dict[str, Tensor]:
    """What a micro batch says, on its device: its metrics times ``scale``, and the seed's means over samples.

    Args:
        metrics: shares of the metrics of the optimizer step.
        scale: ``StepPart.status_scale``.
    """
    device = experience.action_mask.device
    known = {name: experience.info[name] for name in SEED_INFO if name in experience.info}
    # the seed puts numbers in
    info = {name: torch.as_tensor(x, device=device).float() for name, x in known.items()}
    means = {name: values.mean() for name, values in info.items()}
    if "kl" in info:  # per token, as far as lengths tell
        means["kl"] = (info["kl"] * info["response_length"]).sum() / info["response_length"].sum()
    values = torch.stack(
        [*means.values(), *(x.detach().float() for x in metrics.values())]
    ).double()
    values[len(means) :] *= scale
    return dict(zip([*means, *metrics], values.unbind()))


def checked_status(status: Mapping[str, Any] | None) -> dict[str, float]:
    """A status as numbers; an override may have added some of its own. Raises TypeError for an entry that is none."""
    status, numbers = dict(status or {}), {}
    tensors = {
        name: x.detach().double()
        for name, x in status.items()
        if isinstance(x, Tensor) and x.dim() == 0
    }
    for device in {x.device for x in tensors.values()}:  # one copy, and one wait for a GPU
        names = [name for name, x in tensors.items() if x.device == device]
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
    values = [
        [[status[name] for status in step if name in status] for step in steps] for name in names
    ]
    # (names, steps, 2)
    totals = torch.tensor([[(sum(v), len(v)) for v in of] for of in values], dtype=torch.float64)
    of_names = ranks.all_reduce(totals, "sum").tolist() if names else []
    return {
        name: _mean_of_numbers([x / n for x, n in of if n]) for name, of in zip(names, of_names)
    }


def _mean_of_numbers(values: Sequence[float]) -> float:
    """NaN marks a missing number and is left out."""
    numbers = [x for x in values if not math.isnan(x)]
    return sum(numbers) / len(numbers) if numbers else math.nan


_SHOWN = {
    "loss": "train/loss",
    "reward": "rollout/reward",
    "kl": "rollout/kl",
    "entropy": "train/entropy",
}
_SHOWN["teacher kl"] = "rollout/teacher_kl"
_SHOWN |= {"len": "rollout/response_length"}


def shown_status(status: Mapping[str, float]) -> str:
    """What a line of the log and the progress bar show: ``reward 0.61 · kl 0.04 · entropy 1.3 · len 3.4``."""
    status = with_namespace(status)
    return " · ".join(
        f"{short} {round(status[name], 4) + 0.0:.3g}"
        for short, name in _SHOWN.items()
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


class PhaseTimer:
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    def __init__(self) -> None:
        self.passed: list[tuple[str, Any, Any]] = []  # phase, start and end

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
    for part in [part for part in TIMED if tokens and f"time_{part}" in seconds]:
        perf[f"{part}_ms_per_token"] = (
            1000 * seconds[f"time_{part}"] / (tokens * epochs.get(part, 1))
        )
    if trained and (train := seconds.get("time_train")):
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf
