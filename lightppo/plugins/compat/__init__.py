"""The constructor, arguments and call forms of the seed."""

from lightppo.plugin import PUBLIC


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    PUBLIC.update(
        {
            "PPOTrainer": "lightppo.plugins.compat.seed_trainer",
            "NaiveExperienceMaker": "lightppo.plugins.compat.experience_maker",
            "Actor": "lightppo.plugins.compat.seed",
            "ActorLanguage": "lightppo.plugins.compat.seed",
            "DistributedSampler": "lightppo.plugins.compat.seed",
            "masked_mean": "lightppo.plugins.compat.seed",
            "unpacking_samples": "lightppo.plugins.compat.seed",
            "compute_approx_kl": "lightppo.plugins.compat.seed",
            "get_llm_for_sequence_regression": "lightppo.plugins.compat.seed",
            "get_strategy": "lightppo.plugins.compat.seed",
            "NaiveReplayBuffer": "lightppo.plugins.compat.seed",
            "get_tokenizer": "lightppo.plugins.compat.seed",
            "PolicyLoss": "lightppo.plugins.compat.seed",
            "ValueLoss": "lightppo.plugins.compat.seed",
        }
    )
