"""Training on data: ``lightppo sft``, ``rm`` and ``dpo``, and the PTX loss of PPO."""

from lightppo.plugin import (
    PUBLIC,
)


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    PUBLIC.update(
        {
            "SFTTrainer": "lightppo.supervised.script_trainers",
            "RewardModelTrainer": "lightppo.supervised.script_trainers",
            "DPOTrainer": "lightppo.supervised.script_trainers",
            "GPTLMLoss": "lightppo.algorithms.lm_loss",
            "SFTDataset": "lightppo.supervised.script_datasets",
            "RewardDataset": "lightppo.supervised.script_datasets",
        }
    )
