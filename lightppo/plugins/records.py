"""What a run records: its folder, metrics, samples, trackers, alarms."""

from lightppo.option import register_section
from lightppo.plugin import ARGUMENTS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ARGUMENTS.register("wandb_key", Entry("lightppo.logging.wandb_key:take_wandb_key"))
    sections = {
        "trackers": "TrackerConfig",
        "profiles": "ProfileConfig",
        "examples": "ExamplesConfig",
    }
    for name, kind in sections.items():
        register_section(name, f"lightppo.config.records_options:{kind}", adds_to="logging")
    register_section("skipped", "lightppo.config.records_options:SkippedConfig", adds_to="training")
    register_section("samples", "lightppo.config.records_options:SamplesConfig", adds_to="sampling")
    register_section("replay", "lightppo.config.records_options:ReplayConfig", adds_to="sampling")
