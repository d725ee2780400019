"""What happens after a step beside training: logs, evaluations, checkpoints, each at its time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.cadence import Cadence
from lightppo.trainer.checkpointing import RunCheckpointer
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.loggers import MetricLogger
from lightppo.trainer.metric_names import with_namespace
from lightppo.trainer.options import public_options

logger = logging.getLogger(__name__)


class Recorder:
    """Logs, evaluates and saves. All ranks call every method; rank 0's clock decides what is due by time.

    Args:
        config: paths, sinks and the times of each.
        strategy: rank and agreement.
        checkpointer: writes checkpoints.
        evaluator: ``None``: no evaluation.
        start_step: step the run starts or resumes at; logs of later steps, of a run that was cut off, are dropped.
        run_id: Weights & Biases run to go on with.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        checkpointer: RunCheckpointer,
        evaluator: Evaluator | None,
        *,
        start_step: int = 0,
        run_id: str | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.checkpointer = checkpointer
        self.evaluator = evaluator
        c, e = config.checkpoint, config.evaluation
        agree = strategy.broadcast_object
        self.checkpoint_cadence = Cadence(c.save_steps, c.save_epochs, c.save_seconds, agree=agree)
        self.export_cadence = Cadence(c.hf_save_steps, c.hf_save_epochs, c.hf_save_seconds, agree=agree)
        per_episode = 1 if e.eval_steps == -1 and e.eval_seconds is None else None
        self.eval_cadence = Cadence(e.eval_steps, e.eval_epochs or per_episode, e.eval_seconds, agree=agree)
        self.best: float | None = None
        if e.best_metric is not None and start_step > 0:
            self.best = checkpointer.best_value(c.ckpt_path, e.best_metric)
        self.last_evaluated: int | None = None
        self.last_saved: int | None = start_step or None
        self.metric_logger = MetricLogger(
            config.logging,
            c.save_path,
            public_options(config),
            is_rank_0=strategy.is_rank_0(),
            start_step=start_step,
            run_id=run_id,
        )

    @property
    def run_id(self) -> str | None:
        """Of the Weights & Biases run."""
        return self.metric_logger.run_id

    def log(self, step: int, status: Mapping[str, float], perf: Mapping[str, float]) -> None:
        """Log one step, if it is due."""
        if step % self.config.logging.logging_steps == 0:
            self.metric_logger.log(step, with_namespace({**status, **perf}))

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights, once per step at most; empty without an evaluator. Collective."""
        if self.evaluator is None or self.last_evaluated == step:
            return {}
        results = self.evaluator.evaluate(step)
        self.last_evaluated = step
        self.metric_logger.log(step, results)
        self.strategy.print(f"[step {step}] evaluation: accuracy {results['eval/accuracy']:.3f}, "
                            f"reward {results['eval/reward']:.3f}")  # fmt: skip
        if self.config.evaluation.best_metric is not None:
            self._keep_best(step, results, self.config.evaluation.best_metric)
        return results

    def _keep_best(self, step: int, results: Mapping[str, float], metric: str) -> None:
        if metric not in results:
            known = ", ".join(sorted(results))
            raise ConfigError(f"--best_metric {metric} is not among the evaluation's metrics: {known}")
        if self.best is not None and results[metric] <= self.best:
            return
        self.best = results[metric]
        if step > 0:  # the start is the bar to pass, not a result
            self.checkpointer.save_best(self.config.checkpoint.ckpt_path, step, metric, self.best)

    def after_step(
        self, step: int, finished_episodes: int | None, ckpt_path: str, client_state: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Evaluate, checkpoint and export what is due. Collective."""
        if self.evaluator is not None and self.eval_cadence.due(step, finished_episodes):
            self.evaluate(step)
        if self.checkpoint_cadence.due(step, finished_episodes):
            self.save(step, ckpt_path, client_state)
        if self.export_cadence.due(step, finished_episodes):
            self.checkpointer.save_hf(ckpt_path, step)

    def finish(self, step: int, ckpt_path: str, client_state: Callable[[], Mapping[str, Any]]) -> None:
        """The last evaluation and, where checkpoints are kept, the last checkpoint. Collective."""
        self.evaluate(step)
        if self.checkpoint_cadence.active:
            self.save(step, ckpt_path, client_state)

    def close(self) -> None:
        """Close the logs; nothing is logged after it."""
        self.metric_logger.close()

    def save(self, step: int, ckpt_path: str, client_state: Callable[[], Mapping[str, Any]]) -> None:
        """Write a checkpoint, once per step at most. Collective."""
        if self.last_saved == step:
            return
        self.checkpointer.save(ckpt_path, step, client_state())
        self.last_saved = step
        logger.info("checkpoint global_step%d written to %s", step, ckpt_path)
