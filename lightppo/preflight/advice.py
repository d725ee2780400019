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


SPARED = 100_000_000  # bytes that are worth a note


def tell_advice(building: Any) -> Iterator[str]:
    """Yield what is printed of it."""
    if "\\n" in (getattr(building.config.data, "input_template", None) or ""):
        yield "note: --input_template has a backslash and an n, not a line break: in bash write $'\\n'"
    if isinstance(building.config, PPOConfig):
        yield from (f"note: {line}" for line in advice(building.config))


def tell_second_masters(building: Any) -> Iterator[str]:
    """Say where ZeRO keeps masters that one rank does not need: by the sizes of the models."""
    roles = with_second_masters(building.config, building.strategy.world_size)
    spared = 4 * sum(building.sizes.get(role, 0) for role in roles)
    if spared >= SPARED:
        yield f"note: {second_masters(building.config)} about {spared / 1e9:.1f} GB less"


def tell_frozen(building: Any) -> Iterator[str]:
    """Say where the whole run trains the critic alone."""
    config = building.config
    if not isinstance(config, PPOConfig) or config.evaluation.val_only:
        return
    frozen = config.algorithm.freezing_actor_steps
    steps = steps_per_episode(config, building.prompts_dataloader)
    if frozen > 0 and not optimizer_steps(config, steps):
        yield f"note: --freezing_actor_steps {frozen}: all steps of this run train the critic alone, the actor stays"


def second_masters(config: PPOConfig) -> str:
    """Return the note, up to how much it is."""
    return (
        f"--zero_stage {config.strategy.zero_stage} with one rank in float32 shards nothing, and keeps the weights that "
        "train twice: --zero_stage 0 needs"
    )


def with_second_masters(config: PPOConfig, ranks: int) -> list[str]:
    """Return the models that train with weights in float32, which DeepSpeed's ZeRO 1 and 2 copy, on one rank."""
    flat = config.flat()
    if ranks > 1 or flat["bf16"] or flat["fp16"] or flat["overlap_comm"]:
        return []
    stages = {"actor": flat["zero_stage"]}
    if isinstance(config, PPOConfig):
        if config.evaluation.val_only:
            return []
        if needs_critic(config):
            stages["critic"] = flat["critic_zero_stage"]
    if flat["adam_offload"]:
        return []
    return [role for role, stage in stages.items() if stage in (1, 2)]


def advice(config: PPOConfig) -> list[str]:
    """Return what works but is seldom meant; of a resolved config."""
    algorithm = config.algorithm
    lines = []
    if not config.evaluation.val_only and not (
        config.rollout.do_sample and config.rollout.temperature > 0
    ):
        problem = "--temperature 0" if config.rollout.do_sample else "--no_do_sample"
        lines.append(
            f"{problem}: rollouts are the most likely answers alone, and a policy learns by trying others: set 1"
        )
    name = f"--kl_estimator {algorithm.kl_estimator}"
    if algorithm.use_kl_loss and algorithm.kl_estimator in ("k1", "abs"):
        problem = {
            "k1": "has an expected gradient of 0",
            "abs": "pulls by the sign of the difference alone",
        }
        lines.append(
            f"{name} as a loss {problem[algorithm.kl_estimator]}: k2 has the gradient of the KL"
        )
    if (
        algorithm.init_kl_coef > 0
        and algorithm.use_kl_in_reward
        and algorithm.kl_estimator in ("k2", "k3", "k3+")
    ):
        lines.append(
            f"{name} in the reward hardly pulls near the reference: k1 has the gradient of the KL"
        )
    return lines


# -- rows and steps -----------------------------------------------------------------------------------------------------


def check_positions_of(building: Building) -> None:
    """Check that ``--pretrain`` is a language model whose positions hold prompt and response, by its config."""
    config = building.config
    if isinstance(config, PPOConfig):  # else rows say how long they are
        from lightppo.models.loading import check_language_model

        loaded = _config_of_pretrain(config)
        model = config.model
        is_new = model.init_from_scratch
        check_language_model(loaded, "--pretrain", model.pretrain, is_new=is_new)
        check_positions(config, _positions_in(loaded))


def check_rows(building: Building) -> None:
    """Check that the longest row to learn from fits the positions, and prompts hold ``--total_training_steps``."""
    config = building.config
    loader = building.prompts_dataloader
    if "dataset" in building.rows:
        check_longest_row(config, int(building.rows["dataset"].lengths.max()), positions_of(config))
    elif loader is not None and building.keeps:
        check_total_steps(config, steps_per_episode(config, loader), len(loader.dataset))


def positions_of(config: Any) -> int | None:
    """Return how many ``--pretrain`` has; ``None``: no limit."""
    return _positions_in(_config_of_pretrain(config))


def _config_of_pretrain(config: Any) -> PretrainedConfig:
    from lightppo.models.loading import load_config
    from lightppo.models.pretrained import loading_options

    return load_config(stage_to_local(config.model.pretrain), **loading_options(config))


def _positions_in(loaded: PretrainedConfig) -> int | None:
    return getattr(loaded.get_text_config(decoder=True), "max_position_embeddings", None)


def check_positions(config: Any, positions: int | None) -> None:
    """Refuse prompts and responses that do not fit; ``None``: a model without a limit."""
    prompt = config.data.prompt_max_len
    response = config.rollout.generate_max_len
    if positions is not None and prompt + response > positions:
        raise ConfigError(
            f"--prompt_max_len {prompt} + --generate_max_len {response} = {prompt + response} tokens, but "
            f"{config.model.pretrain} has {positions} positions: lower one of them to fit"
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
    total = training.total_training_steps
    available = training.num_episodes * per_episode
    if total is not None and total > available:
        raise ConfigError(
            f"--total_training_steps {total} is more than the {available} steps of --num_episodes {training.num_episodes} "
            f"({prompts} prompts, --rollout_batch_size {config.rollout.rollout_batch_size}): set at most {available}, or "
            f"--num_episodes {math.ceil(total / per_episode)}"
        )
