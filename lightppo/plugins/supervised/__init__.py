"""Training on data: ``lightppo sft``, ``rm`` and ``dpo``."""

from lightppo.plugin import COMMANDS, PUBLIC, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    from lightppo.algorithms.entries import TABLES
    from lightppo.plugins.supervised.preference_losses import PREFERENCE_LOSSES

    TABLES.append(PREFERENCE_LOSSES)
    COMMANDS.register("sft", Command("lightppo.plugins.supervised.sft:main", about="train it on demonstrations"))
    COMMANDS.register(
        "rm", Command("lightppo.plugins.supervised.rm:main", about="train a reward model on pairs of answers")
    )
    COMMANDS.register(
        "dpo",
        Command("lightppo.plugins.supervised.dpo:main", about="train it on pairs of answers, without a reward model"),
    )
    PUBLIC.update(
        {
            "SFTTrainer": "lightppo.plugins.supervised.script_trainers",
            "RewardModelTrainer": "lightppo.plugins.supervised.script_trainers",
            "DPOTrainer": "lightppo.plugins.supervised.script_trainers",
            "NaiveExperienceMaker": "lightppo.plugins.supervised.script_trainers",
            "SFTDataset": "lightppo.plugins.supervised.script_datasets",
            "RewardDataset": "lightppo.plugins.supervised.script_datasets",
        }
    )
