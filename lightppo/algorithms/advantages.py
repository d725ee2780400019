"""Advantage estimators: pure functions with one keyword-only signature. docs/algorithms.md says how to add one.

Notation: B sequences, A action positions, G samples of one prompt, m the action mask, r token rewards, V values,
s = Σ_t r_t of a sequence, R_t = Σ_{k≥0} γ^k r_{t+k} over the trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms.masking import (
    AllReduceSum,
    at_least_float32,
    identity,
    require_one_per_row,
    require_same_shape,
    zero_where_masked,
)


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
        """Advantages (B, A) before whitening, and returns (B, A), the critic's target; both 0 at masked positions.

        Every rank calls it, even a rank without samples (B = 0).

        Args:
            token_rewards: (B, A), including the KL penalty if the KL is part of the reward.
            action_mask: (B, A), True = trained token; holes allowed.
            scores: (B,), s = Σ of ``token_rewards``.
            values: (B, A), V before each action; ``None`` without a critic.
            bootstrap_values: (B,), V after the last token of a truncated response, 0 for a finished one; ``None`` = 0.
            group_ids: (B,) integers, equal for the samples of one prompt, in any order.
            gamma: discount per trained token.
            lambd: λ of GAE.
            std_eps: added to a group's standard deviation (``--grpo_std_eps``).
            divide_std: whether a group's scores are divided by their standard deviation (``--no_group_std_norm``).
            baseline_scores: (B,), score of the greedy answer to each row's prompt; ``None`` if none was generated.
            all_reduce_sum: sums a small tensor over all ranks.
        """
        ...


@torch.no_grad()
def gae(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    values: Tensor | None,
    bootstrap_values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 0.95,
    **_,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: δ_t = r_t + γV_{t+1} - V_t, A_t = δ_t + γλA_{t+1}, returns = A + V.

    t + 1 is the next trained token: V and A pass through positions with m = 0 undiscounted. After the last trained
    token, V is ``bootstrap_values``. Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.
    """
    if values is None:
        raise ValueError("--advantage_estimator gae needs values: give a critic (--critic_pretrain)")
    require_same_shape(token_rewards=token_rewards, action_mask=action_mask, values=values)
    require_one_per_row(action_mask, bootstrap_values=bootstrap_values)
    mask = action_mask.bool()
    rewards = at_least_float32(token_rewards)
    values = zero_where_masked(values, mask)
    next_advantage = values.new_zeros(values.shape[0])  # (B,)
    next_value = next_advantage if bootstrap_values is None else at_least_float32(bootstrap_values)
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(trained, delta + gamma * lambd * next_advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, advantages + values


def reward_to_go(token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """R_t (B, A), 0 at masked positions: GAE with V = 0 and λ = 1. Holes in the mask are not discounted."""
    zeros = torch.zeros_like(token_rewards)
    return gae(token_rewards=token_rewards, action_mask=action_mask, values=zeros, gamma=gamma, lambd=1.0)[0]


def reinforce(*, token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0, **_) -> tuple[Tensor, Tensor]:
    """REINFORCE++: A_t = R_t, whitened over the whole batch afterwards; returns = A. Expects the KL in the reward.

    Source: Hu et al. 2025 (arXiv:2501.03262v9), §3.1, eq. 4; the whitening is its eq. 5.
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
    **_,
) -> tuple[Tensor, Tensor]:
    """ReMax: A_t = R_t - b, where b is the score of the greedy answer to the same prompt, without a KL penalty.

    b depends on the prompt only, so the gradient is unbiased. Source: Li et al. 2023 (arXiv:2310.10505), Algorithm 1.
    """
    if baseline_scores is None:
        raise ValueError(
            "--advantage_estimator remax needs baseline_scores: generate and score the greedy answer to each prompt"
        )
    require_one_per_row(action_mask, baseline_scores=baseline_scores)
    returns = reward_to_go(token_rewards, action_mask, gamma)
    baseline = baseline_scores.to(returns.dtype).unsqueeze(1)  # (B, 1)
    return (returns - baseline).masked_fill(~action_mask.bool(), 0.0), returns


def group_adv_norm(
    *, token_rewards: Tensor, action_mask: Tensor, group_ids: Tensor | None, gamma: float = 1.0, **_
) -> tuple[Tensor, Tensor]:
    """A_t = (R_t - μ_G) / (σ_G + 1e-5), with μ_G and σ_G of R over the group's trained tokens."""
    returns = reward_to_go(token_rewards, action_mask, gamma)
    return group_normalize(returns, action_mask, group_ids, min_size=2), returns


@dataclass(frozen=True)
class Groups:
    """N values that fall into groups. Each method gives every value the statistic of its group: (N,) → (N,)."""

    index: Tensor  # (N,), the group of each value, 0 … count - 1
    count: int  # number of groups; some may be empty

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]

    def max(self, values: Tensor) -> Tensor:
        lowest = values.new_full((self.count,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amax")[self.index]

    def deviation(self, values: Tensor, weights: Tensor) -> Tensor:
        """Each value minus the weighted mean Σ w·x / Σ w of its group, w > 0; exactly 0 if all values are equal."""
        relative = values - self.max(values)
        return relative - self.sum(weights * relative) / self.sum(weights)


@dataclass(frozen=True)
class ScoreGroups(Groups):
    """The N samples of a batch that have trained tokens, grouped by prompt. All tensors are float64."""

    scores: Tensor  # (N,), s of each sample
    tokens: Tensor  # (N,), trained tokens of each sample

    @classmethod
    def from_batch(cls, scores: Tensor, action_mask: Tensor, group_ids: Tensor | None) -> ScoreGroups:
        """The N of B rows that have a trained token, in their order; the scores of the others are ignored."""
        index, count = _number_groups(group_ids, action_mask, min_size=2)
        tokens = action_mask.bool().sum(dim=1)  # (B,)
        require_one_per_row(action_mask, scores=scores)
        member = tokens > 0
        return cls(index=index[member], count=count, scores=scores[member].double(), tokens=tokens[member].double())

    @property
    def size(self) -> Tensor:
        """(N,) number of samples in each sample's group."""
        return self.sum(torch.ones_like(self.scores))

    @property
    def advantage(self) -> Tensor:
        """(N,) s - mean_G."""
        return self.deviation(self.scores, torch.ones_like(self.scores))

    @property
    def std(self) -> Tensor:
        """(N,) unbiased (G - 1) standard deviation of each sample's group; 0 for a group of one."""
        return (self.sum(self.advantage.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def over_std(self, advantage: Tensor, std_eps: float) -> Tensor:
        """``advantage`` / (std_G + std_eps), 0 where both are 0."""
        return advantage / (self.std + std_eps).clamp(min=torch.finfo(advantage.dtype).tiny)


def _number_groups(group_ids: Tensor | None, action_mask: Tensor, min_size: int = 1) -> tuple[Tensor, int]:
    """Group numbers 0 … count - 1 of the rows (B,), and count."""
    if group_ids is None:
        raise ValueError("the samples of one prompt are to be compared: group_ids must be given")
    require_one_per_row(action_mask, group_ids=group_ids)
    ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    small = sizes < min_size
    if small.any():
        raise ValueError(
            f"group {ids[small][0].item()} has {sizes[small][0].item()} sample(s), this advantage estimator needs at "
            f"least {min_size} per prompt: set --n_samples_per_prompt to {min_size} or more"
        )
    return index, len(ids)


@torch.no_grad()
def group_normalize(
    advantages: Tensor, action_mask: Tensor, group_ids: Tensor | None, eps: float = 1e-5, *, min_size: int = 1
) -> Tensor:
    """x ← (x - μ_G) / (σ_G + eps), with μ_G and σ_G (biased) over the trained tokens of all samples of the group.

    Every token counts the same, so long answers weigh more. A group whose trained tokens are all equal gets exactly 0.
    Source: ``group_adv_norm`` of AReaL (Fu et al. 2025, arXiv:2505.24298).
    """
    require_same_shape(advantages=advantages, action_mask=action_mask)
    index, count = _number_groups(group_ids, action_mask, min_size)
    mask = action_mask.bool()
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], count)  # one value per trained token
    tokens = at_least_float32(advantages)[mask].double()
    ones = torch.ones_like(tokens)
    deviation = groups.deviation(tokens, ones)
    std = (groups.sum(deviation.square()) / groups.sum(ones)).sqrt()
    normalized = deviation / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)  # 0/0 with eps 0
    result = torch.zeros_like(at_least_float32(advantages))
    return result.masked_scatter(mask, normalized.to(result.dtype))


class SequenceAdvantageFn(Protocol):
    """The advantage (N,) of each sample, float64; arguments and ranks as in :class:`AdvantageFn`."""

    def __call__(
        self, groups: ScoreGroups, *, std_eps: float, divide_std: bool, all_reduce_sum: AllReduceSum, **_: object
    ) -> Tensor: ...


@dataclass(frozen=True)
class OnEveryToken:
    """An estimator that gives all trained tokens of a sample the same advantage; returns are the rewards to go."""

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
        **_,
    ) -> tuple[Tensor, Tensor]:
        """An :class:`AdvantageFn`."""
        returns = reward_to_go(token_rewards, action_mask, gamma)
        groups = ScoreGroups.from_batch(scores, action_mask, group_ids)
        of_samples = self.sequence_fn(groups, std_eps=std_eps, divide_std=divide_std, all_reduce_sum=all_reduce_sum)
        mask = action_mask.bool()
        per_row = returns.new_zeros(len(mask)).masked_scatter(mask.any(dim=1), of_samples.to(returns.dtype))  # (B,)
        return torch.where(mask, per_row.unsqueeze(1), 0.0), returns


def rloo(groups: ScoreGroups, **_) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740, §2.3): A = s - mean of the others' s = (s - mean_G)·G/(G - 1)."""
    return groups.advantage * groups.size / (groups.size - 1).clamp(min=1)


def group_norm(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_) -> Tensor:
    """GRPO (arXiv:2402.03300, §4.1.2): A = (s - mean_G) / (std_G + std_eps), or ``dr_grpo`` without ``divide_std``."""
    return groups.over_std(groups.advantage, std_eps) if divide_std else groups.advantage


def dr_grpo(groups: ScoreGroups, **_) -> Tensor:
    """A = s - mean_G (arXiv:2503.20783, §3.2): GRPO without the division, which favours prompts whose scores agree.

    The other half of the method is ``--loss_agg_mode seq-mean-token-sum-norm``: divide by a constant, not by lengths.
    """
    return groups.advantage


def reinforce_baseline(groups: ScoreGroups, **_) -> Tensor:
    """REINFORCE++ with baseline (arXiv:2501.03262v9, §3.2): A = s - mean_G, whitened over the batch later; γ = 1."""
    return groups.advantage


def opo(groups: ScoreGroups, **_) -> Tensor:
    """A = s - b,  b = Σ_G len·s / Σ_G len, where len counts the trained tokens of a sample.

    b minimises the gradient's variance if an answer's squared gradient norm is proportional to its length. The paper
    (Hao et al. 2025, arXiv:2505.23585) trains strictly on-policy: one optimizer step per rollout, no KL and no entropy
    term.
    """
    return groups.deviation(groups.scores, groups.tokens)


def gpg(groups: ScoreGroups, *, all_reduce_sum: AllReduceSum = identity, **_) -> Tensor:
    """A = α·(s - mean_G),  α = samples / samples with s ≠ 0, both over all ranks; α = 1 if every s is 0.

    α makes up for samples without a signal; the paper counts groups instead, B/(B - M) with M groups of equal scores.
    Counting samples suits scores of 0 and 1; with the KL in the reward, no s is 0 and α is 1.
    Source: Chu et al. 2025 (arXiv:2504.02546), §2.2.
    """
    counts = torch.stack([torch.ones_like(groups.scores).sum(), groups.scores.count_nonzero().double()])
    samples, nonzero = all_reduce_sum(counts).tolist()
    alpha = samples / nonzero if nonzero else 1.0  # the same on every rank
    return groups.advantage * alpha


def grpo_passk(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_) -> Tensor:
    """A = (max_G s - max of the other samples' s) / (std_G + std_eps): what a sample adds to the best of the group.

    The best sample gets max - second and all others 0; if several share the maximum, all get 0. Undivided, it is the
    leave-one-out gradient of pass@G. Source: Tang et al. 2025 (arXiv:2503.19595): A_i = f(y) - f(y without i) with f =
    max.
    """
    best = groups.max(groups.scores)
    is_best = groups.scores == best
    alone = is_best & (groups.sum(is_best.double()) == 1)
    second = groups.max(groups.scores.masked_fill(alone, -torch.inf))
    best_of_others = torch.where(alone & (groups.size > 1), second, best)
    advantage = best - best_of_others
    return groups.over_std(advantage, std_eps) if divide_std else advantage


def cpgd(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_) -> Tensor:
    """A = ω·(s - mean_G),  ω = 1/(std_G + std_eps) or 1 (arXiv:2505.12504, §4.3, eq. 2); for ``--policy_loss cpgd``."""
    return group_norm(groups, std_eps=std_eps, divide_std=divide_std)
