"""Advantage estimators: pure functions with one keyword-only signature, in one explicit table.

To add one: write the function, name it in ``ADVANTAGE_ESTIMATORS`` and say what it needs in traits.py (which is free of
torch, for the command line), a test with numbers worked out by hand, and a section in docs/algorithms.md. Nothing else
in the library names an estimator. Those that compare the samples of one prompt by their scores are in
group_baselines.py.

Notation: B sequences, A action positions, G samples of one prompt, m the action mask, r token rewards, V values,
s = Σ_t r_t of a sequence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms import group_baselines
from lightppo.algorithms.group_baselines import ScoreGroups, SequenceAdvantageFn, group_normalize
from lightppo.algorithms.masking import AllReduceSum, at_least_float32, identity, require_same_shape
from lightppo.algorithms.tables import lookup
from lightppo.algorithms.traits import ESTIMATOR_TRAITS, EstimatorTraits


class AdvantageFn(Protocol):
    """The signature of all estimators. A function names the arguments it uses and takes the rest as ``**_``."""

    def __call__(
        self,
        *,
        token_rewards: Tensor,
        action_mask: Tensor,
        scores: Tensor,
        values: Tensor | None,
        bootstrap_values: Tensor | None,
        group_ids: Tensor | None,
        gamma: float,
        lambd: float,
        std_eps: float,
        divide_std: bool,
        baseline_scores: Tensor | None,
        all_reduce_sum: AllReduceSum,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns. Every rank calls it, also one without samples (B = 0).

        Args:
            token_rewards: (B, A), KL penalty included where it is part of the reward.
            action_mask: (B, A), True = trained token; holes allowed.
            scores: (B,), s = Σ of ``token_rewards``.
            values: (B, A), V before each action; ``None`` without a critic.
            bootstrap_values: (B,), V after the last token of a truncated response, 0 for a finished one; ``None`` = 0.
            group_ids: (B,) integers, equal for the samples of one prompt, in any order.
            gamma: discount per trained token.
            lambd: λ of GAE.
            std_eps: added to a group's standard deviation (``--grpo_std_eps``).
            divide_std: ``False``: a group's scores are not divided by it (``--no_group_std_norm``).
            baseline_scores: (B,), score of the greedy answer to each row's prompt; ``None`` where none was generated.
            all_reduce_sum: sums a small tensor over all ranks.

        Returns:
            advantages (B, A) before whitening and returns (B, A), the critic's target; 0 at masked positions.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(EstimatorTraits):
    """One line of the table: the function and what it asks of a run."""

    fn: AdvantageFn


@torch.no_grad()
def gae(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    values: Tensor | None,
    bootstrap_values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 0.95,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: δ_t = r_t + γV_{t+1} - V_t, A_t = δ_t + γλA_{t+1}, returns = A + V.

    t + 1 is the next trained token: V and A pass through positions with m = 0 undiscounted. After the last one V is
    ``bootstrap_values``. Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16. Arguments: :class:`AdvantageFn`.

    Raises:
        ValueError: no values, or shapes differ.
    """
    if values is None:
        raise ValueError("--advantage_estimator gae needs values: give a critic (--critic_pretrain)")
    require_same_shape(token_rewards=token_rewards, action_mask=action_mask, values=values)
    mask = action_mask.bool()
    rewards = at_least_float32(token_rewards)
    values = at_least_float32(values).masked_fill(~mask, 0.0)
    next_advantage = values.new_zeros(values.shape[0])  # (B,)
    next_value = next_advantage if bootstrap_values is None else at_least_float32(bootstrap_values)
    if next_value.shape != values.shape[:1]:
        raise ValueError(f"bootstrap_values {tuple(next_value.shape)} do not fit values {tuple(values.shape)}")
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(trained, delta + gamma * lambd * next_advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, advantages + values


@torch.no_grad()
def reinforce(*, token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0, **_: object) -> tuple[Tensor, Tensor]:
    """REINFORCE++: A_t = Σ_{k≥0} γ^k r_{t+k} over the trained tokens, whitened over the whole batch afterwards.

    The KL belongs into the reward; then the penalty of later tokens counts for each token. Returns = A.

    Source: Hu et al. 2025 (arXiv:2501.03262v9), §3.1, eq. 4; the whitening is its eq. 5. Arguments:
    :class:`AdvantageFn`.

    Raises:
        ValueError: shapes differ.
    """
    returns = reward_to_go(token_rewards, action_mask, gamma)
    return returns, returns.clone()


@torch.no_grad()
def remax(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    baseline_scores: Tensor | None = None,
    gamma: float = 1.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """ReMax: A_t = Σ_{k≥0} γ^k r_{t+k} - b, b the score of the greedy answer to the same prompt.

    b depends on the prompt only, so the gradient has no bias. It is the plain score, without a KL penalty.

    Source: Li et al. 2023 (arXiv:2310.10505), the gradient estimator with a subtractive baseline and its Algorithm 1.
    Arguments: :class:`AdvantageFn`.

    Raises:
        ValueError: no baseline scores, or shapes differ.
    """
    if baseline_scores is None:
        raise ValueError(
            "--advantage_estimator remax needs baseline_scores: generate and score the greedy answer to each prompt"
        )
    if baseline_scores.shape != action_mask.shape[:1]:
        raise ValueError(
            f"baseline_scores {tuple(baseline_scores.shape)} do not fit action_mask {tuple(action_mask.shape)}"
        )
    returns = reward_to_go(token_rewards, action_mask, gamma)
    baseline = baseline_scores.to(returns.dtype).unsqueeze(1)  # (B, 1)
    return (returns - baseline).masked_fill(~action_mask.bool(), 0.0), returns


@torch.no_grad()
def group_adv_norm(
    *, token_rewards: Tensor, action_mask: Tensor, group_ids: Tensor | None, gamma: float = 1.0, **_: object
) -> tuple[Tensor, Tensor]:
    """A_t = (R_t - μ_G) / (σ_G + 1e-5), R_t = Σ_{k≥0} γ^k r_{t+k}, μ_G and σ_G over the group's trained tokens.

    R_t is GAE with V = 0 and λ = 1. See :func:`group_normalize`, which does the same to the advantages of any estimator
    (``--adv_norm_scope group``). Source and arguments: there and :class:`AdvantageFn`.

    Raises:
        ValueError: no group ids, a group of one, or shapes differ.
    """
    returns = reward_to_go(token_rewards, action_mask, gamma)
    return group_normalize(returns, action_mask, group_ids, min_size=2), returns


@dataclass(frozen=True)
class OnEveryToken:
    """An estimator that gives each sample one number, put on all its trained tokens; returns are the rewards to go.

    Attributes:
        sequence_fn: from the scores of the groups to one number per sample.
    """

    sequence_fn: SequenceAdvantageFn

    @torch.no_grad()
    def __call__(
        self,
        *,
        token_rewards: Tensor,
        action_mask: Tensor,
        scores: Tensor,
        group_ids: Tensor | None,
        gamma: float = 1.0,
        std_eps: float = 1e-6,
        divide_std: bool = True,
        all_reduce_sum: AllReduceSum = identity,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        """Arguments and result: :class:`AdvantageFn`.

        Raises:
            ValueError: no group ids, a group of one, or shapes differ.
        """
        returns = reward_to_go(token_rewards, action_mask, gamma)
        groups = ScoreGroups.from_batch(scores, action_mask, group_ids)
        of_samples = self.sequence_fn(groups, std_eps=std_eps, divide_std=divide_std, all_reduce_sum=all_reduce_sum)
        mask = action_mask.bool()
        per_row = returns.new_zeros(len(mask)).masked_scatter(mask.any(dim=1), of_samples.to(returns.dtype))  # (B,)
        return torch.where(mask, per_row.unsqueeze(1), 0.0), returns


def _entry(name: str, fn: AdvantageFn) -> AdvantageEstimator:
    return AdvantageEstimator(**asdict(ESTIMATOR_TRAITS[name]), fn=fn)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": _entry("gae", gae),
    "reinforce": _entry("reinforce", reinforce),
    "reinforce++": _entry("reinforce++", reinforce),
    "reinforce++_baseline": _entry("reinforce++_baseline", OnEveryToken(group_baselines.reinforce_baseline)),
    "rloo": _entry("rloo", OnEveryToken(group_baselines.rloo)),
    "grpo": _entry("grpo", OnEveryToken(group_baselines.group_norm)),
    "group_norm": _entry("group_norm", OnEveryToken(group_baselines.group_norm)),
    "dr_grpo": _entry("dr_grpo", OnEveryToken(group_baselines.dr_grpo)),
    "remax": _entry("remax", remax),
    "opo": _entry("opo", OnEveryToken(group_baselines.opo)),
    "gpg": _entry("gpg", OnEveryToken(group_baselines.gpg)),
    "grpo_passk": _entry("grpo_passk", OnEveryToken(group_baselines.grpo_passk)),
    "cpgd": _entry("cpgd", OnEveryToken(group_baselines.cpgd)),
    "group_adv_norm": _entry("group_adv_norm", group_adv_norm),
}


def get_estimator(name: str) -> AdvantageEstimator:
    """The table's entry.

    Raises:
        ValueError: unknown name; the message gives the nearest and all names.
    """
    return lookup(ADVANTAGE_ESTIMATORS, name, "--advantage_estimator")


@torch.no_grad()
def reward_to_go(token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Σ_{k≥0} γ^k r over the trained tokens from t on; 0 at masked positions.

    Args:
        token_rewards: (B, A).
        action_mask: (B, A), True = trained token; holes take no discount.
        gamma: discount per trained token.

    Raises:
        ValueError: shapes differ.
    """
    # GAE with V = 0 and λ = 1.
    zeros = torch.zeros_like(token_rewards)
    return gae(token_rewards=token_rewards, action_mask=action_mask, values=zeros, gamma=gamma, lambd=1.0)[0]
