"""What works but is seldom meant; whether rows fit the model's positions, and the steps of a run its prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic, optimizer_steps, steps_per_episode
from lightppo.errors import ConfigError
from lightppo.files import stage_to_local

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightppo.trainer.building import Building


NOTEWORTHY_BYTES = 100_000_000


def tell_advice(building: Any) -> Iterator[str]:
    """Yield what is printed of it."""
    if "\\n" in (getattr(building.config.data, "input_template", None) or ""):
        yield "note: --input_template has a backslash and an n, not a line break: in bash write $'\\n'"
    if isinstance(building.config, PPOConfig):
        yield from (f"note: {note}" for note in advice(building.config))


def tell_second_masters(building: Any) -> Iterator[str]:
    """Say where ZeRO keeps masters that one rank does not need: by the sizes of the models."""
    roles = with_second_masters(building.config, building.strategy.world_size)
    spared_bytes = 4 * sum(building.sizes.get(role, 0) for role in roles)
    if spared_bytes >= NOTEWORTHY_BYTES:
        yield f"note: {second_masters(building.config)} about {spared_bytes / 1e9:.1f} GB less"


def tell_frozen(building: Any) -> Iterator[str]:
    """Say where the whole run trains the critic alone."""
    config = building.config
    if not isinstance(config, PPOConfig) or config.evaluation.val_only:
        return
    frozen_steps = config.algorithm.freezing_actor_steps
    episode_steps = steps_per_episode(config, building.prompts_dataloader)
    if frozen_steps > 0 and not optimizer_steps(config, episode_steps):
        yield f"note: --freezing_actor_steps {frozen_steps}: all steps of this run train the critic alone, the actor stays"


def second_masters(config: PPOConfig) -> str:
    """Return the note, up to how much it is."""
    return (
        f"--zero_stage {config.strategy.zero_stage} with one rank in float32 shards nothing, and keeps the weights that "
        "train twice: --zero_stage 0 needs"
    )


def with_second_masters(config: PPOConfig, world_size: int) -> list[str]:
    """Return the models that train with weights in float32, which DeepSpeed's ZeRO 1 and 2 copy, on one rank."""
    options = config.flat()
    if world_size > 1 or any(
        options[name] for name in ("bf16", "fp16", "overlap_comm", "adam_offload")
    ):
        return []
    stages = {"actor": options["zero_stage"]}
    if isinstance(config, PPOConfig):
        if config.evaluation.val_only:
            return []
        if needs_critic(config):
            stages["critic"] = options["critic_zero_stage"]
    return [role for role, stage in stages.items() if stage in (1, 2)]


def advice(config: PPOConfig) -> list[str]:
    """Return what works but is seldom meant; of a resolved config."""
    algorithm = config.algorithm
    rollout = config.rollout
    samples = rollout.do_sample and rollout.temperature > 0
    lines = []
    if not samples and not config.evaluation.val_only:
        sampling_flag = "--temperature 0" if rollout.do_sample else "--no_do_sample"
        lines.append(
            f"{sampling_flag}: rollouts are the most likely answers alone, and a policy learns by trying others: set 1"
        )
    estimator = algorithm.kl_estimator
    gradients = {
        "k1": "has an expected gradient of 0",
        "abs": "pulls by the sign of the difference alone",
    }
    if algorithm.use_kl_loss and estimator in gradients:
        lines.append(
            f"--kl_estimator {estimator} as a loss {gradients[estimator]}: k2 has the gradient of the KL"
        )
    rewards_kl = algorithm.init_kl_coef > 0 and algorithm.use_kl_in_reward
    if rewards_kl and estimator in ("k2", "k3", "k3+"):
        lines.append(
            f"--kl_estimator {estimator} in the reward hardly pulls near the reference: k1 has the gradient of the KL"
        )
    is_uncorrected = (
        config.correction.rollout_correction == "none" and config.loss.old_log_probs != "rollout"
    )
    if rollout.max_staleness > 0 and is_uncorrected:
        lines.append(
            f"--max_staleness {rollout.max_staleness} with --rollout_correction none: samples of older weights train as "
            "if the newest had sampled them: leave --rollout_correction out, then it is decoupled"
        )
    return lines


# -- rows and steps -----------------------------------------------------------------------------------------------------


def check_positions_of(building: Building) -> None:
    """Check that ``--pretrain`` is a language model whose positions hold prompt and response, by its config."""
    config = building.config
    if isinstance(config, PPOConfig):  # else rows say how long they are
        from lightppo.models.loading import check_language_model

        model = config.model
        model_config = _config_of_pretrain(config)
        check_language_model(
            model_config, "--pretrain", model.pretrain, is_new=model.init_from_scratch
        )
        check_positions(config, _positions_in(model_config))


def check_rows(building: Building) -> None:
    """Check that the longest row to learn from fits the positions, and prompts hold ``--total_training_steps``."""
    config = building.config
    dataloader = building.prompts_dataloader
    if "dataset" in building.rows:
        check_longest_row(config, int(building.rows["dataset"].lengths.max()), positions_of(config))
    elif dataloader is not None and building.keeps_files:
        check_total_steps(config, steps_per_episode(config, dataloader), len(dataloader.dataset))


def positions_of(config: Any) -> int | None:
    """Return how many ``--pretrain`` has; ``None``: no limit."""
    return _positions_in(_config_of_pretrain(config))


def _config_of_pretrain(config: Any) -> PretrainedConfig:
    from lightppo.models.loading import load_config
    from lightppo.models.pretrained import loading_options

    return load_config(stage_to_local(config.model.pretrain), **loading_options(config))


def _positions_in(model_config: PretrainedConfig) -> int | None:
    return getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_positions(config: Any, positions: int | None) -> None:
    """Refuse prompts and responses that do not fit; ``None``: a model without a limit."""
    prompt_length = config.data.prompt_max_len
    response_length = config.rollout.generate_max_len
    if positions is not None and prompt_length + response_length > positions:
        raise ConfigError(
            f"--prompt_max_len {prompt_length} + --generate_max_len {response_length} = "
            f"{prompt_length + response_length} tokens, but {config.model.pretrain} has {positions} positions: lower "
            "one of them to fit"
        )


def check_longest_row(config: Any, longest: int, positions: int | None) -> None:
    """Refuse a longest row that does not fit; ``None``: a model without a limit."""
    if positions is not None and longest > positions:
        raise ConfigError(
            f"--max_len {config.data.max_len}: the longest row has {longest} tokens, but {config.model.pretrain} has "
            f"{positions} positions: set --max_len {positions}, with --truncation right or drop"
        )


def check_total_steps(config: PPOConfig, per_episode: int, prompts: int) -> None:
    """Refuse schedules that stretch over steps which the prompts do not hold."""
    training = config.training
    total_steps = training.total_training_steps
    available_steps = training.num_episodes * per_episode
    if total_steps is not None and total_steps > available_steps:
        raise ConfigError(
            f"--total_training_steps {total_steps} is more than the {available_steps} steps of --num_episodes "
            f"{training.num_episodes} ({prompts} prompts, --rollout_batch_size {config.rollout.rollout_batch_size}): set "
            f"at most {available_steps}, or --num_episodes {math.ceil(total_steps / per_episode)}"
        )
