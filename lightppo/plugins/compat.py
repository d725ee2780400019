"""The constructor, arguments and call forms of the seed."""

from lightppo.plugin import PUBLIC


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    PUBLIC.update(
        {
            "PPOTrainer": "lightppo.compat.seed_trainer",
            "PromptDataset": "lightppo.compat.script_prompts",
            "NaiveExperienceMaker": "lightppo.compat.experience_maker",
            "ExperienceMaker": "lightppo.compat.seed",
            "Actor": "lightppo.compat.seed",
            "ActorLanguage": "lightppo.compat.seed",
            "DistributedSampler": "lightppo.compat.seed",
            "masked_mean": "lightppo.compat.seed",
            "unpacking_samples": "lightppo.compat.seed",
            "compute_approx_kl": "lightppo.compat.seed",
            "get_llm_for_sequence_regression": "lightppo.compat.seed",
            "get_strategy": "lightppo.compat.seed",
            "ReplayBuffer": "lightppo.compat.seed",
            "NaiveReplayBuffer": "lightppo.compat.seed",
            "get_tokenizer": "lightppo.compat.seed",
            "PolicyLoss": "lightppo.compat.seed",
            "ValueLoss": "lightppo.compat.seed",
        }
    )
