"""What follows from several options of a run, and what ``None`` stands for. Free of torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorEntry,
    PolicyLossEntry,
)
from lightppo.algorithms.option_values import Norm, Rejection
from lightppo.errors import ConfigError
from lightppo.files import join
from lightppo.plugin import TOKEN_WEIGHTS
from lightppo.redaction import shown_value
from lightppo.suggestions import nearest

# -- facts -----------------------------------------------------------------------------------------------------------


def estimator_entry(config: Any) -> EstimatorEntry:
    """Return what the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)


def policy_loss_entry(config: Any) -> PolicyLossEntry:
    """Return the entry of ``--policy_loss``, or of the loss that belongs to the estimator."""
    return POLICY_LOSSES.find(_or(config.loss.policy_loss, estimator_entry(config).policy_loss))


def trains(config: Any) -> bool:
    """Tell whether this run trains, as all its sections say."""
    return all(section.trains(config) for section in config.parts())


def needs_critic(config: Any) -> bool:
    """Tell whether this run trains a critic."""
    return estimator_entry(config).needs_critic and trains(config)


def needs_reference(config: Any) -> bool:
    """Tell whether this run compares with a reference, be it the actor itself without adapters."""
    return config.algorithm.init_kl_coef > 0 and trains(config)


def reference_is_actor(config: Any) -> bool:
    """Tell whether the reference is the actor with its adapters off, and no model of its own."""
    trains_adapters = config.adapter.lora_rank > 0
    compares = config.algorithm.init_kl_coef > 0
    is_the_same = config.model.ref_pretrain in (None, config.model.pretrain)
    return trains_adapters and compares and is_the_same


def needs_teacher(config: Any) -> bool:
    """Tell whether a teacher judges the samples of this run."""
    is_named = config.distill.teacher_pretrain or config.distill.teacher_url
    return bool(is_named) and trains(config)


def adds_teacher(config: Any) -> bool:
    """Tell whether the teacher's term is part of the advantages, not of the loss."""
    return needs_teacher(config) and config.distill.distill_by == "advantage"


@dataclass(frozen=True)
class FrozenModel:
    """A further model of a run: a causal LM with the actor's vocabulary that does not train, such as a teacher."""

    path: str
    flag: str  # that names it


def frozen_models(config: Any) -> dict[str, FrozenModel]:
    """Return the further models that this run loads, by their roles."""
    distill = config.distill
    if not distill.teacher_pretrain or not needs_teacher(config):
        return {}
    return {"teacher": FrozenModel(distill.teacher_pretrain, flag="--teacher_pretrain")}


def moving_models(config: Any) -> list[str]:
    """Return names of the models in float32 that follow the actor, and so belong to its checkpoints."""
    names = {"ema": config.algorithm.enable_ema, "reference": moves_reference(config)}
    return [name for name, is_there in names.items() if is_there]


def moves_reference(config: Any) -> bool:
    """Tell whether the reference changes during the run."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None


def compute_dtype(config: Any) -> Literal["float32", "bfloat16", "float16"]:
    """Return torch's name of the type that models run in; fp32 master copies and averages are beside it."""
    if config.model.bf16:
        return "bfloat16"
    if config.model.fp16:
        return "float16"
    return "float32"


def critic_offloads(config: Any) -> tuple[bool, bool]:
    """Tell whether the critic's optimizer state and parameters are in CPU memory: as the actor's, where it is sharded."""
    strategy = config.strategy
    stage = strategy.critic_zero_stage
    return strategy.adam_offload and stage > 0, strategy.param_offload and stage == 3


def sleep_level(config: Any) -> Literal[1, 2]:
    """Return what vLLM does with its weights while asleep: 1 keeps them in CPU memory, 2 drops them.

    Weights that no push sends again, those below an adapter that travels alone, must outlast the sleep.
    """
    stays = config.adapter.lora_rank > 0 and config.engine.vllm_lora_push != "merged"
    return 1 if stays else 2


def samples_per_rollout(config: Any) -> int:
    """Return samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# -- micro batches ---------------------------------------------------------------------------------------------------


def scoring_calls() -> tuple[str, ...]:
    """Return the passes over a rollout, in the order in which they are made."""
    return ("actor", "reference", "teacher", "critic", "reward")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def micro_batch_spec(config: Any, call: str) -> MicroBatchSpec:
    """Return what holds for a pass: ``--micro_batch_specs``, else the token budget, else the number of samples."""
    training = config.training
    # ranks that hold the tokens of a pass together; those of a reward model are not divided
    ranks = 1 if call == "reward" else config.strategy.sequence_parallel_size
    if (call_spec := parse_specs(training.micro_batch_specs).get(call)) is not None:
        return (
            replace(call_spec, size=call_spec.size * ranks)
            if call_spec.unit == "tokens"
            else call_spec
        )
    if training.max_tokens_per_micro_batch is not None:
        return MicroBatchSpec(training.max_tokens_per_micro_batch * ranks, "tokens")
    trains = call in ("actor_train", "critic_train")
    return MicroBatchSpec(training.micro_train_batch_size if trains else rollout_rows(config))


def calls() -> tuple[str, ...]:
    """Return all that ``--micro_batch_specs`` may name."""
    return (*scoring_calls(), "actor_train", "critic_train")


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """Read ``("actor=16", "actor_train=4096t")`` as call → spec; ConfigError for another form, or a call twice."""
    specs: dict[str, MicroBatchSpec] = {}
    call_names = calls()
    for text in texts:
        form = re.fullmatch(r"(\w+)=([1-9]\d*)(t?)", text)
        if form is None or form[1] not in call_names:
            hint = nearest(text.partition("=")[0], call_names)
            raise ConfigError(
                f"--micro_batch_specs {text!r}: write CALL=SAMPLES or CALL=TOKENSt; calls: {', '.join(call_names)}{hint}"
            )
        if form[1] in specs:
            raise ConfigError(f"--micro_batch_specs names {form[1]} twice")
        specs[form[1]] = MicroBatchSpec(int(form[2]), "tokens" if form[3] else "samples")
    return specs


def rollout_rows(config: Any) -> int:
    """Return ``--micro_rollout_batch_size``; 8 where it is left to the GPU's memory, which only generation follows."""
    return _or(config.rollout.micro_rollout_batch_size, 8)


# -- prompts ---------------------------------------------------------------------------------------------------------


def generation_batch(config: Any) -> int:
    """Return how many prompts are sampled at once, over all ranks."""
    return config.sampling.gen_batch_size or config.rollout.rollout_batch_size


def template_kwargs(value: Mapping[str, Any] | str | None, where: str) -> dict[str, Any]:
    """Return further variables of a chat template, from an object or its text in JSON; ConfigError names ``where``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{where} must be a JSON object, not {shown_value(value)}")
    if reserved_names := sorted(_NO_VARIABLES & set(value or ())):
        raise ConfigError(
            f"{where} has {reserved_names[0]!r}, which is no variable of a chat template"
        )
    return dict(value or {})


# What apply_chat_template takes beside them: it is set by lightppo, or by a column of its own.
_NO_VARIABLES = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)


# -- what None stands for --------------------------------------------------------------------------------------------


def resolutions(config: Any) -> dict[str, Any]:
    """Return what every "None means …" option stands for. Options of a part that the run lacks stay None."""
    model = config.model
    algorithm = config.algorithm
    loss_options = config.loss
    training = config.training
    strategy = config.strategy
    estimator = estimator_entry(config)
    loss = policy_loss_entry(config)
    use_kl_loss = _or(
        algorithm.use_kl_loss,
        estimator.kl_in_loss and algorithm.init_kl_coef > 0 and not algorithm.use_kl_in_reward,
    )

    train_batch_size = 128
    if training.ppo_n_minibatches:
        train_batch_size = samples_per_rollout(config) // training.ppo_n_minibatches
    meaning_of_none: dict[str, Any] = {
        "train_batch_size": train_batch_size,
        "micro_train_batch_size": 4,
        "ref_zero_stage": 3 if strategy.zero_stage == 3 else 0,
        "adv_norm": estimator.whiten,
        "ckpt_path": str(join(config.checkpoint.save_path, "checkpoints_ppo")),
        "use_kl_loss": use_kl_loss,
        "use_kl_in_reward": not use_kl_loss and not estimator.ignores_scores,
        "kl_estimator": "k2" if use_kl_loss else "k1",
        "policy_loss": estimator.policy_loss,
        "loss_agg_mode": _or(estimator.loss_agg_mode, loss.loss_agg_mode),
        **estimator.defaults,
        **loss.defaults,
    }
    if algorithm.init_kl_coef > 0:
        meaning_of_none["ref_pretrain"] = model.pretrain
    if estimator.needs_critic:
        meaning_of_none |= _critic_resolutions(config)
    if estimator.divides_by_std and algorithm.group_std_norm:
        meaning_of_none["grpo_std_eps"] = 1e-6
    if loss.eps_clip is not None:
        low, high = loss.eps_clip
        if loss_options.eps_clip is not None:
            low = high = loss_options.eps_clip
        meaning_of_none |= {"eps_clip_low": low, "eps_clip_high": high}

    for section in config.parts():
        meaning_of_none |= section.meant(config)
    flat = config.flat()
    resolved = {name: _or(flat[name], value) for name, value in meaning_of_none.items()}
    return resolved | {
        "attn_implementation": attention_implementation(config),
        "resume": config.checkpoint.resume if config.checkpoint.load_checkpoint else "never",
    }


def _critic_resolutions(config: Any) -> dict[str, Any]:
    """Return the critic's options: as the actor's, but for where it starts."""
    model = config.model
    start = model.pretrain
    if model.reward_pretrain and not model.init_critic_from_actor:
        start = model.reward_pretrain[0] or model.pretrain
    return {"critic_pretrain": start, "critic_zero_stage": config.strategy.zero_stage}


def attention_implementation(config: Any) -> str:
    """Return the value of ``--attn_implementation``, for which ``--flash_attn`` is short."""
    model = config.model
    return "flash_attention_2" if model.flash_attn else model.attn_implementation


ROUNDING = {
    "float32": {"cpu": 0.001, "cuda": 0.01},
    "float16": {"cuda": 0.02},
    "bfloat16": {"cuda": 0.1},
}
"""Largest mean difference of log probs, in nats, by the coarser type of the two and the device; other devices as CUDA.

Five times what was measured, or more (docs/rollouts.md). In float32 vLLM's attention on a GPU multiplies in TF32, whose
numbers have float16's 10 bits, and the rest in float32; bfloat16's have 7.
"""


def logp_diff_tolerance(config: Any, device: str) -> float:
    """Return the largest mean difference of the engine's log probs that is no mistake, on this type of device."""
    dtypes = {compute_dtype(config), config.engine.vllm_dtype} - {"auto"}
    tolerances = [ROUNDING[name].get(device, ROUNDING[name]["cuda"]) for name in dtypes]
    return config.engine.logp_diff_tolerance or max(tolerances)


# -- normalisations --------------------------------------------------------------------------------------------------

NORM_WORDS = (
    "mean=batch|group std=batch|group leave_one_out unbiased eps=1e-5, those that you want."
)


def norm_problem(name: str, words: tuple[str, ...]) -> Iterator[str]:
    """Say what is wrong with the words of a normalisation, the value of this option."""
    try:
        if words:
            Norm.parse(words)
    except ConfigError as error:
        yield f"--{name} {' '.join(words)}: {error}"


# -- the steps of a run, by its options and its prompts --------------------------------------------------------------


def steps_per_episode(config: Any, dataloader: Iterable, update_steps: int = 0) -> int:
    """Return the PPO steps of the coming episode; with ``--dynamic_sampling``, whose rejected groups take prompts, the most.

    From the length of the dataloader, whose batches are generation batches; where it has none, from ``update_steps``,
    the optimizer steps per episode.
    """
    training = config.training
    if hasattr(dataloader, "__len__"):
        prompts = len(dataloader) * generation_batch(config)
        return math.ceil(prompts / config.rollout.rollout_batch_size)
    samples = update_steps * training.train_batch_size // training.max_epochs
    return max(1, samples // samples_per_rollout(config))


def optimizer_steps(
    config: Any, rollouts_per_episode: int, role: Literal["actor", "critic"] = "actor"
) -> int:
    """Return the optimizer steps of the whole run: what the learning-rate schedule of a model stretches over."""
    training = config.training
    rollouts = training.total_training_steps or training.num_episodes * rollouts_per_episode
    if role == "actor":
        frozen = max(0, config.algorithm.freezing_actor_steps)
        rollouts = max(0, rollouts - frozen)
    batches = math.ceil(samples_per_rollout(config) / training.train_batch_size)
    return rollouts * batches * training.max_epochs


# -- --old_log_probs: auto makes as few passes over the rollout as the algorithm allows ------------------------------


def old_log_probs_from(
    config: Any, exact_rollout: bool
) -> Literal["training", "rollout", "forward"]:
    """Return where a run takes its log probs before an update from.

    - ``"training"``: the training pass itself, with one optimizer step per rollout;
    - ``"rollout"``: those recorded while sampling;
    - ``"forward"``: a pass of the actor over the rollout.

    Args:
        config: resolved.
        exact_rollout: the engine samples with the actor's own weights and forward, so that what it records is what a
            pass would give.
    """
    if config.loss.old_log_probs != "auto":
        return config.loss.old_log_probs
    if _weighs_tokens_before(config) or config.loss.router_replay == "old":
        return "forward"
    if _takes_one_step(config) and not _needed_before(config):
        return "training"
    is_stale = any(section.is_stale(config) for section in config.parts())
    needs_pass = is_stale or any(
        reasons_for_a_pass(SimpleNamespace(**config.flat() | {"config": config}))
    )
    if exact_rollout and compute_dtype(config) == "float32" and not needs_pass:
        return "rollout"
    return "forward"


def _weighs_tokens_before(config: Any) -> bool:
    """Tell whether factors of the policy loss are made before there is a training pass."""
    rejections = map(Rejection.parse, config.correction.rollout_rejection)
    return (
        config.correction.rollout_correction != "none"
        or any(not rejection.entry.in_training for rejection in rejections)
        or config.loss.high_entropy_token_ratio is not None
        or any(
            not entry.in_training and entry.fn(config) is not None
            for entry in TOKEN_WEIGHTS.values()
        )
    )


def _takes_one_step(config: Any) -> bool:
    """Tell whether each rollout is trained on in one optimizer step."""
    training = config.training
    return training.max_epochs == 1 and training.train_batch_size == samples_per_rollout(config)


def _needed_before(config: Any) -> bool:
    """Tell whether something asks for the log probs before there is a training pass."""
    algorithm = config.algorithm
    return (
        (algorithm.init_kl_coef > 0 and algorithm.use_kl_in_reward)
        or adds_teacher(config)
        or policy_loss_entry(config).selection is not None
        or estimator_entry(config).needs_score_norms
        or algorithm.freezing_actor_steps > 0
    )


def reasons_for_a_pass(options: Any) -> Iterator[str]:
    """Say why recorded log probs would not do; ``options`` as of :meth:`Section.problems`."""
    for section in options.config.parts():
        yield from section.passes(options)
    if ADVANTAGE_ESTIMATORS.find(options.advantage_estimator).needs_score_norms:
        name = shown_value(options.advantage_estimator)
        yield f"--advantage_estimator {name} needs the distributions of a pass"
    if not options.do_sample and options.temperature not in (0, 1):
        yield f"greedy rollouts record them at temperature 1, not --temperature {options.temperature:g}"
