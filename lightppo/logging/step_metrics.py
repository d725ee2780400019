"""How numbers of many samples, tokens, micro batches and ranks become one. ``lightppo.metric_names`` says what each is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightppo.experience.experience import Experience
from lightppo.metric_names import METRICS, ON_BARS, SHOWN
from lightppo.ranks import Ranks, heartbeat


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


class SampleMeans:
    """Means over the samples of a step, and over their trained tokens, under the short names of metrics."""

    def __init__(self, update: Any) -> None:
        self.update = update  # :class:`lightppo.trainer.update.Update`
        self.sums: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.unread: list[tuple[Experience, Tensor]] = []  # of an optimizer step

    def begin(self, items: Sequence[Experience]) -> None:
        """Take in this rank's samples of a new step, one each."""
        self.sums, self.counts = Counter(), Counter()
        if not items:
            return
        batch = Experience.collate(items)
        for name, values in batch.info.items():
            if name not in ("kl", "stale"):
                self._count("response_clip_ratio" if name == "truncated" else name, values)
        self.sums["samples"] = len(items)
        if batch.advantages is not None:
            self._count("advantage_mean", batch.advantages[batch.action_mask])
        if batch.action_log_probs is not None:
            self._count_policy(batch, batch.action_log_probs)

    def add(self, experience: Experience, log_probs: Tensor) -> None:
        """A micro batch whose log probs only the training pass has made; they are read later."""
        self.unread.append((experience, log_probs))

    def read(self) -> None:
        """Take in what was added: a wait for a GPU."""
        unread, self.unread = self.unread, []
        for experience, log_probs in unread:
            self._count_policy(experience, log_probs)

    def status(self) -> dict[str, float]:
        """The means over all ranks. Collective."""
        sums, counts = Counter(), Counter()
        for own_sums, own_counts in self.update.strategy.all_gather_object(
            (self.sums, self.counts)
        ):
            sums.update(own_sums)
            counts.update(own_counts)
        means = {name: sums[name] / count if count else math.nan for name, count in counts.items()}
        return means | {"samples": sums["samples"]}

    def _count(self, name: str, values: Tensor) -> None:
        """NaN marks a missing number."""
        values = values.double()
        values = values[~values.isnan()]
        self.sums[name] += values.sum().item()
        self.counts[name] += values.numel()

    def _count_policy(self, experience: Experience, log_probs: Tensor) -> None:
        """The policy before the update against the reference."""
        reference, kl = experience.base_action_log_probs, experience.kl
        if reference is None:
            return
        if kl is None:
            kl = self.update.experience_maker.sampled_kl(log_probs, reference)
        difference = log_probs - reference
        # with NaN the optimizer step is skipped, and counted
        mask = experience.action_mask & ~difference.isnan()
        self._count("policy_kl", difference[mask])
        self._count("kl", kl[mask])


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


# -- what a run tells ------------------------------------------------------------------------------------------------


def on_bar(status: Mapping[str, float]) -> dict[str, float]:
    """What a progress bar shows of a status, by the names there."""
    return {short: status[name] for short, name in ON_BARS.items() if name in status}


def minibatch_on_bar(
    samples: Sequence[Experience], statuses: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """The same of one optimizer step on this rank alone; a KL is the mean over tokens."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for status in statuses:
        for name, value in status.items():
            numbers[name].append(value)
    means = {name: fmean(values) for name, values in numbers.items()}
    lengths = [experience.response_lengths.double() for experience in samples]
    for name in set(ON_BARS.values()) & set.intersection(*(set(e.info) for e in samples)):
        weights = torch.cat([n if name == "kl" else torch.ones_like(n) for n in lengths])
        values = torch.cat([experience.info[name].double() for experience in samples])
        means[name] = (values @ weights / weights.sum()).item()
    return on_bar(means)


class Phases:
    """What this rank is doing."""

    def __call__(self, phase: str) -> AbstractContextManager:
        return heartbeat.during(phase)

    def reset(self) -> dict[str, float]:
        """Seconds by phase since the last reset, where they are measured, as ``time_<phase>``."""
        return {}


def plain_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """Few numbers of a step."""
    shown = (f"{text} {metrics[name]:.3g}" for text, name in SHOWN.items() if name in metrics)
    return " · ".join([f"step {step}/{total}", *shown])


def plain_lines(start_step: int) -> Any:
    """The same line for each step."""
    return plain_line


def without_bar(items: Iterable, *of: Any) -> Iterable:
    """The items, as they are."""
    return items
