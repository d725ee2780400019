"""Advantage estimators: pure functions with one keyword-only signature. docs/extending.md says how to add one.

Notation: B sequences, A action positions, G samples of one prompt, m the action mask, r token rewards, V values,
s = Σ_t r_t of a sequence, R_t = Σ_{k≥0} γ^k r_{t+k} over the trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import EstimatorEntry
from lightppo.algorithms.masking import (
    AllReduceSum,
    at_least_float32,
    identity,
    require_same_shape,
    zero_where_masked,
)
from lightppo.algorithms.option_values import weights_of_parts
from lightppo.user_code import Checked, is_of_lightppo

if TYPE_CHECKING:
    from lightppo.data.records import Rollout


AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""Advantages (B, A) before whitening, and returns (B, A), the critic's target; both 0 at masked positions. Every rank
calls it, even one without samples (B = 0). A function names the keyword arguments it uses, and takes the rest as **_:

- token_rewards (B, A), including the KL penalty if the KL is in the reward; action_mask (B, A), holes allowed
- scores (B,), s; group_ids (B,) integers, equal for the samples of one prompt, in any order
- values (B, A), V before each action, and bootstrap_values (B,), V after the last token of a truncated response, 0 for
  a finished one; None without a critic
- baseline_scores (B,), score of the greedy answer to each row's prompt; None if none was generated
- gamma, the discount per trained token; lambd, λ of GAE
- std_eps, added to a group's standard deviation; divide_std, whether a group's scores are divided by it; batch_std,
  whether the deviation of all scores takes its place
- score_norms (B, A), see :func:`lightppo.algorithms.logprobs.score_norms`; None unless the entry asks for them
- all_reduce_sum, sums a small tensor over all ranks
- what the ``inputs`` of its entry give
"""


@torch.no_grad()
def compute_token_rewards(
    scores: Tensor,
    action_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    token_scores: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef·kl_t + token_scores_t on trained tokens, plus the score at the last trained token: (B, A).

    Source: the KL-in-reward form of RLHF, Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, spread over the tokens.
    """
    require_same_shape(action_mask=action_mask, kl=kl, token_scores=token_scores)
    require_same_shape(scores=scores, rows=action_mask.any(dim=1))
    if kl is None and kl_coef != 0.0:
        raise ValueError(
            f"kl_coef is {kl_coef} but there is no KL: give the reference log probs or set it to 0"
        )
    mask = action_mask.bool()
    scores = at_least_float32(scores)
    rewards = scores.new_zeros(mask.shape)  # (B, A)
    if kl is not None:
        rewards = rewards - kl_coef * at_least_float32(kl)
    if token_scores is not None:
        rewards = rewards + at_least_float32(token_scores)
    positions = torch.arange(mask.shape[1], device=mask.device)
    # (B, A), one True a row
    last = mask & (positions == torch.where(mask, positions, -1).amax(dim=1, keepdim=True))
    return (rewards + torch.where(last, scores.unsqueeze(1), 0.0)).masked_fill(~mask, 0.0)


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
        raise ValueError(
            "--advantage_estimator gae needs values: give a critic (--critic_pretrain)"
        )
    require_same_shape(token_rewards=token_rewards, action_mask=action_mask, values=values)
    require_same_shape(bootstrap_values=bootstrap_values, rows=action_mask.any(dim=1))
    mask = action_mask.bool()
    rewards = at_least_float32(token_rewards)
    values = zero_where_masked(values, mask)
    next_advantage = values.new_zeros(values.shape[0])  # (B,)
    next_value = next_advantage if bootstrap_values is None else at_least_float32(bootstrap_values)
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(
            trained, delta + gamma * lambd * next_advantage, next_advantage
        )
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, advantages + values


@torch.no_grad()
def reward_to_go(token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return R_t (B, A), 0 at masked positions: GAE with V = 0 and λ = 1. Holes in the mask are not discounted."""
    if gamma == 1.0:  # no step for each token
        require_same_shape(token_rewards=token_rewards, action_mask=action_mask)
        rewards = zero_where_masked(token_rewards, action_mask)
        # On the CPU: a GPU has no deterministic sum.
        returns = rewards.double().cpu().flip(1).cumsum(1).flip(1)
        return returns.to(rewards).masked_fill(~action_mask.bool(), 0.0)
    zeros = torch.zeros_like(token_rewards)
    return gae(
        token_rewards=token_rewards, action_mask=action_mask, values=zeros, gamma=gamma, lambd=1.0
    )[0]


def reinforce(
    *, token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0, **_
) -> tuple[Tensor, Tensor]:
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


def on_policy_distill(
    *, token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0, **_
) -> tuple[Tensor, Tensor]:
    """A_t = 0: what is learned is the teacher's term alone (``--distill_by``); scores are only recorded."""
    returns = reward_to_go(token_rewards, action_mask, gamma)
    return torch.zeros_like(returns), returns


# -- groups: the samples of one prompt -------------------------------------------------------------------------------


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
        """Return each value minus the weighted mean Σ w·x / Σ w of its group, w > 0; exactly 0 if all values are equal."""
        relative = values - self.max(values)
        return relative - self.sum(weights * relative) / self.sum(weights)


@dataclass(frozen=True)
class ScoreGroups(Groups):
    """The N samples of a batch that have trained tokens, grouped by prompt. All tensors are float64."""

    scores: Tensor  # (N,), s of each sample
    tokens: Tensor  # (N,), trained tokens of each sample
    batch_std: Tensor | None = None  # (), of all scores of all ranks, in place of each group's

    @classmethod
    def from_batch(
        cls, scores: Tensor, action_mask: Tensor, group_ids: Tensor | None
    ) -> ScoreGroups:
        """Take the N of B rows that have a trained token, in their order; the scores of the others are ignored."""
        index, count = number_groups(group_ids, action_mask, min_size=2)
        tokens = action_mask.bool().sum(dim=1)  # (B,)
        require_same_shape(scores=scores, rows=action_mask.any(dim=1))
        trained = tokens > 0
        return cls(index[trained], count, scores[trained].double(), tokens[trained].double())

    @property
    def size(self) -> Tensor:
        """Count the samples in each sample's group (N,)."""
        return self.sum(torch.ones_like(self.scores))

    @property
    def advantage(self) -> Tensor:
        """Return s - mean_G (N,)."""
        return self.deviation(self.scores, torch.ones_like(self.scores))

    @property
    def std(self) -> Tensor:
        """Return the unbiased (G - 1) deviation of each sample's group (N,), 0 in a group of one; or ``batch_std``."""
        if self.batch_std is not None:
            return self.batch_std
        return (self.sum(self.advantage.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def over_std(self, advantage: Tensor, std_eps: float) -> Tensor:
        """Return ``advantage`` / (std_G + std_eps), 0 where both are 0."""
        return advantage / (self.std + std_eps).clamp(min=torch.finfo(advantage.dtype).tiny)


def number_groups(
    group_ids: Tensor | None, action_mask: Tensor, min_size: int = 1
) -> tuple[Tensor, int]:
    """Return the group numbers 0 … count - 1 of the rows (B,), and count."""
    if group_ids is None:
        raise ValueError("this estimator compares the samples of one prompt: give group_ids")
    require_same_shape(group_ids=group_ids, rows=action_mask.any(dim=1))
    ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    too_small = sizes < min_size
    if too_small.any():
        raise ValueError(
            f"group {ids[too_small][0].item()} has {sizes[too_small][0].item()} sample(s): this estimator needs "
            f"--n_samples_per_prompt {min_size} or more"
        )
    return index, len(ids)


@dataclass(frozen=True)
class OnEveryToken:
    """An :data:`AdvantageFn` that gives all trained tokens of a sample one advantage; returns are the rewards to go."""

    # (groups: ScoreGroups, **arguments of AdvantageFn) -> (N,) float64
    sequence_fn: Callable[..., Tensor]

    @torch.no_grad()
    def __call__(
        self,
        *,
        token_rewards: Tensor,
        action_mask: Tensor,
        scores: Tensor,
        group_ids: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        returns = reward_to_go(token_rewards, action_mask, options.get("gamma", 1.0))
        groups = ScoreGroups.from_batch(scores, action_mask, group_ids)
        if options.get("batch_std"):
            std = _unbiased_std(groups.scores, options.get("all_reduce_sum", identity))
            groups = replace(groups, batch_std=std)
        advantages = self.sequence_fn(groups, **options).to(returns.dtype)  # (N,)
        mask = action_mask.bool()
        rows = returns.new_zeros(len(mask)).masked_scatter(mask.any(dim=1), advantages)  # (B,)
        return torch.where(mask, rows.unsqueeze(1), 0.0), returns


def _unbiased_std(values: Tensor, all_reduce_sum: AllReduceSum) -> Tensor:
    """Return the deviation of the values of all ranks, in two passes; 0 of fewer than two."""
    total, count = all_reduce_sum(torch.stack([values.sum(), torch.ones_like(values).sum()]))
    squares = all_reduce_sum((values - total / count.clamp(min=1)).square().sum())
    return (squares / (count - 1).clamp(min=1)).sqrt()


@torch.no_grad()
def group_normalize(
    advantages: Tensor,
    action_mask: Tensor,
    group_ids: Tensor | None,
    eps: float = 1e-5,
    *,
    min_size: int = 1,
) -> Tensor:
    """x ← (x - μ_G) / (σ_G + eps), with μ_G and σ_G (biased) over the trained tokens of all samples of the group.

    A group whose trained tokens are all equal gets exactly 0.
    Source: ``group_adv_norm`` of AReaL (Fu et al. 2025, arXiv:2505.24298).
    """
    require_same_shape(advantages=advantages, action_mask=action_mask)
    index, count = number_groups(group_ids, action_mask, min_size)
    mask = action_mask.bool()
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], count)  # one value per trained token
    advantages = at_least_float32(advantages)
    tokens = advantages[mask].double()
    ones = torch.ones_like(tokens)
    deviation = groups.deviation(tokens, ones)
    std = (groups.sum(deviation.square()) / groups.sum(ones)).sqrt()
    normalized = deviation / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)  # 0/0 with eps 0
    return torch.zeros_like(advantages).masked_scatter(mask, normalized.to(advantages.dtype))


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
    mask = action_mask.bool()
    width = action_mask.shape[1]
    returns = reward_to_go(token_rewards, action_mask, gamma)
    groups = Groups((index.unsqueeze(1) * width + mask.cumsum(1) - 1)[mask], count * width)
    # On the CPU, because torch refuses cumsum of floats on GPUs under --full_determinism.
    energy = zero_where_masked(score_norms, mask).double().cpu().cumsum(1).to(mask.device)[mask]
    # 0 where all is certain
    advantages = groups.deviation(returns[mask].double(), energy.clamp(min=1e-12))
    return torch.zeros_like(returns).masked_scatter(mask, advantages.to(returns.dtype)), returns


# -- one advantage per sample ----------------------------------------------------------------------------------------


def rloo(groups: ScoreGroups, **_) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740, §2.3): A = s - mean of the others' s = (s - mean_G)·G/(G - 1)."""
    return groups.advantage * groups.size / (groups.size - 1).clamp(min=1)


def group_norm(
    groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_
) -> Tensor:
    """GRPO (arXiv:2402.03300, §4.1.2): A = (s - mean_G) / (std_G + std_eps), or ``dr_grpo`` without ``divide_std``.

    With the deviation of the batch: Liu et al. 2025 (arXiv:2508.08221), "Lite PPO".
    """
    if divide_std:
        return groups.over_std(groups.advantage, std_eps)
    return groups.advantage


def reinforce_baseline(groups: ScoreGroups, **_) -> Tensor:
    """REINFORCE++ with baseline (arXiv:2501.03262v9, §3.2): A = s - mean_G, whitened over the batch later; γ = 1."""
    return groups.advantage


def dr_grpo(groups: ScoreGroups, **_) -> Tensor:
    """Compute A = s - mean_G (arXiv:2503.20783, §3.2): GRPO without the division, which favours prompts whose scores agree.

    The other half of the method is ``--loss_agg_mode seq-mean-token-sum-norm``: divide by a constant, not by lengths.
    """
    return groups.advantage


def opo(groups: ScoreGroups, **_) -> Tensor:
    """OPO (arXiv:2505.23585): A = s - b,  b = Σ_G len·s / Σ_G len, where len counts the trained tokens of a sample.

    b minimises the gradient's variance if an answer's squared gradient norm is proportional to its length.
    """
    return groups.deviation(groups.scores, groups.tokens)


def gpg(groups: ScoreGroups, *, all_reduce_sum: AllReduceSum = identity, **_) -> Tensor:
    """Compute A = α·(s - mean_G),  α = samples / samples with s ≠ 0, both over all ranks; α = 1 if every s is 0.

    α makes up for samples without a signal. Source: Chu et al. 2025 (arXiv:2504.02546), §2.2, which counts groups
    instead: B/(B - M) with M groups of equal scores.
    """
    scores = groups.scores
    counts = torch.stack([torch.ones_like(scores).sum(), scores.count_nonzero().double()])
    samples, nonzero = all_reduce_sum(counts).tolist()
    alpha = samples / nonzero if nonzero else 1.0  # the same on every rank
    return groups.advantage * alpha


def grpo_passk(
    groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_
) -> Tensor:
    """Compute A = (max_G s - max of the other samples' s) / (std_G + std_eps): what a sample adds to the best of the group.

    The best sample gets max - second and all others 0; if several share the maximum, all get 0.
    Source: Tang et al. 2025 (arXiv:2503.19595): A_i = f(y) - f(y without i) with f = max, undivided.
    """
    best = groups.max(groups.scores)
    is_best = groups.scores == best
    only_best = is_best & (groups.sum(is_best.double()) == 1)
    second = groups.max(groups.scores.masked_fill(only_best, -torch.inf))
    advantage = best - torch.where(only_best & (groups.size > 1), second, best)
    if divide_std:
        return groups.over_std(advantage, std_eps)
    return advantage


def cpgd(groups: ScoreGroups, *, std_eps: float = 1e-6, divide_std: bool = True, **_) -> Tensor:
    """Compute A = ω·(s - mean_G),  ω = 1/(std_G + std_eps) or 1 (arXiv:2505.12504, §4.3, eq. 2); for the loss cpgd."""
    return group_norm(groups, std_eps=std_eps, divide_std=divide_std)


# -- several rewards -------------------------------------------------------------------------------------------------


@torch.no_grad()
def gdpo(
    *,
    token_rewards: Tensor,
    action_mask: Tensor,
    scores: Tensor,
    part_scores: Tensor | None = None,
    part_weights: Sequence[float] = (1.0,),
    gamma: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute A = Σ_k w_k · (s_k - mean_G) / (std_G + std_eps): each reward is normalised, then all are added.

    In a sum, rewards of a small spread would disappear beside others, and different mixtures with one sum would be
    alike. Expects the whitening of the batch. Source: Liu et al. 2026 (arXiv:2601.05242), eq. 4 to 6.

    Args:
        part_scores: (B, K), the rewards; ``None``: ``scores`` alone, which is grpo.
        part_weights: w of the K rewards.
    """
    parts = scores.unsqueeze(1) if part_scores is None else part_scores  # (B, K)
    require_same_shape(part_scores=parts[:, 0], rows=action_mask.any(dim=1))
    normalise = OnEveryToken(group_norm)
    advantages = []
    for weight, part in zip(part_weights, parts.unbind(1), strict=True):
        part_advantages, _ = normalise(
            token_rewards=token_rewards, action_mask=action_mask, scores=part, **options
        )
        advantages.append(weight * part_advantages)
    return torch.stack(advantages).sum(0), reward_to_go(token_rewards, action_mask, gamma)


def parts_of_rewards(config: Any) -> Callable[[Sequence[Rollout], Any], dict[str, Any]] | None:
    """Return the function that reads the scores of ``--gdpo_rewards``, with their weights; ``None``: none are named."""
    weights = weights_of_parts(config.algorithm.gdpo_rewards)
    if not weights:
        return None

    def read(rollouts: Sequence[Rollout], device: Any) -> dict[str, Any]:
        rows = [[rollout.extras.get(name) for name in weights] for rollout in rollouts]
        for rollout, row in zip(rollouts, rows):
            if missing := [name for name, score in zip(weights, row) if score is None]:
                names = ", ".join(sorted(rollout.extras)) or "none"
                raise ValueError(
                    f"--gdpo_rewards {missing[0]}: prompt {rollout.prompt.index}, sample {rollout.sample_index} has "
                    f"no such reward; its source gives: {names}"
                )
        scores = torch.tensor(rows, dtype=torch.float64, device=device)
        return {
            "part_scores": scores.reshape(len(rows), len(weights)),  # (B, K)
            "part_weights": tuple(weights.values()),
        }

    return read


# -- entries and functions of the user's -----------------------------------------------------------------------------


def advantage_fn(estimator: EstimatorEntry) -> AdvantageFn:
    """Return the :data:`AdvantageFn` of an entry, whose function is one of tokens or of samples."""
    function = estimator.fn
    if not is_of_lightppo(function):
        if estimator.per_sample:
            problem_of = problem_of_samples
            called_with = "it is called with ScoreGroups and named arguments: take the rest as **_"
        else:
            problem_of = problem_of_tokens
            called_with = (
                "it is called with token_rewards, action_mask and others by name: take the rest as **_. For a function "
                "of ScoreGroups, write @estimator(per_sample=True)"
            )
        function = Checked(function, "--advantage_estimator", problem_of, called_with)
    if estimator.per_sample:
        return OnEveryToken(function)
    return function


def problem_of_tensor(value: Any, shape: tuple[int, ...], what: str, meaning: str) -> str:
    """Return what is wrong with a tensor that a function of the user's gives; empty if nothing."""
    if not isinstance(value, Tensor):
        return f"must return {what}, a tensor of shape {shape}, {meaning}, not {_type_name(value)}"
    if tuple(value.shape) != shape:
        return f"must return {what} of shape {shape}, {meaning}, not {tuple(value.shape)}"
    if not value.is_floating_point():
        return f"must return {what} as floating point numbers, not {value.dtype}"
    return ""


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def problem_of_samples(result: Any, groups: ScoreGroups, **_: Any) -> str:
    """Return what is wrong with the result of an estimator that gives one number per sample; empty if nothing."""
    return problem_of_tensor(result, tuple(groups.scores.shape), "advantages", "one per sample")


def problem_of_tokens(result: Any, *, action_mask: Tensor, **_: Any) -> str:
    """Return what is wrong with the result of an :data:`AdvantageFn`; empty if nothing."""
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, tuple) else _type_name(result)
        return f"must return a pair (advantages, returns), not {got}"
    shape = tuple(action_mask.shape)
    for value, name in zip(result, ("advantages", "returns"), strict=True):
        if problem := problem_of_tensor(value, shape, name, "one number per token"):
            return problem
        if value.requires_grad:
            return f"returns {name} with a gradient: compute them under torch.no_grad()"
    return ""
