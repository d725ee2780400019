"""Options and checks of reward sources."""

from lightppo.option import register_section
from lightppo.plugin import REWARD_NAMES, RULES
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARD_NAMES.register("plan", Entry("lightppo.config.reward_plan:named_sources"))
    RULES.register("sources", Entry("lightppo.config.reward_plan:source_problems"))
    register_section(
        "reward_plan", "lightppo.config.reward_sources_options:PlanConfig", adds_to="verifier"
    )
    register_section(
        "functions", "lightppo.config.reward_sources_options:FunctionConfig", adds_to="verifier"
    )
    register_section(
        "reward_inputs", "lightppo.config.reward_sources_options:InputConfig", adds_to="reward"
    )
