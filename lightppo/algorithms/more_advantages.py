"""Advantage estimators beside those of the core, in the same form and notation: ``lightppo.algorithms.advantages``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.advantages import (
    Groups,
    OnEveryToken,
    ScoreGroups,
    group_norm,
    number_groups,
    reward_to_go,
)
from lightppo.algorithms.masking import (
    AllReduceSum,
    identity,
    require_same_shape,
    zero_where_masked,
)
from lightppo.algorithms.more_entries import weights_of_parts
from lightppo.data.records import Rollout
from lightppo.experience.normalisation import group_normalize


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

    Source: Li et al. 2023 (arXiv:2310.10505), Algorithm 1.
    """
    if baseline_scores is None:
        raise ValueError(
            "--advantage_estimator remax needs baseline_scores: score the greedy answer to each prompt"
        )
    require_same_shape(baseline_scores=baseline_scores, rows=action_mask.any(dim=1))
    returns = reward_to_go(token_rewards, action_mask, gamma)
    baseline = baseline_scores.to(returns.dtype).unsqueeze(1)  # (B, 1)
    return (returns - baseline).masked_fill(~action_mask.bool(), 0.0), returns


def group_adv_norm(
    *, token_rewards: Tensor, action_mask: Tensor, group_ids: Tensor | None, gamma: float = 1.0, **_
) -> tuple[Tensor, Tensor]:
    """A_t = (R_t - μ_G) / (σ_G + 1e-5), with μ_G and σ_G of R over the group's trained tokens."""
    returns = reward_to_go(token_rewards, action_mask, gamma)
    return group_normalize(returns, action_mask, group_ids, min_size=2), returns


@torch.no_grad()
def optimal_token_baseline(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    group_ids: Tensor | None,
    score_norms: Tensor | None = None,
    gamma: float = 1.0,
    **_,
) -> tuple[Tensor, Tensor]:
    """A_t = R_t - Σ_G W_t R_t / Σ_G W_t over the samples that have a t-th trained token; W_t = Σ_{j≤t} ‖∇ log π_j‖².

    The baseline of a token that minimises the gradient's variance if the scores of its tokens are uncorrelated. Alone
    at t, a sample has A_t = 0. Source: Li et al. 2026 (richardli.xyz/optimal-token-baseline); verl.
    """
    if score_norms is None:
        raise ValueError(
            "--advantage_estimator optimal_token_baseline needs score_norms: of a pass over the rollout"
        )
    require_same_shape(score_norms=score_norms, action_mask=action_mask)
    index, count = number_groups(group_ids, action_mask, min_size=2)
    mask, width = action_mask.bool(), action_mask.shape[1]
    returns = reward_to_go(token_rewards, action_mask, gamma)
    groups = Groups((index.unsqueeze(1) * width + mask.cumsum(1) - 1)[mask], count * width)
    # On the CPU, because torch refuses cumsum of floats on GPUs under --full_determinism.
    energy = zero_where_masked(score_norms, mask).double().cpu().cumsum(1).to(mask.device)[mask]
    # 0 where all is certain
    advantages = groups.deviation(returns[mask].double(), energy.clamp(min=1e-12))
    return torch.zeros_like(returns).masked_scatter(mask, advantages.to(returns.dtype)), returns


@torch.no_grad()
def gdpo(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    scores: Tensor,
    part_scores: Tensor | None = None,
    part_weights: Sequence[float] = (1.0,),
    gamma: float = 1.0,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A = Σ_k w_k · (s_k - mean_G) / (std_G + std_eps): each reward k is normalised in its group before they are added.

    In a sum, rewards of a small spread would disappear beside others, and different mixtures with one sum would be
    alike. Expects the whitening of the batch. Source: Liu et al. 2026 (arXiv:2601.05242), eq. 4 to 6.

    Args:
        part_scores: (B, K), the rewards; ``None``: ``scores`` alone, which is grpo.
        part_weights: w of the K rewards.
    """
    parts = scores.unsqueeze(1) if part_scores is None else part_scores  # (B, K)
    require_same_shape(part_scores=parts[:, 0], rows=action_mask.any(dim=1))
    normalise = OnEveryToken(group_norm)
    advantages = [
        weight
        * normalise(token_rewards=token_rewards, action_mask=action_mask, scores=part, **more)[0]
        for weight, part in zip(part_weights, parts.unbind(1), strict=True)
    ]
    return torch.stack(advantages).sum(0), reward_to_go(token_rewards, action_mask, gamma)


def parts_of_rewards(config: Any) -> Callable[[Sequence[Rollout], Any], dict[str, Any]] | None:
    """``--gdpo_rewards``: their scores, as the reward sources give them, and their weights."""
    weights = weights_of_parts(config.algorithm.gdpo_rewards)
    if not weights:
        return None

    def read(rollouts: Sequence[Rollout], device: Any) -> dict[str, Any]:
        rows = [[rollout.extras.get(name) for name in weights] for rollout in rollouts]
        for rollout, row in zip(rollouts, rows):
            if missing := [name for name, score in zip(weights, row) if score is None]:
                known = ", ".join(sorted(rollout.extras)) or "none"
                raise ValueError(
                    f"--gdpo_rewards {missing[0]}: prompt {rollout.prompt.index}, sample {rollout.sample_index} has "
                    f"no such reward; its source gives: {known}"
                )
        scores = torch.tensor(rows, dtype=torch.float64, device=device)
        return {
            "part_scores": scores.reshape(len(rows), len(weights)),  # (B, K)
            "part_weights": tuple(weights.values()),
        }

    return read


def dr_grpo(groups: ScoreGroups, **_) -> Tensor:
    """A = s - mean_G (arXiv:2503.20783, §3.2): GRPO without the division, which favours prompts whose scores agree.

    The other half of the method is ``--loss_agg_mode seq-mean-token-sum-norm``: divide by a constant, not by lengths.
    """
    return groups.advantage


def opo(groups: ScoreGroups, **_) -> Tensor:
    """OPO (arXiv:2505.23585): A = s - b,  b = Σ_G len·s / Σ_G len, where len counts the trained tokens of a sample.

    b minimises the gradient's variance if an answer's squared gradient norm is proportional to its length.
    """
    return groups.deviation(groups.scores, groups.tokens)


def gpg(groups: ScoreGroups, *, all_reduce_sum: AllReduceSum = identity, **_) -> Tensor:
    """A = α·(s - mean_G),  α = samples / samples with s ≠ 0, both over all ranks; α = 1 if every s is 0.

    α makes up for samples without a signal. Source: Chu et al. 2025 (arXiv:2504.02546), §2.2, which counts groups
    instead: B/(B - M) with M groups of equal scores.
    """
    counts = torch.stack(
        [torch.ones_like(groups.scores).sum(), groups.scores.count_nonzero().double()]
    )
    samples, nonzero = all_reduce_sum(counts).tolist()
    alpha = samples / nonzero if nonzero else 1.0  # the same on every rank
    return groups.advantage * alpha


def grpo_passk(
    groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_
) -> Tensor:
    """A = (max_G s - max of the other samples' s) / (std_G + std_eps): what a sample adds to the best of the group.

    The best sample gets max - second and all others 0; if several share the maximum, all get 0.
    Source: Tang et al. 2025 (arXiv:2503.19595): A_i = f(y) - f(y without i) with f = max, undivided.
    """
    best = groups.max(groups.scores)
    is_best = groups.scores == best
    alone = is_best & (groups.sum(is_best.double()) == 1)
    second = groups.max(groups.scores.masked_fill(alone, -torch.inf))
    advantage = best - torch.where(alone & (groups.size > 1), second, best)
    return groups.over_std(advantage, std_eps) if divide_std else advantage


def cpgd(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_) -> Tensor:
    """A = ω·(s - mean_G),  ω = 1/(std_G + std_eps) or 1 (arXiv:2505.12504, §4.3, eq. 2); for ``--policy_loss cpgd``."""
    return group_norm(groups, std_eps=std_eps, divide_std=divide_std)
