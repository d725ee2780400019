"""Options of algorithms whose values have parts: bounds, weights of rewards, means and deviations. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.algorithms.entries import REJECTIONS, RejectionEntry
from lightppo.errors import ConfigError


@dataclass(frozen=True)
class Rejection:
    """One of ``--rollout_rejection``: a name of ``REJECTIONS`` and its bounds, both inside."""

    name: str
    low: float | None
    high: float | None

    @property
    def entry(self) -> RejectionEntry:
        return REJECTIONS.find(self.name)

    @classmethod
    def parse(cls, text: str) -> Rejection:
        """Read ``NAME=HIGH``, ``NAME=LOW:HIGH`` or ``NAME=LOW:``; ConfigError for anything else."""
        name, _, bounds = text.partition("=")
        entry = REJECTIONS.find(name)
        low, colon, high = bounds.rpartition(":")
        try:
            rejection = cls(name, float(low) if low else None, float(high) if high else None)
        except ValueError:
            raise ConfigError(
                f"--rollout_rejection {text!r}: write NAME=HIGH or NAME=LOW:HIGH, in numbers"
            ) from None
        limits = [bound for bound in (rejection.low, rejection.high) if bound is not None]
        if colon and not entry.two_sided:
            raise ConfigError(
                f"--rollout_rejection {text!r}: {name} has an upper bound alone: {name}=HIGH"
            )
        if not limits or not all(map(math.isfinite, limits)) or limits != sorted(set(limits)):
            raise ConfigError(
                f"--rollout_rejection {text!r}: write {name}=HIGH or {name}=LOW:HIGH, the lower one first"
            )
        if entry.measure != "k1" and min(limits) <= 0:
            raise ConfigError(f"--rollout_rejection {text!r}: a bound of {name} must be above 0")
        return rejection


def weights_of_parts(texts: Sequence[str], flag: str = "--gdpo_rewards") -> dict[str, float]:
    """Return the weights of rewards by name, 1 where there is none; ConfigError for anything else."""
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, weight = text.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value) or value == 0:
            raise ConfigError(
                f"{flag} {text!r}: write NAME or NAME=WEIGHT, the weight a number other than 0"
            )
        if name in weights:
            raise ConfigError(f"{flag} names {name} twice: name it once")
        weights[name] = value
    return weights


@dataclass(frozen=True)
class Norm:
    """Mean and deviation of ``--reward_norm_by`` and ``--adv_norm_by``: of the "batch", of each "group", or None."""

    mean: str | None = None
    std: str | None = None
    leave_one_out: bool = False  # a value is not in its own mean
    unbiased: bool = False  # the deviation's divisor is n - 1
    eps: float = 1e-5  # added to the deviation

    @classmethod
    def parse(cls, words: Sequence[str]) -> Norm:
        """Read ``mean=group std=batch leave_one_out unbiased eps=1e-6``, in any order; ConfigError for anything else."""
        values: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if name in values:
                raise ConfigError(f"{name!r} stands twice: write it once")
            if name in ("mean", "std") and value in ("batch", "group"):
                values[name] = value
            elif name in ("leave_one_out", "unbiased") and not equals:
                values[name] = True
            elif name == "eps" and _is_above_zero(value):
                values[name] = float(value)
            else:
                raise ConfigError(
                    f"{word!r} is none of mean=batch, mean=group, std=batch, std=group, leave_one_out, unbiased and "
                    "eps=NUMBER above 0"
                )
        norm = cls(**values)
        if norm.mean is None and norm.std is None:
            raise ConfigError(
                "it names neither a mean nor a std: write mean=group std=batch, for example"
            )
        for name, needs in (("leave_one_out", "mean"), ("unbiased", "std"), ("eps", "std")):
            if name in values and needs not in values:
                raise ConfigError(f"{name} needs {needs}=batch or {needs}=group")
        return norm


def _is_above_zero(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
