"""Every algorithm by name: its function, its defaults and options, its metrics, and what it asks of a run.

Free of torch: the command line reads these tables, and a function is imported when it is first used. Flags, ``--help``,
docs/flags.md, docs/metrics.md and the tests over whole tables follow from an entry. docs/extending.md: how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lightppo.option import Option
from lightppo.table import Entry, Table

F = TypeVar("F", bound=Callable)

# Where the functions are. An entry names one of its own module (``home``) by its name alone.
_ADVANTAGES = "lightppo.algorithms.advantages"
_CORRECTION = "lightppo.algorithms.correction"
_KL = "lightppo.algorithms.kl"
_LOSSES = "lightppo.algorithms.losses"
_MASKING = "lightppo.algorithms.masking"
_SELECTION = "lightppo.algorithms.selection"


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator; the function is an :data:`lightppo.algorithms.advantages.AdvantageFn`."""

    home = _ADVANTAGES
    # The function gives one number per sample, and all tokens of the sample get it, see advantages.advantage_fn.
    per_sample: bool = False
    needs_critic: bool = False  # it reads values
    min_group_size: int = 1  # least samples per prompt
    whiten: bool = False  # over all ranks, unless --adv_norm says otherwise
    # It reads algorithms.logprobs.score_norms, which a pass over the rollout computes.
    needs_score_norms: bool = False
    # It compares samples with the greedy answer to their prompt, which is sampled and scored, too.
    needs_greedy_baseline: bool = False
    discounted: bool = False  # --gamma acts
    # It divides scores by their deviation: --no_group_std_norm, --grpo_std_scope and --grpo_std_eps act.
    divides_by_std: bool = False
    # Where further keyword arguments come from: "module:function". It takes the config, and returns None or another
    # function, which takes this rank's rollouts and their device and returns the arguments by name.
    inputs: str | Callable | None = None
    # Loss terms beside it (lightppo.plugin) say what is learned: a run needs no reward, and scores are only recorded.
    ignores_scores: bool = False
    # By default the KL is a part of the loss. In the reward its noise, too, would be divided by a group's deviation.
    kl_in_loss: bool = False
    policy_loss: str = "ppo"  # where --policy_loss says nothing
    loss_agg_mode: str | None = None  # where --loss_agg_mode says nothing; None: as the loss says


@dataclass(frozen=True)
class PolicyLossEntry(Entry):
    """A policy loss; the function is a :data:`lightppo.algorithms.losses.PolicyLossFn`."""

    home = _LOSSES
    # The low and the high bound where the flags give none. None: the loss clips nothing.
    eps_clip: tuple[float, float] | None = (0.2, 0.2)
    loss_agg_mode: str = "token-mean"  # the aggregation that it is defined with
    # What singles out tokens: a lightppo.algorithms.losses.SelectionFn.
    selection: str | Callable | None = None
    # A token's loss is a multiple of its advantage: samples whose advantages are all 0 are not trained on.
    linear_in_advantages: bool = False


@dataclass(frozen=True)
class KLEntry(Entry):
    """A KL estimator; the function is one of d at the sampled tokens."""

    home = _KL
    # What makes a loss of the limited estimate: a function of the estimate, of d, and of log π / π_old (B, A), which is
    # None where π_old is not known.
    as_loss: str | None = None
    # The function is ``(actor, reference, scores, experience, clip)`` → the KL (B, A), with gradient, and log probs of
    # the reference (B, A); ``scores`` are the actor's lightppo.models.actor.ActionScores of the experience, with logits.
    over_vocabulary: bool = False


@dataclass(frozen=True)
class CorrectionEntry(Entry):
    """An off-policy correction; the function is a :data:`.correction.CorrectionFn`."""

    home = _CORRECTION
    # The lower bound of the weight where --correction_low says nothing. None: the weight has none.
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RejectionEntry(Entry):
    """A rejection, which takes tokens out of the policy loss; the function is a :data:`.correction.RejectionFn`."""

    home = _CORRECTION
    # What is bounded at a token: "ratio", or the estimate of KL(π_rollout ‖ π_old) by one of KL_ESTIMATORS; "k3r"
    # estimates KL(π_old ‖ π_rollout).
    measure: str = "k1"
    two_sided: bool = False  # it may have a lower bound
    in_training: bool = False  # the policy is the one in training; else the one before the update
    # It compares all tokens of the rollout, so it cannot decide in training.
    over_rollout: bool = False


@dataclass(frozen=True)
class PreferenceLossEntry(Entry):
    """A loss of pairs without a reward model: of how far the policy leads its reference, and ``beta``."""

    home = _LOSSES
    # log probs of an answer are means over its tokens, where --average_log_probs says nothing
    of_means: bool = False


def metric_names() -> dict[str, str]:
    """Return the meaning of each name under ``train/`` that single algorithms add."""
    return {
        name: meaning
        for table in TABLES
        for entry in table.values()
        for name, meaning in entry.metrics.items()
    }


# -- files of the user's own -----------------------------------------------------------------------------------------


def estimator(*without_brackets: Any, **traits: Any) -> Callable[[F], F]:
    """Say what an estimator of your own needs of a run: attributes of :class:`EstimatorEntry`; in a file, as literals."""
    if without_brackets:
        raise TypeError(
            "write @estimator() with brackets: @estimator(per_sample=True), for example"
        )
    EstimatorEntry("", **traits)  # a misspelt one is an error here
    return partial(_with_traits, traits)


def policy_loss(*without_brackets: Any, **traits: Any) -> Callable[[F], F]:
    """Say it of a policy loss of your own: attributes of :class:`PolicyLossEntry`."""
    if without_brackets:
        raise TypeError(
            "write @policy_loss() with brackets: @policy_loss(eps_clip=None), for example"
        )
    PolicyLossEntry("", **traits)
    return partial(_with_traits, traits)


def _with_traits(traits: Mapping[str, Any], function: F) -> F:
    """Return the function itself, which now says what it needs: see :meth:`lightppo.table.Table.find`."""
    marked: Any = function
    marked.traits = traits
    return function


# -- the tables ------------------------------------------------------------------------------------------------------

_REINFORCE = EstimatorEntry("reinforce", whiten=True, discounted=True)
_of_group = partial(EstimatorEntry, per_sample=True, min_group_size=2)
_over_std = partial(_of_group, divides_by_std=True, kl_in_loss=True)
_GROUP_NORM = _over_std("group_norm")
_REINFORCE_BASELINE = _of_group("reinforce_baseline", whiten=True)

ADVANTAGE_ESTIMATORS: Table[EstimatorEntry] = Table(
    "--advantage_estimator",
    {
        "gae": EstimatorEntry("gae", needs_critic=True, whiten=True, discounted=True),
        "reinforce": _REINFORCE,
        "reinforce++": _REINFORCE,
        "reinforce++_baseline": _REINFORCE_BASELINE,
        "reinforce_baseline": _REINFORCE_BASELINE,  # the name that OpenRLHF and LightRFT give it
        "rloo": _of_group("rloo"),
        "grpo": _GROUP_NORM,
        "group_norm": _GROUP_NORM,
        "dr_grpo": _of_group("dr_grpo", loss_agg_mode="seq-mean-token-sum-norm"),
        "remax": EstimatorEntry("remax", needs_greedy_baseline=True, discounted=True),
        "opo": _of_group("opo"),
        "gpg": _of_group("gpg", policy_loss="gpg"),
        "optimal_token_baseline": EstimatorEntry(
            "optimal_token_baseline",
            min_group_size=2,
            discounted=True,
            needs_score_norms=True,
        ),
        "grpo_passk": _over_std("grpo_passk"),
        "cpgd": _over_std("cpgd", policy_loss="cpgd"),
        "group_adv_norm": EstimatorEntry(
            "group_adv_norm", min_group_size=2, discounted=True, kl_in_loss=True
        ),
        "gdpo": EstimatorEntry(
            "gdpo",
            inputs=f"{_ADVANTAGES}:parts_of_rewards",
            min_group_size=2,
            whiten=True,
            divides_by_std=True,
            kl_in_loss=True,
        ),
        "on_policy_distill": EstimatorEntry(
            "on_policy_distill", ignores_scores=True, kl_in_loss=True
        ),
    },
    decorator="estimator",
    kind=EstimatorEntry,
)

_PPO = PolicyLossEntry(
    "ppo_policy_loss",
    linear_in_advantages=True,
    options=(
        Option(
            "dual_clip", float | None, None,
            "for A < 0, limit the loss to -this·A. None: off; 3 is usual.", gt=1,
        ),
    ),
    metrics={"dual_clip_ratio": "share of trained tokens whose loss --dual_clip limits"},
)  # fmt: skip

_SELECTED = {"selected_ratio": "share of trained tokens that clip_cov or kl_cov treat differently"}

_dppo = partial(
    PolicyLossEntry,
    options=(
        Option("dppo_ratio_max", float, 20.0, "largest weight π / π_old of a token.", gt=1),
        Option("dppo_drift_coef", float, 0.0, "weight of (log π - log π_old)².", ge=0),
    ),
    metrics={"dppo_truncated_ratio": "share of trained tokens above --dppo_ratio_max"},
)

POLICY_LOSSES: Table[PolicyLossEntry] = Table(
    "--policy_loss",
    {
        "ppo": _PPO,
        "gspo": PolicyLossEntry(
            "gspo_policy_loss",
            linear_in_advantages=True,
            eps_clip=(3e-4, 4e-4),
            loss_agg_mode="seq-mean-token-mean",
            options=_PPO.options,
            metrics=_PPO.metrics,
        ),
        "cispo": PolicyLossEntry(
            "cispo_policy_loss",
            linear_in_advantages=True,
            eps_clip=(1.0, 4.0),
            metrics={
                "weight_clip_ratio": "share of trained tokens whose importance weight cispo clips"
            },
        ),
        "gmpo": PolicyLossEntry(
            "gmpo_policy_loss",
            linear_in_advantages=True,
            eps_clip=(0.4, 0.4),
            loss_agg_mode="seq-mean-token-mean",
        ),
        "sapo": PolicyLossEntry(
            "sapo_policy_loss",
            linear_in_advantages=True,
            eps_clip=None,
            loss_agg_mode="seq-mean-token-mean",
            options=(
                Option("sapo_tau_pos", float, 1.0, "temperature for A > 0.", gt=0),
                Option("sapo_tau_neg", float, 1.05, "temperature for A ≤ 0.", gt=0),
            ),
            metrics={"sapo_gate": "mean share of the gradient that sapo's gate lets through"},
        ),
        "clip_cov": PolicyLossEntry(
            "clip_cov_policy_loss",
            linear_in_advantages=True,
            eps_clip=(1.0, 1.0),
            options=(
                Option(
                    "clip_cov_ratio", float, 2e-4, "share of tokens without gradient.", gt=0, le=1
                ),
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
            "kl_cov_policy_loss",
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
        "gpg": PolicyLossEntry("gpg_policy_loss", linear_in_advantages=True, eps_clip=None),
        "cpgd": PolicyLossEntry(
            "cpgd_policy_loss",
            options=(Option("cpgd_drift_coef", float, 0.01, "weight of the policy drift.", ge=0),),
            metrics={"cpgd_drift": "policy drift of cpgd, before its coefficient"},
        ),
        "dppo_tv": _dppo("dppo_tv_policy_loss", eps_clip=(0.15, 0.15)),
        "dppo_kl": _dppo("dppo_kl_policy_loss", eps_clip=(0.05, 0.05)),
    },
    decorator="policy_loss",
    kind=PolicyLossEntry,
)

TIMES_RATIO = f"{_KL}:times_ratio"

KL_ESTIMATORS: Table[KLEntry] = Table(
    "--kl_estimator",
    {
        "k1": KLEntry("k1"),
        "k2": KLEntry("k2"),
        "k3": KLEntry("k3"),
        "abs": KLEntry("absolute"),
        "full": KLEntry("kl_of_models", over_vocabulary=True),
        "k1+": KLEntry("k1", as_loss=f"{_KL}:with_gradient_of_k2"),
        "k3+": KLEntry("k3", as_loss=f"{_KL}:with_gradient_of_k2"),
        "k1_ratio": KLEntry("k1", as_loss=TIMES_RATIO),
        "k3_ratio": KLEntry("k3", as_loss=TIMES_RATIO),
    },
)

LOSS_AGG_MODES: Table = Table(
    "--loss_agg_mode",
    {
        "token-mean": Entry(f"{_MASKING}:token_mean"),
        "seq-mean-token-sum": Entry(f"{_MASKING}:mean_of_sums"),
        "seq-mean-token-mean": Entry(f"{_MASKING}:mean_of_means"),
        "seq-mean-token-sum-norm": Entry(f"{_MASKING}:mean_of_scaled_sums"),
    },
)
"""How token losses become one number: objects of :class:`lightppo.algorithms.masking.Aggregation`."""

CORRECTIONS: Table[CorrectionEntry] = Table(
    "--rollout_correction",
    {
        "none": CorrectionEntry("none"),
        "tis": CorrectionEntry("tis", low=0.0, high=2.0),
        "seq_tis": CorrectionEntry("seq_tis", low=0.0, high=2.0),
        "geo_tis": CorrectionEntry("geo_tis", low=0.0, high=2.0),
        "icepop": CorrectionEntry("icepop", low=0.5, high=5.0),
        "seq_mis": CorrectionEntry("seq_mis", low=0.0, high=2.0),
        "geo_mis": CorrectionEntry("geo_mis", low=0.0, high=2.0),
        "seq_mask": CorrectionEntry("seq_mask", low=0.999, high=1.001),
        "seq_mask_tis": CorrectionEntry("seq_mask_tis", low=0.5, high=5.0),
        "decoupled": CorrectionEntry("icepop", low=0.0, high=5.0),
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
            function, measure=measure, two_sided=measure in ("ratio", "k1")
        )
        for level, function in _LEVELS.items()
        for measure in ("ratio", "k1", "k2", "k3", "k3r")
    }
    | {
        "opsm": RejectionEntry("opsm", in_training=True),
        "m2po": RejectionEntry("m2po", measure="k2", over_rollout=True),
    },
)


PREFERENCE_LOSSES: Table[PreferenceLossEntry] = Table(
    "--preference_loss",
    {
        "dpo": PreferenceLossEntry(
            "dpo_loss",
            options=(
                Option(
                    "label_smoothing", float, 0.0, "assumed share of pairs with swapped answers; above 0: cDPO.",
                    ge=0, lt=0.5,
                ),
            ),
        ),
        "ipo": PreferenceLossEntry("ipo_loss", of_means=True),
    },
)  # fmt: skip

TABLES: list[Table] = [
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    CORRECTIONS,
    REJECTIONS,
    PREFERENCE_LOSSES,
]
"""All tables of algorithms."""
