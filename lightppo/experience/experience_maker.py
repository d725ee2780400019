"""ExperienceMaker: scored rollouts → log probs, reference, values → KL → token rewards → advantages and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightppo.algorithms.advantages import get_estimator
from lightppo.algorithms.kl import approx_kl
from lightppo.algorithms.masking import masked_mean
from lightppo.algorithms.reward_shaping import clip_scores, compute_token_rewards
from lightppo.config.sections import AlgorithmConfig
from lightppo.data.records import Rollout
from lightppo.experience.experience import Experience


class Strategy(Protocol):
    """The part of a strategy that making experience needs."""

    device: torch.device

    def same_count(self, count: int) -> int: ...


class KLController(Protocol):
    """Holds the KL coefficient."""

    value: float


class ExperienceMaker:
    """Turns the scored rollouts of one rank into experience.

    Forward passes run in evaluation mode, in micro batches of rows of like length; every rank runs the same number of
    them. Advantages are computed over all rows of the rank at once, since groups may span micro batches.

    Args:
        actor: gives action log probs (B, A).
        critic: gives values (B, A); ``None`` where the estimator needs none.
        initial_model: the reference policy; ``None`` without KL.
        strategy: device and the common count of micro batches.
        kl_ctl: its ``value`` is the KL coefficient of the token rewards.
        algorithm: estimator, discounts, KL options.
        micro_rollout_batch_size: rows per forward pass.
        reward_clip_range: scores are clipped to it.
        progress: wraps the micro batches in a progress bar.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        initial_model: nn.Module | None,
        strategy: Strategy,
        kl_ctl: KLController,
        algorithm: AlgorithmConfig,
        *,
        micro_rollout_batch_size: int = 8,
        reward_clip_range: tuple[float, float] | None = None,
        progress: Callable[[Sequence], Any] = iter,
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.initial_model = initial_model
        self.strategy = strategy
        self.kl_ctl = kl_ctl
        self.algorithm = algorithm
        self.estimator = get_estimator(algorithm.advantage_estimator)
        self.micro_rollout_batch_size = micro_rollout_batch_size
        self.reward_clip_range = reward_clip_range
        self.progress = progress

    @torch.no_grad()
    def make_experience_list(self, rollouts: Sequence[Rollout]) -> list[Experience]:
        """Experience of all rollouts of this rank, in their order, in parts of the micro batch size.

        Args:
            rollouts: scored rollouts; the samples of one prompt are one group. May be empty, on some ranks.

        Raises:
            ValueError: if a rollout has no reward, or a group is smaller than the estimator allows.
        """
        self._check(rollouts)
        batch = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
        batch.to_device(self.strategy.device)
        last_values = self._run_models(batch)
        if not rollouts:
            return []
        self._add_advantages(batch, rollouts, last_values)
        return batch.split(self.micro_rollout_batch_size)

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        sizes: dict[int, int] = {}
        for rollout in rollouts:
            if rollout.reward is None:
                raise ValueError(
                    f"prompt {rollout.prompt.index}, sample {rollout.sample_index} has no reward: "
                    "score the rollouts first"
                )
            sizes[rollout.prompt.index] = sizes.get(rollout.prompt.index, 0) + 1
        needed = self.estimator.min_group_size
        small = next((index for index, size in sizes.items() if size < needed), None)
        if small is not None:
            raise ValueError(
                f"prompt {small} has {sizes[small]} sample, but --advantage_estimator "
                f"{self.algorithm.advantage_estimator} needs at least {needed} per prompt: raise --n_samples_per_prompt"
            )

    def _run_models(self, batch: Experience) -> Tensor:
        """Fill in log probs and values, micro batch by micro batch; returns the value after each response (B,)."""
        shape = batch.action_mask.shape
        zeros = lambda: torch.zeros(shape, dtype=torch.float32, device=batch.sequences.device)  # noqa: E731
        batch.action_log_probs = zeros()
        batch.base_action_log_probs = zeros() if self.initial_model is not None else None
        batch.values = zeros() if self.critic is not None else None
        last_values = torch.zeros(shape[0], device=batch.sequences.device)
        for model in (self.actor, self.critic, self.initial_model):
            if model is not None:
                model.eval()

        order = batch.total_lengths.argsort(descending=True)  # longest first: memory runs out early or never
        parts = list(order.split(self.micro_rollout_batch_size))
        parts += parts[-1:] * (self.strategy.same_count(len(parts)) - len(parts))
        for rows in self.progress(parts):
            part = batch.select(rows)
            a = part.num_actions
            inputs = {"num_actions": a, "attention_mask": part.attention_mask}
            batch.action_log_probs[rows, :a] = self.actor(part.sequences, **inputs).float()
            if self.initial_model is not None:
                batch.base_action_log_probs[rows, :a] = self.initial_model(part.sequences, **inputs).float()
            if self.critic is not None:
                values = self.critic(part.sequences, **inputs, include_last=True).float()  # (b, a + 1)
                batch.values[rows, :a] = values[:, :-1]
                last_values[rows] = values.gather(1, part.response_lengths[:, None]).squeeze(1)
        return last_values

    def _add_advantages(self, batch: Experience, rollouts: Sequence[Rollout], last_values: Tensor) -> None:
        config, device, mask = self.algorithm, self.strategy.device, batch.action_mask
        if batch.base_action_log_probs is not None:
            batch.kl = approx_kl(batch.action_log_probs, batch.base_action_log_probs, config.kl_estimator)  # (B, A)
            batch.kl = batch.kl.masked_fill(~mask, 0.0)

        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=device)  # (B,)
        token_rewards = compute_token_rewards(
            clip_scores(rewards, self.reward_clip_range),
            mask,
            kl=batch.kl if config.use_kl_in_reward else None,
            kl_coef=self.kl_ctl.value if config.use_kl_in_reward else 0.0,
        )  # (B, A)
        truncated = batch.info["truncated"].bool()
        batch.advantages, batch.returns = self.estimator.fn(
            token_rewards=token_rewards,
            action_mask=mask,
            scores=token_rewards.sum(-1),
            values=batch.values,
            bootstrap_values=last_values * truncated if config.bootstrap_truncated else None,
            group_ids=torch.tensor([r.prompt.index for r in rollouts], device=device),
            gamma=config.gamma,
            lambd=config.lambd,
            std_eps=config.grpo_std_eps,
        )
        batch.info["reward"] = rewards
        batch.info["return"] = token_rewards.sum(-1)
        batch.info["kl"] = masked_mean(batch.kl, mask, dim=-1) if batch.kl is not None else torch.zeros_like(rewards)
        for name in sorted({name for r in rollouts for name in r.extras}):
            values = [r.extras.get(name, float("nan")) for r in rollouts]
            batch.info[f"reward/{name}"] = torch.tensor(values, device=device)
