"""StepCollector: prompts → sampled, scored and selected groups → experience in the replay buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.algorithms.losses import PolicyLoss
from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError
from lightppo.experience.batching import ReplayBuffer, balance_ranks, select_tokens
from lightppo.experience.checks import RolloutCheck, RolloutReplay, write_step
from lightppo.experience.maker import ExperienceMaker, ScoreShaper
from lightppo.experience.sampler import (
    CollectedStep,
    GroupCollector,
    GroupFilter,
    PromptSource,
    RolloutSampler,
    seed_of_step,
)
from lightppo.rewards.source import AsyncScorer, RewardSource, check_verifier_status
from lightppo.rollout.engine import RolloutEngine
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.metrics import PhaseTimer
from lightppo.trainer.options import sampling_params


class StepCollector:
    """Makes the experience of one step.

    Args:
        config: resolved.
        strategy: everything over ranks.
        engine: samples.
        reward_source: scores.
        maker: scored rollouts → experience.
        buffer: gets the experience.
        actor_loss: may single out tokens of it.
        timer: of the phases of a step.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        engine: RolloutEngine,
        reward_source: RewardSource,
        maker: ExperienceMaker,
        buffer: ReplayBuffer,
        actor_loss: PolicyLoss,
        timer: PhaseTimer,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.maker = maker
        self.buffer = buffer
        self.actor_loss = actor_loss
        self.timer = timer
        self.engine = engine
        self.rollout_check = RolloutCheck(maker.actor, engine, strategy, config)
        s, traits = config.sampling, ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)
        self.sampler = RolloutSampler(
            engine,
            reward_source,
            sampling_params(config),
            traits.min_group_size,
            greedy_baseline=traits.needs_greedy_baseline,
            dense=config.reward.use_dense_reward,
            group_size=config.rollout.n_samples_per_prompt,
            tie=s.best_of_n_tie,
            scorer=self._scorer(engine, reward_source) if config.verifier.async_rewards else None,
            check=self._verifier_check(reward_source) if config.verifier.check_verifier_status else lambda _: None,
            inspect=self.rollout_check.first,
        )
        replay = None
        if s.skip_rollout is not None:
            replay = RolloutReplay(s.skip_rollout, strategy, reuse=s.skip_rollout_reuse)
        group_filter = None
        if s.dynamic_sampling:
            final = lambda rollouts: final_scores(maker.shaper, rollouts)  # noqa: E731
            group_filter = GroupFilter(s.filter_metric, s.filter_range, final)
        selects = s.dynamic_sampling or s.gen_batch_size > config.rollout.rollout_batch_size
        self.groups = GroupCollector(
            self.sampler,
            strategy,
            groups_per_step=config.rollout.rollout_batch_size if selects else None,
            group_filter=group_filter,
            max_batches=s.max_num_gen_batches if s.dynamic_sampling else 1,
            on_exhausted=s.on_exhausted,
            replay=replay,
            timer=timer,
        )

    def _verifier_check(self, source: RewardSource) -> Callable[[Sequence[Rollout]], None]:
        """``--check_verifier_status``. Collective."""
        minimum = self.config.verifier.reward_minimum
        minimum = getattr(source, "minimum", None) if minimum is None else minimum
        if minimum is None:
            raise ConfigError(
                f"--check_verifier_status: {source.name} does not say its lowest score; set --reward_minimum"
            )
        return partial(
            check_verifier_status,
            minimum=minimum,
            source_name=source.name,
            ranks=self.strategy,
        )

    def _scorer(self, engine: RolloutEngine, source: RewardSource) -> AsyncScorer:
        """``--async_rewards``."""
        if not getattr(engine, "reports_finished", False):
            raise ConfigError("--async_rewards: this rollout engine gives its samples all at once; leave it out")
        try:
            return AsyncScorer(source, timeout=60 * self.config.strategy.dist_timeout)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def collect(self, source: PromptSource, step: int) -> CollectedStep:
        """Sample, score, select, make experience, fill the buffer, normalise advantages. Collective."""
        collected = self.groups.collect(source, step)
        if getattr(self.engine, "keeps_weights", False):
            self.engine.sleep()  # until the next push of weights, or the next rollouts
        if collected.groups > 0:
            with self.timer("experience"):
                self._fill_buffer(collected, step)
        if (folder := self.config.sampling.rollout_data_dir) is not None:
            write_step(folder, step, collected.rollouts, self.strategy)
        for rollout in examples(collected.rollouts, self.config.logging.num_examine):
            self.strategy.print(f"[step {step}] {rollout.prompt.text}{rollout.response_text}  → {rollout.reward}")
        return collected

    def _fill_buffer(self, collected: CollectedStep, step: int) -> None:
        a, t, buffer, rollouts = self.config.algorithm, self.config.training, self.buffer, collected.rollouts
        # Repeated groups are named by their place on this rank.
        if t.balance_ranks and not self.strategy.same_count(len(collected.repeated)):
            prompt_once = t.packing_samples and t.share_prompts and t.shuffle == "groups"
            rollouts = balance_ranks(rollouts, self.strategy, prompt_once=prompt_once)
        buffer.extend(self.maker.make_experience_list(rollouts))
        rows = buffer.items[-len(rollouts) :]
        # Rows, not rollouts: the same advantages once more, not those of a group of twice the size.
        buffer.extend([replace(rows[i]) for i in collected.repeated])
        if a.adv_norm and a.adv_norm_scope == "batch":
            options = {"shift_mean": a.adv_shift_mean, "unbiased": a.adv_std_unbiased, "eps": a.adv_norm_eps}
            buffer.normalize("advantages", self.strategy, a.adv_std_norm, **options)
        if a.advantage_clip is not None:
            for item in buffer.items:
                item.advantages = item.advantages.clamp(-a.advantage_clip, a.advantage_clip)
        select_tokens(buffer.items, self.actor_loss, self.strategy, seed_of_step(self.config.strategy.seed, step))


def examples(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """The first ``count`` rollouts of each data source."""
    shown: Counter[str] = Counter()
    found = []
    for rollout in rollouts:
        shown[rollout.prompt.data_source] += 1
        if shown[rollout.prompt.data_source] <= count:
            found.append(rollout)
    return found


def final_scores(shaper: ScoreShaper, rollouts: Sequence[Rollout]) -> Tensor:
    """What training maximises for each sample, before KL (B,): shaped scores, and the sum of dense rewards."""
    scores = shaper.shape(rollouts)
    if not shaper.config.use_dense_reward:
        return scores
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=scores.device)
    mask = torch.arange(int(lengths.max()), device=scores.device) < lengths[:, None]  # (B, A)
    return scores + shaper.token_scores(rollouts, mask).sum(-1)
