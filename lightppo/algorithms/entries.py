"""Every algorithm by name: its function, its defaults and options, its metrics, and what it asks of a run.

Free of torch: the command line reads these tables, and a function is imported when it is first used. Flags, ``--help``,
docs/flags.md, docs/metrics.md and the tests over whole tables follow from an entry. docs/extending.md: how to add one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.table import Entry, Table, load

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator; the function is an :data:`lightppo.algorithms.advantages.AdvantageFn`."""

    per_sample: bool = False  # one number per sample, by lightppo.algorithms.advantages.OnEveryToken
    needs_critic: bool = False  # it reads values
    min_group_size: int = 1  # least samples per prompt
    whiten: bool = False  # over all ranks, unless --adv_norm says otherwise
    needs_score_norms: bool = False  # of a pass over the rollout: lightppo.algorithms.logprobs.score_norms
    needs_greedy_baseline: bool = False  # compares with the greedy answer, which is sampled and scored too
    discounted: bool = False  # --gamma acts
    divides_by_std: bool = False  # of scores: --no_group_std_norm, --grpo_std_scope, --grpo_std_eps act
    of_teacher: bool = False  # a teacher's term is all of its advantage: it needs one, and no reward
    kl_in_loss: bool = False  # by default, not in the reward: its noise would be divided by a group's deviation too
    policy_loss: str = "ppo"  # where --policy_loss says nothing
    loss_agg_mode: str | None = None  # where --loss_agg_mode says nothing; None: as the loss says

    @functools.cached_property
    def fn(self) -> Callable:
        fn = load(self.function)
        return load("lightppo.algorithms.advantages:OnEveryToken")(fn) if self.per_sample else fn


@dataclass(frozen=True)
class PolicyLossEntry(Entry):
    """A policy loss; the function is a :data:`lightppo.algorithms.losses.PolicyLossFn`."""

    eps_clip: tuple[float, float] | None = (0.2, 0.2)  # low, high where the flags say nothing; None: it clips nothing
    loss_agg_mode: str = "token-mean"  # the aggregation that it is defined with
    selection: str | Callable | None = None  # singles out tokens: a lightppo.algorithms.selection.Selection


@dataclass(frozen=True)
class KLEntry(Entry):
    """A KL estimator; the function is one of d at the sampled tokens, or of two sets of logits."""

    gradient_of: str | None = None  # straight-through: the value is the function's, the gradient this one's
    over_vocabulary: bool = False  # needs the logits of both models: lightppo.algorithms.kl.full_kl


@dataclass(frozen=True)
class CorrectionEntry(Entry):
    """An off-policy correction; the function is a :data:`lightppo.plugins.algorithms.correction.CorrectionFn`."""

    low: float | None = None  # bound of the weight where --correction_low says nothing; None: it has no such bound
    high: float | None = None


@dataclass(frozen=True)
class RejectionEntry(Entry):
    """What tokens have no policy loss; the function is a :data:`lightppo.plugins.algorithms.correction.RejectionFn`."""

    measure: str = "k1"  # what is bounded: "ratio", or one of KL_ESTIMATORS, of KL(π_rollout ‖ π_old) at a token
    two_sided: bool = False  # it may have a lower bound
    in_training: bool = False  # the policy is the one in training; else the one before the update
    over_rollout: bool = False  # it compares all tokens of the rollout, and so cannot be judged in training


@dataclass(frozen=True)
class AggregationEntry(Entry):
    """How token losses become one number: their sum, divided by the function of the step's ``LossNormalizer``."""

    mean_of_rows: bool = False  # each row is divided by its own number of trained tokens first


@dataclass(frozen=True)
class PreferenceLossEntry(Entry):
    """A loss of pairs without a reward model: of how far the policy leads its reference, and ``beta``."""

    of_means: bool = False  # log probs of an answer are means over its tokens, where --average_log_probs says nothing


def metric_names() -> dict[str, str]:
    """Names under ``train/`` that single algorithms add → meaning."""
    return {name: meaning for table in TABLES for entry in table.values() for name, meaning in entry.metrics.items()}


# -- files of the user's own -----------------------------------------------------------------------------------------


def estimator(**traits: Any) -> Callable[[F], F]:
    """What an estimator in a file of your own asks of a run: attributes of :class:`EstimatorEntry`, as literals."""
    EstimatorEntry("", **traits)  # a misspelt one is an error here
    return lambda fn: fn


def policy_loss(**traits: Any) -> Callable[[F], F]:
    """The same for ``--policy_loss path.py:name`` and :class:`PolicyLossEntry`."""
    PolicyLossEntry("", **traits)
    return lambda fn: fn


# -- the tables ------------------------------------------------------------------------------------------------------

_ADVANTAGES = "lightppo.algorithms.advantages"
_KL = "lightppo.algorithms.kl"
_CORRECTION = "lightppo.plugins.algorithms.correction"
_LOSSES = "lightppo.algorithms.losses"
_MASKING = "lightppo.algorithms.masking"
_PREFERENCES = "lightppo.plugins.supervised.preferences"
_SELECTION = "lightppo.algorithms.selection"

_REINFORCE = EstimatorEntry(f"{_ADVANTAGES}:reinforce", whiten=True, discounted=True)
_of_group = partial(EstimatorEntry, per_sample=True, min_group_size=2)
_over_std = partial(_of_group, divides_by_std=True, kl_in_loss=True)
_GROUP_NORM = _over_std(f"{_ADVANTAGES}:group_norm")
_REINFORCE_BASELINE = _of_group(f"{_ADVANTAGES}:reinforce_baseline", whiten=True)

ADVANTAGE_ESTIMATORS: Table[EstimatorEntry] = Table(
    "--advantage_estimator",
    {
        "gae": EstimatorEntry(f"{_ADVANTAGES}:gae", needs_critic=True, whiten=True, discounted=True),
        "reinforce": _REINFORCE,
        "reinforce++": _REINFORCE,
        "reinforce++_baseline": _REINFORCE_BASELINE,
        "reinforce_baseline": _REINFORCE_BASELINE,  # the name that OpenRLHF and LightRFT give it
        "rloo": _of_group(f"{_ADVANTAGES}:rloo"),
        "grpo": _GROUP_NORM,
        "group_norm": _GROUP_NORM,
        "dr_grpo": _of_group(f"{_ADVANTAGES}:dr_grpo", loss_agg_mode="seq-mean-token-sum-norm"),
        "remax": EstimatorEntry(f"{_ADVANTAGES}:remax", needs_greedy_baseline=True, discounted=True),
        "opo": _of_group(f"{_ADVANTAGES}:opo"),
        "gpg": _of_group(f"{_ADVANTAGES}:gpg", policy_loss="gpg"),
        "optimal_token_baseline": EstimatorEntry(
            f"{_ADVANTAGES}:optimal_token_baseline", min_group_size=2, discounted=True, needs_score_norms=True
        ),
        "grpo_passk": _over_std(f"{_ADVANTAGES}:grpo_passk"),
        "cpgd": _over_std(f"{_ADVANTAGES}:cpgd", policy_loss="cpgd"),
        "group_adv_norm": EstimatorEntry(
            f"{_ADVANTAGES}:group_adv_norm", min_group_size=2, discounted=True, kl_in_loss=True
        ),
        "on_policy_distill": EstimatorEntry(f"{_ADVANTAGES}:on_policy_distill", of_teacher=True, kl_in_loss=True),
    },
    decorator="estimator",
    kind=EstimatorEntry,
)

_SELECTED = {"selected_ratio": "share of trained tokens that clip_cov or kl_cov treat differently"}

POLICY_LOSSES: Table[PolicyLossEntry] = Table(
    "--policy_loss",
    {
        "ppo": PolicyLossEntry(
            f"{_LOSSES}:ppo_policy_loss",
            options=(
                Option(
                    "dual_clip", float | None, None, "for A < 0, limit the loss to -this·A. None: off; 3 is usual.",
                    gt=1,
                ),
            ),
            metrics={"dual_clip_ratio": "share of trained tokens whose loss --dual_clip limits"},
        ),
        "gspo": PolicyLossEntry(
            f"{_LOSSES}:gspo_policy_loss", eps_clip=(3e-4, 4e-4), loss_agg_mode="seq-mean-token-mean"
        ),
        "cispo": PolicyLossEntry(
            f"{_LOSSES}:cispo_policy_loss",
            eps_clip=(1.0, 4.0),
            metrics={"weight_clip_ratio": "share of trained tokens whose importance weight cispo clips"},
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
                Option("clip_cov_low", float, 1.0, "lower bound of these tokens' covariance.", below="clip_cov_high"),
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
                    "kl_cov_ratio", float, 2e-3, "share of tokens with a KL penalty, highest covariance first.",
                    gt=0, le=1,
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
    },
    decorator="policy_loss",
    kind=PolicyLossEntry,
)  # fmt: skip

KL_ESTIMATORS: Table[KLEntry] = Table(
    "--kl_estimator",
    {
        "k1": KLEntry(f"{_KL}:k1"),
        "abs": KLEntry(f"{_KL}:absolute"),
        "k2": KLEntry(f"{_KL}:k2"),
        "k3": KLEntry(f"{_KL}:k3"),
        "full": KLEntry(f"{_KL}:full_kl", over_vocabulary=True),
        "k1+": KLEntry(f"{_KL}:k1", gradient_of=f"{_KL}:k2"),
        "k3+": KLEntry(f"{_KL}:k3", gradient_of=f"{_KL}:k2"),
    },
)

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

_LEVELS = {"token": "of_tokens", "seq_sum": "of_sums", "seq_mean": "of_means", "seq_max": "of_worst_tokens"}
_REJECTED = {"rejected_ratio": "share of trained tokens that --rollout_rejection leaves out during training"}

REJECTIONS: Table[RejectionEntry] = Table(
    "--rollout_rejection",
    {
        f"{level}_{measure}": RejectionEntry(
            f"{_CORRECTION}:{function}", metrics=_REJECTED, measure=measure, two_sided=measure in ("ratio", "k1")
        )
        for level, function in _LEVELS.items()
        for measure in ("ratio", "k1", "k2", "k3")
    }
    | {
        "opsm": RejectionEntry(f"{_CORRECTION}:opsm", metrics=_REJECTED, in_training=True),
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
        entry, (low, colon, high) = REJECTIONS.find(name), bounds.rpartition(":")
        try:
            found = cls(name, *(float(bound) if bound else None for bound in (low, high)))
        except ValueError:
            raise ConfigError(f"--rollout_rejection {text!r}: write NAME=HIGH or NAME=LOW:HIGH, in numbers") from None
        known = [bound for bound in (found.low, found.high) if bound is not None]
        if colon and not entry.two_sided:
            raise ConfigError(f"--rollout_rejection {text!r}: {name} has an upper bound alone: {name}=HIGH")
        if not known or not all(map(math.isfinite, known)) or known != sorted(set(known)):
            raise ConfigError(
                f"--rollout_rejection {text!r}: write {name}=HIGH or {name}=LOW:HIGH, the lower one first"
            )
        if entry.measure != "k1" and min(known) <= 0:
            raise ConfigError(f"--rollout_rejection {text!r}: a bound of {name} must be above 0")
        return found


LOSS_AGG_MODES: Table[AggregationEntry] = Table(
    "--loss_agg_mode",
    {
        "token-mean": AggregationEntry(f"{_MASKING}:all_tokens"),
        "seq-mean-token-sum": AggregationEntry(f"{_MASKING}:all_sequences"),
        "seq-mean-token-mean": AggregationEntry(f"{_MASKING}:all_sequences", mean_of_rows=True),
        "seq-mean-token-sum-norm": AggregationEntry(f"{_MASKING}:scaled_sequences"),
    },
)

PREFERENCE_LOSSES: Table[PreferenceLossEntry] = Table(
    "--preference_loss",
    {
        "dpo": PreferenceLossEntry(
            f"{_PREFERENCES}:dpo_loss",
            options=(
                Option(
                    "label_smoothing", float, 0.0, "assumed share of pairs with swapped answers; above 0: cDPO.",
                    ge=0, lt=0.5,
                ),
            ),
        ),
        "ipo": PreferenceLossEntry(f"{_PREFERENCES}:ipo_loss", of_means=True),
    },
)  # fmt: skip

TABLES = (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    KL_ESTIMATORS,
    CORRECTIONS,
    REJECTIONS,
    LOSS_AGG_MODES,
    PREFERENCE_LOSSES,
)
