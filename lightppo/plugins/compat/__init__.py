"""The constructor, arguments and call forms of the seed, and reward functions of other trainers."""

from lightppo.plugin import PUBLIC, REWARD_STYLES, STRATEGY_METHODS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    for name in ("verl", "verl_batch", "trl", "areal"):
        styles = "lightppo.plugins.compat.reward_styles"
        REWARD_STYLES.register(name, Entry(f"{styles}:{name.upper()}"))
    for name in ("load_model", "set_max_norm"):
        STRATEGY_METHODS.register(name, Entry(f"lightppo.plugins.compat.script_strategy:{name}"))
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
