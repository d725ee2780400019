"""Advantage estimators: pure functions with one keyword-only signature, in one explicit table.

To add one: write the function, name it in ``ADVANTAGE_ESTIMATORS`` and say what it needs in traits.py (which is free of
torch, for the command line), a test with numbers worked out by hand, and a section in docs/algorithms.md. Nothing else
in the library names an estimator.

Notation: B sequences, A action positions, G samples of one prompt, m the action mask, r token rewards, V values,
s = Σ_t r_t of a sequence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms.masking import at_least_float32, require_same_shape
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
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns.

        Args:
            token_rewards: (B, A), KL penalty included where it is part of the reward.
            action_mask: (B, A), True = trained token; holes allowed.
            scores: (B,), s = Σ of ``token_rewards``.
            values: (B, A), V before each action; ``None`` without a critic.
            bootstrap_values: (B,), V after the last token of a truncated response, 0 for a finished one; ``None`` = 0.
            group_ids: (B,) integers, equal for the samples of one prompt, in any order.
            gamma: discount per trained token.
            lambd: λ of GAE.
            std_eps: added to a group's standard deviation.

        Returns:
            advantages (B, A) before whitening and returns (B, A), the critic's target; 0 at masked positions.
        """
        ...


@dataclass(frozen=True)
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
def rloo(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    scores: Tensor,
    group_ids: Tensor | None,
    gamma: float = 1.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out: s minus the mean s of the other samples of the prompt, on every trained token.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740), §3.2; with s - mean of others = (s - mean_G)·G/(G - 1).
    Arguments: :class:`AdvantageFn`.

    Raises:
        ValueError: no group ids, a group of one, or shapes differ.
    """
    deviation, count, _std = _group_statistics(scores, action_mask, group_ids)
    advantage = deviation * count / (count - 1).clamp(min=1)
    return _on_trained_tokens(advantage, token_rewards, action_mask), reward_to_go(token_rewards, action_mask, gamma)


@torch.no_grad()
def group_norm(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    scores: Tensor,
    group_ids: Tensor | None,
    gamma: float = 1.0,
    std_eps: float = 1e-6,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """GRPO: (s - mean_G) / (std_G + std_eps) on every trained token, std unbiased; equal scores give 0.

    ``std_eps`` is ``--grpo_std_eps``.

    Source: Shao et al. 2024 (arXiv:2402.03300), §4.1.2. Arguments: :class:`AdvantageFn`.

    Raises:
        ValueError: no group ids, a group of one, or shapes differ.
    """
    deviation, _count, std = _group_statistics(scores, action_mask, group_ids)
    advantage = deviation / (std + std_eps).clamp(min=torch.finfo(std.dtype).tiny)  # 0/0 with std_eps 0
    return _on_trained_tokens(advantage, token_rewards, action_mask), reward_to_go(token_rewards, action_mask, gamma)


def _entry(name: str, fn: AdvantageFn) -> AdvantageEstimator:
    return AdvantageEstimator(**asdict(ESTIMATOR_TRAITS[name]), fn=fn)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": _entry("gae", gae),
    "rloo": _entry("rloo", rloo),
    "grpo": _entry("grpo", group_norm),
    "group_norm": _entry("group_norm", group_norm),
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


def _on_trained_tokens(per_sequence: Tensor, token_rewards: Tensor, action_mask: Tensor) -> Tensor:
    """(B,) → (B, A): the same number on every trained token of a row, 0 elsewhere."""
    require_same_shape(token_rewards=token_rewards, action_mask=action_mask)
    return torch.where(action_mask.bool(), per_sequence.to(at_least_float32(token_rewards).dtype).unsqueeze(1), 0.0)


def _group_statistics(
    scores: Tensor, action_mask: Tensor, group_ids: Tensor | None, min_size: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample its deviation from the group's mean, the group's size and its unbiased std: (B,) float64 each.

    Samples without a trained token are not members: they enter no statistic and their deviation is 0. A group they
    leave with one member has deviation 0 (there is nothing to compare it with). float64, so that equal scores give an
    exact 0 and not rounding noise blown up by a division by ``std_eps``.

    Raises:
        ValueError: no group ids, shapes differ, or a group has fewer than ``min_size`` rows.
    """
    if group_ids is None:
        raise ValueError("this advantage estimator compares the samples of one prompt: group_ids must be given")
    member = action_mask.bool().any(dim=1)  # (B,)
    require_same_shape(scores=scores, group_ids=group_ids, rows_of_action_mask=member)
    ids, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    small = sizes < min_size
    if small.any():
        raise ValueError(
            f"group {ids[small][0].item()} has {sizes[small][0].item()} sample(s), this advantage estimator needs at "
            f"least {min_size} per prompt: set --n_samples_per_prompt to {min_size} or more"
        )
    exact = scores.double().masked_fill(~member, 0.0)
    zeros = exact.new_zeros(len(ids))
    count = zeros.index_add(0, group, member.double())
    mean = zeros.index_add(0, group, exact) / count.clamp(min=1)
    deviation = (exact - mean[group]).masked_fill(~member, 0.0)
    variance = zeros.index_add(0, group, deviation.square()) / (count - 1).clamp(min=1)
    return deviation, count[group], variance.sqrt()[group]
