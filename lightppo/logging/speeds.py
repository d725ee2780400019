"""Tokens per second, milliseconds per token, TFLOP/s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightppo.callbacks import Callback
from lightppo.logging.phase_names import TIMED
from lightppo.zero3 import parameter_count


class Speeds(Callback):
    """Adds the speeds of a step whose samples come from rollouts."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        epochs = {"actor_update": run.max_epochs, "critic_update": run.critic_max_epochs}
        models = {"actor_update": run.actor, "critic_update": run.critic}
        passes = sum(
            epochs[part] * parameter_count(model)
            for part, model in models.items()
            if model is not None
        )

        def of(namespace: str) -> dict[str, float]:
            names = [name for name in metrics if name.startswith(f"{namespace}/")]
            return {name.removeprefix(f"{namespace}/"): metrics[name] for name in names}

        speeds = perf_metrics(
            of("perf"),
            of("rollout"),
            epochs=epochs,
            world_size=run.strategy.world_size,
            parameters=passes / max(epochs.values()),
            peak_tflops=run.config.logging.peak_tflops,
        )
        return {f"perf/{name}": value for name, value in speeds.items()}


def speeds(run: Any) -> Speeds | None:
    """Training on data says its own."""
    return Speeds() if run.samples_tokens else None


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: Mapping[str, int],
    world_size: int,
    parameters: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Speed of one step, from its ``time_<phase>``.

    ``status`` is of the rollout (samples, generated_tokens, total_length), ``parameters`` of all models that an epoch
    trains, ``peak_tflops`` of one device; ``epochs`` by the part in ``TIMED``.
    """
    perf: dict[str, float] = {}
    generated = status.get("generated_tokens", 0.0)
    tokens = status.get("samples", 0.0) * status.get("total_length", 0.0)
    trained = tokens * max(epochs.values())
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
        perf["rollout_ms_per_token"] = 1000 * seconds["time_rollout"] / generated
    for part in TIMED:
        if tokens and f"time_{part}" in seconds:
            passed = tokens * epochs.get(part, 1)
            perf[f"{part}_ms_per_token"] = 1000 * seconds[f"time_{part}"] / passed
    if trained and (train := seconds.get("time_train")):
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf
