"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.option import register_section
from lightppo.plugin import (
    BEFORE_IMPORTS,
    CALLBACKS,
    CHECKS,
    COMMANDS,
    FITTED,
    MICRO_BATCHES,
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
            "lightppo.preflight.memory:main",
            about="what a run needs of GPUs and hosts, before anything loads",
        ),
    )
    register_section(
        "micro_batches", "lightppo.config.micro_batch_specs:MicroBatchConfig", adds_to="training"
    )
    MICRO_BATCHES.register("specs", Entry("lightppo.config.micro_batch_specs:spec_of"))
    BEFORE_IMPORTS.register("files", Entry("lightppo.preflight.before_imports:look"))
    FITTED.register("micro_rollout_batch_size", Entry("lightppo.preflight.budget:rows_that_fit"))
    CHECKS.register("files", Check("lightppo.preflight.run_checks:check_files"))
    CHECKS.register("advice", Check("lightppo.preflight.advice:tell_advice"))
    CHECKS.register("frozen", Check("lightppo.preflight.advice:tell_frozen", when="models"))
    CHECKS.register(
        "masters", Check("lightppo.preflight.advice:tell_second_masters", when="models")
    )
    CHECKS.register("positions", Check("lightppo.preflight.row_lengths:check_positions_of"))
    CHECKS.register("memory", Check("lightppo.preflight.run_checks:tell_memory_of", when="folders"))
    CHECKS.register(
        "dry_run", Check("lightppo.preflight.run_checks:become_dry_run", when="folders")
    )
    CHECKS.register("fits", Check("lightppo.preflight.row_lengths:check_rows", when="data"))
    CHECKS.register("rows", Check("lightppo.preflight.run_checks:look_at_rows", when="data"))
    CHECKS.register("places", Check("lightppo.preflight.run_checks:check_places", when="models"))
    CHECKS.register("disk", Check("lightppo.preflight.run_checks:check_disk", when="models"))
    CHECKS.register(
        "padding", Check("lightppo.preflight.run_checks:check_padded_batches", when="models")
    )
    CHECKS.register(
        "decoding", Check("lightppo.preflight.run_checks:check_decoding_of", when="engine")
    )
    CALLBACKS.register(
        "dry_run", CallbackEntry("lightppo.preflight.run_checks:dry_run", after_yours=True)
    )
