"""lightppo: PPO and RLHF training, one process per GPU, on the DeepSpeed launcher.

Public names are resolved on first use, so that ``import lightppo`` loads neither torch nor transformers nor deepspeed.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightppo.version import __version__

# Where bitsandbytes is installed, peft imports it, and transformers' schedules import peft: on a CPU each run would
# begin with its warning of a package of kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_PUBLIC = {
    "PPOConfig": "lightppo.config",
    "PPOTrainer": "lightppo.trainer.ppo_trainer",
    "SFTTrainer": "lightppo.trainer.script_trainers",
    "RewardModelTrainer": "lightppo.trainer.script_trainers",
    "DPOTrainer": "lightppo.trainer.script_trainers",
    "NaiveExperienceMaker": "lightppo.trainer.script_trainers",
    "Experience": "lightppo.experience.experience",
    "ReplayBuffer": "lightppo.experience.batching",
    "NaiveReplayBuffer": "lightppo.experience.batching",
    "ExperienceMaker": "lightppo.experience.maker",
    "Actor": "lightppo.compat",
    "ActorLanguage": "lightppo.compat",
    "DistributedSampler": "lightppo.compat",
    "masked_mean": "lightppo.compat",
    "unpacking_samples": "lightppo.compat",
    "compute_approx_kl": "lightppo.compat",
    "Critic": "lightppo.models.critic",
    "RewardModel": "lightppo.models.critic",
    "get_llm_for_sequence_regression": "lightppo.compat",
    "get_tokenizer": "lightppo.compat",
    "DeepspeedStrategy": "lightppo.strategy.deepspeed",
    "get_strategy": "lightppo.strategy.deepspeed",
    "Prompt": "lightppo.data.records",
    "Rollout": "lightppo.data.records",
    "PromptDataset": "lightppo.data.datasets",
    "SFTDataset": "lightppo.data.script_datasets",
    "RewardDataset": "lightppo.data.script_datasets",
    "blending_datasets": "lightppo.data.readers",
    "HFRolloutEngine": "lightppo.rollout.hf",
    "SamplingParams": "lightppo.rollout.engine",
    "PolicyLoss": "lightppo.compat",
    "ValueLoss": "lightppo.compat",
    "GPTLMLoss": "lightppo.algorithms.losses",
    "estimator": "lightppo.algorithms.entries",
    "policy_loss": "lightppo.algorithms.entries",
    "FixedKLController": "lightppo.algorithms.kl",
    "AdaptiveKLController": "lightppo.algorithms.kl",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lightppo' has no attribute {name!r}; public names: {', '.join(sorted(_PUBLIC))}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from lightppo.algorithms.entries import estimator as estimator
    from lightppo.algorithms.entries import policy_loss as policy_loss
    from lightppo.config import PPOConfig as PPOConfig
    from lightppo.trainer.ppo_trainer import PPOTrainer as PPOTrainer
