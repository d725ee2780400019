"""What each algorithm asks of a run. Free of torch, so that the command line can check it at once.

The functions themselves are in the tables of advantages.py, policy_losses.py, kl.py and correction.py, under the same
names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EstimatorTraits:
    """Attributes:
    needs_critic: it reads values, so a critic must be trained.
    min_group_size: smallest number of samples per prompt it is defined for.
    whiten: its advantages are whitened over all ranks unless ``--adv_norm`` says otherwise.
    needs_greedy_baseline: it compares with the greedy answer to the same prompt, which must be generated and scored.
    discounted: ``--gamma`` acts on its advantages.
    divides_by_std: it divides by the standard deviation of the group (``--no_group_std_norm``, ``--grpo_std_eps``).
    policy_loss: the loss that belongs to it, where ``--policy_loss`` says nothing.
    loss_agg_mode: the aggregation that belongs to it; ``None``: that of the loss.
    """

    needs_critic: bool = False
    min_group_size: int = 1
    whiten: bool = False
    needs_greedy_baseline: bool = False
    discounted: bool = False
    divides_by_std: bool = False
    policy_loss: str = "ppo"
    loss_agg_mode: str | None = None


ESTIMATOR_TRAITS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(needs_critic=True, whiten=True, discounted=True),
    "reinforce": EstimatorTraits(whiten=True, discounted=True),
    "reinforce++": EstimatorTraits(whiten=True, discounted=True),
    "reinforce++_baseline": EstimatorTraits(min_group_size=2, whiten=True),
    "rloo": EstimatorTraits(min_group_size=2),
    "grpo": EstimatorTraits(min_group_size=2, divides_by_std=True),
    "group_norm": EstimatorTraits(min_group_size=2, divides_by_std=True),
    "dr_grpo": EstimatorTraits(min_group_size=2, loss_agg_mode="seq-mean-token-sum-norm"),
    "remax": EstimatorTraits(needs_greedy_baseline=True, discounted=True),
    "opo": EstimatorTraits(min_group_size=2),
    "gpg": EstimatorTraits(min_group_size=2, policy_loss="gpg"),
    "grpo_passk": EstimatorTraits(min_group_size=2, divides_by_std=True),
    "cpgd": EstimatorTraits(min_group_size=2, divides_by_std=True, policy_loss="cpgd"),
    "group_adv_norm": EstimatorTraits(min_group_size=2, discounted=True),
}


@dataclass(frozen=True)
class PolicyLossTraits:
    """Attributes:
    eps_clip: (low, high) where ``--eps_clip`` and its two sides say nothing; ``None``: the loss clips nothing.
    loss_agg_mode: the aggregation it is defined with.
    options: its own options, by flag name, with what they are where the flag says nothing (``None``: off).
    selects_tokens: it treats some tokens of the rollout differently; see selection.py.
    """

    eps_clip: tuple[float, float] | None = (0.2, 0.2)
    loss_agg_mode: str = "token-mean"
    options: Mapping[str, float | None] = field(default_factory=dict)
    selects_tokens: bool = False


POLICY_LOSS_TRAITS: dict[str, PolicyLossTraits] = {
    "ppo": PolicyLossTraits(options={"dual_clip": None}),
    "gspo": PolicyLossTraits(eps_clip=(3e-4, 4e-4), loss_agg_mode="seq-mean-token-mean"),
    "cispo": PolicyLossTraits(eps_clip=(1.0, 4.0)),
    "gmpo": PolicyLossTraits(eps_clip=(0.4, 0.4), loss_agg_mode="seq-mean-token-mean"),
    "sapo": PolicyLossTraits(
        eps_clip=None, loss_agg_mode="seq-mean-token-mean", options={"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}
    ),
    "clip_cov": PolicyLossTraits(
        eps_clip=(1.0, 1.0),
        options={"clip_cov_ratio": 2e-4, "clip_cov_low": 1.0, "clip_cov_high": 5.0},
        selects_tokens=True,
    ),
    "kl_cov": PolicyLossTraits(eps_clip=None, options={"kl_cov_ratio": 2e-3, "kl_cov_coef": 1.0}, selects_tokens=True),
    "gpg": PolicyLossTraits(eps_clip=None),
    "cpgd": PolicyLossTraits(options={"cpgd_drift_coef": 0.01}),
}

KL_ESTIMATOR_NAMES = ("k1", "abs", "k2", "k3", "full", "k1+", "k3+")


@dataclass(frozen=True)
class CorrectionTraits:
    """Attributes:
    low: lower bound of the importance weight where ``--correction_low`` says nothing; ``None``: it has none.
    high: upper bound where ``--correction_high`` says nothing; ``None``: it has none.
    """

    low: float | None = None
    high: float | None = None


CORRECTION_TRAITS: dict[str, CorrectionTraits] = {
    "none": CorrectionTraits(),
    "tis": CorrectionTraits(high=2.0),
    "seq_tis": CorrectionTraits(high=2.0),
    "icepop": CorrectionTraits(low=0.5, high=5.0),
    "seq_mask": CorrectionTraits(low=0.999, high=1.001),
    "seq_mask_tis": CorrectionTraits(low=0.5, high=5.0),
    "decoupled": CorrectionTraits(high=5.0),
}
