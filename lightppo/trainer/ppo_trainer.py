"""PPOTrainer: the PPO loop. Sample, score, make experience, train, sync; log, evaluate, save.

The numerics are in :mod:`lightppo.algorithms`, rollouts and experience in :mod:`lightppo.experience`, everything that
depends on ranks in :mod:`lightppo.strategy`. This file says in which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms.kl import make_kl_controller
from lightppo.config import PPOConfig
from lightppo.config.algorithm_rules import moves_reference
from lightppo.config.micro_batches import micro_batch_spec
from lightppo.data.records import Prompt
from lightppo.errors import ConfigError, RewardError
from lightppo.experience.batching import Minibatch, ReplayBuffer, minibatches, plan_minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.experience.sampler import CollectedStep, OneBatch, PromptSource
from lightppo.models.packing import all_share_prompts
from lightppo.rewards.build import build_reward_source
from lightppo.rewards.source import close_source
from lightppo.rollout.build import build_rollout_engine
from lightppo.rollout.engine import RolloutEngine
from lightppo.strategy.zero3 import parameter_count
from lightppo.trainer import metrics as m
from lightppo.trainer.checkpointing import RunCheckpointer, RunState, TrainerState, state_from_consumed
from lightppo.trainer.collecting import StepCollector
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.options import (
    check_engine,
    check_models,
    constructor_config,
    overlay_args,
    public_options,
)
from lightppo.trainer.prompts import EpisodePrompts, PromptFilter, as_prompts, endless
from lightppo.trainer.recorder import Recorder
from lightppo.trainer.schedule import reached_limits, steps_per_episode
from lightppo.trainer.update import PPOUpdate, build_value_norm


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
        rollout_engine: ``None``: that of ``--rollout_engine``.
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
        config = constructor_config(config, strategy, options, tokenizer)
        check_models(config, critic, initial_model, tokenizer)
        if options.get("gradient_checkpointing"):
            for model in (actor, critic):
                if model is not None:
                    model.gradient_checkpointing_enable()
        self.config = config
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.actor, self.critic, self.initial_model, self.ema_model = actor, critic, initial_model, ema_model
        self.prompts_dataloader: Iterable | None = None

        a, o, t = config.algorithm, config.loss, config.training
        self.kl_ctl = make_kl_controller(a.init_kl_coef, a.kl_target, a.kl_horizon)
        self.value_norm = build_value_norm(o)
        actor_parts, critic_parts = (actor, actor_optim, actor_scheduler), (critic, critic_optim, critic_scheduler)
        self.update = PPOUpdate(
            strategy, *actor_parts, *critic_parts, initial_model, ema_model, a, o, self.kl_ctl, self.value_norm
        )
        self.rollout_engine = rollout_engine or build_rollout_engine(config, strategy, actor, tokenizer)
        check_engine(config, self.rollout_engine)
        self.reward_source = reward_source or build_reward_source(
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            reward_models=_as_list(reward_model),
            device=strategy.device,
            pad_token_id=tokenizer.pad_token_id,
            micro_batch_size=micro_batch_spec(config, "reward"),
            same_count=strategy.same_count,
        )
        self.experience_maker = ExperienceMaker(
            *(actor, critic, initial_model, strategy, self.kl_ctl, config),
            value_norm=self.value_norm,
            exact_rollout_log_probs=getattr(self.rollout_engine, "exact_log_probs", False),
            progress=lambda parts: self._bar(parts, "make experience", leave=False),
        )
        buffer_options = {"device": strategy.device, "pin_memory": config.data.dataloader_pin_memory}
        self.replay_buffer = ReplayBuffer(
            t.micro_train_batch_size, t.buffer_limit, t.buffer_cpu_offload, **buffer_options
        )
        self.timer = m.PhaseTimer()
        self.collector = StepCollector(
            *(config, strategy, self.rollout_engine, self.reward_source, self.experience_maker, self.replay_buffer),
            *(self.update.actor_loss_fn, self.timer),
        )
        self.sampler = self.collector.sampler
        self.prompt_filter = PromptFilter(
            config.sampling.dataset_filter_threshold, config.sampling.dataset_max_filter_percentage, strategy
        )
        self.evaluator = evaluator
        self.state = TrainerState()
        self.run_state = RunState(
            self.kl_ctl, self.experience_maker.shaper, self.value_norm, self.collector.groups, strategy
        )
        saved = {"actor": actor, "critic": critic, "ema": ema_model}
        if moves_reference(config):
            saved["reference"] = initial_model
        self.checkpointer = RunCheckpointer(strategy, config.checkpoint, saved, tokenizer)
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
            limits = reached_limits(self.config, self.state)
            self.strategy.print(
                f"run complete: {self.state.global_step} steps; raise {limits} to go on, or start anew with "
                "--resume never"
            )
        while not self._done():
            prompts, ended = self._episode_prompts(), False
            with self._bar(None, self._episode_name(), total=self._steps_per_episode(0)) as bar:
                while not (ended or self._done()):
                    step, taken = self.state.global_step + 1, prompts.taken
                    with self.timer("step"):
                        collected = self._collect_experience(prompts, step)
                        status = collected.counts | self.ppo_train(step)
                        self.collector.rollout_check.watch(status, step)
                        self.replay_buffer.clear()
                        self._move_reference(step)
                        with self.timer("sync"):
                            self.rollout_engine.sync_weights(self.actor)
                        self.kl_ctl.update(status.get("policy_kl", 0.0), int(status["samples"]))
                    ended = prompts.exhausted and collected.surplus == 0
                    status |= self._finish_step(prompts.taken - taken, ended, collected.prompt_scores)
                    bar.set_postfix(m.short_status(status))
                    bar.update()
                    self.save_logs_and_checkpoints(args, step, bar, status, self.client_state())
        self._end()

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the replay buffer: ``max_epochs`` passes, one optimizer step per ``train_batch_size`` samples.

        Args:
            global_steps: number of this PPO step, from 1; seeds the shuffling.

        Returns:
            means over the optimizer steps, and statistics of the rollout, by the names of
            ``trainer.metric_names.METRICS`` without their namespace; the same on every rank.

        Raises:
            RewardError: there is nothing to train on, although no group was rejected.
        """
        empty = self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0
        if empty and not self.config.sampling.dynamic_sampling:
            raise RewardError(f"step {global_steps}: none of the samples was scored, so there is nothing to train on")
        t, statuses = self.config.training, []
        with self.timer("train"):
            for epoch in range(t.max_epochs):
                plan = minibatches(
                    self.replay_buffer.items,
                    self.strategy,
                    train_batch_size=t.train_batch_size,
                    actor=micro_batch_spec(self.config, "actor_train"),
                    critic=micro_batch_spec(self.config, "critic_train"),
                    packed=t.packing_samples,
                    share_prompts=self._shares_prompts,
                    shuffle=t.shuffle,
                    generator=self._shuffle_generator(global_steps, epoch),
                    collate=self.replay_buffer.collate_fn,
                    **self._plan_options(),
                )
                for minibatch in self._bar(plan, f"Train epoch [{epoch + 1}/{t.max_epochs}]", leave=False):
                    statuses.append(self.train_minibatch(minibatch, global_steps))
        # now that all rows have the log probs of before
        local = m.rollout_summaries(self.replay_buffer.items, self.experience_maker.sampled_kl)
        status = m.mean_status(statuses) | m.rollout_status(m.merge_summaries(self.strategy.all_gather_object(local)))
        return {"samples": 0.0} | status | {"kl_coef": self.kl_ctl.value, "optimizer_steps": float(len(statuses))}

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
            entropy_mask: (B, A), only tokens where it is True have a policy loss; the loss is divided as without it.
        """
        status = self.training_step_actor(experience, entropy_mask) if self._actor_trains(global_steps) else {}
        return status | (self.training_step_critic(experience) if self.critic is not None else {})

    def training_step_actor(self, experience: Experience, entropy_mask: Tensor | None = None) -> dict[str, float]:
        """One optimizer step of the actor on this experience alone; arguments as :meth:`training_step`."""
        if entropy_mask is not None:
            weights = 1.0 if experience.loss_weights is None else experience.loss_weights
            experience = replace(experience, loss_weights=weights * entropy_mask.float())
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
        self.recorder.after_step(global_step, finished, ckpt_path, lambda: self._saved_state(client_states))

    def client_state(self) -> dict[str, Any]:
        """All that a checkpoint holds beside models, optimizers and what is of each rank."""
        more = {"consumed_samples": self.state.global_step * self.config.rollout.rollout_batch_size}
        return self.run_state.of_all_ranks(self.state) | {"config": public_options(self.config)} | more

    def _saved_state(self, client_states: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self.run_state.with_ranks(client_states or self.client_state())

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
        self.state = self.run_state.restore(saved)
        self.update.skipped_steps = self.state.skipped_optimizer_steps
        self.update.stopped_steps = self.state.stopped_optimizer_steps
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

    def _collect_experience(self, prompts: PromptSource | list[Prompt], step: int) -> CollectedStep:
        """Sample, score, select and fill the buffer; with a list of prompts, with these."""
        return self.collector.collect(OneBatch(prompts) if isinstance(prompts, list) else prompts, step)

    def _episode_prompts(self) -> EpisodePrompts:
        """The prompts of the present episode, from where it was left."""
        convert = lambda batch: as_prompts(batch, self.tokenizer, self.config.data.prompt_max_len)  # noqa: E731
        return EpisodePrompts(self.prompts_dataloader, self.state.episode, self.state.consumed_prompts, convert)

    def _move_reference(self, step: int) -> None:
        """The reference follows the actor (``--ref_ema_eta``), or becomes a copy of it (``--ref_reset_steps``)."""
        a = self.config.algorithm
        if a.ref_ema_eta is not None:
            self.strategy.moving_average(self.actor, self.initial_model, 1 - a.ref_ema_eta)
        elif a.ref_reset_steps is not None and step % a.ref_reset_steps == 0:
            self.strategy.moving_average(self.actor, self.initial_model, 0.0)

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
        self.prompt_filter.restore(self.prompts_dataloader, self.state)
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

    def _finish_step(self, taken: int, ends_episode: bool, prompt_scores: Mapping[int, float]) -> dict[str, float]:
        """Bring the state up to date after a step that took so many prompts on this rank; what there is to log."""
        state, update = self.state, self.update
        status = self.prompt_filter.after_step(self.prompts_dataloader, state, prompt_scores, ends_episode)
        state.finish_step(self.strategy.all_reduce(taken, "sum"), ends_episode)
        state.pretrain_batches = update.pretrain_taken
        state.skipped_optimizer_steps, state.stopped_optimizer_steps = update.skipped_steps, update.stopped_steps
        return status

    def _end(self) -> None:
        """Last evaluation, checkpoint and, where the trainer built itself, the model at ``save_path``."""
        c = self.config.checkpoint
        if not self.config.evaluation.val_only:
            self.recorder.finish(self.state.global_step, c.ckpt_path, self._saved_state)
            if self.saves_at_end:
                self.save_model()
        self.recorder.close()
        self.rollout_engine.close()
        if self.saves_at_end:  # a source that a script made is the script's to end
            close_source(self.reward_source)

    def _steps_per_episode(self, update_steps: int) -> int:
        return steps_per_episode(self.config, self.prompts_dataloader, update_steps)

    def _done(self) -> bool:
        return self.config.evaluation.val_only or bool(reached_limits(self.config, self.state))

    def _actor_trains(self, step: int) -> bool:
        return step > self.config.algorithm.freezing_actor_steps

    def _shuffle_generator(self, step: int, epoch: int) -> torch.Generator:
        """Another order in each step, epoch and on each rank; the same after a resume."""
        key = (self.config.strategy.seed, step, epoch, self.strategy.get_rank())
        return torch.Generator().manual_seed(hash(key) & 0x7FFF_FFFF_FFFF_FFFF)

    @property
    def _shares_prompts(self) -> bool:
        """Whether a prompt counts once for all its samples of a micro batch; with a load-balancing loss it does not."""
        models = (self.actor, self.critic, self.initial_model)
        config = self.config
        return config.training.share_prompts and all_share_prompts(models) and config.loss.aux_loss_coef == 0

    def _plan_options(self) -> dict[str, Any]:
        return {"loss_scale": float(self.config.rollout.generate_max_len), "device": self.strategy.device}

    def _bar(self, items: Iterable, desc: str, **options: Any) -> tqdm:
        """A progress bar on rank 0 of a terminal; elsewhere silent."""
        return tqdm(items, desc=desc, disable=None if self.strategy.is_rank_0() else True, **options)

    def _episode_name(self) -> str:
        return f"Episode [{self.state.episode + 1}/{self.config.training.num_episodes}]"


def _as_list(models: Any) -> list:
    return [] if models is None else list(models) if isinstance(models, (list, tuple)) else [models]
