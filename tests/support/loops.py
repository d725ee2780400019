"""A training loop that trains nothing: what is logged, evaluated and saved, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightppo.callbacks import Callback
from lightppo.config import PPOConfig
from lightppo.distributed.signals import StopAtSignal
from lightppo.logging.performance import PhaseTimer
from lightppo.trainer.loop import SkippedSteps, TrainerState, TrainingLoop
from support.fakes import FakeStrategy


class FakeCheckpointer:
    """Remembers what it is to save."""

    def __init__(self) -> None:
        self.run = "run"
        self.saved: list[tuple[str, int, Any]] = []
        self.exported: list[tuple[str, int]] = []
        self.models, self.tokenizer, self.strategy = {"actor": None}, None, FakeStrategy()
        self.strategy.save_model = self.export
        self.strategy.on_rank_0 = lambda work, what: None  # there is no folder

    def save(self, root: str, step: int, client_state: Any) -> None:
        self.saved.append((root, step, client_state))

    def export(self, model: Any, tokenizer: Any, folder: Path) -> None:
        self.exported.append((str(folder.parent), int(re.sub(r"\D", "", folder.name))))

    def require_finite(self, step: int) -> None:
        """The weights are."""


class FakeEvaluator:
    """An accuracy that rises with the step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluate(self, step: int) -> dict[str, float]:
        self.steps.append(step)
        return {"eval/accuracy": step / 10, "eval/reward": 1.0}


class IdleLoop(TrainingLoop):
    """Episodes of ``per_episode`` steps that :meth:`run` only counts; begun as ``fit`` begins, but for evaluations."""

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any = None,
        checkpointer: Any = None,
        evaluator: Any = None,
        callbacks: Iterable[Callback] = (),
        per_episode: int = 3,
        start_step: int = 0,
        before: TrainingLoop | None = None,
    ) -> None:
        strategy = strategy or FakeStrategy()
        self.per_episode, state = per_episode, TrainerState(global_step=start_step)
        super().__init__(
            config,
            strategy,
            None,
            checkpointer or FakeCheckpointer(),
            SkippedSteps(state, strategy),
            state=state,
            timer=PhaseTimer(),
            callbacks=callbacks,
            evaluator=evaluator,
        )
        if before is not None:  # goes on from its last checkpoint
            _, _, state = before.checkpointer.saved[-1]
            for name, part in self.states.items():
                part.load_state_dict(state[name])
            self.last_saved = start_step
        self.begin_run()
        for callback in self.callbacks:
            # a loop that its test does not end would keep the signals
            if not isinstance(callback, StopAtSignal):
                callback.on_start(self)

    @property
    def only_evaluates(self) -> bool:
        return self.config.evaluation.val_only

    def limits(self) -> dict[str, tuple[int, int | None]]:
        return {}

    def step(self, status: dict[str, float] | None = None) -> bool:
        """One more step, with these numbers."""
        step = self.state.global_step + 1
        self.state.finish_step(1, step % self.per_episode == 0)
        return self.finish_step(
            step, {"reward": float(step), "time_step": 0.5} if status is None else status
        )

    def run(self, last: int) -> None:
        """Steps until this one."""
        while self.state.global_step < last:
            self.step()

    def end(self) -> None:
        """What ``fit`` does at its end, but for the model."""
        self.finish()
        for callback in self.callbacks:
            callback.on_end(self, None)

    def check_trained(self) -> None:
        """Nothing is."""

    @property
    def saved_steps(self) -> list[int]:
        return [step for _, step, _ in self.checkpointer.saved]


def idle_loop(
    folder: Path, strategy: Any = None, evaluates: bool = True, **options: Any
) -> IdleLoop:
    """A loop whose records are in this folder; ``options`` of the config, and of :class:`IdleLoop`."""
    names = ("start_step", "checkpointer", "callbacks", "before", "per_episode")
    own = {name: options.pop(name) for name in names if name in options}
    config = PPOConfig.from_flat(save_path=str(folder), ckpt_path="CKPT", **options)
    return IdleLoop(config, strategy, evaluator=FakeEvaluator() if evaluates else None, **own)
