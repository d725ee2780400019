"""Supervised fine-tuning: next-token cross entropy on demonstrations. What PPO starts from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightppo import signals
from lightppo.algorithms.losses import GPTLMLoss
from lightppo.models.actor import Actor
from lightppo.ranks import heartbeat
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.metrics import Pace, progress_bar
from lightppo.trainer.recorder import JsonlSink
from lightppo.trainer.report import summary
from lightppo.trainer.update import pretrain_loss

Batch = dict[str, torch.Tensor]


class SFTTrainer:
    """Trains an Actor on batches with labels.

    The loss is the mean over the labelled tokens of the whole optimizer step, over all ranks and micro batches, so
    that it does not depend on how the step is cut into micro batches.

    Args:
        strategy: with the process group up; its train_batch_size and micro_train_batch_size say how many micro
            batches make a step. The last step of an epoch has what is left: no row is dropped.
        model: prepared.
        scheduler: of the model, or None for a constant rate.
        train_dataloader: this rank's micro batches, from ``strategy.setup_dataloader``; each has ``input_ids``,
            ``attention_mask`` and ``labels``, (B, S) long, the labels -100 where nothing is learned.
        max_steps: optimizer steps of the run, over as many epochs as it takes; see :func:`total_steps`.
        log_path: JSONL file of the metrics, written by rank 0; None for no file.
        logging_steps: a row every so many optimizer steps.

    Raises:
        ValueError: no step to take, or batch sizes that do not divide.
    """

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        model: Actor,
        optim: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        train_dataloader: DataLoader,
        *,
        max_steps: int,
        log_path: str | Path | None = None,
        logging_steps: int = 1,
    ) -> None:
        if max_steps < 1 or logging_steps < 1:
            raise ValueError(f"max_steps ({max_steps}) and logging_steps ({logging_steps}) must be at least 1")
        self.strategy, self.model, self.optim, self.scheduler = strategy, model, optim, scheduler
        self.train_dataloader, self.micro_batches_per_step = train_dataloader, strategy.accumulated_gradient
        self.max_steps, self.logging_steps, self.log_path = max_steps, logging_steps, log_path
        self.loss_fn = GPTLMLoss()
        self.stop_signal = 0  # that all ranks stop for, after the step

    def fit(self) -> dict[str, float]:
        """Train; returns the metrics of the last step, see :meth:`training_step`. Collective.

        A signal stops all ranks after the same step (``lightppo.signals``); nothing is saved.
        """
        sink = JsonlSink(Path(self.log_path)) if self.log_path is not None and self.strategy.is_rank_0() else None
        self.model.train()
        status: dict[str, float] = {}
        steps, pace = itertools.islice(self._steps(), self.max_steps), Pace()
        bar = progress_bar(steps, "step", total=self.max_steps, shown=self.strategy.is_rank_0())
        try:
            with signals.safe_points():
                for step, (epoch, micro_batches) in enumerate(bar, start=1):
                    heartbeat.step = step
                    with heartbeat.during("train"):
                        status = {**self.training_step(micro_batches), "train/epoch": float(epoch)}
                    if step % self.logging_steps == 0 or step == self.max_steps:
                        self.strategy.print(pace.line(step, self.max_steps, status))
                        if sink is not None:
                            sink.log(step, status)
                    if self.stop_signal and step < self.max_steps:
                        stop = signals.Stopped(self.stop_signal, together=True)
                        self.strategy.print(f"stopped by {stop.name} after step {step}; nothing is saved")
                        signals.nothing_is_lost()
                        raise stop
        finally:
            if sink is not None:
                sink.close()
        if sink is not None:
            self.strategy.print(summary(Path(self.log_path)))
        return status

    def training_step(self, micro_batches: list[Batch]) -> dict[str, float]:
        """One optimizer step. Collective; every rank has the same number of micro batches.

        Returns:
            Over all ranks: ``train/loss`` (nats per labelled token), ``train/grad_norm`` before clipping,
            ``train/lr`` of this step, ``train/tokens`` with a label, and ``train/skipped``, 1 where a gradient that is
            not finite made all ranks skip the step.
        """
        lr = self.optim.param_groups[0]["lr"]
        tokens = sum(self.loss_fn.num_tokens(batch["labels"]) for batch in micro_batches)
        tokens = self.strategy.all_reduce(float(tokens), op="sum")
        loss_sum = 0.0
        for batch in micro_batches:
            batch = {name: tensor.to(self.strategy.device) for name, tensor in batch.items()}
            loss = pretrain_loss(self.model, batch, self.loss_fn, tokens, self.strategy.world_size)
            self.strategy.backward(loss, self.model, self.optim)
            loss_sum += loss.item()
        outcome = self.strategy.optimizer_step(self.optim, self.model, self.scheduler, name="sft")
        means = self.strategy.all_reduce({"loss": loss_sum} | signals.votes(), op="mean")
        self.stop_signal = signals.elected(means)
        return {
            "train/loss": means["loss"],
            "train/grad_norm": outcome.grad_norm,
            "train/lr": lr,
            "train/tokens": tokens,
            "train/skipped": float(outcome.skipped),
        }

    def _steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """(epoch, micro batches of one optimizer step), without end; a step never spans two epochs."""
        for epoch in itertools.count():
            self.train_dataloader.sampler.set_epoch(epoch)
            batches = iter(self.train_dataloader)
            while step := list(itertools.islice(batches, self.micro_batches_per_step)):
                yield epoch, step


def total_steps(
    strategy: DeepspeedStrategy, train_dataloader: DataLoader, num_epochs: int = 1, max_steps: int | None = None
) -> int:
    """Optimizer steps of a run: ``max_steps`` if given, else the steps of ``num_epochs``."""
    per_epoch = -(-len(train_dataloader) // strategy.accumulated_gradient)
    return max_steps if max_steps is not None else num_epochs * per_epoch
