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


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator; the function is an :data:`lightppo.algorithms.advantages.AdvantageFn`."""

    # The function gives one number per sample, and all tokens of the sample get it, see experience.maker.advantage_fn.
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

    # The low and the high bound where the flags give none. None: the loss clips nothing.
    eps_clip: tuple[float, float] | None = (0.2, 0.2)
    loss_agg_mode: str = "token-mean"  # the aggregation that it is defined with
    # What singles out tokens: a lightppo.algorithms.losses.SelectionFn.
    selection: str | Callable | None = None


@dataclass(frozen=True)
class KLEntry(Entry):
    """A KL estimator; the function is one of d at the sampled tokens."""

    # What makes a loss of the limited estimate: a function of the estimate, of d, and of log π / π_old (B, A), which is
    # None where π_old is not known.
    as_loss: str | None = None
    # The function is ``(actor, reference, scores, experience, clip)`` → the KL (B, A), with gradient, and log probs of
    # the reference (B, A); ``scores`` are the actor's lightppo.models.actor.ActionScores of the experience, with logits.
    over_vocabulary: bool = False


def metric_names() -> dict[str, str]:
    """Names under ``train/`` that single algorithms add → meaning."""
    return {
        name: meaning
        for table in TABLES
        for entry in table.values()
        for name, meaning in entry.metrics.items()
    }


# -- files of the user's own -----------------------------------------------------------------------------------------


def estimator(*without_brackets: Any, **traits: Any) -> Callable[[F], F]:
    """What an estimator of your own asks of a run: attributes of :class:`EstimatorEntry`; in a file, as literals."""
    if without_brackets:
        raise TypeError(
            "write @estimator() with brackets: @estimator(per_sample=True), for example"
        )
    EstimatorEntry("", **traits)  # a misspelt one is an error here
    return partial(_with_traits, traits)


def policy_loss(*without_brackets: Any, **traits: Any) -> Callable[[F], F]:
    """The same for ``--policy_loss`` and :class:`PolicyLossEntry`."""
    if without_brackets:
        raise TypeError(
            "write @policy_loss() with brackets: @policy_loss(eps_clip=None), for example"
        )
    PolicyLossEntry("", **traits)
    return partial(_with_traits, traits)


def _with_traits(traits: Mapping[str, Any], function: F) -> F:
    """The function itself, which now says what it needs: see :meth:`lightppo.table.Table.find`."""
    function.traits = traits
    return function


# -- the tables ------------------------------------------------------------------------------------------------------

_ADVANTAGES = "lightppo.algorithms.advantages"
_KL = "lightppo.algorithms.kl"
_LOSSES = "lightppo.algorithms.losses"
_MASKING = "lightppo.algorithms.masking"

_REINFORCE = EstimatorEntry(f"{_ADVANTAGES}:reinforce", whiten=True, discounted=True)
_of_group = partial(EstimatorEntry, per_sample=True, min_group_size=2)
_GROUP_NORM = _of_group(f"{_ADVANTAGES}:group_norm", divides_by_std=True, kl_in_loss=True)
_REINFORCE_BASELINE = _of_group(f"{_ADVANTAGES}:reinforce_baseline", whiten=True)

ADVANTAGE_ESTIMATORS: Table[EstimatorEntry] = Table(
    "--advantage_estimator",
    {
        "gae": EstimatorEntry(
            f"{_ADVANTAGES}:gae", needs_critic=True, whiten=True, discounted=True
        ),
        "reinforce": _REINFORCE,
        "reinforce++": _REINFORCE,
        "reinforce++_baseline": _REINFORCE_BASELINE,
        "reinforce_baseline": _REINFORCE_BASELINE,  # the name that OpenRLHF and LightRFT give it
        "rloo": _of_group(f"{_ADVANTAGES}:rloo"),
        "grpo": _GROUP_NORM,
        "group_norm": _GROUP_NORM,
    },
    decorator="estimator",
    kind=EstimatorEntry,
)

POLICY_LOSSES: Table[PolicyLossEntry] = Table(
    "--policy_loss",
    {
        "ppo": PolicyLossEntry(
            f"{_LOSSES}:ppo_policy_loss",
            options=(
                Option(
                    "dual_clip", float | None, None,
                    "for A < 0, limit the loss to -this·A. None: off; 3 is usual.", gt=1,
                ),
            ),
            metrics={"dual_clip_ratio": "share of trained tokens whose loss --dual_clip limits"},
        ),
    },
    decorator="policy_loss",
    kind=PolicyLossEntry,
)  # fmt: skip

KL_ESTIMATORS: Table[KLEntry] = Table(
    "--kl_estimator",
    {
        "k1": KLEntry(f"{_KL}:k1"),
        "k2": KLEntry(f"{_KL}:k2"),
        "k3": KLEntry(f"{_KL}:k3"),
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

TABLES: list[Table] = [ADVANTAGE_ESTIMATORS, POLICY_LOSSES, KL_ESTIMATORS, LOSS_AGG_MODES]
"""All tables of algorithms; a plugin adds its own."""
