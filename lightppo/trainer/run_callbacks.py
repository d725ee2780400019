"""The callbacks of a run: its own, in their order, those of other packages and the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightppo.callbacks import Callback
from lightppo.checkpoint.run_exports import Exports, TimedExports
from lightppo.config import PPOConfig
from lightppo.config.checkpoint_options import CheckpointConfig
from lightppo.config.rules import logp_diff_tolerance, moves_reference
from lightppo.distributed.signals import StopAtSignal
from lightppo.logging.alarms import AlarmBell, DriftWatch
from lightppo.logging.performance import GPUMemory, Profiles, Speeds
from lightppo.logging.recorder import Recorder
from lightppo.logging.report_page import RunSummary
from lightppo.logging.run_notes import ClosingLines
from lightppo.logging.samples import keep_samples
from lightppo.logging.skipped_batches import skipped_in_a_row
from lightppo.plugin import CALLBACKS
from lightppo.preflight.run_checks import DryRun
from lightppo.rewards.registry import asks_outside
from lightppo.rollout.balancing import Balancing
from lightppo.rollout.sampler import keep_samples_of_next_step
from lightppo.rollout.vllm.lora_adapters import PushedBytes
from lightppo.rollout.vllm.offload_optimizer import SleepAfterEvaluation
from lightppo.trainer.due_times import TimedSaves
from lightppo.trainer.evaluation import Evaluation, EvaluationFiles
from lightppo.trainer.prompts import prompt_filter


def run_callbacks(run: Any, user_callbacks: Iterable[Callback]) -> list[Callback]:
    """Make the callbacks of a :class:`lightppo.trainer.loop.TrainingLoop`, in the order in which each time calls them.

    The user's see what those before them add to a step's numbers; the last ones see what the user's add.
    """
    early_callbacks = [
        Speeds() if run.samples_tokens else None,
        TimedSaves() if saves(run.config.checkpoint) else None,
        Evaluation(run),
        prompt_filter(run),
        followers(run),
        keep_samples_of_next_step(run),
        *of_rollouts(run),
        drift_watch(run),
        *(of_episodes(run) if run.samples_tokens else ()),
        Exports(run),
        TimedExports() if run.config.checkpoint.hf_save_steps > 0 else None,
        Profiles(run.config.logging.profile_steps) if run.config.logging.profile_steps else None,
        GPUMemory() if run.strategy.device.type == "cuda" else None,
        EvaluationFiles(),
        ClosingLines(),
        skipped_in_a_row(run),
        AlarmBell(run),
        keep_samples(run) if run.samples_tokens else None,
        *(entry.fn(run) for entry in CALLBACKS.values() if not entry.after_yours),
    ]
    late_callbacks = [
        None if run.keeps_files else DryRun(),
        Recorder(run),
        RunSummary(),
        push_to_hub(run),
        StopAtSignal(),
        *(entry.fn(run) for entry in CALLBACKS.values() if entry.after_yours),
    ]
    callbacks = (*early_callbacks, *user_callbacks, *late_callbacks)
    return [callback for callback in callbacks if callback is not None]


def saves(options: CheckpointConfig) -> bool:
    """Tell whether a run writes checkpoints before its end."""
    return (
        options.save_steps > 0
        or options.save_epochs is not None
        or options.save_seconds is not None
    )


def push_to_hub(run: Any) -> Callback | None:
    """Return what uploads the model of a run that leaves one."""
    if not run.config.checkpoint.push_to_hub or not run.keeps_files or run.only_evaluates:
        return None
    from lightppo.logging.hub import PushToHub

    return PushToHub()


def drift_watch(run: Any) -> DriftWatch | None:
    """Make the callback of a PPO run, whatever its engine is; None with ``--rollout_check off``."""
    if not isinstance(run.config, PPOConfig) or run.config.engine.rollout_check == "off":
        return None
    return DriftWatch(logp_diff_tolerance(run.config, run.strategy.device.type))


def of_rollouts(run: Any) -> list[Callback]:
    """Make the callbacks of a run's rollouts: ranks that balance their tokens, and what a copy of the weights needs."""
    callbacks: list[Callback] = []
    if run.config.flat().get("balance_ranks") and run.strategy.world_size > 1:
        callbacks.append(Balancing())
    engine = getattr(run, "rollout_engine", None)  # training on data has none
    if getattr(engine, "room", None) is not None:
        callbacks.append(SleepAfterEvaluation())
    if "sync_bytes" in getattr(engine, "last_stats", {}):
        callbacks.append(PushedBytes())
    return callbacks


def of_episodes(run: Any) -> list[Callback | None]:
    """Make the callbacks of a run that samples: of its tape, and of its episodes."""
    from lightppo.episodes.episode_metrics import EpisodeMetrics
    from lightppo.episodes.tape import tape_callback

    sums = getattr(run.rollout_engine, "episode_sums", None)
    if sums is not None and run.config.rollout.max_staleness > 0:
        run.register_state("episode_sums", sums, per_rank=True)
    return [
        tape_callback(run) if asks_outside(run.config) else None,
        None if sums is None else EpisodeMetrics(sums),
    ]


# -- models that follow the actor: a moving average, and a reference that moves ---------------------------------------


class Followers(Callback):
    """Moves the average after each optimizer step of the actor, and the reference after each PPO step."""

    def __init__(self, run: Any) -> None:
        self.average = run.followers.get("ema")
        self.beta = run.config.algorithm.ema_beta
        if self.average is not None:
            run.exported = self.average

    def on_optimizer_step(self, run: Any, model: str) -> None:
        if model == "actor" and self.average is not None:
            run.strategy.moving_average(run.actor, self.average, self.beta)

    @contextmanager
    def around_step(self, run: Any, step: int) -> Iterator[None]:
        yield
        move_reference(run, step)


def followers(run: Any) -> Followers | None:
    """Make the callback of a PPO run in which a model follows the actor."""
    if not hasattr(run, "followers"):
        return None
    run.moving_average = Followers(run)
    if run.moving_average.average is None and not moves_reference(run.config):
        return None
    return run.moving_average


def move_reference(run: Any, step: int) -> None:
    """Let the reference follow the actor (``--ref_ema_eta``), or become a copy of it (``--ref_reset_steps``)."""
    algorithm = run.config.algorithm
    if algorithm.ref_ema_eta is not None:
        run.strategy.moving_average(run.actor, run.initial_model, 1 - algorithm.ref_ema_eta)
    elif algorithm.ref_reset_steps is not None and step % algorithm.ref_reset_steps == 0:
        run.strategy.moving_average(run.actor, run.initial_model, 0.0)
