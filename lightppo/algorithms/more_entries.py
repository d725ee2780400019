"""What this plugin adds to the tables of algorithms, and its own: off-policy corrections and rejections.

Free of torch, as the command line reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightppo.algorithms.entries import POLICY_LOSSES as CORE_LOSSES
from lightppo.algorithms.entries import EstimatorEntry, KLEntry, PolicyLossEntry
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.table import Entry, Table

_CORRECTION = "lightppo.algorithms.correction"
_ESTIMATORS = "lightppo.algorithms.more_advantages"
_LOSSES = "lightppo.algorithms.policy_losses"
_SELECTION = "lightppo.experience.selection"

_of_group = partial(EstimatorEntry, per_sample=True, min_group_size=2)
_over_std = partial(_of_group, divides_by_std=True, kl_in_loss=True)

ESTIMATORS = {
    "dr_grpo": _of_group(f"{_ESTIMATORS}:dr_grpo", loss_agg_mode="seq-mean-token-sum-norm"),
    "remax": EstimatorEntry(f"{_ESTIMATORS}:remax", needs_greedy_baseline=True, discounted=True),
    "opo": _of_group(f"{_ESTIMATORS}:opo"),
    "gpg": _of_group(f"{_ESTIMATORS}:gpg", policy_loss="gpg"),
    "optimal_token_baseline": EstimatorEntry(
        f"{_ESTIMATORS}:optimal_token_baseline",
        min_group_size=2,
        discounted=True,
        needs_score_norms=True,
    ),
    "grpo_passk": _over_std(f"{_ESTIMATORS}:grpo_passk"),
    "cpgd": _over_std(f"{_ESTIMATORS}:cpgd", policy_loss="cpgd"),
    "group_adv_norm": EstimatorEntry(
        f"{_ESTIMATORS}:group_adv_norm", min_group_size=2, discounted=True, kl_in_loss=True
    ),
    "gdpo": EstimatorEntry(
        f"{_ESTIMATORS}:gdpo",
        inputs=f"{_ESTIMATORS}:parts_of_rewards",
        min_group_size=2,
        whiten=True,
        divides_by_std=True,
        kl_in_loss=True,
    ),
}

PPO = CORE_LOSSES["ppo"]  # whose loss --dual_clip limits, as gspo's

_SELECTED = {"selected_ratio": "share of trained tokens that clip_cov or kl_cov treat differently"}

_dppo = partial(
    PolicyLossEntry,
    options=(
        Option("dppo_ratio_max", float, 20.0, "largest weight π / π_old of a token.", gt=1),
        Option("dppo_drift_coef", float, 0.0, "weight of (log π - log π_old)².", ge=0),
    ),
    metrics={"dppo_truncated_ratio": "share of trained tokens above --dppo_ratio_max"},
)

POLICY_LOSSES = {
    "gspo": PolicyLossEntry(
        f"{_LOSSES}:gspo_policy_loss",
        eps_clip=(3e-4, 4e-4),
        loss_agg_mode="seq-mean-token-mean",
        options=PPO.options,
        metrics=PPO.metrics,
    ),
    "cispo": PolicyLossEntry(
        f"{_LOSSES}:cispo_policy_loss",
        eps_clip=(1.0, 4.0),
        metrics={
            "weight_clip_ratio": "share of trained tokens whose importance weight cispo clips"
        },
    ),
    "gmpo": PolicyLossEntry(
        f"{_LOSSES}:gmpo_policy_loss", eps_clip=(0.4, 0.4), loss_agg_mode="seq-mean-token-mean"
    ),
    "sapo": PolicyLossEntry(
        f"{_LOSSES}:sapo_policy_loss",
        eps_clip=None,
        loss_agg_mode="seq-mean-token-mean",
        options=(
            Option("sapo_tau_pos", float, 1.0, "temperature for A > 0.", gt=0),
            Option("sapo_tau_neg", float, 1.05, "temperature for A ≤ 0.", gt=0),
        ),
        metrics={"sapo_gate": "mean share of the gradient that sapo's gate lets through"},
    ),
    "clip_cov": PolicyLossEntry(
        f"{_LOSSES}:clip_cov_policy_loss",
        eps_clip=(1.0, 1.0),
        options=(
            Option("clip_cov_ratio", float, 2e-4, "share of tokens without gradient.", gt=0, le=1),
            Option(
                "clip_cov_low",
                float,
                1.0,
                "lower bound of these tokens' covariance.",
                below="clip_cov_high",
            ),
            Option("clip_cov_high", float, 5.0, "upper bound of these tokens' covariance."),
        ),
        selection=f"{_SELECTION}:select_clip_cov",
        metrics=_SELECTED,
    ),
    "kl_cov": PolicyLossEntry(
        f"{_LOSSES}:kl_cov_policy_loss",
        eps_clip=None,
        options=(
            Option(
                "kl_cov_ratio",
                float,
                2e-3,
                "share of tokens with a KL penalty, highest covariance first.",
                gt=0,
                le=1,
            ),
            Option("kl_cov_coef", float, 1.0, "weight of the KL penalty.", ge=0),
        ),
        selection=f"{_SELECTION}:select_kl_cov",
        metrics=_SELECTED,
    ),
    "gpg": PolicyLossEntry(f"{_LOSSES}:gpg_policy_loss", eps_clip=None),
    "cpgd": PolicyLossEntry(
        f"{_LOSSES}:cpgd_policy_loss",
        options=(Option("cpgd_drift_coef", float, 0.01, "weight of the policy drift.", ge=0),),
        metrics={"cpgd_drift": "policy drift of cpgd, before its coefficient"},
    ),
    "dppo_tv": _dppo(f"{_LOSSES}:dppo_tv_policy_loss", eps_clip=(0.15, 0.15)),
    "dppo_kl": _dppo(f"{_LOSSES}:dppo_kl_policy_loss", eps_clip=(0.05, 0.05)),
}

_KL = "lightppo.algorithms.kl"
_MORE_KL = "lightppo.algorithms.more_kl"
TIMES_RATIO = f"{_MORE_KL}:times_ratio"

KL_ESTIMATORS = {
    "abs": KLEntry(f"{_MORE_KL}:absolute"),
    "full": KLEntry(f"{_MORE_KL}:kl_of_models", over_vocabulary=True),
    "k1+": KLEntry(f"{_KL}:k1", as_loss=f"{_MORE_KL}:with_gradient_of_k2"),
    "k3+": KLEntry(f"{_KL}:k3", as_loss=f"{_MORE_KL}:with_gradient_of_k2"),
    "k1_ratio": KLEntry(f"{_KL}:k1", as_loss=TIMES_RATIO),
    "k3_ratio": KLEntry(f"{_KL}:k3", as_loss=TIMES_RATIO),
}


@dataclass(frozen=True)
class CorrectionEntry(Entry):
    """An off-policy correction; the function is a :data:`.correction.CorrectionFn`."""

    # The lower bound of the weight where --correction_low says nothing. None: the weight has none.
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RejectionEntry(Entry):
    """What tokens have no policy loss; the function is a :data:`.correction.RejectionFn`."""

    # What is bounded at a token: "ratio", or the estimate of KL(π_rollout ‖ π_old) by one of KL_ESTIMATORS; "k3r"
    # estimates KL(π_old ‖ π_rollout).
    measure: str = "k1"
    two_sided: bool = False  # it may have a lower bound
    in_training: bool = False  # the policy is the one in training; else the one before the update
    # It compares all tokens of the rollout, so it cannot decide in training.
    over_rollout: bool = False


CORRECTIONS: Table[CorrectionEntry] = Table(
    "--rollout_correction",
    {
        "none": CorrectionEntry(f"{_CORRECTION}:none"),
        "tis": CorrectionEntry(f"{_CORRECTION}:tis", low=0.0, high=2.0),
        "seq_tis": CorrectionEntry(f"{_CORRECTION}:seq_tis", low=0.0, high=2.0),
        "geo_tis": CorrectionEntry(f"{_CORRECTION}:geo_tis", low=0.0, high=2.0),
        "icepop": CorrectionEntry(f"{_CORRECTION}:icepop", low=0.5, high=5.0),
        "seq_mis": CorrectionEntry(f"{_CORRECTION}:seq_mis", low=0.0, high=2.0),
        "geo_mis": CorrectionEntry(f"{_CORRECTION}:geo_mis", low=0.0, high=2.0),
        "seq_mask": CorrectionEntry(f"{_CORRECTION}:seq_mask", low=0.999, high=1.001),
        "seq_mask_tis": CorrectionEntry(f"{_CORRECTION}:seq_mask_tis", low=0.5, high=5.0),
        "decoupled": CorrectionEntry(f"{_CORRECTION}:icepop", low=0.0, high=5.0),
    },
)

_LEVELS = {
    "token": "of_tokens",
    "seq_sum": "of_sums",
    "seq_mean": "of_means",
    "seq_max": "of_worst_tokens",
}

REJECTIONS: Table[RejectionEntry] = Table(
    "--rollout_rejection",
    {
        f"{level}_{measure}": RejectionEntry(
            f"{_CORRECTION}:{function}", measure=measure, two_sided=measure in ("ratio", "k1")
        )
        for level, function in _LEVELS.items()
        for measure in ("ratio", "k1", "k2", "k3", "k3r")
    }
    | {
        "opsm": RejectionEntry(f"{_CORRECTION}:opsm", in_training=True),
        "m2po": RejectionEntry(f"{_CORRECTION}:m2po", measure="k2", over_rollout=True),
    },
)


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
        """``NAME=HIGH``, ``NAME=LOW:HIGH`` or ``NAME=LOW:``; ConfigError for anything else."""
        name, _, bounds = text.partition("=")
        entry = REJECTIONS.find(name)
        low, colon, high = bounds.rpartition(":")
        try:
            rejection = cls(
                name, low=float(low) if low else None, high=float(high) if high else None
            )
        except ValueError:
            raise ConfigError(
                f"--rollout_rejection {text!r}: write NAME=HIGH or NAME=LOW:HIGH, in numbers"
            ) from None
        known = [bound for bound in (rejection.low, rejection.high) if bound is not None]
        if colon and not entry.two_sided:
            raise ConfigError(
                f"--rollout_rejection {text!r}: {name} has an upper bound alone: {name}=HIGH"
            )
        if not known or not all(map(math.isfinite, known)) or known != sorted(set(known)):
            raise ConfigError(
                f"--rollout_rejection {text!r}: write {name}=HIGH or {name}=LOW:HIGH, the lower one first"
            )
        if entry.measure != "k1" and min(known) <= 0:
            raise ConfigError(f"--rollout_rejection {text!r}: a bound of {name} must be above 0")
        return rejection


def weights_of_parts(texts: Sequence[str]) -> dict[str, float]:
    """``--gdpo_rewards``: the weight of each reward, 1 where there is none; ConfigError for anything else."""
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, weight = text.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value) or value == 0:
            raise ConfigError(
                f"--gdpo_rewards {text!r}: write NAME or NAME=WEIGHT, the weight a number other than 0"
            )
        if name in weights:
            raise ConfigError(f"--gdpo_rewards names {name} twice: name it once")
        weights[name] = value
    return weights


@dataclass(frozen=True)
class Norm:
    """What ``--reward_norm_by`` and ``--adv_norm_by`` say: of what mean and deviation are, "batch", "group" or None."""

    mean: str | None = None
    std: str | None = None
    leave_one_out: bool = False  # a value is not in its own mean
    unbiased: bool = False  # the deviation's divisor is n - 1
    eps: float = 1e-5  # added to the deviation

    @classmethod
    def parse(cls, words: Sequence[str]) -> Norm:
        """``mean=group std=batch leave_one_out unbiased eps=1e-6``, in any order; ConfigError for anything else."""
        given: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if name in given:
                raise ConfigError(f"{name!r} stands twice: write it once")
            if name in ("mean", "std") and value in ("batch", "group"):
                given[name] = value
            elif name in ("leave_one_out", "unbiased") and not equals:
                given[name] = True
            elif name == "eps" and _above_zero(value):
                given[name] = float(value)
            else:
                raise ConfigError(
                    f"{word!r} is none of mean=batch, mean=group, std=batch, std=group, leave_one_out, unbiased and "
                    "eps=NUMBER above 0"
                )
        norm = cls(**given)
        if norm.mean is None and norm.std is None:
            raise ConfigError(
                "it names neither a mean nor a std: write mean=group std=batch, for example"
            )
        for name, needs in (("leave_one_out", "mean"), ("unbiased", "std"), ("eps", "std")):
            if name in given and needs not in given:
                raise ConfigError(f"{name} needs {needs}=batch or {needs}=group")
        return norm


def _above_zero(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
