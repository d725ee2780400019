"""The callbacks of a run: its own, in their order, those of other packages and the user's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightppo.callbacks import Callback
from lightppo.distributed.signals import StopAtSignal
from lightppo.experience.rollout_check import watch
from lightppo.logging.alarms import AlarmBell
from lightppo.logging.evaluations import Evaluations
from lightppo.logging.performance import GPUMemory, Profiles, Speeds
from lightppo.logging.recorder import Recorder
from lightppo.logging.report_page import RunSummary
from lightppo.logging.run_notes import ClosingLines
from lightppo.logging.samples import Samples
from lightppo.logging.skipped_batches import skipped_in_a_row
from lightppo.plugin import CALLBACKS
from lightppo.preflight.run_checks import DryRun
from lightppo.rollout.balancing import balancing
from lightppo.rollout.dynamic_sampling import keep_surplus
from lightppo.rollout.vllm.lora_adapters import pushed_bytes
from lightppo.rollout.vllm.offload_optimizer import sleep_after_evaluation
from lightppo.trainer.due_times import TimedSaves
from lightppo.trainer.evaluation import Evaluation
from lightppo.trainer.exports import Exports
from lightppo.trainer.moving_average import followers
from lightppo.trainer.prompt_filter import prompt_filter


def run_callbacks(run: Any, yours: Iterable[Callback]) -> list[Callback]:
    """Make the callbacks of a :class:`lightppo.trainer.loop.TrainingLoop`, in the order in which each time calls them.

    The user's see what those before them add to a step's numbers; the last ones see what the user's add.
    """
    first = [
        Speeds() if run.samples_tokens else None,
        TimedSaves(run),
        Evaluation(run),
        prompt_filter(run),
        followers(run),
        keep_surplus(run),
        balancing(run),
        sleep_after_evaluation(run),
        pushed_bytes(run),
        watch(run),
        *_of_episodes(run),
        Exports(run),
        Profiles(run.config.logging.profile_steps) if run.config.logging.profile_steps else None,
        GPUMemory() if run.strategy.device.type == "cuda" else None,
        Evaluations(run),
        ClosingLines(run),
        skipped_in_a_row(run),
        AlarmBell(run),
        Samples(run) if run.samples_tokens else None,
        *(entry.fn(run) for entry in CALLBACKS.values() if not entry.after_yours),
    ]
    last = [
        None if run.keeps else DryRun(),
        Recorder(run),
        RunSummary(run),
        StopAtSignal(run),
        *(entry.fn(run) for entry in CALLBACKS.values() if entry.after_yours),
    ]
    return [callback for callback in (*first, *yours, *last) if callback is not None]


def _of_episodes(run: Any) -> list[Callback | None]:
    """Make the callbacks of a run that samples: of its tape, and of its episodes."""
    if not run.samples_tokens:
        return []
    from lightppo.episodes.episode_metrics import episode_metrics
    from lightppo.episodes.tape import tape_callback

    return [tape_callback(run), episode_metrics(run)]
