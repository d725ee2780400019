"""Options of exports; docs/checkpoints.md."""

from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class ExportConfig(Section, adds_to="checkpoint", resume_safe=True):
    """The actor for transformers, while the run goes on."""

    hf_save_steps: int = option(
        -1, "Export the actor in HF format every N steps; -1: never.", "PPO steps", ge=-1
    )
    hf_save_epochs: int | None = option(None, "Export every N episodes.", "episodes", ge=1)
    hf_save_seconds: float | None = option(None, "Export every N seconds.", "seconds", gt=0)
    save_hf_ckpt: bool = option(
        False,
        "Also export the actor in HF format with each checkpoint.",
        needs="save_steps>0 or save_epochs or save_seconds",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        saves = options.save_steps > 0 or options.save_epochs or options.save_seconds
        if saves and options.disable_ds_ckpt and not options.save_hf_ckpt:
            yield "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save at --save_steps/epochs/seconds"


class BestConfig(Section, adds_to="evaluation", resume_safe=True):
    """The actor of the best evaluation."""

    best_metric: str | None = option(
        None,
        "Keep the actor with the highest value of this metric in --ckpt_path/best_hf, e.g. eval/accuracy.",
        needs="eval_data",
    )
