"""Training on data: ``lightppo sft``, ``rm`` and ``dpo``, and the PTX loss of PPO."""

from lightppo.plugin import (
    LOSS_TERMS,
    PUBLIC,
    STRATEGY_METHODS,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    from lightppo.algorithms.entries import TABLES
    from lightppo.algorithms.preference_losses import PREFERENCE_LOSSES

    TABLES.append(PREFERENCE_LOSSES)
    share = "lightppo.supervised.rank_samples:setup_dataloader"
    STRATEGY_METHODS.register("setup_dataloader", Entry(share))
    LOSS_TERMS.register("pretraining", Entry("lightppo.trainer.pretraining:pretraining"))
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
