"""From a config to a finished trainer: strategy, data, models, optimizers, rewards, engine, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from lightppo.algorithms.kl import make_kl_controller
from lightppo.callbacks import Callback, load_callbacks
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.config import PPOConfig
from lightppo.config.evaluation_options import evaluation_config
from lightppo.config.options import OptionSet
from lightppo.config.rules import (
    adds_teacher,
    estimator_entry,
    generation_batch,
    moves_reference,
    needs_reference,
    old_log_probs_from,
    optimizer_steps,
    steps_per_episode,
    trains,
)
from lightppo.data.blends import read_rows
from lightppo.data.datasets import PromptDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy, with_optimizer
from lightppo.episodes.episode_engine import with_episodes
from lightppo.episodes.rewards import taped, unless_failed
from lightppo.errors import ConfigError, as_config_error
from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.maker import ExperienceMaker
from lightppo.experience.normalisation import make_value_norm
from lightppo.experience.rollout_check import RolloutCheck
from lightppo.logging.performance import PhaseTimer, progress_bar
from lightppo.logging.samples import RolloutReplay
from lightppo.models.actor import Actor
from lightppo.models.run_models import Models, build_models, build_tokenizer, fit_vocabulary
from lightppo.models.wrapper import Role
from lightppo.plugin import (
    ENGINES,
    LOSS_TERMS,
)
from lightppo.preflight.fitting import rows_that_fit
from lightppo.ranks import Ranks
from lightppo.rewards.registry import asks_outside, source_of
from lightppo.rewards.reward_source import (
    AsyncScorer,
    NoReward,
    RewardRequest,
    RewardSource,
    status_check,
)
from lightppo.rollout.engine import RolloutEngine, SamplingParams, capabilities_of
from lightppo.rollout.sampler import AroundSampling, BatchCollector, RolloutSampler, with_selection
from lightppo.trainer.building import Building
from lightppo.trainer.distillation import TEACHER, advantage_term, teacher_pass
from lightppo.trainer.evaluation import Evaluator
from lightppo.trainer.loop import SkippedSteps, TrainerState
from lightppo.trainer.pretraining import pretraining
from lightppo.trainer.prompts import RolloutBatchSampler
from lightppo.trainer.start_checks import (
    check_data,
    check_engine,
    check_folders,
    check_models,
    check_options,
    check_tokenizer,
    checks_of_packages,
)
from lightppo.trainer.training_losses import LossTerm
from lightppo.verifiers.formats import with_xml_format

T = TypeVar("T")


@dataclass
class Origin:
    """The beginning of a run; the default is that of one whose parts a script has made."""

    options: PPOConfig | None = None  # the options as they were given
    content: Mapping[str, str] = field(default_factory=dict)  # marks of what options name
    keeps_files: bool = True  # anything of it at its end


@dataclass
class PPOParts:
    """Everything that a trainer works with: what ``build`` or a script has made, and what :func:`assemble` adds."""

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

    # what assemble adds
    state: TrainerState = field(init=False)
    timer: PhaseTimer = field(init=False)
    kl_ctl: Any = field(init=False)
    experience_maker: ExperienceMaker = field(init=False)
    replay_buffer: ReplayBuffer = field(init=False)
    sampler: BatchCollector = field(init=False)
    value_norm: Any = field(init=False)
    checkpointer: RunCheckpointer = field(init=False)
    skipped: SkippedSteps = field(init=False)


def build(config: PPOConfig, trainer: Callable[..., T], callbacks: Iterable[Callback] = ()) -> T:
    """Return a finished trainer of this class; whatever cannot work is an error that names its flag. Collective."""
    # What can fail on a user's mistake comes before what takes long: all rows and the reward file, then the models.
    callbacks = [*callbacks, *load_callbacks(config.training.callback)]
    building = begin(config)
    read_data(building)
    models, optimizers = load_models(building)
    actor = models.actor
    reference = models.reference
    if reference is None and needs_reference(building.config):
        reference = actor.as_loaded
    strategy = building.strategy
    tokenizer = building.tokenizer
    config = building.config
    if building.reward_source is None:
        build_rewards(building, models.reward_models)
    engine = building.rollout_engine = build_rollout_engine(config, strategy, actor, tokenizer)
    if building.held_out is not None:
        judge = building.reward_source if building.judge is None else building.judge
        building.evaluator = build_evaluator(config, engine, judge, building.held_out, strategy)
    check_engine(building)
    (actor_optim, actor_scheduler), (critic_optim, critic_scheduler) = optimizers.values()
    return trainer(
        strategy=strategy,
        actor=actor,
        critic=models.critic,
        reward_model=models.reward_models,
        initial_model=reference,
        ema_model=None,  # one of the followers
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
        callbacks=callbacks,
        origin=Origin(building.options, building.content, building.keeps_files),
    )


def begin(config: OptionSet) -> Building:
    """Let the ranks meet, check options and tokenizer, and take the run's folders. Collective."""
    strategy = build_strategy(config)
    strategy.setup_distributed()
    resolved = config.resolved()
    building = Building(
        options=config, resolved_options=resolved, config=resolved, strategy=strategy
    )
    check_options(building)
    building.tokenizer = build_tokenizer(resolved)
    check_tokenizer(building)
    check_folders(building)
    return building


def read_data(building: Building) -> None:
    """Read all rows, and make what scores them, if it is no model. Collective."""
    config = building.config
    strategy = building.strategy
    if trains(config):
        prompts = building.rows["prompt_data"] = build_prompts(config, building.tokenizer, strategy)
        building.prompts_dataloader = prompts_dataloader(config, prompts, strategy)
    if config.data.pretrain_data is not None:
        building.loss_terms["pretraining"] = pretraining(building)
    building.loss_terms |= LOSS_TERMS.made(building)
    if not config.model.reward_pretrain:
        build_rewards(building)
    if building.resolved_options.data.eval_data is not None:
        # All of them, also where a dry run takes few.
        building.held_out = build_held_out(building.resolved_options, building.tokenizer, strategy)
    check_data(building)
    if trains(config) and not building.keeps_files and building.held_out is not None:
        building.held_out = build_held_out(config, building.tokenizer, strategy)


def load_models(building: Building) -> tuple[Models, dict[str, Any]]:
    """Load all models into their engines; return (optimizer, scheduler) of each role that trains, too. Collective."""
    config = building.config
    strategy = building.strategy
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
        trained = with_optimizer(model, rates[role], steps, config, strategy)
        model, *optimizers[role] = strategy.prepare(trained)
        return model

    models = build_models(config, strategy, into_engine)
    fit_vocabulary(models, building.tokenizer, config)
    building.saved = saved_parts(
        config, models.actor, models.critic, models.followers, models.reference
    )
    building.models = models.by_flag
    check_models(building)
    return models, optimizers


def assemble(parts: PPOParts, own_training_step: bool = False) -> None:
    """Make everything between prompts and weights, around the models, the engine and the rewards of a run.

    ``own_training_step``: its training step is a user's, which needs old log probs in place.
    """
    config = parts.config
    strategy = parts.strategy
    algorithm = config.algorithm
    parts.state = TrainerState()
    parts.timer = PhaseTimer()
    parts.kl_ctl = make_kl_controller(
        algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon
    )
    parts.value_norm = make_value_norm(config)
    parts.experience_maker = build_maker(parts, own_training_step)
    parts.replay_buffer = ReplayBuffer(
        config.training.micro_train_batch_size,
        config.training.buffer_limit,
        config.training.buffer_cpu_offload,
        strategy.device,
        pin_memory=config.data.dataloader_pin_memory,
    )
    parts.sampler = build_sampler(parts)
    models = saved_parts(config, parts.actor, parts.critic, parts.followers, parts.initial_model)
    parts.checkpointer = RunCheckpointer(strategy, config.checkpoint, models, parts.tokenizer)
    parts.skipped = SkippedSteps(parts.state, strategy)


def build_maker(parts: PPOParts, own_training_step: bool) -> ExperienceMaker:
    """Make what makes experience of rollouts; ``own_training_step`` as of :func:`assemble`."""
    config = parts.config
    strategy = parts.strategy
    capabilities = capabilities_of(parts.rollout_engine)
    if config.loss.router_replay == "rollout" and not capabilities.records_experts:
        raise ConfigError(
            f"--router_replay rollout: --rollout_engine {config.engine.rollout_engine} does not record experts: set old"
        )
    exact_rollout = capabilities.exact_log_probs
    old_log_probs = old_log_probs_from(config, exact_rollout)
    if old_log_probs == "training" and own_training_step:
        old_log_probs = "forward"
    passes = {}
    advantage_terms = []
    if TEACHER in parts.frozen:
        if (pass_of_teacher := teacher_pass(config, parts.frozen[TEACHER])) is not None:
            passes[TEACHER] = pass_of_teacher
        if adds_teacher(config):
            advantage_terms.append(advantage_term(config))
    return ExperienceMaker(
        parts.actor,
        parts.critic,
        parts.initial_model,
        strategy.data_parallel,
        parts.kl_ctl,
        config,
        passes=passes,
        advantage_terms=advantage_terms,
        rewarded=not isinstance(parts.reward_source, NoReward),
        value_norm=parts.value_norm,
        old_log_probs=old_log_probs,
        progress=partial(progress_bar, desc="experience", shown=strategy.is_rank_0(), leave=False),
        timer=parts.timer,
    )


# -- models ----------------------------------------------------------------------------------------------------------


def build_strategy(config: OptionSet) -> DeepspeedStrategy:
    """Make the strategy, no process group yet; ConfigError for ZeRO options that exclude each other."""
    options = config.resolved().flat()
    names = [option.name for option in fields(DeepspeedStrategy) if option.name in options]
    values = {name: options[name] for name in names}
    with as_config_error():
        return DeepspeedStrategy(**values, timeout_minutes=config.strategy.dist_timeout)


def saved_parts(
    config: PPOConfig, actor: Any, critic: Any, followers: Mapping[str, Any], reference: Any
) -> dict[str, Any]:
    """Return the models that a checkpoint of this run holds, by the name of their part."""
    parts = {
        "actor": actor,
        "critic": critic,
        **followers,
        "reference": reference if moves_reference(config) else None,
    }
    return {name: model for name, model in parts.items() if model is not None}


# -- data ------------------------------------------------------------------------------------------------------------


def build_prompts(
    config: PPOConfig,
    tokenizer: Any,
    strategy: DeepspeedStrategy,
    name: str = "prompt_data",
    split: str | None = None,
    limit: int | None = None,
) -> PromptDataset:
    """Read the prompts of an option, checked and tokenised; ``split`` and ``limit``: by default of ``--prompt_data``."""
    data = config.data
    rows = read_rows(config, name, split or data.prompt_split, strategy)
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


def build_held_out(config: PPOConfig, tokenizer: Any, strategy: DeepspeedStrategy) -> PromptDataset:
    """Read the prompts of ``--eval_data``, checked and tokenised."""
    data = config.data
    return build_prompts(
        config, tokenizer, strategy, "eval_data", data.eval_split, data.eval_max_samples
    )


def prompts_dataloader(
    config: PPOConfig, prompts: PromptDataset, strategy: DeepspeedStrategy
) -> DataLoader:
    """Make the loader of this rank's share of every generation batch."""
    ranks = {"rank": strategy.get_rank(), "world_size": strategy.world_size}
    order = {"shuffle": config.data.data_shuffle, "seed": config.strategy.seed}
    sampler = RolloutBatchSampler(len(prompts), generation_batch(config), **ranks, **order)
    # A generator of its own, so that beginning an episode, as a resumed run does, draws no number of the global one.
    generator = torch.Generator()
    return DataLoader(
        prompts, batch_sampler=sampler, collate_fn=PromptDataset.collate_fn, generator=generator
    )


# -- sampling --------------------------------------------------------------------------------------------------------


def build_sampler(parts: PPOParts) -> BatchCollector:
    """Prompts → the scored groups that a step trains on. ConfigError: engine or source cannot do what options ask."""
    config = parts.config
    strategy = parts.strategy
    engine = parts.rollout_engine
    source = parts.reward_source
    maker = parts.experience_maker
    if config.sampling.fire_sampling and not capabilities_of(engine).heats_first_token:
        raise ConfigError(
            f"--fire_sampling: {type(engine).__name__} has one temperature for all tokens; leave it out"
        )
    if config.rollout.max_staleness > 0 and not capabilities_of(engine).samples_ahead:
        raise ConfigError(
            f"--max_staleness {config.rollout.max_staleness}: {type(engine).__name__} cannot sample while the trainer "
            "trains (it has no start and finish): set --rollout_engine vllm_server, or 0"
        )
    entry = estimator_entry(config)
    status = None
    if config.verifier.check_verifier_status:
        status = status_check(config, strategy, source)
    sampler = RolloutSampler(
        engine,
        source,
        sampling=sampling_params(config),
        min_group_size=entry.min_group_size,
        greedy_baseline=entry.needs_greedy_baseline,
        dense=config.reward.use_dense_reward,
        scorer=build_scorer(config, engine, source),
        checks=[] if status is None else [status],
        timer=parts.timer,
    )
    around: list[AroundSampling] = []
    check = None
    if config.engine.rollout_check != "off" and capabilities_of(engine).keeps_weights:
        check = RolloutCheck(maker.actor, engine, strategy, config)
        around.append(check.rollouts)
    if config.sampling.skip_rollout is not None:
        around.append(RolloutReplay(config.sampling.skip_rollout, strategy).rollouts)
    collector = BatchCollector(
        sampler,
        strategy,
        around=around,
        timer=parts.timer,
        max_staleness=config.rollout.max_staleness,
    )
    if check is not None:
        collector.must_wait = check.is_due
    return with_selection(collector, config, maker.shaper.final_scores)


def build_scorer(
    config: PPOConfig, engine: RolloutEngine, source: RewardSource
) -> AsyncScorer | None:
    """Return what scores the answers to a prompt while others are generated: with ``--async_rewards``, and with
    ``--max_staleness`` where the source may be called in a thread."""
    is_ahead = config.rollout.max_staleness > 0 and not getattr(source, "needs_all_ranks", False)
    if not config.verifier.async_rewards and not is_ahead:
        return None
    if not capabilities_of(engine).reports_finished:
        requested = "--async_rewards" if config.verifier.async_rewards else "--max_staleness"
        raise ConfigError(
            f"{requested}: this rollout engine gives its samples all at once; leave it out"
        )
    with as_config_error():
        return AsyncScorer(source, timeout=60 * config.strategy.dist_timeout)


def build_rewards(building: Building, reward_models: Sequence[Any] = ()) -> None:
    """Make what scores the samples, and evaluations; a run that only evaluates has nothing else."""
    building.reward_models = reward_models
    judge_config = evaluation_config(building.config)
    if judge_config is not None:
        has_own_function = building.config.evaluation.eval_reward_fn is not None
        flag = "--eval_reward_fn" if has_own_function else "--reward_fn"
        building.judge = build_reward(
            judge_config, reward_models, building.tokenizer, building.strategy, flag
        )
        if building.config.evaluation.val_only:
            building.reward_source = building.judge
    checks_of_packages(building, "rewards")
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
    around = taped if asks_outside(config) else None
    request = RewardRequest(config, tokenizer, ranks, reward_models, flag, around)
    if estimator_entry(config).ignores_scores and not request.names:
        return NoReward()
    with as_config_error():
        source = source_of(request)
        if config.verifier.check_xml_format:
            source = with_xml_format(source, request)
        if config.episodes.env or config.episodes.tools:
            return unless_failed(source)
        return source


def sampling_params(config: PPOConfig) -> SamplingParams:
    """Say how training rollouts are sampled."""
    rollout = config.rollout
    sampling = config.sampling
    options = vars(rollout)
    values = {
        parameter.name: options[parameter.name]
        for parameter in fields(SamplingParams)
        if parameter.name in options
    }
    return SamplingParams(
        **values,
        max_new_tokens=rollout.generate_max_len,
        n=rollout.n_samples_per_prompt,
        seed=config.strategy.seed,
        first_token_temperature=10.0 if sampling.fire_sampling else None,
    )


def eval_sampling_params(config: PPOConfig) -> SamplingParams:
    """Say how evaluation samples: as training, but for temperature, top-p, top-k and the number of samples."""
    evaluation = config.evaluation
    return replace(
        sampling_params(config),
        n=evaluation.eval_n_samples,
        temperature=evaluation.eval_temperature,
        top_p=evaluation.eval_top_p,
        top_k=evaluation.eval_top_k,
        do_sample=True,
        first_token_temperature=None,
    )


def build_evaluator(
    config: PPOConfig,
    engine: RolloutEngine,
    source: RewardSource,
    prompts: PromptDataset,
    ranks: Ranks,
) -> Evaluator:
    """Make the evaluation on held-out prompts as the options say."""
    threshold = config.evaluation.eval_correct_threshold
    return Evaluator(engine, source, prompts, eval_sampling_params(config), ranks, threshold)


def build_rollout_engine(
    config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any
) -> RolloutEngine:
    """Build the engine that ``--rollout_engine`` names, with the actor's present weights. Collective."""
    name = config.engine.rollout_engine
    rows = config.rollout.micro_rollout_batch_size
    make_engine = ENGINES.find(name).fn
    # vLLM sizes its own batches; what else decodes here gets what the GPU's memory holds.
    if rows is None and name not in ("vllm", "vllm_server") and strategy.device.type == "cuda":
        fitting = config.with_options(micro_rollout_batch_size=rows_that_fit(config, strategy))
    else:
        fitting = config
    engine = make_engine(fitting, strategy, actor, tokenizer)
    if config.episodes.env or config.episodes.tools:
        return with_episodes(engine, config, strategy, tokenizer)
    return engine
