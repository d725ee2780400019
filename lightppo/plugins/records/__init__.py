"""What a run records: its folder, metrics, samples, trackers, alarms."""

from lightppo.option import register_section
from lightppo.plugin import (
    ARGUMENTS,
    CALLBACKS,
    CHECKS,
    ENTROPY_SAMPLES,
    METRICS,
    SAMPLING,
    CallbackEntry,
    Check,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ARGUMENTS.register("wandb_key", Entry("lightppo.plugins.records.wandb_key:take_wandb_key"))
    here = "lightppo.plugins.records"
    CHECKS.register("told_options", Check(f"{here}.told:tell_options"))
    CHECKS.register("told_models", Check(f"{here}.told:tell_models", when="models"))
    CALLBACKS.register("profiles", CallbackEntry(f"{here}.profiles:profiles"))
    CALLBACKS.register("gpu_memory", CallbackEntry(f"{here}.gpu_memory:gpu_memory"))
    CALLBACKS.register("evaluations", CallbackEntry(f"{here}.evaluations:Evaluations"))
    CALLBACKS.register("closing_lines", CallbackEntry(f"{here}.told:ClosingLines"))
    CHECKS.register(
        "own_folders", Check("lightppo.plugins.records.run_folder:claim_folders", when="folders")
    )
    CHECKS.register(
        "content", Check("lightppo.plugins.records.run_folder:mark_content", when="data")
    )
    ENTROPY_SAMPLES.register("large_steps", Entry(f"{here}.logged_entropy:entropy_sample"))
    CALLBACKS.register("skipped", CallbackEntry(f"{here}.kept_batches:skipped_in_a_row"))
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
        register_section(name, f"{here}.sections:{kind}", adds_to="logging")
    register_section("skipped", f"{here}.sections:SkippedConfig", adds_to="training")
    register_section("samples", f"{here}.sections:SamplesConfig", adds_to="sampling")
    register_section("replay", f"{here}.sections:ReplayConfig", adds_to="sampling")
    SAMPLING.register("replay", Entry("lightppo.plugins.records.rollout_files:replay"))
