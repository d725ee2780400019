"""A run that is asked to stop by a signal: after the step, all ranks together, with all that they have done saved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightppo.callbacks import Callback
from lightppo.distributed import signals


class StopAtSignal(Callback):
    """Saves, and ends the process, where a signal asks for it."""

    def __init__(self, run: Any) -> None:
        self.safe_points: AbstractContextManager | None = None
        self.stopping = False

    def on_start(self, run: Any) -> None:
        self.safe_points = signals.safe_points(run.config.checkpoint.signal_grace)
        self.safe_points.__enter__()

    def votes(self, run: Any) -> Mapping[str, float]:
        return signals.votes()

    def on_votes(self, run: Any, step: int, votes: Mapping[str, float]) -> None:
        if number := signals.elected(votes):
            self.stop(run, step, number)

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        self._look(run, step)

    def on_save(self, run: Any, step: int) -> None:
        self._look(run, step)

    def _look(self, run: Any, step: int) -> None:
        """After what took long: a signal that has come since need not wait for the end of another step. Collective."""
        if step > 0 and not self.stopping:
            self.on_votes(run, step, run.strategy.all_reduce(signals.votes(), "sum"))

    def stop(self, run: Any, step: int, number: int) -> None:
        """Save and end the process. Collective."""
        self.stopping = True
        checkpoint, stop, saved = (
            run.config.checkpoint,
            signals.Stopped(number, together=True),
            "nothing is saved",
        )
        if run.keeps and not checkpoint.disable_ds_ckpt:
            run.save_checkpoint(step)
            saved = f"saved in {run.ckpt_path}: the same command goes on"
            saved += ", without --resume never" * (checkpoint.resume == "never")
        signals.nothing_is_lost()
        total = f" of {run.total_steps}" if run.total_steps is not None else ""
        run.strategy.print(f"stopped by {stop.name} after step {step}{total}; {saved}")
        raise stop

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if isinstance(error, signals.Stopped) and error.together:
            run.strategy.barrier()  # a launcher ends the others when the first one has ended
        if self.safe_points is not None:
            self.safe_points.__exit__(None if error is None else type(error), error, None)
