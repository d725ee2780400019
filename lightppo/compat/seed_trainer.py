"""The public ``PPOTrainer``: the core's, with the seed's constructor, attributes, call forms and methods to override.

The seed are OpenRLHF's and LightRFT's trainers of the launcher era.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from lightppo.algorithms.kl import make_kl_controller
from lightppo.algorithms.masking import masked_mean
from lightppo.callbacks import Callback
from lightppo.checkpoint.engine_state import rng_state
from lightppo.checkpoint.layout import mark_latest, step_of, tag_of
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.compat.prompt_batches import ScriptPrompts, as_prompts
from lightppo.compat.seed import (
    OUTCOMES,
    SEED_INFO,
    ExperienceMaker,
    ReplayBuffer,
    SeedLoader,
    accept_seed_calls,
    check_actor,
    constructor_config,
    fill_schedule,
    generation_options,
    give_router_loss,
    lone_part,
    of_whole_step,
    policy_loss_of,
    pretrain_batches_of,
    pretrain_loss_of,
    sample_share,
    script_args,
    seed_means,
    take_schedule,
    value_loss_of,
    with_generation,
)
from lightppo.config import PPOConfig
from lightppo.config.rules import (
    estimator_entry,
    micro_batch_spec,
    moves_reference,
    needs_critic,
    needs_reference,
    needs_teacher,
    of_role,
    rollout_rows,
    scoring_calls,
)
from lightppo.config.run_length import steps_per_episode
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, RewardError
from lightppo.experience.batching import StepPart
from lightppo.experience.experience import Experience
from lightppo.files import local_folder
from lightppo.logging.step_metrics import checked_status, optimizer_status
from lightppo.rewards.function import function_source
from lightppo.rewards.registry import build_reward_source
from lightppo.rewards.reward_source import NoReward, RewardSource
from lightppo.rollout.engine import RolloutEngine
from lightppo.rollout.sampler import nothing_scored
from lightppo.trainer import ppo_trainer as core
from lightppo.trainer.build import (
    Origin,
    PPOInputs,
    assemble,
    build_evaluator,
    build_rollout_engine,
    sampling_params,
)
from lightppo.trainer.consumed_samples import state_after
from lightppo.trainer.evaluation import Evaluator
from lightppo.trainer.pretraining import Pretraining, endless
from lightppo.trainer.training_losses import LossTerm
from lightppo.trainer.update import Update
from lightppo.zero3 import find_engine

_STEPS = ("training_step", "training_step_actor", "training_step_critic")
_TRAINING_METHODS = ("ppo_train", *_STEPS)


class SeedUpdate(Update):
    """An update whose steps are the methods of a trainer, which a subclass of it may override."""

    trainer: PPOTrainer
    waits = True  # training_step returns numbers, not tensors on a GPU

    def train_minibatch(self, minibatch: Any, step: int = 0) -> list[Mapping[str, float]]:
        statuses = self.trainer.train_minibatch(minibatch, step)
        # The means over the rollout take their place.
        return [
            {name: value for name, value in status.items() if name not in SEED_INFO}
            for status in statuses
        ]

    def take_step(self, minibatch: Any, step: int) -> list[Mapping[str, float]]:
        """The optimizer step of actor and critic."""
        # Numbers are read at the end of the step, unless an override reads them: no micro batch waits for a GPU.
        self.waits = self.trainer.overrides(*_TRAINING_METHODS)
        statuses = super().train_minibatch(minibatch, step)
        self.waits = True
        return statuses

    def training_step(self, experience: Experience, step: int) -> Any:
        return self.trainer.training_step(experience, step)

    def training_step_actor(self, experience: Experience) -> Any:
        return self.trainer.training_step_actor(experience)

    def training_step_critic(self, experience: Experience) -> Any:
        return self.trainer.training_step_critic(experience)

    def given(self, micro_batches: Iterable[Experience]) -> Iterable[Experience]:
        return self._for_overrides(micro_batches) if self.waits else micro_batches

    def _for_overrides(self, micro_batches: Iterable[Experience]) -> Iterator[Experience]:
        """Micro batches of a step; what an override does with one counts by its share of the step's samples."""
        for experience in micro_batches:
            self.weigh(sample_share(experience.action_mask, experience.part.normalizer))
            # The seed's status is read from a placeholder, too.
            if not experience.part.has_samples:
                ones = torch.ones(1, device=experience.action_mask.device)
                experience = replace(experience, info=dict.fromkeys(SEED_INFO, ones))
            yield experience

    def weigh(self, weight: float | Tensor) -> None:
        """What an override gives to ``strategy.backward`` counts by this factor."""
        for model in (self.actor, self.critic):
            if (engine := find_engine(model)) is not None:
                self.strategy.loss_weights[engine] = weight

    def backward(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        """Of a loss that is its micro batch's share of the step already."""
        engine, weights = find_engine(model), getattr(self.strategy, "loss_weights", {})
        weight = None if engine is None else weights.pop(engine, None)
        super().backward(loss, model, optimizer)
        if weight is not None:
            weights[engine] = weight

    def part_of(self, experience: Experience) -> StepPart:
        """Of a micro batch that a script's own loop trains on, too."""
        if experience.part is not None:
            return experience.part
        scale = float(self.config.rollout.generate_max_len)
        part = lone_part(
            experience, self.strategy, scale=scale, accumulation=self.lone_accumulation()
        )
        self.begin_terms(1)
        return part

    def with_kl(self, experience: Experience, log_probs: Tensor) -> Experience:
        """Nobody else gives a loop of the script's own the KL."""
        reference = experience.base_action_log_probs
        if experience.part is not None or reference is None:
            return experience
        kl = self.experience_maker.sampled_kl(log_probs, reference)  # (B, A)
        of_samples = masked_mean(kl, experience.action_mask)
        return replace(experience, info=experience.info | {"kl": of_samples})

    def told(self, status: Mapping[str, Any], experience: Experience) -> Mapping[str, Any]:
        """Numbers, unless :meth:`train_minibatch` reads them later; for a loop of a script's own as the seed's."""
        if not self.waits:
            return dict(status)
        self.summarise()
        status = checked_status(seed_means(experience) | status)
        return self.trainer.of_micro_batch(status, experience)

    def accumulate_alone(self) -> None:
        """A loop in the seed's style takes a step every ``train_batch_size`` samples; ``fit`` says it for each step."""
        for model in (self.actor, self.critic):
            self.strategy.accumulate(model, self.lone_accumulation())
        self.weigh(1 / self.lone_accumulation())

    def lone_accumulation(self) -> int:
        """Micro batches that hold the ``train_batch_size`` of the strategy."""
        strategy = self.strategy
        return max(
            1,
            -(
                -strategy.train_batch_size
                // (strategy.micro_train_batch_size * strategy.world_size)
            ),
        )

    def critic_spec(self) -> Any | None:
        """``training_step`` gets one micro batch for both models."""
        spec = super().critic_spec()
        if spec is not None and self.trainer.overrides("training_step"):
            raise ConfigError(
                f"{type(self.trainer).__name__}.training_step trains actor and critic on one micro batch, and the "
                "options give the critic others: set the same for both, or override training_step_actor and "
                "training_step_critic"
            )
        return spec


def _own_fit(fit: Callable[..., None]) -> Callable[..., None]:
    """A ``fit`` of a subclass's own: its loader gives the seed's batches, and the records end with it.

    What its caller leaves out comes from the trainer.
    """
    signature = inspect.signature(fit)
    ordinary = {
        n: p.default for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    }

    @wraps(fit)
    def run(self: Any, *values: Any, **named: Any) -> None:
        if self.is_complete():
            self.tell_complete()
            return self.close()
        bound = signature.bind_partial(self, *values, **named)
        for name, value in self.fit_arguments().items():
            missing = name not in bound.arguments and (
                self.owns_parts or ordinary.get(name) is inspect.Parameter.empty
            )
            if name in ordinary and (missing or bound.arguments.get(name, ...) is None):
                bound.arguments[name] = value
        loader = bound.arguments.get("prompts_dataloader")
        if loader is not None and not isinstance(loader, SeedLoader):
            bound.arguments["prompts_dataloader"] = SeedLoader(loader)
        fit(*bound.args, **bound.kwargs)
        self.end_records()

    return run


# -- attributes ------------------------------------------------------------------------------------------------------


class _KLState:
    """State of a ``kl_ctl`` that has only ``value`` and ``update``."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self.controller).__name__, "value": float(self.controller.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != (own := type(self.controller).__name__):
            raise ValueError(
                f"the checkpoint's kl_ctl is {state['kind']}, here {own}: set the one that it was made with"
            )
        self.controller.value = float(state["value"])


class _GivenTracker:
    """A Weights & Biases run (or module), or a TensorBoard writer, that a script has set; the script ends it."""

    def __init__(self, name: str, given: Any) -> None:
        self.replaces, self.given = name, given

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.replaces == "_wandb":
            return self.given.log({"global_step": step, **metrics})
        for name, value in metrics.items():
            self.given.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing to do."""


def _is_tracker(sink: Any, name: str) -> bool:
    if isinstance(sink, _GivenTracker):
        return sink.replaces == name
    return getattr(sink, "name", None) == "wandb" if name == "_wandb" else hasattr(sink, "writer")


def _setting(path: str, apply: str | None = None) -> property:
    """An attribute of the seed's trainer that is an option here; when it is set, the trainer works with it."""
    name, read = path.rpartition(".")[2], attrgetter(f"config.{path}")

    def write(trainer: Any, value: Any) -> None:
        trainer._set_options(**{name: value})
        if apply is not None:
            getattr(trainer, apply)()

    return property(read, write)


def _of_part(path: str) -> property:
    """An attribute that the seed's trainer has, and here a part of it."""
    part, _, name = path.rpartition(".")

    def write(trainer: Any, value: Any) -> None:
        setattr(attrgetter(part)(trainer), name, value)

    return property(attrgetter(path), write)


def _tracker(name: str, of_recorder: str) -> property:
    """Of rank 0: what a script has set, else the recorder's, from the first step on."""

    def read(trainer: Any) -> Any:
        return trainer._trackers.get(name) or (
            trainer.recorder and getattr(trainer.recorder, of_recorder)
        )

    def write(trainer: Any, value: Any) -> None:
        trainer._trackers = trainer._trackers | {name: value}
        if trainer.started:
            trainer.use_given_trackers()

    return property(read, write)


def buffer_of(config: PPOConfig, strategy: Any) -> ReplayBuffer:
    """A buffer with the methods and options that scripts know."""
    training = config.training
    return ReplayBuffer(
        training.micro_train_batch_size,
        training.buffer_limit,
        training.buffer_cpu_offload,
        device=strategy.device,
        pin_memory=config.data.dataloader_pin_memory,
    )


class PPOTrainer(core.PPOTrainer):
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

    _trackers: Mapping[str, Any] = {}  # that a script has set
    _aux_loss: bool | None = None  # as a script has set it
    _text_step = 0  # number of the last step whose prompts came as texts
    _synced = 0  # optimizer steps of the weights that the engine has
    update_steps = 0  # optimizer steps per episode, where the dataloader has no length
    # The outcomes of optimizer steps that a script's own loop has taken.
    _outcomes: Sequence[Mapping[str, float]] = ()
    _args_of_fit: Any = None  # that a script gave to fit
    _client_states: Mapping[str, Any] | None = None  # that a script adds to the checkpoint
    _wants_stop = False  # a callback does
    started = False  # callbacks have had on_start
    update_class = SeedUpdate

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
        frozen: Mapping[str, Any] = {},
        followers: Mapping[str, Any] = {},
        reward_fn=None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_source=None,
        eval_reward_fn=None,
        rollout_engine: RolloutEngine | None = None,
        prompts_dataloader: Iterable | None = None,
        pretrain_dataloader: Iterable | None = None,
        loss_terms: Mapping[str, LossTerm] = {},
        eval_prompts=None,
        evaluator: Evaluator | None = None,
        callbacks: Iterable[Callback] = (),
        origin: Origin | None = None,
        **options: Any,
    ) -> None:
        if origin is None:  # else it was checked before it was built
            config = constructor_config(config, strategy, options, tokenizer)
        frozen = dict(frozen) if teacher is None else {**frozen, "teacher": teacher}
        _check_models(config, actor, critic, initial_model, tokenizer, frozen.get("teacher"))
        if options.get("gradient_checkpointing"):
            _checkpoint_gradients(actor, critic)
        self.args, self.generate_kwargs = script_args(strategy, config), generation_options(options)
        self.reward_fn, self.remote_rm_url = reward_fn, remote_rm_url
        engine = rollout_engine or build_rollout_engine(config, strategy, actor, tokenizer)
        source = self._reward_source_of(config, strategy, tokenizer, reward_model, reward_source)
        if eval_prompts is not None:
            judge = (
                source
                if eval_reward_fn is None
                else function_source(eval_reward_fn, "--eval_reward_fn")
            )
            evaluator = build_evaluator(config, engine, judge, eval_prompts, strategy)
        terms = {"pretraining": Pretraining(config.algorithm.ptx_coef, strategy), **loss_terms}
        if pretrain_dataloader is not None:
            terms["pretraining"].batches = endless(pretrain_dataloader)
        inputs = PPOInputs(
            strategy, actor, critic, reward_model, initial_model,
            actor_optim, critic_optim, actor_scheduler, critic_scheduler,
            config=config, tokenizer=tokenizer, reward_source=source, rollout_engine=engine, frozen=frozen,
            followers=followers if ema_model is None else {**followers, "ema": ema_model},
            prompts_dataloader=prompts_dataloader, loss_terms=terms, evaluator=evaluator, origin=origin or Origin(),
        )  # fmt: skip
        own_actor_step = self.overrides("training_step", "training_step_actor")
        self._replaced_sources: list[RewardSource] = []
        parts = assemble(
            inputs, self.update_class, ExperienceMaker, own_training_step=own_actor_step
        )
        parts.replay_buffer = parts.update.replay_buffer = buffer_of(config, strategy)
        super().__init__(parts, callbacks)
        self._accept_overrides(config)

    def _accept_overrides(self, config: PPOConfig) -> None:
        """Steps are the methods of this trainer; losses and models can be called in the seed's form."""
        self.update.trainer = self
        self.experience_maker.sample = self._sample_texts
        horizon = float(config.rollout.generate_max_len)
        self.actor_loss_fn = of_whole_step(self.update.policy_loss, horizon)
        self.critic_loss_fn = of_whole_step(self.update.value_loss, horizon)
        self.ptx_loss_fn = self.pretrain_loss
        self.update.accumulate_alone()
        self._accept_seed_calls("fit", *_TRAINING_METHODS)

    @classmethod
    def from_inputs(cls, inputs: PPOInputs, callbacks: Iterable[Callback] = ()) -> Self:
        of_inputs = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        return cls(**of_inputs, ema_model=None, callbacks=callbacks)

    @property
    def reward_source(self) -> RewardSource:
        """What scores the samples: set a function, or another source, and it scores those that follow.

        It scores evaluations too, where they have no source of their own. The source that was there is closed with the
        trainer, if a run was built: the new one may call it.
        """
        return super().reward_source

    @reward_source.setter
    def reward_source(self, given: RewardSource | Callable[..., Any]) -> None:
        before, source = self.reward_source, function_source(given, "reward_source")
        self._replaced_sources.append(before)
        self.sampler.sampler.score_by(source)
        self.experience_maker.rewarded = not isinstance(source, NoReward)
        if getattr(self.evaluator, "reward_source", None) is before:
            self.evaluator.reward_source = source

    def sources(self) -> list[RewardSource]:
        return [*self._replaced_sources, *super().sources()]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "fit" in vars(cls):
            cls.fit = _own_fit(vars(cls)["fit"])

    @classmethod
    def overrides(cls, *methods: str) -> bool:
        """Whether a subclass has one of these methods of its own."""
        return any(getattr(cls, name) is not getattr(PPOTrainer, name) for name in methods)

    def _reward_source_of(
        self, config: PPOConfig, strategy: Any, tokenizer: Any, reward_model: Any, given: Any
    ) -> RewardSource:
        """The source that was given, or one of the constructor's reward models, function or servers."""
        if given is not None:
            return function_source(given, "reward_source")
        is_given = reward_model or self.reward_fn or self.remote_rm_url
        if estimator_entry(config).ignores_scores and not is_given:
            return NoReward()
        models = [] if reward_model is None else [reward_model]
        return build_reward_source(
            remote_rm_url=self.remote_rm_url,
            reward_fn=self.reward_fn,
            reward_models=list(reward_model) if isinstance(reward_model, (list, tuple)) else models,
            remote_options={"ranks": strategy},
            model_options={
                "device": strategy.device,
                "pad_token_id": tokenizer.pad_token_id,
                "ranks": strategy,
                "micro_batch_size": micro_batch_spec(config, "reward"),
            },
        )

    # -- fit -----------------------------------------------------------------------------------------------------

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
        if not self.is_complete():
            if prompts_dataloader is not None:
                self.prompts_dataloader = prompts_dataloader
            if self.prompts is None and not self.only_evaluates:
                raise ConfigError(
                    "fit() needs a prompts_dataloader, unless the trainer was made by from_config()"
                )
            self.update_steps = num_update_steps_per_episodes
            per_episode = self.steps_per_episode()
            if args is not None:
                self._use_config(take_schedule(self.config, args, per_episode))
            elif self.overrides("save_logs_and_checkpoints", "_save_checkpoint"):
                args = self._script_args()
            self._args_of_fit = args
            if pretrain_dataloader is not None:
                self.pretrain_dataloader = endless(pretrain_dataloader)
            if consumed_samples and self.state.global_step == 0:
                batch_size = self.config.rollout.rollout_batch_size
                self.state.become(state_after(consumed_samples, per_episode, batch_size))
            self.started = True
        super().fit()

    def episode_prompts(self) -> ScriptPrompts:
        def convert(batch: Any) -> list[Prompt]:
            return as_prompts(batch, self.tokenizer, self.config.data.prompt_max_len)

        state = self.state
        return ScriptPrompts(self.prompts, state.episode, state.consumed_prompts, convert)

    def before_first_step(self) -> None:
        self.use_given_trackers()
        super().before_first_step()

    def train(self, step: int) -> dict[str, float]:
        """A subclass's ``ppo_train`` as well runs only where there is something to train on."""
        if (
            self.overrides("ppo_train")
            and self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0
        ):
            return PPOTrainer.ppo_train(self, step)
        return self.ppo_train(step)

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the replay buffer: ``max_epochs`` passes, one optimizer step per ``train_batch_size`` samples.

        Returns the means over the optimizer steps, and statistics of the rollout, by the names of
        ``trainer.metrics.METRICS`` without their namespace; the same on every rank. ``global_steps``, the number of
        this PPO step, seeds the shuffling.
        """
        if self.overrides("fit") and self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0:
            raise nothing_scored(global_steps)
        status = self.update.train(global_steps)
        self.update.accumulate_alone()
        return status

    def train_minibatch(self, minibatch: Any, global_steps: int = 0) -> list[Mapping[str, float]]:
        """One optimizer step of actor and critic; what ``training_step`` says of each micro batch with samples."""
        return self.update.take_step(minibatch, global_steps)

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: Tensor | None = None
    ) -> dict[str, float]:
        """One micro batch of actor and critic; its numbers, whose mean ``fit`` logs whatever their names. Collective.

        Gradients add up; at the last micro batch of ``train_batch_size`` samples the optimizers step. In ``fit`` a
        micro batch weighs by its share of the step's tokens, in a loop of a script's own all weigh the same. Only
        tokens where ``entropy_mask`` (B, A) is True have a policy loss, which is divided as without it.
        """
        status: dict[str, float] = {}
        if self.update.actor_trains(global_steps):
            masked = {} if entropy_mask is None else {"entropy_mask": entropy_mask}
            with self.timer("actor_update"):
                status |= self.training_step_actor(experience, **masked)
        if self.update.critic_trains():
            with self.timer("critic_update"):
                # The actor's status wins: its pass may know the KL more exactly.
                status = self.training_step_critic(experience) | status
        return status

    def training_step_actor(
        self, experience: Experience, entropy_mask: Tensor | None = None
    ) -> dict[str, float]:
        """One micro batch of the actor; see :meth:`training_step`."""
        if entropy_mask is not None:
            weights = 1.0 if experience.loss_weights is None else experience.loss_weights
            experience = replace(experience, loss_weights=weights * entropy_mask.float())
        return Update.training_step_actor(self.update, experience)

    def training_step_critic(self, experience: Experience) -> dict[str, float]:
        """One micro batch of the critic; see :meth:`training_step`."""
        return Update.training_step_critic(self.update, experience)

    def control_kl(self, status: Mapping[str, float]) -> None:
        """A subclass's ``ppo_train`` may say the KL by the seed's name."""
        if self.overrides("ppo_train") and "policy_kl" not in status:
            if not math.isnan(kl := status.get("kl", math.nan)):
                rollout = self.config.rollout
                self.kl_ctl.update(kl, rollout.rollout_batch_size * rollout.n_samples_per_prompt)
        else:
            super().control_kl(status)

    def check_trained(self) -> None:
        """Optimizer steps of a subclass's own are not counted."""
        if not self.overrides(*_TRAINING_METHODS):
            super().check_trained()

    # -- records and checkpoints ---------------------------------------------------------------------------------

    def finish_step(self, step: int, status: Mapping[str, float]) -> bool:
        self._wants_stop = False
        state = self.client_state() if self.overrides("save_logs_and_checkpoints") else None
        self.save_logs_and_checkpoints(
            self._args_of_fit, step, getattr(self, "bar", None), dict(status), state
        )
        return self._wants_stop

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
        self.start_records()  # a loop of the user's own may come without fit()
        status = logs_dict or {}
        if outcomes := self._take_outcomes():  # of a loop of the script's own
            status = optimizer_status([[outcome] for outcome in outcomes], self.strategy) | dict(
                status
            )
        if global_step > self.state.global_step:  # of a loop of the user's own
            self.state.global_step = global_step
        before, self._args_of_fit, self._client_states = self._args_of_fit, args, client_states
        self._wants_stop = super().finish_step(global_step, status)
        self._args_of_fit, self._client_states = before, None

    def write_checkpoint(self, step: int) -> None:
        """By a subclass's ``_save_checkpoint`` if there is one. Collective."""
        tag, state = tag_of(step), self.whole_state()
        added = dict(self._client_states or {})
        state = (
            state | added | {name: state[name] for name in (*self.states, *self.states_of_ranks)}
        )
        if not self.overrides("_save_checkpoint"):
            return self._save_checkpoint(self._args_of_fit, tag, state)
        state["rng"] = self.strategy.gather_object(rng_state())
        self._save_checkpoint(self._args_of_fit, tag, state)
        adopt(self.checkpointer, self.ckpt_path, tag)

    def _save_checkpoint(
        self, args: Any, tag: str, client_states: Mapping[str, Any] | None = None
    ) -> None:
        """Write the checkpoint ``tag``; the seed's name, so that an override acts. Collective."""
        is_whole = client_states is not None and "trainer" in client_states
        state = client_states if is_whole else self.whole_state() | dict(client_states or {})
        path = getattr(args, "ckpt_path", None) or self.config.checkpoint.ckpt_path
        self.checkpointer.save(path, step_of(tag), state)

    @property
    def ckpt_path(self) -> str:
        return getattr(self._args_of_fit, "ckpt_path", None) or self.config.checkpoint.ckpt_path

    @property
    def recorder(self) -> Any | None:
        """What writes the logs, from the first step on."""
        if not self.started:
            return None
        return next(
            (callback for callback in self.callbacks if hasattr(callback, "tensorboard_writer")),
            None,
        )

    def start_records(self) -> None:
        """For a loop of a script's own: what ``fit`` does before the first step. Collective."""
        if self.started:
            return
        self.started = True
        self.begin_run()
        for callback in self.callbacks:
            callback.on_start(self)
        self.use_given_trackers()

    def end_records(self) -> None:
        """For a loop of a script's own: what ``fit`` does after the last step. Collective."""
        if self.started:
            for callback in self.callbacks:
                callback.on_end(self, None)

    def use_given_trackers(self) -> None:
        """What a script has set takes the place of the recorder's own run or writer."""
        recorder = self.recorder
        for name, given in (
            self._trackers.items() if recorder is not None and self.strategy.is_rank_0() else ()
        ):
            replaced = [sink for sink in recorder.sinks if _is_tracker(sink, name)]
            for sink in replaced:
                sink.close()
            recorder.sinks = [sink for sink in recorder.sinks if sink not in replaced]
            if given is not None:
                recorder.sinks.append(_GivenTracker(name, given))

    # -- options that are attributes -----------------------------------------------------------------------------

    micro_train_batch_size = _setting("training.micro_train_batch_size", "_resize_training")
    prompt_max_len = _setting("data.prompt_max_len")
    dataloader_pin_memory = _setting("data.dataloader_pin_memory", "_pin_buffer")
    kl_target = _setting("algorithm.kl_target", "_make_kl_controller")
    gradient_checkpointing = _setting("model.gradient_checkpointing", "_checkpoint_gradients")
    save_hf_ckpt = _setting("checkpoint.save_hf_ckpt")
    disable_ds_ckpt = _setting("checkpoint.disable_ds_ckpt")
    _wandb = _tracker("_wandb", "wandb_run")
    _tensorboard = _tracker("_tensorboard", "tensorboard_writer")
    max_epochs = _of_part("update.max_epochs")
    critic_max_epochs = _of_part("update.critic_max_epochs")
    freezing_actor_steps = _of_part("update.freezing_actor_steps")
    epoch = _of_part("update.epoch")
    ema_beta = _of_part("moving_average.beta")
    ema_model = property(lambda trainer: trainer.followers.get("ema"))
    ptx_coef = _of_part("pretraining.coef")
    policy_loss = _of_part("update.policy_loss")
    value_loss = _of_part("update.value_loss")
    pretrain_loss = _of_part("pretraining.loss_fn")
    value_norm = _of_part("update.value_norm")
    early_stops = _of_part("update.early_stops")
    actor_optim = _of_part("update.actor_optim")
    critic_optim = _of_part("update.critic_optim")
    actor_scheduler = _of_part("update.actor_scheduler")
    critic_scheduler = _of_part("update.critic_scheduler")

    @property
    def micro_rollout_batch_size(self) -> int:
        return rollout_rows(self.config)

    @micro_rollout_batch_size.setter
    def micro_rollout_batch_size(self, value: int) -> None:
        self._set_options(micro_rollout_batch_size=value)
        self.experience_maker.micro_rollout_batch_size = value
        self.experience_maker.micro_batches = {
            call: micro_batch_spec(self.config, call) for call in scoring_calls()
        }
        for part in (self.rollout_engine, self.sampler.sampler.engine):
            if hasattr(part, "micro_rollout_batch_size"):
                part.micro_rollout_batch_size = value

    @property
    def max_norm(self) -> float:
        return self.config.training.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        roles = (
            {"actor": self.actor}
            if self.critic is None
            else {"actor": self.actor, "critic": self.critic}
        )
        same = {role: of_role(self.config, role).max_norm == self.max_norm for role in roles}
        self._set_options(
            max_norm=value, **({"critic_max_norm": value} if same.get("critic") else {})
        )
        self.strategy.max_norm = value
        for role, model in roles.items():
            if same[role]:  # a norm of the critic's own stays
                self.strategy.set_max_norm(model, value)

    @property
    def aux_loss(self) -> bool:
        return self.config.loss.aux_loss_coef > 0 if self._aux_loss is None else self._aux_loss

    @aux_loss.setter
    def aux_loss(self, value: bool) -> None:
        self._aux_loss = bool(value)
        if not value:
            self._set_options(aux_loss_coef=0.0)

    # -- what can be replaced ------------------------------------------------------------------------------------

    @property
    def actor_loss_fn(self) -> Callable[..., Any]:
        return self._actor_loss_fn

    @actor_loss_fn.setter
    def actor_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._actor_loss_fn, self.policy_loss = fn, policy_loss_of(fn)

    @property
    def critic_loss_fn(self) -> Callable[..., Any]:
        return self._critic_loss_fn

    @critic_loss_fn.setter
    def critic_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._critic_loss_fn, self.value_loss = fn, value_loss_of(fn)

    @property
    def ptx_loss_fn(self) -> Callable[..., Any]:
        return self._ptx_loss_fn

    @ptx_loss_fn.setter
    def ptx_loss_fn(self, fn: Callable[..., Any]) -> None:
        self._ptx_loss_fn, self.pretrain_loss = fn, pretrain_loss_of(fn)

    @property
    def kl_ctl(self) -> Any:
        return self.update.kl_ctl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self.update.kl_ctl = controller
        maker = self.experience_maker
        # A script's NaiveExperienceMaker holds the maker inside.
        getattr(maker, "maker", maker).kl_ctl = controller
        if (states := vars(self).get("states")) is not None:
            states["kl_ctl"] = (
                controller if hasattr(controller, "state_dict") else _KLState(controller)
            )

    @property
    def prompts_dataloader(self) -> Any:
        """In a subclass with a ``fit`` of its own it gives the seed's batches."""
        if self.prompts is None or not self.overrides("fit"):
            return self.prompts
        return SeedLoader(self.prompts)

    @prompts_dataloader.setter
    def prompts_dataloader(self, loader: Any) -> None:
        self.prompts = loader.loader if isinstance(loader, SeedLoader) else loader

    @property
    def pretraining(self) -> Pretraining:
        """The PTX loss."""
        return self.update.loss_terms["pretraining"]

    @property
    def pretrain_dataloader(self) -> Any:
        return self.pretraining.batches

    @pretrain_dataloader.setter
    def pretrain_dataloader(self, batches: Any) -> None:
        self.pretraining.batches = (
            pretrain_batches_of(batches) if isinstance(batches, Iterator) else batches
        )

    # -- what setting an attribute changes -----------------------------------------------------------------------

    def _set_options(self, **options: Any) -> None:
        """Work with other options from now on."""
        config = self.config.with_options(**options)
        config.validate(self.strategy.world_size, by_hand=True)
        self._use_config(config)

    def _use_config(self, config: PPOConfig) -> None:
        self.config = config
        self.update.use(config)
        self.checkpointer.config = config.checkpoint

    def _resize_training(self) -> None:
        self.replay_buffer.sample_batch_size = self.strategy.micro_train_batch_size = (
            self.micro_train_batch_size
        )
        self.update.accumulate_alone()

    def _pin_buffer(self) -> None:
        self.replay_buffer.pin_memory = (
            self.dataloader_pin_memory and self.replay_buffer.device.type == "cuda"
        )

    def _make_kl_controller(self) -> None:
        algorithm = self.config.algorithm
        self.kl_ctl = make_kl_controller(
            self.kl_ctl.value, algorithm.kl_target, algorithm.kl_horizon
        )

    def _checkpoint_gradients(self) -> None:
        for model in (self.actor, self.critic):
            if model is not None and self.gradient_checkpointing:
                model.gradient_checkpointing_enable()
            elif model is not None:
                model.gradient_checkpointing_disable()

    # -- what overrides need -------------------------------------------------------------------------------------

    def _accept_seed_calls(self, *methods: str) -> None:
        """Overrides of these methods may call the models as OpenRLHF's do."""
        for model in (self.actor, self.critic) if self.overrides(*methods) else ():
            if model is not None:
                accept_seed_calls(model)
        # The seed's training step reads output.aux_loss.
        if self.aux_loss and self.overrides("training_step_actor"):
            self.actor.check_router()
            give_router_loss(self.actor)

    def _script_args(self) -> Any:
        """The namespace for overrides that read options from ``args``, where ``fit`` gets none."""
        if self.prompts is not None:
            fill_schedule(self.args, self.steps_per_episode())
        return self.args

    def fit_arguments(self) -> dict[str, Any]:
        """What a ``fit`` of a subclass's own gets where its caller leaves it out."""
        arguments = {
            "args": self._script_args(),
            "prompts_dataloader": self.prompts,
            "pretrain_dataloader": self.pretrain_dataloader,
        }
        if self.owns_parts and self.prompts is not None:
            rollout, training = self.config.rollout, self.config.training
            prompts = self.steps_per_episode() * rollout.rollout_batch_size
            samples = prompts * rollout.n_samples_per_prompt * training.max_epochs
            arguments["num_update_steps_per_episodes"] = math.ceil(
                samples / training.train_batch_size
            )
            arguments["consumed_samples"] = self.state.global_step * rollout.rollout_batch_size
        return arguments

    def steps_per_episode(self) -> int:
        return steps_per_episode(self.config, self.prompts, self.update_steps)

    def _before_texts(self) -> int:
        """Brings the engine up to date before prompts come as texts; the number of the step. Collective."""
        engine = find_engine(self.actor)
        if engine is None or engine.global_steps != self._synced:
            self.rollout_engine.sync_weights(self.actor)
            self._synced = 0 if engine is None else engine.global_steps
        if self.recorder is None and self.overrides("fit"):
            self.start_records()
        self._text_step = max(self._text_step, self.state.global_step) + 1
        return self._text_step

    def of_micro_batch(self, status: dict[str, float], experience: Any) -> dict[str, float]:
        """The status for a loop of a script's own: the same names from every micro batch, as the seed's.

        What only a micro batch that ends an optimizer step can say is kept for :meth:`save_logs_and_checkpoints`.
        """
        if experience.part is not None:
            return status
        outcome = {name: x for name, x in status.items() if name in OUTCOMES}
        if outcome:
            self._outcomes = [*self._outcomes, outcome]
        return {name: x for name, x in status.items() if name not in outcome}

    def _take_outcomes(self) -> list[Mapping[str, float]]:
        """Those that no log has, and begins anew."""
        outcomes, self._outcomes = list(self._outcomes), ()
        return outcomes

    def _sample_texts(
        self, prompts: Sequence[str], labels: Sequence[Any] | None, **options: Any
    ) -> list[Rollout]:
        """Scored rollouts of prompts as texts, for ``experience_maker.make_experience_list`` in the seed's style."""
        step = self._before_texts()
        batch = list(prompts) if labels is None else (list(prompts), list(labels))
        config = with_generation(self.config, options, self.tokenizer) if options else self.config
        records = as_prompts(batch, self.tokenizer, config.data.prompt_max_len)
        sampler = self.sampler.sampler
        sampling = replace(sampling_params(config), n=sampler.sampling.n)
        sampler = replace(sampler, sampling=sampling)
        sampled = sampler.score(sampler.generate(records, step))
        if sampled.not_finite is not None:
            raise RewardError(sampled.not_finite)
        return sampled.rollouts


def adopt(checkpointer: RunCheckpointer, root: str, tag: str) -> None:
    """Mark a checkpoint that a script has written as the latest, if all parts have it. Collective."""

    def mark() -> None:
        if tag in checkpointer.with_all_parts(local_folder(root)):
            mark_latest(root, tag)

    checkpointer.strategy.on_rank_0(mark, f"mark {tag} as the latest in {root}")


def _checkpoint_gradients(*models: Any) -> None:
    """The seed's constructor asks for it, as an option."""
    for model in models:
        if model is not None:
            model.gradient_checkpointing_enable()


def _check_models(
    config: PPOConfig, actor: Any, critic: Any, initial_model: Any, tokenizer: Any, teacher: Any
) -> None:
    """Raises ConfigError where the options need what the constructor was not given."""
    check_actor(config, actor)
    algorithm = config.algorithm
    if tokenizer is None:
        raise ConfigError("PPOTrainer needs the actor's tokenizer: pass tokenizer=")
    if critic is None and needs_critic(config):
        raise ConfigError(
            f"--advantage_estimator {algorithm.advantage_estimator} needs a critic, but critic is None"
        )
    if initial_model is None and needs_reference(config):
        raise ConfigError(
            f"init_kl_coef {algorithm.init_kl_coef} needs a reference: pass initial_model, or set init_kl_coef=0"
        )
    if (teacher is not None) != needs_teacher(config):
        raise ConfigError(
            "pass teacher=, and name it by --teacher_pretrain: one without the other does nothing"
        )
    if moves_reference(config) and not hasattr(initial_model, "parameters"):
        raise ConfigError(
            "--ref_ema_eta and --ref_reset_steps need a reference with weights of its own, and this one is the actor "
            "without its adapters: leave them out, or pass another initial_model"
        )
