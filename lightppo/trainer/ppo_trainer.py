"""PPOTrainer: the PPO loop. Sample, score, make experience, train, sync; log, evaluate, save.

The numerics are in :mod:`lightppo.algorithms`, rollouts and experience in :mod:`lightppo.experience`, everything that
depends on ranks in :mod:`lightppo.strategy`. This file says in which order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms.kl import make_kl_controller
from lightppo.algorithms.traits import ESTIMATOR_TRAITS
from lightppo.config import PPOConfig
from lightppo.config.fields import ConfigError
from lightppo.data.records import Prompt
from lightppo.experience.batching import Minibatch, minibatches, plan_minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.experience_maker import ExperienceMaker
from lightppo.experience.replay_buffer import ReplayBuffer
from lightppo.experience.sampling import RolloutSampler
from lightppo.rewards.build import build_reward_source
from lightppo.rewards.source import RewardError
from lightppo.rollout.engine import RolloutEngine
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.strategy.zero3 import parameter_count
from lightppo.trainer import metrics as m
from lightppo.trainer.checkpointing import RunCheckpointer
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.options import (
    check_models,
    checked_config,
    config_from_options,
    overlay_args,
    public_options,
    sampling_params,
)
from lightppo.trainer.prompts import as_prompts, endless, start_episode
from lightppo.trainer.recorder import Recorder
from lightppo.trainer.state import TrainerState, state_from_consumed
from lightppo.trainer.update import PPOUpdate


class PPOTrainer:
    """Trains an actor, and a critic where the estimator needs one.

    Two ways in: ``PPOTrainer.from_config(config).fit()`` builds everything; the constructor takes what a script built
    and prepared itself (``strategy.prepare``).

    Args:
        strategy: distribution; its ``args`` are read for options where no ``config`` is given.
        actor: the policy, prepared.
        critic: the value model, prepared; ``None`` where the estimator needs none.
        reward_model: one, a list (then ``reward_fn`` combines their scores), or ``None`` with another source.
        initial_model: the reference policy; ``None`` with ``init_kl_coef`` 0 only.
        ema_model: keeps the moving average of the actor; ``None``: none.
        actor_optim: the actor's optimizer.
        critic_optim: the critic's.
        actor_scheduler: the actor's learning-rate schedule.
        critic_scheduler: the critic's.
        config: options; ``None``: from ``strategy.args`` and ``options``.
        tokenizer: of the actor.
        reward_fn: combines the scores of several reward models, or is the reward function itself.
        remote_rm_url: reward servers or a Python file.
        reward_source: instead of the three above.
        rollout_engine: ``None``: Hugging Face generation by the actor itself.
        evaluator: ``None``: no evaluation.
        **options: the seed's options (``eps_clip``, ``ptx_coef``, …) and generation options (``max_new_tokens``, …).

    Raises:
        ConfigError: on an unknown option, a contradiction, or a missing model.
    """

    def __init__(
        self,
        strategy,
        actor,
        critic,
        reward_model,
        initial_model,
        ema_model,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        *,
        config: PPOConfig | None = None,
        tokenizer=None,
        reward_fn=None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_source=None,
        rollout_engine: RolloutEngine | None = None,
        evaluator: Evaluator | None = None,
        **options: Any,
    ) -> None:
        if config is None:
            config = config_from_options(getattr(strategy, "args", None), options, tokenizer, strategy.world_size)
        elif options:
            raise ConfigError(f"options {sorted(options)} beside config: put them into the config")
        else:
            config = checked_config(config, strategy.world_size)
        check_models(config, critic, initial_model, tokenizer)
        if options.get("max_norm", strategy.max_norm) != strategy.max_norm:
            raise ConfigError(
                f"max_norm {options['max_norm']} is not the strategy's ({strategy.max_norm}): set it there"
            )
        if options.get("gradient_checkpointing"):
            for model in (actor, critic):
                if model is not None:
                    model.gradient_checkpointing_enable()
        self.config = config
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.actor, self.critic, self.initial_model, self.ema_model = actor, critic, initial_model, ema_model
        self.prompts_dataloader: Iterable | None = None

        a, t = config.algorithm, config.training
        self.kl_ctl = make_kl_controller(a.init_kl_coef, a.kl_target, a.kl_horizon)
        self.update = PPOUpdate(
            strategy,
            actor,
            actor_optim,
            actor_scheduler,
            critic,
            critic_optim,
            critic_scheduler,
            ema_model,
            a,
            self.kl_ctl,
        )
        self.rollout_engine = rollout_engine or HFRolloutEngine(
            actor,
            tokenizer,
            micro_rollout_batch_size=config.rollout.micro_rollout_batch_size,
            gather_parameters=lambda: strategy.gathered_parameters(self.actor),
            progress=strategy.is_rank_0() and sys.stderr.isatty(),
        )
        self.reward_source = reward_source or build_reward_source(
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            reward_models=_as_list(reward_model),
            device=strategy.device,
            pad_token_id=tokenizer.pad_token_id,
            micro_batch_size=config.rollout.micro_rollout_batch_size,
            same_count=strategy.same_count,
        )
        traits = ESTIMATOR_TRAITS[a.advantage_estimator]
        self.sampler = RolloutSampler(
            self.rollout_engine, self.reward_source, sampling_params(config), traits.min_group_size
        )
        self.experience_maker = ExperienceMaker(
            actor,
            critic,
            initial_model,
            strategy,
            self.kl_ctl,
            a,
            micro_rollout_batch_size=config.rollout.micro_rollout_batch_size,
            reward_clip_range=config.reward.reward_clip_range,
            progress=lambda parts: self._bar(parts, "make experience", leave=False),
        )
        self.replay_buffer = ReplayBuffer(
            t.micro_train_batch_size,
            t.buffer_limit,
            t.buffer_cpu_offload,
            device=strategy.device,
            pin_memory=config.data.dataloader_pin_memory,
        )
        self.evaluator = evaluator
        self.state = TrainerState()
        self.timer = m.PhaseTimer()
        self.checkpointer = RunCheckpointer(
            strategy, config.checkpoint, {"actor": actor, "critic": critic, "ema": ema_model}, tokenizer
        )
        self.recorder: Recorder | None = None
        self.saves_at_end = False  # a script in the seed's style saves by itself

    @classmethod
    def from_config(cls, config: PPOConfig) -> PPOTrainer:
        """Build strategy, models, data and everything else, and resume if there is something to resume."""
        from lightppo.trainer.build import build_trainer

        return build_trainer(config, cls)

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(
        self,
        args: Any = None,
        prompts_dataloader: Iterable | None = None,
        pretrain_dataloader: Iterable | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """Train until all episodes are done.

        Args:
            args: namespace with the schedule (``num_episodes``, ``save_steps``, …); ``None``: the trainer's config.
            prompts_dataloader: batches of prompts of this rank; ``None``: those of :meth:`from_config`.
            pretrain_dataloader: batches for the PTX loss, endless or not.
            consumed_samples: prompts used before, over all ranks: where a script's own resume starts.
            num_update_steps_per_episodes: optimizer steps per episode, where the dataloader has no length.
        """
        self._begin(args, prompts_dataloader, pretrain_dataloader, consumed_samples, num_update_steps_per_episodes)
        if self._done() and not self.config.evaluation.val_only:
            self.strategy.print(
                f"run complete: {self.state.global_step} steps; raise {self._ended_by()} to go on, or start anew with "
                "--resume never"
            )
        while not self._done():
            episode = start_episode(self.prompts_dataloader, self.state.episode, self.state.consumed_prompts)
            with self._bar(None, self._episode_name(), total=self._steps_per_episode(0)) as bar:
                for batch, is_last in episode:
                    step = self.state.global_step + 1
                    prompts = as_prompts(batch, self.tokenizer, self.config.data.prompt_max_len)
                    with self.timer("step"):
                        left_out = self._collect_experience(prompts, step)
                        status = left_out | self.ppo_train(step)
                        self.replay_buffer.clear()
                        with self.timer("sync"):
                            self.rollout_engine.sync_weights(self.actor)
                        self.kl_ctl.update(status.get("kl", 0.0), int(status["samples"]))
                    self._finish_step(prompts, is_last)
                    bar.set_postfix(m.short_status(status))
                    bar.update()
                    self.save_logs_and_checkpoints(args, step, bar, status, self.client_state())
                    if self._done():
                        break
        self._end()

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the replay buffer: ``max_epochs`` passes, one optimizer step per ``train_batch_size`` samples.

        Args:
            global_steps: number of this PPO step, from 1; seeds the shuffling.

        Returns:
            means over the optimizer steps, and statistics of the rollout, by the names of ``trainer.metrics.METRICS``
            without their namespace; the same on every rank.
        """
        local = m.rollout_summaries(self.replay_buffer.items)
        rollout_status = m.rollout_status(m.merge_summaries(self.strategy.all_gather_object(local)))
        if not rollout_status:
            raise RewardError(f"step {global_steps}: none of the samples was scored, so there is nothing to train on")
        t, statuses = self.config.training, []
        with self.timer("train"):
            for epoch in range(t.max_epochs):
                plan = minibatches(
                    self.replay_buffer.items,
                    self.strategy,
                    train_batch_size=t.train_batch_size,
                    micro_batch_size=t.micro_train_batch_size,
                    generator=self._shuffle_generator(global_steps, epoch),
                    collate=self.replay_buffer.collate_fn,
                    **self._plan_options(),
                )
                for minibatch in self._bar(plan, f"Train epoch [{epoch + 1}/{t.max_epochs}]", leave=False):
                    statuses.append(self.train_minibatch(minibatch, global_steps))
        status = m.mean_status(statuses) | rollout_status
        return status | {"kl_coef": self.kl_ctl.value, "optimizer_steps": float(len(statuses))}

    def train_minibatch(self, minibatch: Minibatch, global_steps: int = 0) -> dict[str, float]:
        """One optimizer step of actor and critic; the same status on every rank."""
        status = self.update.train_actor(minibatch) if self._actor_trains(global_steps) else {}
        return status | (self.update.train_critic(minibatch) if self.critic is not None else {})

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: Tensor | None = None
    ) -> dict[str, float]:
        """One optimizer step of actor and critic on this experience alone.

        Args:
            experience: this rank's samples.
            global_steps: number of the PPO step; up to ``freezing_actor_steps`` only the critic is trained.
            entropy_mask: (B, A), the actor trains only where it is True.
        """
        status = self.training_step_actor(experience, entropy_mask) if self._actor_trains(global_steps) else {}
        return status | (self.training_step_critic(experience) if self.critic is not None else {})

    def training_step_actor(self, experience: Experience, entropy_mask: Tensor | None = None) -> dict[str, float]:
        """One optimizer step of the actor on this experience alone; arguments as :meth:`training_step`."""
        if entropy_mask is not None:
            experience = replace(experience, action_mask=experience.action_mask & entropy_mask.bool())
        return self.update.train_actor(plan_minibatch([experience], self.strategy, **self._plan_options()))

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """One optimizer step of the critic on this experience alone."""
        return self.update.train_critic(plan_minibatch([experience], self.strategy, **self._plan_options()))

    # -- records and state ---------------------------------------------------------------------------------------

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] | None = None,
        client_states: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a finished step; evaluate, checkpoint and export if due.

        Args:
            args: namespace with ``ckpt_path``; ``None``: the trainer's config.
            global_step: the step, from 1.
            step_bar: progress bar of the episode; not used, in the signature for scripts in the seed's style.
            logs_dict: status of the step.
            client_states: goes into the checkpoint; ``None``: the trainer's own state.
        """
        self.recorder = self.recorder or self._new_recorder()  # a loop of the user's own may come without fit()
        finished = self.state.episode if self.state.consumed_prompts == 0 else None
        ckpt_path = getattr(args, "ckpt_path", None) or self.config.checkpoint.ckpt_path
        perf = m.perf_metrics(
            self.timer.reset(),
            logs_dict or {},
            epochs=self.config.training.max_epochs,
            world_size=self.strategy.world_size,
            parameters=sum(parameter_count(model) for model in (self.actor, self.critic) if model is not None),
            peak_tflops=self.config.logging.peak_tflops,
        )
        self.recorder.log(global_step, logs_dict or {}, perf)
        self.recorder.after_step(global_step, finished, ckpt_path, lambda: client_states or self.client_state())

    def client_state(self) -> dict[str, Any]:
        """All that a checkpoint holds beside models and optimizers."""
        return {
            "trainer": self.state.state_dict(),
            "kl_ctl": self.kl_ctl.state_dict(),
            "config": public_options(self.config),
            "consumed_samples": self.state.global_step * self.config.rollout.rollout_batch_size,
        }

    def resume(self) -> bool:
        """Go on from the last checkpoint that ``--resume`` allows. Collective.

        Returns:
            whether there was one.

        Raises:
            ConfigError: if options that must stay as they were have changed.
            CheckpointError: if the checkpoint does not fit this run.
        """
        saved = self.checkpointer.resume(public_options(self.config))
        if saved is None:
            return False
        self.state = TrainerState.from_dict(saved["trainer"])
        self.update.skipped_steps = self.state.skipped_optimizer_steps
        self.kl_ctl.load_state_dict(saved["kl_ctl"])
        self.rollout_engine.sync_weights(self.actor)
        return True

    def save_model(self, path: str | Path | None = None) -> None:
        """Save the actor (its moving average where there is one) for transformers, and the critic if asked for."""
        path = Path(path or self.config.checkpoint.save_path)
        model = self.ema_model if self.ema_model is not None else self.actor
        self.strategy.save_model(model, self.tokenizer, path)
        if self.config.checkpoint.save_value_network:
            self.strategy.save_model(self.critic, self.tokenizer, path.with_name(f"{path.name}_critic"))

    # -- parts of the loop ---------------------------------------------------------------------------------------

    def _collect_experience(self, prompts: list[Prompt], step: int) -> dict[str, int]:
        """Sample, score, make experience, fill the buffer, normalise advantages; counts what was left out."""
        a = self.config.algorithm
        with self.timer("rollout"):
            rollouts = self.sampler.generate(prompts, step)
        with self.timer("reward"):
            batch = self.sampler.score(rollouts)
        with self.timer("experience"):
            self.replay_buffer.extend(self.experience_maker.make_experience_list(batch.rollouts))
            if a.adv_norm:
                self.replay_buffer.normalize("advantages", self.strategy, a.adv_std_norm)
            if a.advantage_clip is not None:
                for item in self.replay_buffer.items:
                    item.advantages = item.advantages.clamp(-a.advantage_clip, a.advantage_clip)
        for rollout in rollouts[: self.config.logging.num_examine]:
            self.strategy.print(f"[step {step}] {rollout.prompt.text}{rollout.response_text}  → {rollout.reward}")
        return self.strategy.all_reduce(batch.left_out, "sum")

    def _begin(
        self, args: Any, prompts: Iterable | None, pretrain: Iterable | None, consumed_samples: int, update_steps: int
    ) -> None:
        if args is not None:
            self.config = overlay_args(self.config, args)
            self.checkpointer.config = self.config.checkpoint
        self.prompts_dataloader = prompts if prompts is not None else self.prompts_dataloader
        if self.prompts_dataloader is None:
            raise ConfigError("fit() needs a prompts_dataloader, unless the trainer was made by from_config()")
        if pretrain is not None:
            self.update.pretrain_batches = endless(pretrain)
        if self.update.pretrain_batches is not None:
            for _ in range(self.state.pretrain_batches):  # resume where the pretraining data was left
                next(self.update.pretrain_batches)
            self.update.pretrain_taken = self.state.pretrain_batches
        if consumed_samples and self.state.global_step == 0:
            self.state = state_from_consumed(
                consumed_samples, self._steps_per_episode(update_steps), self.config.rollout.rollout_batch_size
            )
        self.recorder = self._new_recorder()
        e = self.config.evaluation
        if e.val_only or (self.state.global_step == 0 and e.val_before_train):
            self.recorder.evaluate(self.state.global_step)

    def _new_recorder(self) -> Recorder:
        recorder = Recorder(
            self.config,
            self.strategy,
            self.checkpointer,
            self.evaluator,
            start_step=self.state.global_step,
            run_id=self.state.run_id,
        )
        self.state.run_id = recorder.run_id
        return recorder

    def _finish_step(self, prompts: list[Prompt], is_last: bool) -> None:
        """Bring the state up to date; on all ranks alike."""
        state = self.state
        state.finish_step(self.strategy.all_reduce(len(prompts), "sum"), is_last)
        state.pretrain_batches, state.skipped_optimizer_steps = self.update.pretrain_taken, self.update.skipped_steps

    def _end(self) -> None:
        """Last evaluation, checkpoint and, where the trainer built itself, the model at ``save_path``."""
        c = self.config.checkpoint
        if not self.config.evaluation.val_only:
            self.recorder.finish(self.state.global_step, c.ckpt_path, self.client_state)
            if self.saves_at_end:
                self.save_model()
        self.recorder.close()
        self.rollout_engine.close()

    def _steps_per_episode(self, update_steps: int) -> int:
        """PPO steps per episode: the dataloader's length, or what the number of optimizer steps comes to."""
        if hasattr(self.prompts_dataloader, "__len__"):
            return len(self.prompts_dataloader)
        r, t = self.config.rollout, self.config.training
        samples = r.rollout_batch_size * r.n_samples_per_prompt
        return max(1, update_steps * t.train_batch_size // t.max_epochs // samples)

    def _done(self) -> bool:
        return self.config.evaluation.val_only or bool(self._ended_by())

    def _ended_by(self) -> str:
        """The limits that are reached, as flags."""
        t, state = self.config.training, self.state
        limits = {
            "num_episodes": (state.episode, t.num_episodes),
            "total_training_steps": (state.global_step, t.total_training_steps),
            "benchmark_steps": (state.global_step, t.benchmark_steps),
        }
        return ", ".join(f"--{name} {n}" for name, (done, n) in limits.items() if n is not None and done >= n)

    def _actor_trains(self, step: int) -> bool:
        return step > self.config.algorithm.freezing_actor_steps

    def _shuffle_generator(self, step: int, epoch: int) -> torch.Generator:
        """Another order in each step, epoch and on each rank; the same after a resume."""
        key = (self.config.strategy.seed, step, epoch, self.strategy.get_rank())
        return torch.Generator().manual_seed(hash(key) & 0x7FFF_FFFF_FFFF_FFFF)

    def _plan_options(self) -> dict[str, Any]:
        return {"loss_scale": float(self.config.rollout.generate_max_len), "device": self.strategy.device}

    def _bar(self, items: Iterable, desc: str, **options: Any) -> tqdm:
        """A progress bar on rank 0 of a terminal; elsewhere silent."""
        return tqdm(items, desc=desc, disable=None if self.strategy.is_rank_0() else True, **options)

    def _episode_name(self) -> str:
        return f"Episode [{self.state.episode + 1}/{self.config.training.num_episodes}]"


def _as_list(models: Any) -> list:
    return [] if models is None else list(models) if isinstance(models, (list, tuple)) else [models]
