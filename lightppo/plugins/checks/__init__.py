"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.option import register_section
from lightppo.plugin import (
    BEFORE_IMPORTS,
    CALLBACKS,
    CHECKS,
    COMMANDS,
    FITTED,
    MICRO_BATCHES,
    RANK_START,
    RESUMES,
    STRATEGY_METHODS,
    CallbackEntry,
    Check,
    Command,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "memory",
        Command(
            "lightppo.plugins.checks.memory:main",
            about="what a run needs of GPUs and hosts, before anything loads",
        ),
    )
    specs = "lightppo.plugins.checks.micro_batch_specs"
    register_section("micro_batches", f"{specs}:MicroBatchConfig", adds_to="training")
    MICRO_BATCHES.register("specs", Entry(f"{specs}:spec_of"))
    BEFORE_IMPORTS.register("files", Entry("lightppo.plugins.checks.preflight:look"))
    FITTED.register(
        "micro_rollout_batch_size", Entry("lightppo.plugins.checks.budget:rows_that_fit")
    )
    RESUMES.register("options", Entry("lightppo.plugins.checks.resumed:check_same_run"))
    CHECKS.register("files", Check("lightppo.plugins.checks.building:check_files"))
    CHECKS.register("advice", Check("lightppo.plugins.checks.advice:tell_advice"))
    CHECKS.register("frozen", Check("lightppo.plugins.checks.advice:tell_frozen", when="models"))
    CHECKS.register(
        "masters", Check("lightppo.plugins.checks.advice:tell_second_masters", when="models")
    )
    CHECKS.register("positions", Check("lightppo.plugins.checks.fits:check_positions_of"))
    CHECKS.register(
        "memory", Check("lightppo.plugins.checks.building:tell_memory_of", when="folders")
    )
    CHECKS.register(
        "dry_run", Check("lightppo.plugins.checks.building:become_dry_run", when="folders")
    )
    CHECKS.register("fits", Check("lightppo.plugins.checks.fits:check_rows", when="data"))
    CHECKS.register("rows", Check("lightppo.plugins.checks.building:look_at_rows", when="data"))
    CHECKS.register("places", Check("lightppo.plugins.checks.building:check_places", when="models"))
    CHECKS.register("disk", Check("lightppo.plugins.checks.building:check_disk", when="models"))
    CHECKS.register(
        "padding", Check("lightppo.plugins.checks.building:check_padded_batches", when="models")
    )
    CHECKS.register(
        "decoding", Check("lightppo.plugins.checks.building:check_decoding_of", when="engine")
    )
    STRATEGY_METHODS.register(
        "report_memory", Entry("lightppo.plugins.checks.building:report_memory")
    )
    RANK_START.register("type", Entry("lightppo.plugins.checks.device_type:trainable_type"))
    CALLBACKS.register(
        "dry_run", CallbackEntry("lightppo.plugins.checks.building:dry_run", after_yours=True)
    )
