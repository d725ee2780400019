"""From a config to a finished :class:`Run`: strategy, models, data, optimizers, rewards, engine, in this order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightppo.algorithms.kl import make_kl_controller
from lightppo.callbacks import Callback, load_callbacks
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.config.rules import (
    estimator_entry,
    followers,
    frozen_models,
    generation_batch,
    moves_reference,
    needs_critic,
    needs_reference,
    of_role,
    old_log_probs_from,
    trains,
)
from lightppo.data.datasets import PromptDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.episodes import assembly
from lightppo.episodes.rewards import taped, unless_failed
from lightppo.errors import ConfigError
from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.maker import ExperienceMaker
from lightppo.files import stage_to_local
from lightppo.logging.step_metrics import Phases
from lightppo.models import loading
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.wrapper import Role, prepare_model
from lightppo.plugin import (
    CHECKS,
    COLLECTORS,
    ENGINES,
    LOADING,
    LOSS_TERMS,
    MEASURING,
    MODEL_CONFIGS,
    ROWS,
    SAMPLING,
    VALUE_NORMS,
    FrozenModel,
)
from lightppo.ranks import Ranks
from lightppo.rewards.async_scorer import AsyncScorer
from lightppo.rewards.registry import source_of
from lightppo.rewards.reward_source import NoReward, RewardRequest, RewardSource
from lightppo.rollout.engine import RolloutEngine, SamplingParams, capabilities_of
from lightppo.rollout.sampler import BatchCollector, RolloutSampler
from lightppo.trainer.loop import SkippedSteps, TrainerState
from lightppo.trainer.prompts import RolloutBatchSampler
from lightppo.trainer.update import LossTerm, Update
from lightppo.verifiers.formats import with_xml_format
from lightppo.verifiers.status import status_check
from lightppo.zero3 import find_adapters, parameter_count

T = TypeVar("T")


@dataclass
class Building:
    """A run that is being built, as far as it is: what ``lightppo.plugin.CHECKS`` look at.

    A check of ``folders`` may put another config in place, and say that nothing is kept of the run.
    """

    given: OptionSet  # the options as they were given
    asked: OptionSet  # with what None means
    config: OptionSet  # as it runs
    strategy: DeepspeedStrategy
    tokenizer: Any = None
    # Data sets, by the option that names their files.
    rows: dict[str, Any] = field(default_factory=dict)
    prompts_dataloader: DataLoader | None = None  # None: the run does not train
    held_out: Any = None  # data to evaluate on, for plugins
    loss_terms: dict[str, LossTerm] = field(default_factory=dict)
    reward_source: RewardSource | None = None
    judge: RewardSource | None = None  # scores answers to them
    reward_models: Sequence[Any] = ()  # of --reward_pretrain
    # Further models by name, which are elsewhere.
    frozen: dict[str, Any] = field(default_factory=dict)
    # By the flag that names each.
    models: dict[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)  # models by their part of a checkpoint
    rollout_engine: RolloutEngine | None = None
    evaluator: Any = None  # of the run, see :class:`lightppo.trainer.loop.TrainingLoop`
    content: dict[str, str] = field(default_factory=dict)  # marks of what options name
    keeps: bool = True

    @property
    def actor(self) -> Any:
        """The model that trains."""
        return self.saved["actor"]

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters by part of a checkpoint; ``export``: of an export."""
        of_parts = {
            part: parameter_count(model, trained_only=find_adapters(model) is not None)
            for part, model in self.saved.items()
        }
        return of_parts | {"export": parameter_count(self.actor)}

    def check(self, when: str) -> None:
        """Run the checks of a time, and print what they say. Collective."""
        for check in CHECKS.values():
            if check.when == when:
                for line in check.fn(self) or ():
                    self.strategy.print(line)


def check_options(building: Building) -> None:
    """Options that cannot work, alone or together, are refused."""
    building.given.validate(building.strategy.world_size)


@dataclass
class Origin:
    """What a run knows of its beginning; the default is that of one whose parts a script has made."""

    asked: PPOConfig | None = None  # the options as they were given
    content: Mapping[str, str] = field(default_factory=dict)  # marks of what options name
    keeps: bool = True  # anything of it at its end


@dataclass
class PPOInputs:
    """What ``build`` makes, or a script: models with their optimizers, data, rewards, engine."""

    strategy: DeepspeedStrategy
    actor: Actor
    critic: Any | None
    reward_model: Any
    initial_model: Any | None
    actor_optim: Any
    critic_optim: Any
    actor_scheduler: Any
    critic_scheduler: Any
    config: PPOConfig
    tokenizer: Any
    reward_source: RewardSource
    rollout_engine: RolloutEngine
    frozen: Mapping[str, Any] = field(default_factory=dict)  # further models by name
    followers: Mapping[str, Any] = field(default_factory=dict)  # models that follow the actor
    prompts_dataloader: Iterable | None = None
    loss_terms: Mapping[str, LossTerm] = field(default_factory=dict)
    evaluator: Any = None
    origin: Origin = field(default_factory=Origin)


@dataclass
class PPOParts(PPOInputs):
    """Everything that a trainer works with, finished."""

    state: TrainerState = field(kw_only=True)
    timer: Phases = field(kw_only=True)
    kl_ctl: Any = field(kw_only=True)
    experience_maker: ExperienceMaker = field(kw_only=True)
    replay_buffer: ReplayBuffer = field(kw_only=True)
    sampler: BatchCollector = field(kw_only=True)
    update: Update = field(kw_only=True)
    checkpointer: RunCheckpointer = field(kw_only=True)
    skipped: SkippedSteps = field(kw_only=True)


def build(config: PPOConfig, trainer: type[T], callbacks: Iterable[Callback] = ()) -> T:
    """A finished trainer of this class; whatever cannot work is an error that names its flag. Collective."""
    # What can fail on a user's mistake comes before what takes long: all rows and the reward file, then the models.
    callbacks = [*callbacks, *load_callbacks(config.training.callback)]
    building = begin(config)
    read_data(building)
    models, optimizers = load_models(building)
    actor, reference = models.actor, models.reference
    if reference is None and needs_reference(building.config):
        reference = actor.as_loaded
    strategy, tokenizer, config = building.strategy, building.tokenizer, building.config
    if building.reward_source is None:
        build_rewards(building, models.reward_models)
    engine = building.rollout_engine = build_rollout_engine(config, strategy, actor, tokenizer)
    building.check("engine")
    (actor_optim, actor_scheduler), (critic_optim, critic_scheduler) = optimizers.values()
    inputs = PPOInputs(
        strategy=strategy,
        actor=actor,
        critic=models.critic,
        reward_model=models.reward_models,
        initial_model=reference,
        actor_optim=actor_optim,
        critic_optim=critic_optim,
        actor_scheduler=actor_scheduler,
        critic_scheduler=critic_scheduler,
        config=config,
        tokenizer=tokenizer,
        reward_source=building.reward_source,
        rollout_engine=engine,
        frozen=building.frozen | models.frozen,
        followers=models.followers,
        prompts_dataloader=building.prompts_dataloader,
        loss_terms=building.loss_terms,
        evaluator=building.evaluator,
        origin=Origin(building.given, building.content, building.keeps),
    )
    return trainer.from_inputs(inputs, callbacks)


def begin(config: PPOConfig) -> Building:
    """The ranks have met, options and tokenizer are right, and the run's folders are its own. Collective."""
    strategy = build_strategy(config)
    strategy.setup_distributed()
    resolved = config.resolved()
    building = Building(given=config, asked=resolved, config=resolved, strategy=strategy)
    building.check("options")
    building.tokenizer = build_tokenizer(resolved)
    building.check("tokenizer")
    building.check("folders")
    return building


def read_data(building: Building) -> None:
    """All rows are read, and what scores them, if it is no model. Collective."""
    config, strategy = building.config, building.strategy
    if trains(config):
        prompts = building.rows["prompt_data"] = build_prompts(config, building.tokenizer, strategy)
        building.prompts_dataloader = prompts_dataloader(config, prompts, strategy)
    building.loss_terms = LOSS_TERMS.made(building)
    if not config.model.reward_pretrain:
        build_rewards(building)
    building.check("data")


def load_models(building: Building) -> tuple[Models, dict[str, Any]]:
    """All models, in their engines, and (optimizer, scheduler) of each role that trains. Collective."""
    config, strategy = building.config, building.strategy
    per_episode = steps_per_episode(config, building.prompts_dataloader)
    rates = {
        "actor": config.training.actor_learning_rate,
        "critic": config.training.critic_learning_rate,
    }
    optimizers: dict[str, Any] = dict.fromkeys(rates, (None, None))

    def into_engine(model: Any, role: Role) -> Any:
        if role not in rates:
            return strategy.prepare(model)
        steps = optimizer_steps(config, per_episode, role)
        trained = with_optimizer(model, rates[role], steps, config, strategy, role)
        model, *optimizers[role] = strategy.prepare(trained)
        return model

    models = build_models(config, strategy, into_engine)
    fit_vocabulary(models, building.tokenizer, config)
    building.saved = saved_parts(
        config, models.actor, models.critic, models.followers, models.reference
    )
    building.models = models.by_flag
    building.check("models")
    return models, optimizers


def assemble(
    inputs: PPOInputs,
    kind: type[Update] = Update,
    maker_kind: type[ExperienceMaker] = ExperienceMaker,
    own_training_step: bool = False,
) -> PPOParts:
    """Everything between prompts and weights, around the models, the engine and the rewards of a run.

    Args:
        kind, maker_kind: the classes of the update and of the maker of experience.
        own_training_step: its training step is a user's, which needs old log probs in place.
    """
    config, strategy = inputs.config, inputs.strategy
    state, timer, algorithm = TrainerState(), MEASURING["timer"].fn(), config.algorithm
    kl_ctl = make_kl_controller(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    value_norm = VALUE_NORMS.first(config)
    maker = build_maker(inputs, kl_ctl, value_norm, timer, maker_kind, own_training_step)
    buffer = ReplayBuffer(
        config.training.buffer_cpu_offload,
        strategy.device,
        pin_memory=config.data.dataloader_pin_memory,
    )
    skipped = SkippedSteps(state, strategy)
    update = kind(
        inputs,
        experience_maker=maker,
        replay_buffer=buffer,
        kl_ctl=kl_ctl,
        value_norm=value_norm,
        state=state,
        skipped=skipped,
        timer=timer,
    )
    saved = saved_parts(config, inputs.actor, inputs.critic, inputs.followers, inputs.initial_model)
    return PPOParts(
        **vars(inputs),
        state=state,
        timer=timer,
        kl_ctl=kl_ctl,
        experience_maker=maker,
        replay_buffer=buffer,
        sampler=build_sampler(
            config, strategy, inputs.rollout_engine, inputs.reward_source, maker, timer
        ),
        update=update,
        checkpointer=RunCheckpointer(strategy, config.checkpoint, saved, inputs.tokenizer),
        skipped=skipped,
    )


def build_maker(
    inputs: PPOInputs,
    kl_ctl: Any,
    value_norm: Any,
    timer: Phases,
    kind: type[ExperienceMaker],
    own_training_step: bool,
) -> ExperienceMaker:
    """What makes experience of rollouts; ``kind`` and ``own_training_step`` as of :func:`assemble`."""
    config, strategy = inputs.config, inputs.strategy
    old_log_probs = old_log_probs_from(
        config, capabilities_of(inputs.rollout_engine).exact_log_probs
    )
    if old_log_probs == "training" and own_training_step:
        old_log_probs = "forward"
    around_parts = MEASURING["part"].fn
    return kind(
        inputs.actor,
        inputs.critic,
        inputs.initial_model,
        strategy,
        kl_ctl,
        config,
        frozen=inputs.frozen,
        rewarded=not isinstance(inputs.reward_source, NoReward),
        value_norm=value_norm,
        old_log_probs=old_log_probs,
        progress=lambda parts: around_parts(parts, "experience", strategy),
        timer=timer,
    )


# -- models ----------------------------------------------------------------------------------------------------------


@contextmanager
def _as_config_error() -> Iterator[None]:
    """A part that refuses its arguments refuses options."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_strategy(config: OptionSet) -> DeepspeedStrategy:
    """The strategy of a config; no process group yet. Raises ConfigError for ZeRO options that exclude each other."""
    flat = config.resolved().flat()
    same_name = {f.name: flat[f.name] for f in fields(DeepspeedStrategy) if f.name in flat}
    with _as_config_error():
        return DeepspeedStrategy(**same_name, timeout_minutes=config.strategy.dist_timeout)


@dataclass
class Models:
    """The models of a run. No reference also where the actor itself is it, adapters off."""

    actor: Actor
    critic: Any | None  # these are in their engines, if they were prepared
    reference: Actor | None
    reward_models: list[Any]
    # By the names of their parts in checkpoints.
    followers: dict[str, Actor] = field(default_factory=dict)
    frozen: dict[str, Actor] = field(default_factory=dict)  # further models by name
    # Models that score or train, by the flag that names each.
    by_flag: dict[str, Any] = field(default_factory=dict)


def loading_options(config: OptionSet) -> dict[str, Any]:
    """How all models but reward models are loaded."""
    asked = config.model
    # The reference too, so that it is what the actor without adapters would be; scores of reward models stay exact.
    of_tables = {*LOADING, *MODEL_CONFIGS}
    changes = {name: value for name, value in config.flat().items() if name in of_tables}
    return changes | {
        "attn_implementation": asked.attn_implementation,
        "trust_remote_code": asked.trust_remote_code,
        "external_lib": asked.external_lib,
        "seed": config.strategy.seed,
        "init_from_scratch": asked.init_from_scratch,
    }


def build_models(
    config: PPOConfig,
    strategy: DeepspeedStrategy,
    into_engine: Callable[[Any, Role], Any] = lambda model, role: model,
) -> Models:
    """Load all models, each under the ZeRO configuration of its role.

    ``into_engine(model, role)`` takes each to its place before the next one loads: below ZeRO-3 a host holds one whole
    model per rank, not four.
    """
    loader = ModelLoader(config, strategy, into_engine)
    actor = loader.actor()
    return Models(
        actor=actor,
        critic=loader.critic() if needs_critic(config) else None,
        reference=loader.reference(actor) if needs_reference(config) else None,
        reward_models=[loader.reward_model(path) for path in config.model.reward_pretrain],
        followers={
            name: loader.follower(name) for name in followers(config) if name != "reference"
        },
        frozen={name: loader.frozen(name, one) for name, one in frozen_models(config).items()},
        by_flag=loader.by_flag,
    )


class ModelLoader:
    """Loads, prepares and places the models of a run, one by one."""

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        into_engine: Callable[[Any, Role], Any],
    ) -> None:
        self.config, self.strategy, self.into_engine = config, strategy, into_engine
        self.by_flag: dict[str, Any] = {}
        self.options = loading_options(config)
        of_all = ("attn_implementation", "trust_remote_code", "external_lib", "seed")
        self.options_of_frozen = {name: self.options[name] for name in of_all}
        self.temperature = config.rollout.temperature or 1.0

    def actor(self) -> Actor:
        """The policy that trains."""
        path = self.config.model.pretrain
        model = Actor(
            stage_to_local(path),
            dtype=self.strategy.dtype,
            ds_config=self.strategy.get_ds_train_config(),
            temperature=self.temperature,
            **self._options_of(path),
        )
        if self.config.loss.aux_loss_coef > 0:
            with _as_config_error():
                model.check_router()
        return self._placed(model, "actor", "--pretrain")

    def critic(self) -> Any:
        """``--critic_pretrain``, in its engine."""
        named, zero = self.config.model, self.config.strategy
        ds_config = self.strategy.get_ds_train_config(
            zero_stage=zero.critic_zero_stage,
            max_norm=of_role(self.config, "critic").max_norm,
            adam_offload=zero.critic_adam_offload,
            param_offload=zero.critic_param_offload,
        )
        model = Critic(
            stage_to_local(named.critic_pretrain),
            dtype=self.strategy.dtype,
            ds_config=ds_config,
            value_head_prefix=named.value_head_prefix,
            init_value_head=True if named.init_critic_from_actor else None,
            **self._options_of(named.critic_pretrain),
        )
        return self._placed(model, "critic", "--critic_pretrain")

    def reference(self, actor: Actor) -> Actor | None:
        """``--ref_pretrain``; None where the actor itself can say what it was, see ``Actor.as_loaded``."""
        path, zero = self.config.model.ref_pretrain, self.config.strategy
        if actor.as_loaded is not None and path in (None, self.config.model.pretrain):
            return None
        # A reference that moves, like an average, is fp32: small steps would vanish in 16 bits.
        dtype = torch.float32 if moves_reference(self.config) else self.strategy.dtype
        model = Actor(
            stage_to_local(path),
            dtype=dtype,
            ds_config=self.strategy.get_ds_eval_config(
                zero.ref_offload, zero_stage=zero.ref_zero_stage, dtype=dtype
            ),
            flag="--ref_pretrain",
            temperature=self.temperature,
            **self._options_of(path),
        )
        return self._placed(model, "reference", "--ref_pretrain")

    def reward_model(self, path: str) -> Any:
        """One of ``--reward_pretrain``, in its engine."""
        zero = self.config.strategy
        model = RewardModel(
            stage_to_local(path),
            dtype=self.strategy.dtype,
            ds_config=self.strategy.get_ds_eval_config(
                zero.reward_offload, zero_stage=zero.reward_zero_stage
            ),
            normalize_reward=self.config.reward.normalize_reward,
            value_head_prefix=self.config.model.value_head_prefix,
            **self.options_of_frozen,
        )
        return self._placed(model, "reward", f"--reward_pretrain {path}")

    def follower(self, name: str) -> Actor:
        """What the actor is, in float32."""
        path, zero = self.config.model.pretrain, self.config.strategy
        ds_config = self.strategy.get_ds_eval_config(
            zero.ref_offload, zero_stage=zero.ref_zero_stage, dtype=torch.float32
        )
        model = Actor(stage_to_local(path), ds_config=ds_config, **self._options_of(path))
        return self._placed(model, name)

    def frozen(self, name: str, asked: FrozenModel) -> Actor:
        """A further model, as it is: neither 4 bits nor ``--override_config`` are its."""
        model = Actor(
            stage_to_local(asked.path),
            dtype=self.strategy.dtype,
            ds_config=self.strategy.get_ds_eval_config(asked.offload, zero_stage=asked.zero_stage),
            flag=asked.flag,
            temperature=self.temperature,
            **self.options_of_frozen,
        )
        return self._placed(model, name, asked.flag)

    def _options_of(self, path: str | None) -> dict[str, Any]:
        """How the actor, or a model that may have a checkpoint of its own, is loaded."""
        from_scratch = self.config.model.init_from_scratch and path == self.config.model.pretrain
        return self.options | {"init_from_scratch": from_scratch}

    def _placed(self, model: Any, role: Role, flag: str | None = None) -> Any:
        prepare_model(model, role, self.config, self.strategy.device)
        model = self.into_engine(model, role)
        if flag is not None:
            self.by_flag[flag] = model
        return model


def fit_vocabulary(models: Models, tokenizer: Any, config: PPOConfig) -> None:
    """Policies give log probs over the tokenizer's ids; ModelLoadError where it has more."""
    loading.fit_to_model(tokenizer, models.actor.hf_model, config.model.pretrain, "--pretrain")
    for name, one in frozen_models(config).items():
        loading.fit_to_model(tokenizer, models.frozen[name].hf_model, one.path, one.flag)
    for model in filter(None, (models.actor, models.reference, *models.frozen.values())):
        model.valid_vocab_size = loading.valid_vocab_size(tokenizer)


def saved_parts(
    config: PPOConfig, actor: Any, critic: Any, followers: Mapping[str, Any], reference: Any
) -> dict[str, Any]:
    """The models that a checkpoint of this run holds, by the name of their part."""
    parts = {
        "actor": actor,
        "critic": critic,
        **followers,
        "reference": reference if moves_reference(config) else None,
    }
    return {name: model for name, model in parts.items() if model is not None}


def build_tokenizer(config: OptionSet, actor: Actor | None = None) -> Any:
    """The actor's tokenizer; if the actor is there, checked against its embedding."""
    asked = config.model
    own = asked.tokenizer_path
    return loading.get_tokenizer(
        stage_to_local(asked.pretrain if own is None else own),
        actor,
        use_fast=not asked.disable_fast_tokenizer,
        trust_remote_code=asked.trust_remote_code,
        flag="--pretrain" if own is None else "--tokenizer_path",
    )


def with_optimizer(
    model: Any,
    learning_rate: float,
    steps: int,
    config: OptionSet,
    strategy: DeepspeedStrategy,
    role: Literal["actor", "critic"] = "actor",
) -> tuple[Any, Any, Any]:
    """(model, optimizer, scheduler) for ``strategy.prepare``; three times ``None`` without a model."""
    if model is None:
        return None, None, None
    asked = of_role(config, role)
    optimizer = strategy.create_optimizer(
        model,
        lr=learning_rate,
        betas=asked.adam_betas,
        weight_decay=asked.l2,
    )
    warmup = asked.lr_warmup_steps
    if warmup is None:
        warmup = math.ceil(steps * asked.lr_warmup_ratio)
    of_step = partial(
        share_of_peak_rate,
        kind=asked.lr_scheduler,
        steps=steps,
        warmup=warmup,
        least=asked.min_lr_ratio,
    )
    return model, optimizer, LambdaLR(optimizer, of_step)


def share_of_peak_rate(step: int, kind: str, steps: int, warmup: int, least: float) -> float:
    """The learning rate of an optimizer step, counted from 0, as a share of the highest one.

    The warm-up is ``(step + 1) / (warmup + 1)``, so that its first step trains too; behind it the rates are those of
    ``transformers.get_scheduler``, and behind the last step the last one's.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return max(0, steps - step) / max(1, steps - warmup)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return cosine if kind == "cosine" else cosine * (1 - least) + least


# -- data ------------------------------------------------------------------------------------------------------------


def build_prompts(
    config: PPOConfig,
    tokenizer: Any,
    strategy: DeepspeedStrategy,
    name: str = "prompt_data",
    split: str | None = None,
    limit: int | None = None,
) -> PromptDataset:
    """Prompts of an option, checked and tokenised; ``split`` and ``limit`` are those of ``--prompt_data`` by default."""
    data = config.data
    rows = ROWS.last(config, name, split or data.prompt_split, strategy)
    dataset = PromptDataset(
        rows.select(range(min(len(rows), limit or data.max_samples))),
        tokenizer,
        input_template=data.input_template,
        input_key=data.input_key,
        label_key=data.label_key,
        data_source_key=data.data_source_key,
        apply_chat_template=data.apply_chat_template,
        prompt_max_len=data.prompt_max_len,
        truncation=data.truncation,
        system_prompt=data.system_prompt,
        chat_template_kwargs=data.chat_template_kwargs,
        on_bad_row=data.on_bad_row,
        filter_overlong=data.filter_overlong_prompts,
        num_workers=data.data_num_workers,
        ranks=strategy,
    )
    strategy.print(f"--{name} {config.flat()[name]}: {dataset.report}")
    return dataset


def prompts_dataloader(
    config: PPOConfig, prompts: PromptDataset, strategy: DeepspeedStrategy
) -> DataLoader:
    """This rank's share of every generation batch."""
    ranks = {"rank": strategy.get_rank(), "world_size": strategy.world_size}
    order = {"shuffle": config.data.data_shuffle, "seed": config.strategy.seed}
    sampler = RolloutBatchSampler(len(prompts), generation_batch(config), **ranks, **order)
    # A generator of its own, so that beginning an episode, as a resumed run does, draws no number of the global one.
    generator = torch.Generator()
    return DataLoader(
        prompts, batch_sampler=sampler, collate_fn=PromptDataset.collate_fn, generator=generator
    )


def steps_per_episode(config: PPOConfig, dataloader: Iterable, update_steps: int = 0) -> int:
    """PPO steps of the coming episode, at most so many with ``--dynamic_sampling``, whose rejected groups take prompts.

    From the length of the dataloader, whose batches are generation batches; where it has none, from ``update_steps``,
    the optimizer steps per episode.
    """
    rollout, training = config.rollout, config.training
    if hasattr(dataloader, "__len__"):
        prompts = len(dataloader) * generation_batch(config)
        return math.ceil(prompts / rollout.rollout_batch_size)
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return max(1, update_steps * training.train_batch_size // training.max_epochs // samples)


def optimizer_steps(
    config: PPOConfig, rollouts_per_episode: int, role: Literal["actor", "critic"] = "actor"
) -> int:
    """Optimizer steps of the whole run: what the learning-rate schedule of a model stretches over."""
    rollout, training = config.rollout, config.training
    epochs = of_role(config, role).max_epochs or 0  # None: there is no critic
    rollouts = training.total_training_steps or training.num_episodes * rollouts_per_episode
    if role == "actor":
        frozen = max(0, config.algorithm.freezing_actor_steps)
        rollouts = max(0, rollouts - frozen)
    return (
        rollouts
        * math.ceil(
            rollout.rollout_batch_size * rollout.n_samples_per_prompt / training.train_batch_size
        )
        * epochs
    )


# -- sampling --------------------------------------------------------------------------------------------------------


def build_sampler(
    config: PPOConfig,
    strategy: Ranks,
    engine: RolloutEngine,
    source: RewardSource,
    maker: ExperienceMaker,
    timer: Callable[[str], Any],
) -> BatchCollector:
    """Prompts → the scored groups that a step trains on. ConfigError: engine or source cannot do what options ask."""
    if config.sampling.fire_sampling and not capabilities_of(engine).heats_first_token:
        raise ConfigError(
            f"--fire_sampling: {type(engine).__name__} has one temperature for all tokens; leave it out"
        )
    entry = estimator_entry(config)
    status = status_check(config, strategy, source)
    sampler = RolloutSampler(
        engine,
        source,
        sampling=sampling_params(config),
        min_group_size=entry.min_group_size,
        greedy_baseline=entry.needs_greedy_baseline,
        dense=maker.shaper.of_tokens is not None,
        scorer=build_scorer(config, engine, source),
        checks=[] if status is None else [status],
        timer=timer,
    )
    around = [
        entry.fn(config=config, strategy=strategy, actor=maker.actor, engine=engine)
        for entry in SAMPLING.values()
    ]
    collector = BatchCollector(
        sampler,
        strategy,
        around=[stand_around for stand_around in around if stand_around is not None],
        timer=timer,
    )
    for entry in COLLECTORS.values():
        collector = entry.fn(collector, config, maker)
    return collector


def build_scorer(
    config: PPOConfig, engine: RolloutEngine, source: RewardSource
) -> AsyncScorer | None:
    """Return what scores samples while others are generated, with ``--async_rewards``."""
    if not config.verifier.async_rewards:
        return None
    if not capabilities_of(engine).reports_finished:
        raise ConfigError(
            "--async_rewards: this rollout engine gives its samples all at once; leave it out"
        )
    with _as_config_error():
        return AsyncScorer(source, timeout=60 * config.strategy.dist_timeout)


def build_rewards(building: Building, reward_models: Sequence[Any] = ()) -> None:
    """What scores the samples, where no check has put another source in place."""
    building.reward_models = reward_models
    building.check("rewards")
    if building.reward_source is None:
        building.reward_source = build_reward(
            building.config, reward_models, building.tokenizer, building.strategy
        )


def build_reward(
    config: PPOConfig,
    reward_models: Sequence[Any],
    tokenizer: Any,
    ranks: Ranks,
    flag: str = "--reward_fn",
) -> RewardSource:
    """Return what scores the samples of a run; ``flag`` is what errors call the reward function."""
    request = RewardRequest(config, tokenizer, ranks, reward_models, flag, around=taped)
    if estimator_entry(config).ignores_scores and not request.names:
        return NoReward()
    with _as_config_error():
        return unless_failed(with_xml_format(source_of(request), request), request)


def sampling_params(config: PPOConfig) -> SamplingParams:
    """How training rollouts are sampled."""
    rollout, sampling = config.rollout, config.sampling
    same_name = {
        f.name: getattr(rollout, f.name) for f in fields(SamplingParams) if hasattr(rollout, f.name)
    }
    return SamplingParams(
        **same_name,
        max_new_tokens=rollout.generate_max_len,
        n=rollout.n_samples_per_prompt,
        seed=config.strategy.seed,
        first_token_temperature=sampling.fire_temperature if sampling.fire_sampling else None,
    )


def build_rollout_engine(
    config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any
) -> RolloutEngine:
    """The engine that ``--rollout_engine`` names, with the actor's present weights. Collective."""
    make_engine = ENGINES.find(config.engine.rollout_engine).fn
    engine = make_engine(config, strategy, actor, tokenizer)
    return assembly.around(engine, config, strategy, tokenizer)
