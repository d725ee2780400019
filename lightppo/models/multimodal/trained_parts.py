"""What a run trains, looked at before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic
from lightppo.files import stage_to_local
from lightppo.models.multimodal.detection import check_trainable
from lightppo.models.run_models import loading_options

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


def check_trained_models(building: Building) -> None:
    """ModelLoadError where what trains cannot be told from image or audio towers; of a PPO run the critic's too."""
    config = building.config
    if config.flat().get("val_only"):
        return
    options, pretrain = loading_options(config), config.model.pretrain
    check_trainable(stage_to_local(pretrain), **options)
    if isinstance(config, PPOConfig) and needs_critic(config):
        critic = config.model.critic_pretrain
        if critic != pretrain:
            options["init_from_scratch"] = False
            check_trainable(stage_to_local(critic), flag="--critic_pretrain", **options)
