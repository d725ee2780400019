"""Options of checkpoints by episodes and by the clock."""

from lightppo.option import Section, option


class SaveTimesConfig(Section, adds_to="checkpoint", resume_safe=True):
    """When checkpoints are saved."""

    save_epochs: int | None = option(None, "Save a checkpoint every N episodes.", "episodes", ge=1)
    save_seconds: float | None = option(None, "Save a checkpoint every N seconds.", "seconds", gt=0)
