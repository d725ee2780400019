"""Which sampled groups a step trains on, and on which rank: dynamic sampling, best of n, balanced ranks."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, METRICS, CallbackEntry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CALLBACKS.register("surplus", CallbackEntry("lightppo.rollout.dynamic_sampling:keep_surplus"))
    CALLBACKS.register("balance_ranks", CallbackEntry("lightppo.rollout.balancing:balancing"))
    METRICS.register(
        "rollout",
        {
            "not_best": "samples left out by best of n (--generation_size)",
            "num_gen_batches": "generation batches in this step (--dynamic_sampling, --gen_batch_size)",
            "trained_groups": "groups (prompts) trained on",
            "reused_groups": "trained groups that are repeated (--on_exhausted reuse)",
            "stale_groups": "trained groups that were generated in an earlier step",
            "staleness": "mean PPO steps between generating a group and training on it",
            "surplus_groups": "accepted groups that wait for the next step",
            "kept_share": "share of this step's groups that --dynamic_sampling accepted",
            "rejected_equal": "groups rejected because all samples have the same --filter_metric",
            "rejected_low": "groups rejected because their mean is at or below the lower bound of --filter_range",
            "rejected_high": "groups rejected because their mean is at or above the upper bound",
            "rejected_unmeasured": "groups rejected because a sample lacks --filter_metric",
        },
    )
    register_section(
        "selection", "lightppo.config.selection_options:SelectionConfig", adds_to="sampling"
    )
    register_section(
        "balancing", "lightppo.config.selection_options:BalancingConfig", adds_to="training"
    )
