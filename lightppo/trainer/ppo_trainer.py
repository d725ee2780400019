"""PPOTrainer: the PPO loop. ``fit`` is the schedule; docs/dataflow.md follows the data through its numbered stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms.kl import make_kl_controller
from lightppo.algorithms.losses import GPTLMLoss, ValueLoss
from lightppo.config import PPOConfig
from lightppo.config.rules import (
    estimator_entry,
    idle_flags,
    micro_batch_spec,
    moves_reference,
    needs_critic,
    needs_reference,
    needs_teacher,
    of_role,
    old_log_probs_from,
    token_weights,
)
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, NonFiniteError, RewardError
from lightppo.experience.batching import Minibatch, ReplayBuffer, StepPart, lone_part, minibatches, save_batch
from lightppo.experience.checks import RolloutCheck
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.experience.sampler import CollectedStep, dealt_out
from lightppo.models.packing import all_share_prompts, on_cpu
from lightppo.plugins.checks.places import SAMPLES
from lightppo.plugins.checks.rehearsal import after_step
from lightppo.plugins.compat.seed import (
    SeedAttributes,
    check_actor,
    constructor_config,
    generation_options,
    of_whole_step,
    script_args,
    take_schedule,
    with_generation,
)
from lightppo.plugins.ops import signals
from lightppo.plugins.ops.ending import SkippedSteps, check_trained, dry_run_cost, is_saved, stop_together
from lightppo.plugins.ops.storage import local_folder
from lightppo.plugins.records.alarms import Alarms
from lightppo.plugins.records.recorder import Recorder
from lightppo.plugins.records.run_folder import (
    content_of,
    public_options,
    record_start,
    release,
    save_run_config,
    set_records_aside,
    upload_records,
)
from lightppo.plugins.records.samples import SampleRecord, examined, with_overlong, write_step
from lightppo.ranks import heartbeat
from lightppo.rewards.registry import build_reward_source
from lightppo.rewards.source import NoReward, RewardSource, close_source
from lightppo.rollout.engine import RolloutEngine, capabilities_of
from lightppo.strategy.checkpoint import rng_state
from lightppo.strategy.zero3 import parameter_count
from lightppo.trainer import metrics as m
from lightppo.trainer import update
from lightppo.trainer.build import (
    Run,
    build,
    build_evaluator,
    build_rollout_engine,
    build_sampler,
    ending,
    sampling_params,
    saved_parts,
    steps_per_episode,
)
from lightppo.trainer.checkpointing import RunCheckpointer, TrainerState
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.prompts import EpisodePrompts, PromptFilter, as_lm_batch, as_prompts, endless

_TRAINING_METHODS = ("ppo_train", "training_step", "training_step_actor", "training_step_critic")


class PPOTrainer(SeedAttributes):
    """Trains an actor, and a critic where the estimator needs one.

    Two ways in: ``PPOTrainer.from_config(config).fit()`` builds everything; the constructor takes what a script built
    and prepared itself (``strategy.prepare``). ``fit`` calls ``ppo_train``, ``training_step``, ``training_step_actor``,
    ``training_step_critic`` and ``save_logs_and_checkpoints``: a subclass may override each.

    Args:
        strategy: its ``args`` are read for options where no ``config`` is given.
        critic: ``None`` where the estimator needs none.
        reward_model: one, a list (then ``reward_fn`` combines their scores), or ``None`` with another source.
        initial_model: the reference; ``None`` with ``init_kl_coef`` 0 only.
        teacher: judges the actor's samples: a frozen :class:`Actor`, of which ``config`` says ``teacher_pretrain``.
        ema_model: gets the moving average of the actor; or ``None``.
        reward_fn: combines the scores of several reward models, or is the reward function itself.
        remote_rm_url: reward servers or a Python file.
        reward_source: instead of the three above.
        rollout_engine: ``None``: the engine that ``--rollout_engine`` names.
        prompts_dataloader, pretrain_dataloader: as for :meth:`fit`, which may bring others.
        evaluator: in place of one made from ``eval_prompts``, the held-out prompts.
        **options: the seed's options (``eps_clip``, ``ptx_coef``, …) and generation options (``max_new_tokens``, …).
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
        teacher=None,
        reward_fn=None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_source=None,
        rollout_engine: RolloutEngine | None = None,
        prompts_dataloader: Iterable | None = None,
        pretrain_dataloader: Iterable | None = None,
        eval_prompts=None,
        evaluator: Evaluator | None = None,
        **options: Any,
    ) -> None:
        config = constructor_config(config, strategy, options, tokenizer)
        _check_models(config, actor, critic, initial_model, tokenizer, teacher)
        for model in (actor, critic) if options.get("gradient_checkpointing") else ():
            if model is not None:
                model.gradient_checkpointing_enable()
        self.config, self.strategy, self.tokenizer = config, strategy, tokenizer
        self.args, self.generate_kwargs = script_args(strategy, config), generation_options(options)
        self.actor, self.critic, self.initial_model, self.ema_model = actor, critic, initial_model, ema_model
        self.teacher = teacher
        self.actor_optim, self.actor_scheduler = actor_optim, actor_scheduler
        self.critic_optim, self.critic_scheduler = critic_optim, critic_scheduler
        self.reward_model, self.reward_fn, self.remote_rm_url = reward_model, reward_fn, remote_rm_url
        self._make_losses()
        self.rollout_engine = rollout_engine or build_rollout_engine(config, strategy, actor, tokenizer)
        self.reward_source = reward_source or self._make_reward_source()
        self._make_rollout_parts()
        self.evaluator = evaluator
        if eval_prompts is not None:
            parts = (self.rollout_engine, self.reward_source, eval_prompts, strategy)
            self.evaluator = build_evaluator(config, *parts)
        self.prompts_dataloader = prompts_dataloader
        self.pretrain_dataloader = None if pretrain_dataloader is None else endless(pretrain_dataloader)
        self.state = TrainerState()
        saved = saved_parts(config, actor, critic, ema_model, initial_model)
        self.checkpointer = RunCheckpointer(strategy, config.checkpoint, saved, tokenizer)
        self.recorder: Recorder | None = None
        self.alarms = Alarms(len(tokenizer))
        self.total_steps: int | None = None  # of the run, known in fit
        self.update_steps = 0  # optimizer steps per episode, where the dataloader has no length
        self.stop_signal = 0  # that all ranks stop for, after the step
        self.owns_parts = False  # a script in the seed's style saves and closes by itself
        self.content: dict[str, str] = {}  # marks of what options name, where the trainer built itself
        self._accumulate_alone()
        self._accept_seed_calls("fit", *_TRAINING_METHODS)

    def _make_losses(self) -> None:
        """What the update calls."""
        a, o, t = self.config.algorithm, self.config.loss, self.config.training
        self.max_epochs, self.freezing_actor_steps = t.max_epochs, a.freezing_actor_steps
        critic_epochs = of_role(self.config, "critic").max_epochs
        self.critic_max_epochs = 0 if self.critic is None else critic_epochs or self.max_epochs
        self.epoch = 0  # the pass over the rollout that is under way
        self.ema_beta, self.ptx_coef = a.ema_beta, a.ptx_coef
        value_loss = ValueLoss(o.value_clip, loss_agg_mode=o.loss_agg_mode, huber_delta=o.value_huber_delta)
        horizon = float(self.config.rollout.generate_max_len)
        self.actor_loss_fn = of_whole_step(update.build_policy_loss(self.config), horizon)
        self.critic_loss_fn = of_whole_step(value_loss, horizon)
        self.token_weights = list(token_weights(self.config, in_training=True).values())
        self.ptx_loss_fn = GPTLMLoss()
        self.kl_ctl = make_kl_controller(a.init_kl_coef, a.kl_target, a.kl_horizon)
        self.value_norm = update.build_value_norm(o)
        self.early_stop = update.EarlyStop(o, self.strategy)
        self.on_policy: dict[str, m.Summary] = {}  # of log probs that only the training pass has made
        self.unread: list[tuple[Experience, Tensor]] = []  # those of an optimizer step
        self.waits = True  # training_step returns numbers, not tensors on a GPU
        folder, again = self.config.checkpoint.save_path, "lightppo replay {folder} --step {step} --batch {batch}"
        self.skipped = SkippedSteps(
            *(self.strategy, t.max_skipped_steps, folder, self._write_batch), f"To run the batch again: {again}"
        )

    def _make_reward_source(self) -> RewardSource:
        """Of the constructor's reward models, function or servers."""
        models, strategy = self.reward_model, self.strategy
        if estimator_entry(self.config).of_teacher and not (models or self.reward_fn or self.remote_rm_url):
            return NoReward()
        options = {"device": strategy.device, "pad_token_id": self.tokenizer.pad_token_id, "ranks": strategy}
        return build_reward_source(
            remote_rm_url=self.remote_rm_url,
            reward_fn=self.reward_fn,
            reward_models=[] if models is None else list(models) if isinstance(models, (list, tuple)) else [models],
            remote_options={"ranks": strategy},
            model_options=options | {"micro_batch_size": micro_batch_spec(self.config, "reward")},
        )

    def _make_rollout_parts(self) -> None:
        """Everything between prompts and the replay buffer, around engine and reward source."""
        config, strategy, t, s = self.config, self.strategy, self.config.training, self.config.sampling
        self.timer = m.PhaseTimer()
        self.experience_maker = ExperienceMaker(
            *(self.actor, self.critic, self.initial_model, strategy, self.kl_ctl, config),
            teacher=self.teacher,
            rewarded=not isinstance(self.reward_source, NoReward),
            value_norm=self.value_norm,
            old_log_probs=self._old_log_probs(),
            sample=self._sample_texts,
            progress=lambda parts: self._bar(parts, "experience", leave=False),
            timer=self.timer,
        )
        place = {"device": strategy.device, "pin_memory": config.data.dataloader_pin_memory}
        self.replay_buffer = ReplayBuffer(t.micro_train_batch_size, t.buffer_limit, t.buffer_cpu_offload, **place)
        self.rollout_check = RolloutCheck(self.actor, self.rollout_engine, strategy, config)
        self.sampler = build_sampler(
            *(config, strategy, self.rollout_engine, self.reward_source, self.experience_maker, self.rollout_check),
            self.timer,
        )
        self.samples = SampleRecord(
            *(local_folder(config.checkpoint.save_path) / SAMPLES, s.record_samples),
            *(config.rollout.n_samples_per_prompt, strategy, self.tokenizer.decode, self.experience_maker.sampled_kl),
        )
        self.prompt_filter = PromptFilter(s.dataset_filter_threshold, s.dataset_max_filter_percentage, strategy)

    @classmethod
    def from_config(cls, config: PPOConfig) -> Self:
        """Build strategy, models, data and everything else, and resume if there is something to resume. Collective."""
        run = build(config)
        trainer = cls.from_run(run)
        trainer.resume()
        if trainer.is_complete():
            return trainer  # and its folder stays as it is
        trainer.set_aside()  # only now: a refused resume leaves the run's own files in place
        save_run_config(run.config if config.training.dry_run else config, run.strategy)
        total = None if run.prompts_dataloader is None else trainer._count_steps()
        record_start(run.config, run.strategy, trainer.state.global_step, trainer.content, total)
        return trainer

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """A trainer that ends the parts that ``build`` made, at its start. Collective."""
        trainer = cls(**vars(run))
        trainer.owns_parts = True
        loaders = {"prompt_data": run.prompts_dataloader, "pretrain_data": run.pretrain_dataloader}
        rows = {name: loader.dataset.dataset for name, loader in loaders.items() if loader is not None}
        trainer.content = content_of(run.config, rows, run.strategy)
        return trainer

    def is_complete(self) -> bool:
        """Whether the run has come to its end and its model is there, whole: nothing is left to do. Collective."""
        c, step = self.config.checkpoint, self.state.global_step
        if not self.owns_parts or step == 0 or self.config.evaluation.val_only or not self._reached_limits():
            return False
        critic = [f"{c.save_path.rstrip('/')}_critic"] if c.save_value_network else []
        return is_saved(self.strategy, [c.save_path, *critic], step)

    def set_aside(self) -> None:
        """Keep what an earlier run recorded apart, unless this one goes on with it. Collective."""
        if self.state.global_step == 0:
            folder = self.config.checkpoint.save_path
            self.strategy.on_rank_0(lambda: set_records_aside(self.config), f"keep apart what is in {folder}")

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
            prompts_dataloader: batches of prompts of this rank; ``None``: the constructor's.
            pretrain_dataloader: batches for the PTX loss, endless or not.
            consumed_samples: prompts used before, over all ranks: where a script's own resume starts.
            num_update_steps_per_episodes: optimizer steps per episode, where the dataloader has no length.
        """
        if self.is_complete():
            self._tell_complete()
            return self.close()
        self._begin(args, prompts_dataloader, pretrain_dataloader, consumed_samples, num_update_steps_per_episodes)
        if args is None and self._overrides("save_logs_and_checkpoints", "_save_checkpoint"):
            args = self._script_args()
        with signals.safe_points(self.config.checkpoint.signal_grace):
            for step, prompts, bar in self._steps():
                taken = prompts.taken
                with self.timer("step"), self.profiler(step):
                    collected = self.sampler.collect(prompts, step)  # 1 prompts → responses, scored and selected
                    self.make_experience(collected, step)  # 2 log probs, values, rewards → 3 advantages in the buffer
                    status = collected.counts | self._train_on_buffer(step)  # 4 → training_step per micro batch
                    self.samples.write(step)
                    self.replay_buffer.clear()
                    self.move_reference(step)
                    with self.timer("sync"):
                        self.rollout_engine.sync_weights(self.actor)  # 5 the next rollouts are on-policy
                    kl, samples = self._measured_kl(status)
                    if not math.isnan(kl):  # a token is trained, so there is a KL
                        self.kl_ctl.update(kl, samples)  # 6
                status |= self._finish_step(prompts, taken, collected)
                bar.update()
                self.save_logs_and_checkpoints(args, step, bar, status, self.client_state())  # 7
                self.skipped.check(self.state, step)
                self._stop_if_asked(args, step)
            self._end(args)

    def make_experience(self, collected: CollectedStep, step: int) -> None:
        """Fill the replay buffer with the step's rollouts; advantages are whitened over all ranks. Collective."""
        if collected.not_finite is not None:
            batch = Experience.from_rollouts(collected.rollouts) if collected.rollouts else Experience.placeholder()
            batch.info["reward"] = torch.tensor([r.reward for r in collected.rollouts])
            self._leave_out(step, NonFiniteError(collected.not_finite, batch))
        elif collected.groups > 0:
            with self.timer("experience"):
                try:
                    experience = self.experience_maker.make_experience_list(collected.rollouts)
                    self.replay_buffer.fill(experience, collected.repeated)
                    self.experience_maker.normalize(self.replay_buffer, self.actor_loss_fn, step)
                except NonFiniteError as error:
                    self._leave_out(step, error)
        self._record_samples(collected, step)

    def _record_samples(self, collected: CollectedStep, step: int) -> None:
        """The step's samples for files and people. Collective."""
        r = self.config.reward
        max_len = self.config.rollout.generate_max_len
        rollouts = with_overlong(collected.rollouts, max_len, r.overlong_buffer_len, r.overlong_penalty_factor)
        self.samples.pick(step, rollouts, self.replay_buffer.items, len(collected.repeated))
        if (folder := self.config.sampling.rollout_data_dir) is not None:
            write_step(folder, step, rollouts, self.strategy)
        shown: Counter[str] = Counter()
        for rollout in rollouts:
            shown[source := rollout.prompt.data_source] += 1
            if shown[source] <= self.config.logging.num_examine:
                self.strategy.print(f"[step {step}] {examined(rollout)}")

    def _train_on_buffer(self, step: int) -> dict[str, float]:
        """A subclass's ``ppo_train`` as well runs only where there is something to train on."""
        if self._overrides("ppo_train") and self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0:
            return PPOTrainer.ppo_train(self, step)
        return self.ppo_train(step)

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the replay buffer: ``max_epochs`` passes, one optimizer step per ``train_batch_size`` samples.

        Returns the means over the optimizer steps, and statistics of the rollout, by the names of
        ``trainer.metrics.METRICS`` without their namespace; the same on every rank. ``global_steps``, the number of
        this PPO step, seeds the shuffling.
        """
        empty = self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0
        if empty and not self.config.sampling.dynamic_sampling and self.skipped.batch is None:
            raise RewardError(f"step {global_steps}: none of the samples was scored, so there is nothing to train on")
        rollout = m.rollout_summaries(self.replay_buffer.items, self.experience_maker.sampled_kl)
        self.on_policy, steps = {}, []
        with self.timer("train"):
            epochs = max(self.max_epochs, self.critic_max_epochs)
            for epoch in range(epochs):
                self.epoch = epoch
                plan = self._minibatches(global_steps, epoch)
                for minibatch in self._bar(plan, f"train, epoch {epoch + 1}/{epochs}", leave=False):
                    steps.append(self.train_minibatch(minibatch, global_steps))
        self.epoch = 0
        self._accumulate_alone()
        rollout = m.merge_summaries([rollout, self.on_policy])
        status = m.optimizer_status(steps, self.strategy)  # the means of the rollout take the place of the seed's
        status = {name: value for name, value in status.items() if name not in m.SEED_INFO}
        status |= m.rollout_status(m.merge_summaries(self.strategy.all_gather_object(rollout)))
        self.skipped.end_step(self.state)
        if not steps:
            status |= {f"{name}_skipped": 1.0 for name in self.skipped.of_model}
        return {"samples": 0.0} | status | {"kl_coef": self.kl_ctl.value, "optimizer_steps": float(len(steps))}

    def train_minibatch(self, minibatch: Minibatch, global_steps: int = 0) -> list[Mapping[str, float]]:
        """One optimizer step of actor and critic; what ``training_step`` says of each micro batch with samples."""
        micro_batches = self._with_pretrain(minibatch.micro_batches)
        of_critic = micro_batches if minibatch.critic_micro_batches is None else minibatch.critic_micro_batches
        self.skipped.begin(minibatch)
        # numbers are read at the end of the step, so that no micro batch waits for a GPU, unless an override reads them
        self.waits = self._overrides(*_TRAINING_METHODS)
        self.strategy.accumulate(self.actor, len(micro_batches))
        self.strategy.accumulate(self.critic, len(of_critic))
        if self.critic is None or of_critic is micro_batches:
            done = [(e, self.training_step(e, global_steps)) for e in self._shared(micro_batches)]
        else:
            with self.timer("actor_update"):
                actors = self._shared(micro_batches if self._actor_trains(global_steps) else ())
                done = [(e, self.training_step_actor(e)) for e in actors]
            with self.timer("critic_update"):
                critics = self._shared(of_critic if self._critic_trains() else ())
                done += [(e, self.training_step_critic(e)) for e in critics]
        self.waits = True
        statuses = [(experience.part.has_samples, m.checked_status(status)) for experience, status in done]
        self._summarise()
        # A placeholder says nothing but the PTX loss of its own batch.
        return [s if real else {n: v for n, v in s.items() if n == "ptx_loss"} for real, s in statuses]

    def _shared(self, micro_batches: Iterable[Experience]) -> Iterable[Experience]:
        """The micro batches of a step, as an override needs them if there is one."""
        return self._for_overrides(micro_batches) if self.waits else micro_batches

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: Tensor | None = None
    ) -> dict[str, float]:
        """One micro batch of actor and critic; its numbers, whose mean ``fit`` logs whatever their names. Collective.

        Gradients add up; at the last micro batch of ``train_batch_size`` samples the optimizers step. In ``fit`` a
        micro batch weighs by its share of the step's tokens, in a loop of a script's own all weigh the same. Only
        tokens where ``entropy_mask`` (B, A) is True have a policy loss, which is divided as without it.
        """
        status: dict[str, float] = {}
        if self._actor_trains(global_steps):
            masked = {} if entropy_mask is None else {"entropy_mask": entropy_mask}
            with self.timer("actor_update"):
                status |= self.training_step_actor(experience, **masked)
        if self._critic_trains():
            with self.timer("critic_update"):
                status = self.training_step_critic(experience) | status  # the actor's pass may know more of the KL
        return status

    def training_step_actor(self, experience: Experience, entropy_mask: Tensor | None = None) -> dict[str, float]:
        """One micro batch of the actor; see :meth:`training_step`."""
        if entropy_mask is not None:
            weights = 1.0 if experience.loss_weights is None else experience.loss_weights
            experience = replace(experience, loss_weights=weights * entropy_mask.float())
        part = experience.part or self._lone_part(experience, self.pretrain_dataloader)
        self.actor.train()
        loss, metrics, log_probs, entropy = update.actor_loss(
            *(self.actor, experience, part.normalizer),
            loss_fn=self.policy_loss,
            config=self.config,
            kl_coef=self.kl_ctl.value,
            reference=self.initial_model,
            teacher=self.teacher,
            token_weights=self.token_weights,
        )
        self._backward(loss * part.loss_scale, self.actor, self.actor_optim)
        self.early_stop.add(metrics)
        self.samples.observe(experience, log_probs, entropy)
        if experience.action_log_probs is None and part.has_samples:
            self.unread.append((experience, log_probs))
            if experience.part is None:  # nobody else gives a loop of the script's own the KL
                experience = self.experience_maker.with_kl(experience, log_probs)
        status = m.micro_batch_status(metrics, experience, part.status_scale)
        if part.pretrain is not None:
            batch, tokens, batches = part.pretrain
            ptx = update.pretrain_loss(self.actor, batch, self.pretrain_loss, tokens, self.strategy.world_size)
            self._backward(self.ptx_coef * part.loss_scale * ptx, self.actor, self.actor_optim)
            status["ptx_loss"] = ptx.detach().double() * batches
        return self._of_micro_batch(self._read(status | self._actor_step()), experience)

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """One micro batch of the critic; see :meth:`training_step`."""
        part = experience.part or self._lone_part(experience)
        self.critic.train()
        parts = (self.value_loss, self.value_norm)
        loss, metrics = update.critic_loss(self.critic, experience, part.normalizer, *parts)
        self._backward(loss * part.loss_scale, self.critic, self.critic_optim)
        status = m.micro_batch_status(metrics, experience, part.status_scale)
        status |= self._optimizer_step("critic", self.critic, self.critic_optim, self.critic_scheduler)
        return self._of_micro_batch(self._read(status), experience)

    def _read(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """As numbers, unless :meth:`train_minibatch` reads them later."""
        if not self.waits:
            return dict(status)
        self._summarise()
        return m.checked_status(status)

    def _summarise(self) -> None:
        """What is known of log probs that only a training pass has made."""
        unread, self.unread = self.unread, []
        found = [m.policy_summaries(*made, self.experience_maker.sampled_kl) for made in unread]
        self.on_policy = m.merge_summaries([self.on_policy, *found])

    # -- records and state ---------------------------------------------------------------------------------------

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] | None = None,
        client_states: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a finished step with its status ``logs_dict``; evaluate, checkpoint and export if due.

        ``client_states`` goes into the checkpoint, by default the trainer's own. ``args`` may name another
        ``ckpt_path``. ``step_bar`` is not used: it is in the signature for scripts in the seed's style.
        """
        self.recorder = self.recorder or self._new_recorder()  # a loop of the user's own may come without fit()
        status = logs_dict or {}
        if outcomes := self._take_outcomes():  # of a loop of the script's own
            status = m.optimizer_status([[outcome] for outcome in outcomes], self.strategy) | dict(status)
        epochs = {"actor_update": self.max_epochs, "critic_update": self.critic_max_epochs}
        trained = zip((self.actor, self.critic), epochs.values())
        passes = sum(n * parameter_count(model) for model, n in trained if model is not None)
        perf = m.perf_metrics(
            *(self.timer.reset(), status),
            epochs=epochs,
            world_size=self.strategy.world_size,
            parameters=passes / max(epochs.values()),
            peak_tflops=self.config.logging.peak_tflops,
        )
        self.recorder.log(global_step, {**status, **perf}, self.total_steps)
        self.rollout_check.watch(status, global_step)
        finished = self.state.episode if self.state.consumed_prompts == 0 else None
        if global_step > self.state.global_step:  # of a loop of the user's own
            self.state.global_step = global_step
        due = lambda: self._save_step(args, global_step, client_states)  # noqa: E731
        stops = self.owns_parts and self._saves_at_stop()
        self.recorder.after_step(global_step, finished, self._ckpt_path(args), due, stops)

    def _save_step(self, args: Any, step: int, client_states: Mapping[str, Any] | None = None) -> None:
        """Save after a step, by a subclass's ``_save_checkpoint`` if there is one. Collective."""
        tag, state = f"global_step{step}", self._whole_state(client_states)
        if not self._overrides("_save_checkpoint"):
            return self._save_checkpoint(args, tag, state)
        state["rng"] = self.strategy.gather_object(rng_state())
        self._save_checkpoint(args, tag, state)
        self.checkpointer.adopt(self._ckpt_path(args), tag)

    def _save_checkpoint(self, args: Any, tag: str, client_states: Mapping[str, Any] | None = None) -> None:
        """Write the checkpoint ``tag``; the seed's name, so that an override acts. Collective."""
        state = client_states if client_states and "alarms" in client_states else self._whole_state(client_states)
        self.checkpointer.save(self._ckpt_path(args), int(tag.removeprefix("global_step")), state)

    def _whole_state(self, client_states: Mapping[str, Any] | None) -> dict[str, Any]:
        """The trainer's client state with what a script adds, and what is of each rank or changes later. Collective."""
        state = self.client_state() | dict(client_states or {})
        state["surplus"] = self.strategy.gather_object(self.sampler.state_dict())
        state["alarms"] = self.alarms.state_dict()  # only here: the step has been looked at since client_state()
        return state

    def client_state(self) -> dict[str, Any]:
        """All that a checkpoint holds beside models, optimizers and what is of each rank."""
        return {name: part.state_dict() for name, part in self._stateful_parts().items()} | {
            "trainer": asdict(self.state),
            "config": public_options(self.config),
            "content": self.content,
            "consumed_samples": self.state.global_step * self.config.rollout.rollout_batch_size,
        }

    def _stateful_parts(self) -> dict[str, Any]:
        parts = {
            "kl_ctl": self.kl_state,
            "score_statistics": self.experience_maker.shaper,
            "value_statistics": self.value_norm,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def resume(self, options: Mapping[str, Any] | None = None, before: int | None = None) -> bool:
        """Go on from the last checkpoint that ``--resume`` allows; returns whether there was one. Collective.

        Args:
            options: compared with the saved ones; ``None``: the trainer's.
            before: from the last one before this step.
        """
        options = options or public_options(self.config)
        idle = set().union(*idle_flags(self.config, options).values())
        saved = self.checkpointer.resume(options, self.content, idle, before)
        if saved is None:
            return False
        for name, part in ({} if self.config.evaluation.val_only else self._stateful_parts()).items():
            part.load_state_dict(saved[name])
        before, now = saved["world_size"], self.strategy.world_size
        self.sampler.load_state_dict(dealt_out(saved["surplus"], now)[self.strategy.get_rank()])
        self.alarms.load_state_dict(saved["alarms"])
        self.state = TrainerState.from_saved(saved["trainer"])
        self.state.pretrain_batches = math.ceil(self.state.pretrain_batches * before / now)  # of each rank
        self.rollout_engine.sync_weights(self.actor)
        return True

    def save_model(self, path: str | Path | None = None) -> None:
        """Save the actor (its moving average where there is one) for transformers, and the critic if asked for."""
        path = path or self.config.checkpoint.save_path
        self.checkpointer.require_finite(self.state.global_step)
        model = self.ema_model if self.ema_model is not None else self.actor
        models = [(model, path)]
        if self.config.checkpoint.save_value_network:
            models.insert(0, (self.critic, f"{str(path).rstrip('/')}_critic"))
        for model, path in models:
            self.strategy.save_model(model, self.tokenizer, path, step=self.state.global_step)

    # -- parts of the loop ---------------------------------------------------------------------------------------

    def _begin(
        self, args: Any, prompts: Iterable | None, pretrain: Iterable | None, consumed_samples: int, update_steps: int
    ) -> None:
        if prompts is not None:
            self.prompts_dataloader = prompts
        val_only = self.config.evaluation.val_only
        if self.own_prompts is None and not val_only:
            raise ConfigError("fit() needs a prompts_dataloader, unless the trainer was made by from_config()")
        self.update_steps = update_steps
        per_episode = self._steps_per_episode()
        if args is not None:
            self.config = take_schedule(self.config, args, per_episode)
            self.checkpointer.config = self.config.checkpoint
        if pretrain is not None:
            self.pretrain_dataloader = endless(pretrain)
        for _ in range(self.state.pretrain_batches if self.pretrain_dataloader is not None else 0):
            next(self.pretrain_dataloader)  # resume where the pretraining data was left
        if consumed_samples and self.state.global_step == 0:
            batch_size = self.config.rollout.rollout_batch_size
            self.state = TrainerState.from_consumed(consumed_samples, per_episode, batch_size)
        if not val_only:
            self.prompt_filter.restore(self.own_prompts, self.state)
        self.recorder = self._new_recorder()
        if self.owns_parts and self.state.global_step > 0 and not val_only:
            finished = self.state.episode if self.state.consumed_prompts == 0 else None
            self.recorder.catch_up(self.state.global_step, finished, self.config.checkpoint.ckpt_path)
        if val_only or (self.state.global_step == 0 and self.config.evaluation.val_before_train):
            self.recorder.evaluate(self.state.global_step)

    def _steps(self) -> Iterator[tuple[int, EpisodePrompts, tqdm]]:
        """Number, prompts and progress bar of each PPO step until a limit is reached."""
        if self._reached_limits() and not self.config.evaluation.val_only:
            self._tell_complete()
        with self._bar(None, "step", initial=self.state.global_step) as bar:
            while not self._done():
                episode, data = self.state.episode, self.own_prompts
                self.total_steps = bar.total = self._count_steps()
                if late := [n for n in self.config.logging.profile_steps if n > self.total_steps]:
                    raise ConfigError(f"--profile_steps {late[0]}: the run has {self.total_steps} steps")
                prompts = EpisodePrompts(
                    *(data, episode, self.state.consumed_prompts),
                    lambda batch: as_prompts(batch, self.tokenizer, self.config.data.prompt_max_len),
                )
                while self.state.episode == episode and not self._done():
                    heartbeat.step = self.state.global_step + 1
                    yield heartbeat.step, prompts, bar

    def _tell_complete(self) -> None:
        done, limits = self.state.global_step, self._reached_limits()
        self.strategy.print(f"run complete: {done} steps; raise {limits} to go on, or start anew with --resume never")

    def _count_steps(self) -> int:
        """Steps of the whole run, those that are done included; at most so many with ``--dynamic_sampling``."""
        t, state = self.config.training, self.state
        per_episode = self._steps_per_episode()
        done = state.consumed_prompts // self.config.rollout.rollout_batch_size  # of this episode
        total = state.global_step + (t.num_episodes - state.episode) * per_episode - done
        return min(n for n in (total, t.total_training_steps, t.benchmark_steps) if n is not None)

    def _steps_per_episode(self) -> int:
        return steps_per_episode(self.config, self.own_prompts, self.update_steps)

    def _reached_limits(self) -> str:
        """The limits that the run has come to, as flags; empty while it goes on."""
        t, state = self.config.training, self.state
        limits = {
            "num_episodes": (state.episode, t.num_episodes),
            "total_training_steps": (state.global_step, t.total_training_steps),
            "benchmark_steps": (state.global_step, t.benchmark_steps),
        }
        return ", ".join(f"--{name} {n}" for name, (done, n) in limits.items() if n is not None and done >= n)

    def _done(self) -> bool:
        return self.config.evaluation.val_only or bool(self._reached_limits())

    def move_reference(self, step: int) -> None:
        """The reference follows the actor (``--ref_ema_eta``), or becomes a copy of it (``--ref_reset_steps``)."""
        a = self.config.algorithm
        if a.ref_ema_eta is not None:
            self.strategy.moving_average(self.actor, self.initial_model, 1 - a.ref_ema_eta)
        elif a.ref_reset_steps is not None and step % a.ref_reset_steps == 0:
            self.strategy.moving_average(self.actor, self.initial_model, 0.0)

    def profiler(self, step: int) -> AbstractContextManager:
        """Writes a trace of a step of ``--profile_steps``."""
        name = f"step{step}_rank{self.strategy.get_rank()}.json.gz"
        path = local_folder(self.config.checkpoint.save_path) / "profile" / name
        return m.profile(path, self.timer) if step in self.config.logging.profile_steps else nullcontext()

    def _finish_step(self, prompts: EpisodePrompts, taken: int, collected: CollectedStep) -> dict[str, float]:
        """Bring the state up to date after a step; what there is to log."""
        ended = prompts.exhausted and collected.surplus == 0
        status = self.prompt_filter.after_step(self.own_prompts, self.state, collected.prompt_scores, ended)
        counts = self.strategy.all_reduce({"prompts": prompts.taken - taken} | signals.votes(), "sum")
        self.state.finish_step(counts["prompts"], ended)
        self.stop_signal = signals.elected(counts)
        return status

    def _saves_at_stop(self) -> bool:
        return self.stop_signal > 0 and not (self.config.training.dry_run or self.config.checkpoint.disable_ds_ckpt)

    def _stop_if_asked(self, args: Any, step: int) -> None:
        """Save, close and end the process where a signal asks for it. Collective."""
        if not self.stop_signal and step in (self.recorder.last_evaluated, self.recorder.last_saved):
            # That took long: a signal that has come since need not wait for the end of another step.
            self.stop_signal = signals.elected(self.strategy.all_reduce(signals.votes(), "sum"))
        if not self.stop_signal:
            return
        when, save = f"after step {step} of {self.total_steps}", partial(self._save_stopped, args, step)
        stop_together(
            *(self.strategy, self.stop_signal, when, save if self._saves_at_stop() else None),
            close=lambda: (self.recorder.close(), self.close()),
            resume=self.config.checkpoint.resume,
        )

    def _save_stopped(self, args: Any, step: int) -> str:
        self.recorder.checkpoint(step, lambda: self._save_step(args, step))
        return self._ckpt_path(args)

    def _end(self, args: Any) -> None:
        """Last evaluation, checkpoint and, where the trainer built itself, the model at ``save_path``."""
        if not self.config.evaluation.val_only:
            step = self.state.global_step
            self.stop_signal = signals.elected(self.strategy.all_reduce(signals.votes(), "sum"))
            self._stop_if_asked(args, step)  # before what may take long
            self._check_trained()
            self.recorder.finish(step, lambda: self._save_step(args, step))
            if self.owns_parts and not self.config.training.dry_run:
                self.save_model()
        self.recorder.close()
        if self.config.training.dry_run:
            told = self.strategy.is_rank_0() and not self.config.evaluation.val_only
            took = dry_run_cost(self.config) if told else "no step"
            for line in after_step(self.config, self.tokenizer) if told else ():
                self.strategy.print(line)
            self.strategy.report_memory(f"dry run: {took}; nothing is kept; memory of rank 0")
        elif self.strategy.is_rank_0():
            for line in ending(self.config, self.state.global_step, self.owns_parts):
                self.strategy.print(line)
        if self.strategy.is_rank_0():
            upload_records(self.config.checkpoint.save_path)  # with the picture
        self.close()

    def close(self) -> None:
        """End the rollout engine and, where the trainer built itself, rewards and locks."""
        self.rollout_engine.close()
        if self.owns_parts:  # a source that a script made is the script's to end
            close_source(self.reward_source)
            judge = getattr(self.evaluator, "reward_source", self.reward_source)
            if judge is not self.reward_source:
                close_source(judge)
            c = self.config.checkpoint
            release([c.save_path, c.ckpt_path])

    def _check_trained(self) -> None:
        """A run that did not change its models is no success."""
        s, t = self.state, self.config.training
        if not self._overrides(*_TRAINING_METHODS):
            rejected = "every group was rejected: widen --filter_range, or take other prompts"
            check_trained(s, rejected, t.dry_run, self.skipped.last_why)
        if t.total_training_steps is not None and s.global_step < t.total_training_steps and t.benchmark_steps is None:
            self.strategy.print(
                f"note: the prompts held {s.global_step} steps; the schedules were stretched over "
                f"--total_training_steps {t.total_training_steps}"
            )

    def _leave_out(self, step: int, error: NonFiniteError) -> None:
        """Train nothing on rollouts whose numbers are not finite, on any rank."""
        trained = {"actor": self._actor_trains(step), "critic": self._critic_trains()}
        models = [name for name, trains in trained.items() if trains]
        self.skipped.leave_out(self.state, step, models, Minibatch([error.batch]), error)

    def _write_batch(self, path: Path, batch: Minibatch, facts: Mapping[str, Any]) -> Counter[str]:
        texts = [text for part in batch.micro_batches for text in part.texts(self.tokenizer.decode)]
        save_batch(path, batch, texts, **facts)
        return sum((Counter(part.non_finite()) for part in batch.micro_batches), Counter())

    def _new_recorder(self) -> Recorder:
        if not self.owns_parts:
            self.set_aside()
        parts = (self.config, self.strategy, self.checkpointer, self.evaluator)
        start = {"start_step": self.state.global_step, "run_ids": self.state.run_ids}
        recorder = Recorder(*parts, options=public_options(self.config), alarms=self.alarms, **start)
        self.state.run_ids = recorder.run_ids
        self.use_given_trackers(recorder)
        return recorder

    def _ckpt_path(self, args: Any) -> str:
        return getattr(args, "ckpt_path", None) or self.config.checkpoint.ckpt_path

    # -- parts of the training step ------------------------------------------------------------------------------

    def _minibatches(self, step: int, epoch: int) -> Iterator[Minibatch]:
        """The optimizer steps of one pass; another order in each step, epoch and on each rank, also after a resume."""
        c, t = self.config, self.config.training
        key = (c.strategy.seed, step, epoch, self.strategy.get_rank())
        # With a load-balancing loss a prompt must count for each of its samples.
        shares = t.share_prompts and c.loss.aux_loss_coef == 0
        return minibatches(
            self.replay_buffer.items,
            self.strategy,
            train_batch_size=t.train_batch_size,
            actor=micro_batch_spec(c, "actor_train"),
            critic=self._critic_spec(),
            packed=self.experience_maker.batching.packed,
            share_prompts=shares and all_share_prompts((self.actor, self.critic, self.initial_model, self.teacher)),
            shuffle=t.shuffle,
            generator=torch.Generator().manual_seed(hash(key) & 0x7FFF_FFFF_FFFF_FFFF),
            collate=self.replay_buffer.collate_fn,
            loss_scale=float(c.rollout.generate_max_len),
        )

    def _critic_spec(self) -> Any | None:
        """Micro batches of the critic's own; ``training_step`` gets one micro batch for both models."""
        actor, critic = micro_batch_spec(self.config, "actor_train"), micro_batch_spec(self.config, "critic_train")
        if self.critic is None or critic == actor:
            return None
        if self._overrides("training_step"):
            raise ConfigError(
                f"{type(self).__name__}.training_step trains actor and critic on one micro batch, and the options give "
                "the critic others: set the same for both, or override training_step_actor and training_step_critic"
            )
        return critic

    def _with_pretrain(self, micro_batches: list[Experience]) -> list[Experience]:
        """The micro batches of a step, each with a batch for the PTX loss where there is one. Collective then."""
        if self.pretrain_dataloader is None or self.ptx_coef == 0 or self.epoch >= self.max_epochs:
            return micro_batches
        batches = [as_lm_batch(next(self.pretrain_dataloader), self.strategy.device) for _ in micro_batches]
        self.state.pretrain_batches += len(batches)
        tokens = sum(self.pretrain_loss.num_tokens(on_cpu(batch["labels"])) for batch in batches)
        tokens = self.strategy.all_reduce(tokens, "sum")
        parts = [replace(e.part, pretrain=(b, tokens, len(batches))) for e, b in zip(micro_batches, batches)]
        return [replace(e, part=part) for e, part in zip(micro_batches, parts)]

    def _lone_part(self, experience: Experience, pretrain: Iterator | None = None) -> StepPart:
        """Of a micro batch that a script's own loop trains on."""
        scale = float(self.config.rollout.generate_max_len)
        part = lone_part(experience, self.strategy, scale=scale, accumulation=self._lone_accumulation())
        return part if pretrain is None else self._with_pretrain([replace(experience, part=part)])[0].part

    def _accumulate_alone(self) -> None:
        """A loop in the seed's style takes a step every ``train_batch_size`` samples; ``fit`` says it for each step."""
        for model in (self.actor, self.critic):
            self.strategy.accumulate(model, self._lone_accumulation())
        self._weigh(1 / self._lone_accumulation())

    def _lone_accumulation(self) -> int:
        """Micro batches that hold the ``train_batch_size`` of the strategy."""
        strategy = self.strategy
        return max(1, -(-strategy.train_batch_size // (strategy.micro_train_batch_size * strategy.world_size)))

    def _actor_trains(self, step: int) -> bool:
        return step > self.freezing_actor_steps and self.epoch < self.max_epochs

    def _critic_trains(self) -> bool:
        return self.epoch < self.critic_max_epochs

    def _actor_step(self) -> dict[str, float]:
        """At the last micro batch of a step: the optimizer step or an early stop, then the moving average."""
        if self.strategy.completes_step(self.actor) and self.early_stop.reached():
            self.state.stopped_optimizer_steps += 1
            self.strategy.skip_step(self.actor, name="actor")
            return {"actor_lr": self.actor_optim.param_groups[0]["lr"], "actor_stopped": 1.0}
        status = self._optimizer_step("actor", self.actor, self.actor_optim, self.actor_scheduler)
        if "actor_grad_norm" in status:
            status["actor_stopped"] = 0.0
            if self.ema_model is not None and math.isfinite(status["actor_grad_norm"]):  # not after a skipped step
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta)
        return status

    def _optimizer_step(self, name: str, model: Any, optim: Any, scheduler: Any) -> dict[str, float]:
        status = {f"{name}_lr": optim.param_groups[0]["lr"]}
        outcome = self.strategy.optimizer_step(optim, model, scheduler, name=name)
        if outcome is None:  # more micro batches follow
            return status
        self.skipped.add(self.state, name, outcome.skipped, outcome.overflow)
        grad_norm = float("nan") if outcome.skipped else outcome.grad_norm
        return status | {f"{name}_grad_norm": grad_norm} | {f"{name}_{key}": x for key, x in outcome.metrics().items()}

    def _old_log_probs(self) -> str:
        """Where the log probs before an update come from; an actor step of the user's own finds them in place."""
        source = old_log_probs_from(self.config, capabilities_of(self.rollout_engine).exact_log_probs)
        return "forward" if source == "training" and self._overrides("training_step", "training_step_actor") else source

    def _overrides(self, *methods: str) -> bool:
        """Whether a subclass has one of these methods of its own."""
        return any(getattr(type(self), name) is not getattr(PPOTrainer, name) for name in methods)

    def _sample_texts(self, prompts: Sequence[str], labels: Sequence[Any] | None, **options: Any) -> list[Rollout]:
        """Scored rollouts of prompts as texts, for ``experience_maker.make_experience_list`` in the seed's style."""
        step = self._before_texts()
        batch = list(prompts) if labels is None else (list(prompts), list(labels))
        config = with_generation(self.config, options, self.tokenizer) if options else self.config
        records = as_prompts(batch, self.tokenizer, config.data.prompt_max_len)
        sampler = replace(self.sampler.sampler, sampling=sampling_params(config))
        sampled = sampler.score(sampler.generate(records, step))
        if sampled.not_finite is not None:
            raise RewardError(sampled.not_finite)
        return sampled.rollouts

    def _bar(self, items: Iterable, desc: str, **options: Any) -> tqdm:
        """A progress bar on rank 0 of a terminal; elsewhere silent."""
        return m.progress_bar(items, desc, shown=self.strategy.is_rank_0(), **options)


def _check_models(config: PPOConfig, actor: Any, critic: Any, initial_model: Any, tokenizer: Any, teacher: Any) -> None:
    """Raises ConfigError where the options need what the constructor was not given."""
    check_actor(config, actor)
    a = config.algorithm
    if tokenizer is None:
        raise ConfigError("PPOTrainer needs the actor's tokenizer: pass tokenizer=")
    if critic is None and needs_critic(config):
        raise ConfigError(f"--advantage_estimator {a.advantage_estimator} needs a critic, but critic is None")
    if initial_model is None and needs_reference(config):
        raise ConfigError(f"init_kl_coef {a.init_kl_coef} needs a reference: pass initial_model, or set init_kl_coef=0")
    if (teacher is not None) != needs_teacher(config):
        raise ConfigError("pass teacher=, and name it by --teacher_pretrain: one without the other does nothing")
    if moves_reference(config) and not hasattr(initial_model, "parameters"):
        raise ConfigError(
            "--ref_ema_eta and --ref_reset_steps need a reference with weights of its own, and this one is the actor "
            "without its adapters: leave them out, or pass another initial_model"
        )
