"""What follows from several options of a run, and what ``None`` stands for. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorEntry,
    PolicyLossEntry,
)
from lightppo.algorithms.option_values import Norm
from lightppo.errors import ConfigError
from lightppo.files import join
from lightppo.redaction import shown_value
from lightppo.suggestions import nearest

# -- facts -----------------------------------------------------------------------------------------------------------


def estimator_entry(config: Any) -> EstimatorEntry:
    """What the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS.find(config.algorithm.advantage_estimator)


def policy_loss_entry(config: Any) -> PolicyLossEntry:
    """The entry of ``--policy_loss``, or of the loss that belongs to the estimator."""
    return POLICY_LOSSES.find(_or(config.loss.policy_loss, estimator_entry(config).policy_loss))


def trains(config: Any) -> bool:
    """Whether this run trains, as all its sections say."""
    return all(part.trains(config) for part in config.parts())


def needs_critic(config: Any) -> bool:
    """Whether this run trains a critic."""
    return estimator_entry(config).needs_critic and trains(config)


def needs_reference(config: Any) -> bool:
    """Whether this run compares with a reference, be it the actor itself without adapters."""
    return config.algorithm.init_kl_coef > 0 and trains(config)


def reference_is_actor(config: Any) -> bool:
    """Whether the reference is the actor with its adapters off, and no model of its own."""
    trains_adapters = config.adapter.lora_rank > 0
    compares = config.algorithm.init_kl_coef > 0
    is_the_same = config.model.ref_pretrain in (None, config.model.pretrain)
    return trains_adapters and compares and is_the_same


def needs_teacher(config: Any) -> bool:
    """Whether a teacher judges the samples of this run."""
    is_named = config.distill.teacher_pretrain or config.distill.teacher_url
    return bool(is_named) and trains(config)


def adds_teacher(config: Any) -> bool:
    """Whether the teacher's term is part of the advantages, not of the loss."""
    return needs_teacher(config) and config.distill.distill_by == "advantage"


@dataclass(frozen=True)
class FrozenModel:
    """A further model of a run: a causal LM with the actor's vocabulary that does not train, such as a teacher."""

    path: str
    flag: str  # that names it


def frozen_models(config: Any) -> dict[str, FrozenModel]:
    """The further models that this run loads, by their roles."""
    distill = config.distill
    if not distill.teacher_pretrain or not needs_teacher(config):
        return {}
    teacher = FrozenModel(
        distill.teacher_pretrain,
        flag="--teacher_pretrain",
    )
    return {"teacher": teacher}


def followers(config: Any) -> list[str]:
    """Names of the models in float32 that follow the actor, and so belong to its checkpoints."""
    names = {"ema": config.algorithm.enable_ema, "reference": moves_reference(config)}
    return [name for name, is_there in names.items() if is_there]


def moves_reference(config: Any) -> bool:
    """Whether the reference changes during the run."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None


def compute_dtype(config: Any) -> Literal["float32", "bfloat16", "float16"]:
    """Torch's name of the type that models are held and run in; fp32 master copies and averages are beside it."""
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
    """Samples per rollout over all ranks."""
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# -- micro batches ---------------------------------------------------------------------------------------------------


def scoring_calls() -> tuple[str, ...]:
    """The passes over a rollout, in the order in which they are made."""
    return ("actor", "reference", "teacher", "critic", "reward")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def micro_batch_spec(config: Any, call: str) -> MicroBatchSpec:
    """What holds for a pass: ``--micro_batch_specs``, else the token budget, else the number of samples."""
    training = config.training
    if (own := parse_specs(training.micro_batch_specs).get(call)) is not None:
        return own
    if training.max_tokens_per_micro_batch is not None:
        return MicroBatchSpec(training.max_tokens_per_micro_batch, "tokens")
    trains = call in ("actor_train", "critic_train")
    return MicroBatchSpec(training.micro_train_batch_size if trains else rollout_rows(config))


def calls() -> tuple[str, ...]:
    """All that ``--micro_batch_specs`` may name."""
    return (*scoring_calls(), "actor_train", "critic_train")


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """``("actor=16", "actor_train=4096t")`` → call → spec; a ConfigError for another form, or a call named twice."""
    specs: dict[str, MicroBatchSpec] = {}
    known = calls()
    for text in texts:
        form = re.fullmatch(r"(\w+)=([1-9]\d*)(t?)", text)
        if form is None or form[1] not in known:
            hint = nearest(text.partition("=")[0], known)
            raise ConfigError(
                f"--micro_batch_specs {text!r}: write CALL=SAMPLES or CALL=TOKENSt; calls: {', '.join(known)}{hint}"
            )
        if form[1] in specs:
            raise ConfigError(f"--micro_batch_specs names {form[1]} twice")
        specs[form[1]] = MicroBatchSpec(int(form[2]), "tokens" if form[3] else "samples")
    return specs


def rollout_rows(config: Any) -> int:
    """``--micro_rollout_batch_size``; 8 where it is left to the GPU's memory, which only generation follows."""
    return _or(config.rollout.micro_rollout_batch_size, 8)


# -- prompts ---------------------------------------------------------------------------------------------------------


def generation_batch(config: Any) -> int:
    """How many prompts are sampled at once, over all ranks."""
    return config.sampling.gen_batch_size or config.rollout.rollout_batch_size


def template_kwargs(value: Mapping[str, Any] | str | None, where: str) -> dict[str, Any]:
    """Further variables of a chat template, from an object or its text in JSON; ConfigError names ``where``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{where} must be a JSON object, not {shown_value(value)}")
    if own := sorted(_NO_VARIABLES & set(value or ())):
        raise ConfigError(f"{where} has {own[0]!r}, which is no variable of a chat template")
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
    """What every "None means …" option stands for. Options of a part that the run lacks stay None."""
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

    meant: dict[str, Any] = {
        "train_batch_size": samples_per_rollout(config) // training.ppo_n_minibatches
        if training.ppo_n_minibatches
        else 128,
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
        meant["ref_pretrain"] = model.pretrain
    if estimator.needs_critic:
        meant |= _critic_resolutions(config)
    if estimator.divides_by_std and algorithm.group_std_norm:
        meant["grpo_std_eps"] = 1e-6
    if loss.eps_clip is not None:
        low, high = (
            loss.eps_clip
            if loss_options.eps_clip is None
            else (loss_options.eps_clip, loss_options.eps_clip)
        )
        meant |= {"eps_clip_low": low, "eps_clip_high": high}

    for part in config.parts():
        meant |= part.meant(config)
    given = config.flat()
    resolved = {name: _or(given[name], value) for name, value in meant.items()}
    return resolved | {
        "attn_implementation": "flash_attention_2"
        if model.flash_attn
        else model.attn_implementation,
        "resume": config.checkpoint.resume if config.checkpoint.load_checkpoint else "never",
    }


def _critic_resolutions(config: Any) -> dict[str, Any]:
    """The critic's options: as the actor's, but for where it starts."""
    model = config.model
    strategy = config.strategy
    if model.reward_pretrain and not model.init_critic_from_actor:
        reward_model = model.reward_pretrain[0]
    else:
        reward_model = None
    return {
        "critic_pretrain": reward_model or model.pretrain,
        "critic_zero_stage": strategy.zero_stage,
    }


# -- normalisations --------------------------------------------------------------------------------------------------

NORM_WORDS = (
    "mean=batch|group std=batch|group leave_one_out unbiased eps=1e-5, those that you want."
)


def norm_problem(name: str, words: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the words of a normalisation, the value of this option."""
    try:
        if words:
            Norm.parse(words)
    except ConfigError as error:
        yield f"--{name} {' '.join(words)}: {error}"
