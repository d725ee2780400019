"""What a run records: its folder, metrics, samples, trackers, alarms."""

from lightppo.option import register_section
from lightppo.plugin import ARGUMENTS, CALLBACKS, CHECKS, METRICS, CallbackEntry, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ARGUMENTS.register("wandb_key", Entry("lightppo.logging.wandb_key:take_wandb_key"))
    CHECKS.register("told_options", Check("lightppo.logging.run_notes:tell_options"))
    CHECKS.register("told_models", Check("lightppo.logging.run_notes:tell_models", when="models"))
    CALLBACKS.register("profiles", CallbackEntry("lightppo.logging.profiles:profiles"))
    CALLBACKS.register("gpu_memory", CallbackEntry("lightppo.logging.gpu_memory:gpu_memory"))
    CALLBACKS.register("evaluations", CallbackEntry("lightppo.logging.evaluations:Evaluations"))
    CALLBACKS.register("closing_lines", CallbackEntry("lightppo.logging.run_notes:ClosingLines"))
    CHECKS.register(
        "own_folders", Check("lightppo.logging.run_folder:claim_folders", when="folders")
    )
    CHECKS.register("content", Check("lightppo.logging.run_folder:mark_content", when="data"))
    CALLBACKS.register(
        "skipped", CallbackEntry("lightppo.logging.skipped_batches:skipped_in_a_row")
    )
    CALLBACKS.register("alarms", CallbackEntry("lightppo.logging.alarms:AlarmBell"))
    CALLBACKS.register("samples", CallbackEntry("lightppo.logging.samples:samples"))
    CALLBACKS.register(
        "recorder", CallbackEntry("lightppo.logging.recorder:Recorder", after_yours=True)
    )
    METRICS.register(
        "alarm",
        "lightppo.logging.alarms:meanings",
        about="1 if the metrics show a problem, otherwise 0; the log says when it starts",
    )
    METRICS.register(
        "perf",
        {
            "gpu_memory_gb": "GB of tensors at the step's peak, of the rank that had most; on GPUs",
            "gpu_memory_reserved_gb": "GB that torch held for them",
        },
    )
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
