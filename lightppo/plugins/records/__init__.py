"""What a run records: its folder, metrics, samples, trackers, alarms."""

from lightppo.option import register_section
from lightppo.plugin import ARGUMENTS, CALLBACKS, CHECKS, METRICS, SAMPLING, CallbackEntry, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ARGUMENTS.register("wandb_key", Entry("lightppo.plugins.records.wandb_key:take_wandb_key"))
    CHECKS.register(
        "own_folders", Check("lightppo.plugins.records.run_folder:claim_folders", when="folders")
    )
    CHECKS.register(
        "content", Check("lightppo.plugins.records.run_folder:mark_content", when="data")
    )
    CALLBACKS.register("alarms", CallbackEntry("lightppo.plugins.records.alarms:AlarmBell"))
    CALLBACKS.register("samples", CallbackEntry("lightppo.plugins.records.samples:samples"))
    CALLBACKS.register(
        "recorder", CallbackEntry("lightppo.plugins.records.recorder:Recorder", after_yours=True)
    )
    METRICS.register(
        "alarm",
        "lightppo.plugins.records.alarms:meanings",
        about="1 if the metrics show a problem, otherwise 0; the log says when it starts",
    )
    register_section(
        "trackers", "lightppo.plugins.records.sections:TrackerConfig", adds_to="logging"
    )
    SAMPLING.register("replay", Entry("lightppo.plugins.records.rollout_files:replay"))
