"""PPOTrainer: the PPO loop. ``fit`` is the schedule; docs/dataflow.md follows the data through its numbered stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Self

from lightppo.callbacks import Callback
from lightppo.compat.constructor_options import (
    constructor_config,
    generation_options,
    script_args,
    take_schedule,
)
from lightppo.compat.own_steps import give_router_loss
from lightppo.compat.script_members import KLState, ScriptMembers, as_prompts, own_fit
from lightppo.config import PPOConfig
from lightppo.config.rules import moves_reference, steps_per_episode, trains
from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.rewards.function import function_source
from lightppo.rewards.reward_source import NoReward, RewardSource, close_source
from lightppo.rollout.engine import RolloutEngine
from lightppo.rollout.sampler import CollectedStep, joined
from lightppo.trainer.build import (
    Origin,
    PPOParts,
    assemble,
    build,
    build_evaluator,
    build_rollout_engine,
)
from lightppo.trainer.by_hand import (
    check_models,
    check_moving_reference,
    judge_of,
    refuse_pieces,
    reward_source_of,
    sample_texts,
    state_after,
)
from lightppo.trainer.evaluation import Evaluator
from lightppo.trainer.loop import TrainingLoop
from lightppo.trainer.pretraining import Pretraining, endless
from lightppo.trainer.prompts import EpisodePrompts
from lightppo.trainer.training_losses import LossTerm
from lightppo.trainer.update import TRAINING_METHODS, Update

_SAVING_METHODS = ("save_logs_and_checkpoints", "_save_checkpoint")


class PPOTrainer(Update, ScriptMembers, TrainingLoop):
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
        frozen: further models by name, the teacher among them.
        ema_model: gets the moving average of the actor; or ``None``.
        followers: models that follow the actor by name, ``ema_model`` among them.
        reward_fn: combines the scores of several reward models, or is the reward function itself.
        remote_rm_url: reward servers or a Python file.
        reward_source: instead of the three above: a function, or an object with ``name`` and ``score(rollouts)``.
        eval_reward_fn: scores the answers to ``eval_prompts``: a function or such an object.
        rollout_engine: ``None``: the engine that ``--rollout_engine`` names.
        prompts_dataloader, pretrain_dataloader: as for :meth:`fit`, which may bring others.
        evaluator: in place of one made from ``eval_prompts``, the held-out prompts.
        callbacks: what happens beside training, see :class:`lightppo.callbacks.Callback`.
        origin: of a run that was built.
        **options: the seed's options (``eps_clip``, ``ptx_coef``, …) and generation options (``max_new_tokens``, …).
    """

    config: PPOConfig
    samples_tokens = True
    next_prompts: EpisodePrompts | None = None  # of the next episode, some of them sampled ahead
    update_steps = 0  # optimizer steps per episode, where the dataloader has no length

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        ema_model: Any,
        actor_optim: Any,
        critic_optim: Any,
        actor_scheduler: Any,
        critic_scheduler: Any,
        *,
        config: PPOConfig | None = None,
        tokenizer: Any = None,
        teacher: Any = None,
        frozen: Mapping[str, Any] = {},
        followers: Mapping[str, Any] = {},
        reward_fn: Callable[..., Any] | None = None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_source: Any = None,
        eval_reward_fn: Any = None,
        rollout_engine: RolloutEngine | None = None,
        prompts_dataloader: Iterable | None = None,
        pretrain_dataloader: Iterable | None = None,
        loss_terms: Mapping[str, LossTerm] = {},
        eval_prompts: Any = None,
        evaluator: Evaluator | None = None,
        callbacks: Iterable[Callback] = (),
        origin: Origin | None = None,
        **options: Any,
    ) -> None:
        frozen = dict(frozen) if teacher is None else {**frozen, "teacher": teacher}
        followers = followers if ema_model is None else {**followers, "ema": ema_model}
        if origin is None or config is None:  # a script made the parts
            config = self._options_of_script(config, strategy, options, tokenizer)
            check_models(config, actor, critic, initial_model, tokenizer, frozen.get("teacher"))
            if options.get("gradient_checkpointing"):
                for model in filter(None, (actor, critic)):
                    model.gradient_checkpointing_enable()
        if moves_reference(config):
            check_moving_reference(initial_model)
        engine = rollout_engine or build_rollout_engine(config, strategy, actor, tokenizer)
        self.reward_fn = reward_fn
        self.remote_rm_url = remote_rm_url
        if reward_source is None:
            reward_source = reward_source_of(
                config, strategy, tokenizer, reward_model, reward_fn, remote_rm_url
            )
        source = function_source(reward_source, "reward_source")
        if eval_prompts is not None:
            judge = judge_of(eval_reward_fn, source)
            evaluator = build_evaluator(config, engine, judge, eval_prompts, strategy)
        # One of the terms as soon as it has text; checkpoints keep its state anyway.
        self.pretraining: Any = loss_terms.get("pretraining")
        if self.pretraining is None:
            self.pretraining = Pretraining(config.algorithm.ptx_coef, strategy)
        if pretrain_dataloader is not None:
            self.pretraining.batches = endless(pretrain_dataloader)
            loss_terms = {"pretraining": self.pretraining, **loss_terms}
        parts = PPOParts(
            strategy, actor, critic, reward_model, initial_model,
            actor_optim, critic_optim, actor_scheduler, critic_scheduler,
            config=config, tokenizer=tokenizer, reward_source=source, rollout_engine=engine, frozen=frozen,
            followers=followers, prompts_dataloader=prompts_dataloader, loss_terms=loss_terms, evaluator=evaluator,
            origin=origin or Origin(),
        )  # fmt: skip
        own_actor_step = self.overrides("training_step", "training_step_actor")
        assemble(parts, own_training_step=own_actor_step)
        self._take(parts, callbacks)

    def _options_of_script(
        self, config: PPOConfig | None, strategy: Any, options: Mapping[str, Any], tokenizer: Any
    ) -> PPOConfig:
        """Return the options of a script, as they run."""
        refuse_pieces(strategy)
        config = constructor_config(config, strategy, options, tokenizer)
        self.args = script_args(strategy, config)
        self.generate_kwargs = generation_options(options)
        return config

    def _take(self, parts: PPOParts, callbacks: Iterable[Callback]) -> None:
        """Work with these parts from now on."""
        self.initial_model = parts.initial_model
        self.reward_model = parts.reward_model
        self.followers = parts.followers
        self.exported = parts.actor
        self.rollout_engine = parts.rollout_engine
        self.sampler = parts.sampler
        self.prompts = parts.prompts_dataloader
        self.replaced_sources: list[RewardSource] = []
        self.has_own_steps = self.overrides("train_minibatch", *TRAINING_METHODS)
        Update.__init__(self, parts)
        TrainingLoop.__init__(
            self,
            parts.config,
            parts.strategy,
            parts.tokenizer,
            parts.checkpointer,
            parts.skipped,
            state=parts.state,
            timer=parts.timer,
            callbacks=callbacks,
            evaluator=parts.evaluator,
            content=parts.origin.content,
            keeps_files=parts.origin.keeps_files,
            options=parts.origin.options,
        )
        self.why_untrained = self.sampler.why_untrained
        states = {
            "kl_ctl": self.kl_ctl,
            **self.experience_maker.shaper.states,
            "value_statistics": self.value_norm,
            "pretraining": self.pretraining,
            **self.loss_terms,
        }
        for name, stateful in states.items():
            if stateful is not None:
                self.register_state(name, stateful)
        self.experience_maker.sample = partial(sample_texts, self)
        self.accumulate_alone()
        if self.overrides("training_step_actor") and self.aux_loss:
            self.actor.check_router()
            give_router_loss(self.actor)

    @classmethod
    def from_config(cls, config: PPOConfig, callbacks: Iterable[Callback] = ()) -> Self:
        """Build strategy, models, data and everything else, and resume if there is something to resume. Collective."""
        trainer = build(config, cls, callbacks)
        trainer.resume()
        return trainer

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "fit" in vars(cls):
            subclass: Any = cls
            subclass.fit = own_fit(vars(cls)["fit"])

    def overrides(self, *methods: str) -> bool:
        """Tell whether a subclass, or this object, has one of these methods of its own."""
        return any(
            name in vars(self) or getattr(type(self), name) is not getattr(PPOTrainer, name)
            for name in methods
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(
        self,
        args: Any = None,
        prompts_dataloader: Iterable | None = None,
        pretrain_dataloader: Iterable | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """Train until the prompts or a limit end the run. Collective.

        A run that was built needs no argument; a script hands over:

        Args:
            args: namespace with the schedule (``num_episodes``, ``save_steps``, …); ``None``: the trainer's config.
            prompts_dataloader: batches of prompts of this rank; ``None``: the constructor's.
            pretrain_dataloader: batches for the PTX loss, endless or not.
            consumed_samples: prompts used before, over all ranks: where a script's own resume starts.
            num_update_steps_per_episodes: optimizer steps per episode, where the dataloader has no length.
        """
        if self.is_complete():
            self.tell_complete()
            return self.close()
        self._take_data(prompts_dataloader, pretrain_dataloader, num_update_steps_per_episodes)
        self._take_schedule(args, consumed_samples)
        self.started = True
        samples_ahead = self.config.rollout.max_staleness > 0
        with self.running():
            for step, prompts in self.steps():
                taken = prompts.taken
                with self.timer("step"), self.callbacks.around_step(self, step):
                    # 1 prompts → responses, scored and selected
                    collected = self.sampler.collect(prompts, step)
                    if samples_ahead:  # what the next step trains on, while this one trains
                        self.sample_ahead(prompts, step, collected.surplus)
                    self.callbacks.on_rollouts(self, step, collected)
                    # 2 log probs, values, rewards → 3 advantages in the buffer
                    if self.strategy.sequence_group is None:
                        self.make_experience(collected, step)
                        items = self.replay_buffer.items
                    else:
                        of_group, own = joined(collected, self.strategy.sequence_group)
                        self.make_experience(of_group, step)
                        items = own(self.replay_buffer.items)
                    self.callbacks.on_experience(self, step, items)
                    # 4 → training_step per micro batch
                    status = collected.counts | self.train(step)
                    self.replay_buffer.clear()
                    if samples_ahead:  # by the weights before the push
                        self.sampler.finish()
                    with self.timer("sync"):
                        # 5 the next rollouts are on-policy
                        self.rollout_engine.sync_weights(self.actor)
                    self.control_kl(status)  # 6
                # An episode ends when its prompts and the samples that wait are used.
                ended = prompts.exhausted and collected.surplus == 0
                used = self.strategy.all_reduce(prompts.taken - taken, "sum")
                if samples_ahead:
                    self.count_prompts_ahead(used, ended)
                else:
                    self.state.finish_step(used, last_of_episode=ended)
                if self.finish_step(step, status):  # 7 logged, evaluated, saved
                    break
            self.finish()

    def sample_ahead(self, prompts: EpisodePrompts, step: int, surplus: int) -> None:
        """Begin to sample what the next step trains on (``--max_staleness 1``), unless this is the last. Collective.

        ``surplus``: groups of all ranks that wait for the next step.
        """
        # --benchmark_steps ends no schedule: the run may be resumed, and is then the one that was never stopped.
        if step == self.config.training.total_training_steps:
            return
        if prompts.exhausted and surplus == 0:
            self.next_prompts = self._prompts_of_next_episode()
            prompts = self.next_prompts or prompts
        self.sampler.start(prompts, step, surplus)

    def _prompts_of_next_episode(self) -> EpisodePrompts | None:
        """Return the prompts of the next episode; ``None``: there is none, or this step chooses them."""
        episode = self.state.episode + 1
        chooses_prompts = self.config.sampling.dataset_filter_threshold is not None
        if episode == self.config.training.num_episodes or chooses_prompts:
            return None
        return EpisodePrompts(self.prompts, episode, 0, self._prompts_of)

    def count_prompts_ahead(self, used: int, ended: bool) -> None:
        """Count the step and its ``used`` prompts of the episode, those sampled ahead included. Collective.

        ``ended``: this episode has no more prompts, and no group waits.
        """
        has_samples_ahead = self.sampler.ahead is not None and self.next_prompts is None
        self.state.finish_step(used, last_of_episode=ended and not has_samples_ahead)
        if self.next_prompts is not None:
            used_of_next = self.strategy.all_reduce(self.next_prompts.taken, "sum")
            self.state.consumed_prompts = used_of_next

    def make_experience(self, collected: CollectedStep, step: int) -> None:
        """Fill the replay buffer with the step's rollouts; advantages are whitened over all ranks. Collective.

        Rollouts whose numbers are not finite on some rank are left out: nothing is trained on them, on any rank.
        """
        error = None
        if collected.not_finite is not None:
            error = NonFiniteError(collected.not_finite, collected.rollouts)
        elif collected.groups > 0:
            with self.timer("experience"), self.strategy.together:
                try:
                    experience = self.experience_maker.make_experience_list(collected.rollouts)
                    self.replay_buffer.fill(experience, collected.repeated)
                    self.experience_maker.normalize(self.replay_buffer, self.policy_loss, step)
                except NonFiniteError as not_finite:
                    error = not_finite
        if error is not None:
            self.skipped.leave_out(step, self.trained_models(step), error)

    def train(self, step: int) -> dict[str, float]:
        """Update the models by ``ppo_train``; that of a subclass only if there is something to train on. Collective."""
        with self.strategy.together:
            if self.overrides("ppo_train") and self.buffer_is_empty():
                return PPOTrainer.ppo_train(self, step)
            return self.ppo_train(step)

    def control_kl(self, status: Mapping[str, float]) -> None:
        """Adapt the coefficient to the step's KL, if a token was trained."""
        if "policy_kl" not in status and self.overrides("ppo_train"):
            # A subclass's ppo_train may say the KL by the seed's name.
            if not math.isnan(kl := status.get("kl", math.nan)):
                rollout = self.config.rollout
                self.kl_ctl.update(kl, rollout.rollout_batch_size * rollout.n_samples_per_prompt)
        elif not math.isnan(status.get("advantage_mean", 0.0)):
            self.kl_ctl.update(status.get("policy_kl", 0.0), int(status.get("samples", 0)))

    def finish_step(self, step: int, status: Mapping[str, float]) -> bool:
        if self.outcomes or self.overrides("save_logs_and_checkpoints"):
            return self.finish_step_of_script(step, status)
        return super().finish_step(step, status)

    # -- what a script hands over --------------------------------------------------------------------------------

    def _take_data(
        self, prompts: Iterable | None, pretrain_data: Iterable | None, update_steps: int
    ) -> None:
        """Train on what was given to ``fit``."""
        if prompts is not None:
            self.prompts_dataloader = prompts
        if self.prompts is None and not self.only_evaluates:
            raise ConfigError(
                "fit() needs a prompts_dataloader, unless the trainer was made by from_config()"
            )
        if pretrain_data is not None:
            self.pretrain_dataloader = endless(pretrain_data)
        self.update_steps = update_steps

    def _take_schedule(self, args: Any, consumed_samples: int) -> None:
        """Work with the schedule of a script's ``args``, from the sample where it goes on."""
        if args is not None:
            self.use_config(take_schedule(self.config, args, self.steps_per_episode()))
        elif self.overrides(*_SAVING_METHODS):
            args = self.options_of_script()
        self.args_of_fit = args
        if consumed_samples and self.state.global_step == 0:
            batch_size = self.config.rollout.rollout_batch_size
            self.state.become(state_after(consumed_samples, self.steps_per_episode(), batch_size))

    @property
    def kl_ctl(self) -> Any:
        """Return the controller of the KL's coefficient, which the maker of experience has, too."""
        return self._kl_ctl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self._kl_ctl = self.experience_maker.kl_ctl = controller
        if "kl_ctl" in vars(self).get("states", ()):
            has_state = hasattr(controller, "state_dict")
            self.states["kl_ctl"] = controller if has_state else KLState(controller)

    @property
    def reward_source(self) -> RewardSource:
        """Return what scores the samples: set a function, or another source, and it scores those that follow.

        It scores evaluations too, where they have no source of their own. The source that was there is closed with the
        trainer, if a run was built: the new one may call it.
        """
        return self.sampler.sampler.reward_source

    @reward_source.setter
    def reward_source(self, source: RewardSource | Callable[..., Any]) -> None:
        replaced_source = self.reward_source
        source = function_source(source, "reward_source")
        self.replaced_sources.append(replaced_source)
        self.sampler.sampler.score_by(source)
        self.experience_maker.rewarded = not isinstance(source, NoReward)
        evaluator: Any = self.evaluator
        if getattr(evaluator, "reward_source", None) is replaced_source:
            evaluator.reward_source = source

    # -- limits and prompts --------------------------------------------------------------------------------------

    @property
    def only_evaluates(self) -> bool:
        return not trains(self.config)

    def limits(self) -> dict[str, tuple[int, int | None]]:
        training = self.config.training
        state = self.state
        return {
            "num_episodes": (state.episode, training.num_episodes),
            "total_training_steps": (state.global_step, training.total_training_steps),
            "benchmark_steps": (state.global_step, training.benchmark_steps),
        }

    def count_steps(self) -> int:
        """Count the steps of the whole run, those that are done included; rejected groups may leave fewer."""
        training = self.config.training
        state = self.state
        per_episode = self.steps_per_episode()
        done = state.consumed_prompts // self.config.rollout.rollout_batch_size  # of this episode
        if self.sampler.ahead is not None:
            done = math.ceil(state.consumed_prompts / self.config.rollout.rollout_batch_size) - 1
        total = state.global_step + (training.num_episodes - state.episode) * per_episode - done
        limits = (total, training.total_training_steps, training.benchmark_steps)
        return min(limit for limit in limits if limit is not None)

    def steps_per_episode(self) -> int:
        return steps_per_episode(self.config, self.prompts, self.update_steps)

    @property
    def finished_episodes(self) -> int | None:
        """Return it as of any loop; prompts of the next episode that are sampled ahead are no step of it yet."""
        ahead = self.sampler.ahead
        batch_size = self.config.sampling.gen_batch_size or self.config.rollout.rollout_batch_size
        of_next_step = 0 if ahead is None else ahead.batches * batch_size
        return self.state.episode if self.state.consumed_prompts <= of_next_step else None

    def episode_steps(self) -> Iterator[EpisodePrompts]:
        """Yield the prompts of the episode, once for each step that takes some of them."""
        state = self.state
        prompts = self.next_prompts or EpisodePrompts(
            self.prompts, state.episode, state.consumed_prompts, self._prompts_of
        )
        self.next_prompts = None
        yield from repeat(prompts)

    def _prompts_of(self, batch: Any) -> list[Prompt]:
        """Return the prompts of a batch of the dataloader, which may be one of a script."""
        if isinstance(batch, list) and all(isinstance(item, Prompt) for item in batch):
            return batch
        return as_prompts(batch, self.tokenizer, self.config.data.prompt_max_len)

    def before_first_step(self) -> None:
        if self.trackers:
            self.use_given_trackers()
        super().before_first_step()

    # -- state and the end ---------------------------------------------------------------------------------------

    def client_state(self) -> dict[str, Any]:
        samples = self.state.global_step * self.config.rollout.rollout_batch_size
        return super().client_state() | {"consumed_samples": samples}

    def load_state(self, states: Mapping[str, Any]) -> None:
        if self.only_evaluates:  # another training's statistics and samples are not its own
            states = {name: states[name] for name in ("trainer", "world_size")}
        super().load_state(states)
        self.rollout_engine.sync_weights(self.actor)

    @property
    def ckpt_path(self) -> str:
        return getattr(self.args_of_fit, "ckpt_path", None) or super().ckpt_path

    def write_checkpoint(self, step: int) -> None:
        if self.client_states or self.overrides("_save_checkpoint"):
            return self.write_checkpoint_of_script(step)
        super().write_checkpoint(step)

    def check_trained(self) -> None:
        if self.overrides(*TRAINING_METHODS):  # whose optimizer steps are not counted
            return
        super().check_trained()
        training = self.config.training
        step = self.state.global_step
        planned_steps = training.total_training_steps
        if planned_steps is not None and step < planned_steps and training.benchmark_steps is None:
            self.strategy.print(
                f"note: the prompts held {step} steps; the schedules were stretched over "
                f"--total_training_steps {planned_steps}"
            )

    def saved_models(self) -> list[str]:
        checkpoint = self.config.checkpoint
        folders = [checkpoint.save_path]
        if checkpoint.save_value_network:
            folders.append(critic_folder(checkpoint.save_path))
        return folders

    def save_model(self, path: str | Path | None = None) -> None:
        """Save the actor, or what a callback has ``exported`` in its place, for transformers; the critic if asked for."""
        path = path or self.config.checkpoint.save_path
        step = self.state.global_step
        self.checkpointer.require_finite(step)
        if self.config.checkpoint.save_value_network:
            self.strategy.save_model(self.critic, self.tokenizer, critic_folder(path), step=step)
        self.strategy.save_model(self.exported, self.tokenizer, path, step=step)

    def close(self) -> None:
        """End the rollout engine; of a run that was built the reward sources, too: a script ends its own."""
        self.rollout_engine.close()
        if not self.owns_parts:
            return
        source = self.reward_source
        judge = getattr(self.evaluator, "reward_source", source)
        sources = {id(one): one for one in (*self.replaced_sources, source, judge)}
        for source in sources.values():
            close_source(source)


def critic_folder(path: str | Path) -> str:
    """Return the folder of the critic beside that of the actor."""
    return f"{str(path).rstrip('/')}_critic"
