"""Whether rows fit the model's positions, and the steps of a run its prompts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightppo.config import PPOConfig
from lightppo.config.run_length import steps_per_episode
from lightppo.errors import ConfigError
from lightppo.files import stage_to_local

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightppo.trainer.building import Building


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
    held = training.num_episodes * per_episode
    if total is not None and total > held:
        raise ConfigError(
            f"--total_training_steps {total} is more than the {held} steps of --num_episodes {training.num_episodes} "
            f"({prompts} prompts, --rollout_batch_size {config.rollout.rollout_batch_size}): set at most {held}, or "
            f"--num_episodes {math.ceil(total / per_episode)}"
        )
