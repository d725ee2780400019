"""Advantages from the comparison of the samples of one prompt: small functions from scores to one number per sample.

Each takes the groups of a batch (:class:`ScoreGroups`) and returns A per sample; advantages.py puts it on every trained
token and gives it a name in the table of estimators. A sample without a trained token is a member of no group, so no
statistic sees it; a group that this leaves with one member gets A = 0 (there is nothing to compare it with). A group
lies on one rank as a whole. Statistics are in float64 and relative to the group's largest value, so that equal scores
give an exact 0 and not rounding noise, which a division by their standard deviation would blow up.

Notation: B sequences, A action positions, N samples with trained tokens, G samples of one prompt, s the sum of a
sample's token rewards (KL penalty included where it is part of the reward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms.masking import AllReduceSum, at_least_float32, identity, require_same_shape


@dataclass(frozen=True)
class Groups:
    """N values that fall into groups. Each method gives every value the statistic of its group: (N,) → (N,).

    Attributes:
        index: (N,) the number of each value's group, 0 … count - 1.
        count: groups; some may have no value.
    """

    index: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]

    def max(self, values: Tensor) -> Tensor:
        lowest = values.new_full((self.count,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amax")[self.index]

    def deviation(self, values: Tensor, weights: Tensor) -> Tensor:
        """Each value minus the weighted mean Σ w·x / Σ w of its group, w > 0; an exact 0 where all are equal."""
        relative = values - self.max(values)
        return relative - self.sum(weights * relative) / self.sum(weights)


@dataclass(frozen=True)
class ScoreGroups(Groups):
    """The samples of a batch that have trained tokens, by prompt. All float64.

    Attributes:
        scores: (N,) s of each sample.
        tokens: (N,) trained tokens of each sample.
    """

    scores: Tensor
    tokens: Tensor

    @classmethod
    def from_batch(cls, scores: Tensor, action_mask: Tensor, group_ids: Tensor | None) -> ScoreGroups:
        """N samples out of B rows, in their order.

        Args:
            scores: (B,); rows without a trained token may hold anything.
            action_mask: (B, A), True = trained token.
            group_ids: (B,) integers, equal for the samples of one prompt, in any order.

        Raises:
            ValueError: no group ids, shapes differ, or a group has fewer than two rows.
        """
        index, count = number_groups(group_ids, action_mask, min_size=2)
        tokens = action_mask.bool().sum(dim=1)  # (B,)
        require_same_shape(scores=scores, group_ids=group_ids)
        member = tokens > 0
        return cls(index=index[member], count=count, scores=scores[member].double(), tokens=tokens[member].double())

    @property
    def size(self) -> Tensor:
        """(N,) members of each sample's group."""
        return self.sum(torch.ones_like(self.scores))

    @property
    def advantage(self) -> Tensor:
        """(N,) s - mean_G."""
        return self.deviation(self.scores, torch.ones_like(self.scores))

    @property
    def std(self) -> Tensor:
        """(N,) unbiased (G - 1) standard deviation of each sample's group, 0 for one member."""
        return (self.sum(self.advantage.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def over_std(self, advantage: Tensor, std_eps: float) -> Tensor:
        """``advantage`` / (std_G + std_eps), 0 where both are 0."""
        return advantage / (self.std + std_eps).clamp(min=torch.finfo(advantage.dtype).tiny)


class SequenceAdvantageFn(Protocol):
    """The signature of the functions below. Each names the options it uses and takes the rest as ``**_``.

    Args:
        groups: the samples with trained tokens, by prompt.
        std_eps: added to a group's standard deviation (``--grpo_std_eps``).
        divide_std: ``False``: do not divide by it (``--no_group_std_norm``).
        all_reduce_sum: sums a small tensor over all ranks; every rank calls the estimator, also one without samples.

    Returns:
        (N,) the advantage of every trained token of each sample, float64.
    """

    def __call__(
        self, groups: ScoreGroups, *, std_eps: float, divide_std: bool, all_reduce_sum: AllReduceSum, **_: object
    ) -> Tensor: ...


def rloo(groups: ScoreGroups, **_: object) -> Tensor:
    """A = s - mean of the other samples' s = (s - mean_G)·G/(G - 1): REINFORCE leave-one-out.

    The baseline does not depend on the sample, so the gradient has no bias.
    Source: Ahmadian et al. 2024 (arXiv:2402.14740), §2.3. Signature: :class:`SequenceAdvantageFn`.
    """
    return groups.advantage * groups.size / (groups.size - 1).clamp(min=1)


def group_norm(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_: object) -> Tensor:
    """A = (s - mean_G) / (std_G + std_eps): GRPO, std with G - 1.

    Without the division (``--no_group_std_norm``) it is ``dr_grpo``.
    Source: Shao et al. 2024 (arXiv:2402.03300), §4.1.2. Signature: :class:`SequenceAdvantageFn`.
    """
    return groups.over_std(groups.advantage, std_eps) if divide_std else groups.advantage


def dr_grpo(groups: ScoreGroups, **_: object) -> Tensor:
    """A = s - mean_G: GRPO without the division, which would weigh prompts by how much their scores agree.

    The other half of the method is a loss divided by a constant and not by each answer's length
    (``--loss_agg_mode seq-mean-token-sum-norm``).
    Source: Liu et al. 2025 (arXiv:2503.20783), §3.2. Signature: :class:`SequenceAdvantageFn`.
    """
    return groups.advantage


def reinforce_baseline(groups: ScoreGroups, **_: object) -> Tensor:
    """A = s - mean_G, whitened over the whole batch afterwards: REINFORCE++ with a baseline, γ = 1.

    Source: Hu et al. 2025 (arXiv:2501.03262v9), §3.2, eqs. 6 and 7. Signature: :class:`SequenceAdvantageFn`.
    """
    return groups.advantage


def opo(groups: ScoreGroups, **_: object) -> Tensor:
    """A = s - b,  b = Σ_G len·s / Σ_G len, len the trained tokens of a sample.

    b leaves the gradient the least variance where the squared gradient norm of an answer is proportional to its length.
    The paper trains strictly on-policy: one optimizer step per rollout, no KL and no entropy term.
    Source: Hao et al. 2025 (arXiv:2505.23585), the optimal reward baseline. Signature: :class:`SequenceAdvantageFn`.
    """
    return groups.deviation(groups.scores, groups.tokens)


def gpg(groups: ScoreGroups, *, all_reduce_sum: AllReduceSum = identity, **_: object) -> Tensor:
    """A = α·(s - mean_G),  α = samples / samples with s ≠ 0, both over all ranks; α = 1 where no s ≠ 0.

    α makes up for samples without a signal; the paper counts groups for it, B/(B - M) with M groups of equal scores.
    The count of samples is meant for scores of 0 and 1: with the KL in the reward no s is 0 and α is 1.
    Source: Chu et al. 2025 (arXiv:2504.02546), §2.2. Signature: :class:`SequenceAdvantageFn`.
    """
    counts = torch.stack([torch.ones_like(groups.scores).sum(), groups.scores.count_nonzero().double()])
    samples, nonzero = all_reduce_sum(counts).tolist()
    alpha = samples / nonzero if nonzero else 1.0  # the same on every rank
    return groups.advantage * alpha


def grpo_passk(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_: object) -> Tensor:
    """A = (max_G s - max of the other samples' s) / (std_G + std_eps): what a sample adds to the best of the group.

    So the best sample gets max - second and all others 0; where several share the maximum, none adds anything and all
    get 0. ``--no_group_std_norm``: not divided, the leave-one-out gradient of pass@G as in the paper.
    Source: Tang et al. 2025 (arXiv:2503.19595): A_i = f(y) - f(y without i) with f = max. Signature:
    :class:`SequenceAdvantageFn`.
    """
    best = groups.max(groups.scores)
    is_best = groups.scores == best
    alone = is_best & (groups.sum(is_best.double()) == 1)
    second = groups.max(groups.scores.masked_fill(alone, -torch.inf))
    best_of_others = torch.where(alone & (groups.size > 1), second, best)
    advantage = best - best_of_others
    return groups.over_std(advantage, std_eps) if divide_std else advantage


def cpgd(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_: object) -> Tensor:
    """A = ω·(s - mean_G),  ω = 1/(std_G + std_eps), or 1 with ``--no_group_std_norm``.

    The advantage of CPGD; what sets the method apart is its loss (``--policy_loss cpgd``).
    Source: Liu et al. 2025 (arXiv:2505.12504), §4.3, eq. 2 with STD weight or equal weight. Signature:
    :class:`SequenceAdvantageFn`.
    """
    return group_norm(groups, std_eps=std_eps, divide_std=divide_std)


@torch.no_grad()
def group_normalize(
    advantages: Tensor, action_mask: Tensor, group_ids: Tensor | None, eps: float = 1e-5, *, min_size: int = 1
) -> Tensor:
    """x ← (x - μ_G) / (σ_G + eps), μ_G and σ_G (biased) over the trained tokens of all samples of the group.

    Every token counts the same, so long answers weigh more. A group with one trained token, or with equal ones, gets an
    exact 0. Groups may have one sample: its tokens are compared with each other.

    Args:
        advantages: (B, A); masked positions may hold anything.
        action_mask: (B, A), True = trained token.
        group_ids: (B,) integers, equal for the samples of one prompt, in any order.
        eps: added to the standard deviation.
        min_size: smallest number of rows of a group.

    Returns:
        (B, A), float32 or float64; masked positions are 0.

    Raises:
        ValueError: no group ids, shapes differ, or a group has fewer than ``min_size`` rows.

    Source: ``group_adv_norm`` of AReaL (Fu et al. 2025, arXiv:2505.24298).
    """
    require_same_shape(advantages=advantages, action_mask=action_mask)
    index, count = number_groups(group_ids, action_mask, min_size=min_size)
    mask = action_mask.bool()
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], count)  # one value per trained token
    tokens = at_least_float32(advantages)[mask].double()
    ones = torch.ones_like(tokens)
    deviation = groups.deviation(tokens, ones)
    std = (groups.sum(deviation.square()) / groups.sum(ones)).sqrt()
    normalized = deviation / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)  # 0/0 with eps 0
    result = torch.zeros_like(advantages, dtype=at_least_float32(advantages).dtype)
    return result.masked_scatter(mask, normalized.to(result.dtype))


def number_groups(group_ids: Tensor | None, action_mask: Tensor, min_size: int = 1) -> tuple[Tensor, int]:
    """Group numbers 0 … count - 1 of the rows (B,), and count.

    Raises:
        ValueError: no group ids, not one per row, or a group has fewer than ``min_size`` rows.
    """
    if group_ids is None:
        raise ValueError("the samples of one prompt are to be compared: group_ids must be given")
    if group_ids.shape != action_mask.shape[:1]:
        raise ValueError(f"group_ids {tuple(group_ids.shape)} do not fit action_mask {tuple(action_mask.shape)}")
    ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    small = sizes < min_size
    if small.any():
        raise ValueError(
            f"group {ids[small][0].item()} has {sizes[small][0].item()} sample(s), this advantage estimator needs at "
            f"least {min_size} per prompt: set --n_samples_per_prompt to {min_size} or more"
        )
    return index, len(ids)
