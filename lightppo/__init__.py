"""lightppo: PPO and RLHF training, one process per GPU, on the DeepSpeed launcher.

Public names are resolved on first use, so that ``import lightppo`` loads neither torch nor transformers nor deepspeed.
"""

import logging
from typing import TYPE_CHECKING, Any

from lightppo.plugin import PUBLIC, load_plugins, public
from lightppo.version import __version__

# Where bitsandbytes is installed, peft imports it, and transformers' schedules import peft: on a CPU each run would
# begin with its warning of a package of kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

load_plugins()

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(
            f"module 'lightppo' has no attribute {name!r}; public names: {', '.join(sorted(PUBLIC))}"
        )
    globals()[name] = public(name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:  # for editors
    from lightppo.algorithms.entries import estimator as estimator
    from lightppo.algorithms.entries import policy_loss as policy_loss
    from lightppo.algorithms.kl import AdaptiveKLController as AdaptiveKLController
    from lightppo.algorithms.kl import FixedKLController as FixedKLController
    from lightppo.algorithms.losses import GPTLMLoss as GPTLMLoss
    from lightppo.algorithms.losses import PolicyLoss as PolicyLoss
    from lightppo.algorithms.losses import ValueLoss as ValueLoss
    from lightppo.algorithms.masking import masked_mean as masked_mean
    from lightppo.callbacks import Callback as Callback
    from lightppo.compat.script_names import ActorLanguage as ActorLanguage
    from lightppo.compat.script_names import DistributedSampler as DistributedSampler
    from lightppo.compat.script_names import NaiveReplayBuffer as NaiveReplayBuffer
    from lightppo.compat.script_names import compute_approx_kl as compute_approx_kl
    from lightppo.compat.script_names import (
        get_llm_for_sequence_regression as get_llm_for_sequence_regression,
    )
    from lightppo.compat.script_names import get_strategy as get_strategy
    from lightppo.compat.script_names import unpacking_samples as unpacking_samples
    from lightppo.config import PPOConfig as PPOConfig
    from lightppo.data.blends import blending_datasets as blending_datasets
    from lightppo.data.datasets import PromptDataset as PromptDataset
    from lightppo.data.examples import SFTDataset as SFTDataset
    from lightppo.data.records import Prompt as Prompt
    from lightppo.data.records import Rollout as Rollout
    from lightppo.distributed.deepspeed import DeepspeedStrategy as DeepspeedStrategy
    from lightppo.experience.batching import ReplayBuffer as ReplayBuffer
    from lightppo.experience.experience import Experience as Experience
    from lightppo.experience.maker import ExperienceMaker as ExperienceMaker
    from lightppo.models.actor import Actor as Actor
    from lightppo.models.critic import Critic as Critic
    from lightppo.models.critic import RewardModel as RewardModel
    from lightppo.models.loading import get_tokenizer as get_tokenizer
    from lightppo.rollout.engine import SamplingParams as SamplingParams
    from lightppo.rollout.hf import HFRolloutEngine as HFRolloutEngine
    from lightppo.supervised.pairs import RewardDataset as RewardDataset
    from lightppo.supervised.script_trainers import DPOTrainer as DPOTrainer
    from lightppo.supervised.script_trainers import RewardModelTrainer as RewardModelTrainer
    from lightppo.supervised.script_trainers import SFTTrainer as SFTTrainer
    from lightppo.trainer.naive_experience_maker import NaiveExperienceMaker as NaiveExperienceMaker
    from lightppo.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from lightppo.trainer.prompts import RolloutBatchSampler as RolloutBatchSampler
