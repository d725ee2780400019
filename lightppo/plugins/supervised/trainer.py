"""Training on data: the one loop under ``lightppo sft``, ``rm`` and ``dpo``. What a run learns is an ``Objective``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from lightppo.config.rules import idle_flags
from lightppo.data.readers import blending_datasets
from lightppo.models import loading
from lightppo.models.packing import to_device
from lightppo.models.preparation import prepare_model
from lightppo.plugins.adapters.lora import check_peft
from lightppo.plugins.adapters.quantised import check_bitsandbytes
from lightppo.plugins.checks.preflight import NOTHING_KEPT
from lightppo.plugins.checks.probes import check_padding
from lightppo.plugins.checks.rehearsal import after_step, fewer_rows, rehearse
from lightppo.plugins.ops import signals
from lightppo.plugins.ops.ending import SkippedSteps, check_trained, is_saved, stop_together
from lightppo.plugins.ops.storage import local_folder
from lightppo.plugins.records.alarms import Alarms
from lightppo.plugins.records.recorder import Recorder
from lightppo.plugins.records.run_folder import (
    claim,
    content_of,
    public_options,
    record_start,
    refuse_overlaps,
    release,
    save_run_config,
    set_records_aside,
    upload_records,
)
from lightppo.plugins.report.page import summary
from lightppo.plugins.supervised.objectives import OBJECTIVES, Batch, Objective, shared_rows
from lightppo.plugins.supervised.sections import SupervisedConfig
from lightppo.ranks import heartbeat
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.strategy.zero3 import parameter_count
from lightppo.trainer import build as building
from lightppo.trainer import metrics as m
from lightppo.trainer.checkpointing import RunCheckpointer, TrainerState


class HeldOut:
    """Evaluation on rows that are not trained on: the means of the objective over all of them.

    Args:
        dataset: the same on every rank; ranks share its rows.
    """

    def __init__(self, objective: Objective, model: Any, dataset: Any, micro_batch_size: int) -> None:
        self.objective, self.model, self.dataset, self.size = objective, model, dataset, micro_batch_size
        self.strategy = objective.strategy

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """This rank's micro batches, each row once over all ranks; False: a filler, as ranks take equally many."""
        for rows, batch in shared_rows(self.dataset, self.strategy, self.size):
            yield batch, bool(rows)

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        """``eval/loss``, further means and their count, the same on every rank. Collective."""
        sums, objective, ranks = Counter(), self.objective, self.strategy
        self.model.eval()
        for batch, counts in self.batches():
            loss, metrics = objective.loss(self.model, batch, 1.0, ranks.world_size)
            count = {objective.unit: float(objective.count(batch)) * ranks.world_size}
            for name, value in ({"loss": loss} | metrics | count).items():
                sums[name] += float(value) * counts
        means = ranks.all_reduce(dict(sums), op="mean")
        total = means.pop(objective.unit)
        objective.finish(self.model, self.batches())
        return {f"eval/{name}": x / total for name, x in means.items()} | {f"eval/{objective.unit}": total}


class SupervisedTrainer:
    """Trains a model on the batches of an objective.

    The loss is a mean over the whole optimizer step, over all ranks and micro batches, so that it does not depend on
    how the step is cut into micro batches. ``from_config(config).fit()`` builds everything; a script may bring parts.

    Args:
        model: prepared, with ``optim`` and ``scheduler``.
        train_dataloader: this rank's micro batches, from ``strategy.setup_dataloader``. The last step of an epoch has
            what is left: no row is dropped.
        config: resolved.
        evaluator: of held-out rows, or ``None``.
    """

    def __init__(
        self,
        objective: Objective,
        model: Any,
        optim: torch.optim.Optimizer,
        scheduler: Any,
        train_dataloader: DataLoader,
        *,
        config: SupervisedConfig,
        tokenizer: Any,
        evaluator: HeldOut | None = None,
    ) -> None:
        self.objective, self.strategy, self.config, self.tokenizer = objective, objective.strategy, config, tokenizer
        self.model, self.optim, self.scheduler, self.evaluator = model, optim, scheduler, evaluator
        self.train_dataloader, self.state, self.alarms = train_dataloader, TrainerState(), Alarms()
        self.checkpointer = RunCheckpointer(self.strategy, config.checkpoint, {"actor": model}, tokenizer)
        limit, folder = config.training.max_skipped_steps, config.checkpoint.save_path
        again = "To train on the batch again alone: lightppo replay {folder} --batch {batch}"
        self.skipped = SkippedSteps(self.strategy, limit, folder, self._write_batch, again)
        self.timer, self.stop_signal = m.PhaseTimer(), 0
        self.content: dict[str, str] = {}  # marks of what options name
        self.recorder: Recorder | None = None

    @classmethod
    def from_config(cls, config: SupervisedConfig) -> Self:
        """Build everything, and resume if there is something to resume. Collective."""
        trainer, asked = build(config, cls), config
        trainer.resume()
        if trainer.is_complete():
            return trainer  # and its folder stays as it is
        config, strategy, step = trainer.config, trainer.strategy, trainer.state.global_step
        if step == 0:
            strategy.on_rank_0(
                lambda: set_records_aside(config), f"keep apart what is in {config.checkpoint.save_path}"
            )
        save_run_config(config if config.training.dry_run else asked, strategy)
        record_start(config, strategy, step, trainer.content, trainer.total_steps)
        return trainer

    @classmethod
    def of_parts(cls, *parts: Any, **named: Any) -> Self:
        """Made of what ``build`` built: a subclass may have a constructor of its own."""
        return cls(*parts, **named)

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train, evaluate, save; returns the metrics of the last step, see :meth:`training_step`. Collective."""
        status: dict[str, float] = {}
        if self.is_complete():
            self._tell_complete()
        else:
            with signals.safe_points(self.config.checkpoint.signal_grace):
                self._begin()
                for step, micro_batches, is_last in self._steps():
                    epoch = float(self.state.episode)
                    with self.timer("step"), self._profiler(step):
                        status = {**self.training_step(micro_batches), "train/epoch": epoch}
                    self.skipped.end_step(self.state)
                    self.state.finish_step(self.config.training.train_batch_size, is_last)
                    self._record(step, status)
                    self.skipped.check(self.state, step)
                    self._stop_if_asked()
                self._end(status)
        c = self.config.checkpoint
        release([c.save_path, c.ckpt_path])
        return status

    def training_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """One optimizer step. Collective; every rank has the same number of micro batches.

        Returns:
            Over all ranks: ``train/loss`` and the objective's means, ``train/<unit>`` counted, ``train/grad_norm``
            before clipping, ``train/lr`` of this step, and ``train/skipped``, 1 where a gradient that is not finite
            made all ranks skip the step; with --fp16 also ``train/overflow`` and ``train/loss_scale``.
        """
        objective, ranks, lr = self.objective, self.strategy, self.optim.param_groups[0]["lr"]
        counts = {"total": sum(map(objective.count, micro_batches))}
        counts["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
        counts = ranks.all_reduce({name: float(count) for name, count in counts.items()}, op="sum")
        sums, found = Counter(loss=0.0), []
        self.model.train()
        self.skipped.begin(micro_batches)
        with self.timer("train"):
            for batch in micro_batches:
                batch = {name: to_device(tensor, ranks.device) for name, tensor in batch.items()}
                loss, metrics = objective.loss(self.model, batch, counts["total"], ranks.world_size)
                ranks.backward(loss, self.model, self.optim)
                found.append({"loss": loss.detach()} | metrics)
            outcome = ranks.optimizer_step(self.optim, self.model, self.scheduler, name="model")
            for metrics in found:  # only now, so that no micro batch waits for a GPU
                sums.update(m.checked_status(metrics))
        self.skipped.add(self.state, "model", outcome.skipped, outcome.overflow)
        means = ranks.all_reduce(dict(sums) | signals.votes(), op="mean")
        self.stop_signal = signals.elected(means)
        self.tokens = counts["tokens"]
        return (
            {f"train/{name}": means[name] for name in sums}
            | {
                "train/grad_norm": outcome.grad_norm,
                "train/lr": lr,
                f"train/{objective.unit}": counts["total"],
            }
            | {f"train/{name}": value for name, value in outcome.metrics().items()}
        )

    def _steps(self) -> Iterator[tuple[int, list[Batch], bool]]:
        """Number, micro batches and whether it ends the epoch, of each optimizer step until a limit is reached."""
        state, size = self.state, self.strategy.accumulated_gradient
        with m.progress_bar(
            None, "step", shown=self.strategy.is_rank_0(), initial=state.global_step, total=self.total_steps
        ) as bar:
            while not self._reached_limits():
                self.train_dataloader.sampler.set_epoch(state.episode, state.consumed_prompts)
                left, batches = len(self.train_dataloader), iter(self.train_dataloader)
                while left and not self._reached_limits():
                    micro_batches = list(itertools.islice(batches, size))
                    left -= len(micro_batches)
                    heartbeat.step = state.global_step + 1
                    yield heartbeat.step, micro_batches, left == 0
                    bar.update()

    # -- records and state ---------------------------------------------------------------------------------------

    def _record(self, step: int, status: Mapping[str, float]) -> None:
        """Log a step; evaluate, checkpoint and export if due."""
        perf = m.perf_metrics(
            *(self.timer.reset(), {"samples": 1.0, "total_length": self.tokens}),
            epochs={"train": 1},
            world_size=self.strategy.world_size,
            parameters=parameter_count(self.model),
            peak_tflops=self.config.logging.peak_tflops,
        )
        self.recorder.log(step, {**status, **perf}, self.total_steps, due=step == self.total_steps)
        save = partial(self._save_checkpoint, step)
        self.recorder.after_step(step, self._finished_epochs(), self._ckpt_path, save, stops=self._saves_at_stop())

    def _finished_epochs(self) -> int | None:
        return self.state.episode if self.state.consumed_prompts == 0 else None

    @property
    def _ckpt_path(self) -> str:
        return self.config.checkpoint.ckpt_path

    def _save_checkpoint(self, step: int) -> None:
        """All that a resumed run needs beside what the checkpointer saves. Collective."""
        state = {"trainer": asdict(self.state), "alarms": self.alarms.state_dict()}
        state |= {"config": public_options(self.config), "content": self.content}
        self.checkpointer.save(self._ckpt_path, step, state)

    def resume(self, options: Mapping[str, Any] | None = None, before: int | None = None) -> bool:
        """Go on from the last checkpoint that ``--resume`` allows, ``before`` a step; returns whether there was one.
        ``options``, by default the trainer's, are compared with the saved ones. Collective."""
        options = options or public_options(self.config)
        idle = set().union(*idle_flags(self.config, options).values())
        saved = self.checkpointer.resume(options, self.content, idle, before, list(self.config.all_options()))
        if saved is None:
            return False
        self.state = TrainerState.from_saved(saved["trainer"])
        self.alarms.load_state_dict(saved["alarms"])
        return True

    def is_complete(self) -> bool:
        """Whether the run has come to its end and its model is there, whole: nothing is left to do. Collective."""
        step = self.state.global_step
        ended = step > 0 and bool(self._reached_limits())
        return ended and is_saved(self.strategy, [self.config.checkpoint.save_path], step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        t = self.config.training
        total = schedule_steps(self.config, self.train_dataloader, self.strategy)
        return total if t.benchmark_steps is None else min(total, t.benchmark_steps)

    def _reached_limits(self) -> str:
        """The limits that the run has come to, as flags; empty while it goes on."""
        t, state = self.config.training, self.state
        epochs = t.num_epochs or (1 if t.max_steps is None else None)
        limits = {"num_epochs": (state.episode, epochs)}
        limits |= {name: (state.global_step, getattr(t, name)) for name in ("max_steps", "benchmark_steps")}
        return ", ".join(f"--{name} {n}" for name, (done, n) in limits.items() if n is not None and done >= n)

    def _tell_complete(self) -> None:
        done, limits = self.state.global_step, self._reached_limits()
        self.strategy.print(f"run complete: {done} steps; raise {limits} to go on, or start anew with --resume never")

    # -- parts of the loop ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        parts = (self.config, self.strategy, self.checkpointer, self.evaluator)
        start = {"start_step": self.state.global_step, "run_ids": self.state.run_ids}
        self.recorder = Recorder(*parts, options=public_options(self.config), alarms=self.alarms, **start)
        self.state.run_ids = self.recorder.run_ids
        if self.state.global_step > 0:
            self.recorder.catch_up(self.state.global_step, self._finished_epochs(), self._ckpt_path)
        elif self.config.evaluation.val_before_train:
            self.recorder.evaluate(0)

    def _profiler(self, step: int) -> Any:
        name = f"step{step}_rank{self.strategy.get_rank()}.json.gz"
        path = local_folder(self.config.checkpoint.save_path) / "profile" / name
        return m.profile(path, self.timer) if step in self.config.logging.profile_steps else nullcontext()

    def _saves_at_stop(self) -> bool:
        return self.stop_signal > 0 and not (self.config.training.dry_run or self.config.checkpoint.disable_ds_ckpt)

    def _stop_if_asked(self) -> None:
        """Save, close and end the process where a signal asks for it. Collective."""
        step, c = self.state.global_step, self.config.checkpoint
        if not self.stop_signal and step in (self.recorder.last_evaluated, self.recorder.last_saved):  # took long
            self.stop_signal = signals.elected(self.strategy.all_reduce(signals.votes(), "sum"))
        if not self.stop_signal:
            return

        def save() -> str:
            self.recorder.checkpoint(step, partial(self._save_checkpoint, step))
            return self._ckpt_path

        def close() -> None:
            self.recorder.close()
            release([c.save_path, c.ckpt_path])

        when = f"after step {step} of {self.total_steps}"
        saves = save if self._saves_at_stop() else None
        stop_together(self.strategy, self.stop_signal, when, saves, close, resume=c.resume)

    def _end(self, status: Mapping[str, float]) -> None:
        """Last evaluation and checkpoint, the model at ``save_path``, and what to tell."""
        config, strategy, step = self.config, self.strategy, self.state.global_step
        path, dry_run = config.checkpoint.save_path, config.training.dry_run
        self.stop_signal = signals.elected(strategy.all_reduce(signals.votes(), "sum"))
        self._stop_if_asked()  # before what may take long
        check_trained(self.state, "there was none", dry_run, self.skipped.last_why)
        self.recorder.finish(step, partial(self._save_checkpoint, step))
        if not dry_run:
            size = config.training.micro_train_batch_size
            self.model.eval()
            self.objective.finish(
                self.model, HeldOut(self.objective, self.model, self.train_dataloader.dataset, size).batches()
            )
            strategy.save_model(self.model, self.tokenizer, path, step=step)
        self.recorder.close()
        if dry_run:
            for line in after_step(config, self.tokenizer) if strategy.is_rank_0() else ():
                strategy.print(line)
            rows = f"the {len(self.train_dataloader.dataset)} longest rows, loss {status['train/loss']:.4f}"
            strategy.report_memory(f"dry run: one step of {rows}; nothing is kept; memory of rank 0")
        elif strategy.is_rank_0():
            strategy.print(summary(self.recorder.path))
            strategy.print(f"finished: {step} steps; files: {building.places(config)}")
            strategy.print(f"next: {self.objective.next.format(path=path)}")
            upload_records(path)  # with the picture

    def _write_batch(self, path: Path, batch: Sequence[Batch], facts: Mapping[str, Any]) -> Mapping[str, int]:
        """Keep this rank's micro batches of a step whose gradient is not finite."""
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [self.tokenizer.batch_decode(part.get("sequences", part.get("input_ids"))) for part in batch]
        torch.save({"micro_batches": list(batch), "texts": texts, "facts": dict(facts)}, path)
        return {}


# -- building ----------------------------------------------------------------------------------------------------------


def build(config: SupervisedConfig, trainer: type[SupervisedTrainer] = SupervisedTrainer) -> SupervisedTrainer:
    """Strategy → data → model → trainer; whatever cannot work is an error that names its flag. Collective."""
    strategy = building.build_strategy(config)
    strategy.setup_distributed()
    config.validate(strategy.world_size)
    strategy.print(building.described(config))
    check_packages(config)
    asked = config.resolved()
    refuse_overlaps(asked, strategy)
    building.check_text_only(asked)
    config = dry_run_config(asked, strategy) if asked.training.dry_run else asked
    c, d, t = config.checkpoint, config.data, config.training
    claim({"--save_path": c.save_path, "--ckpt_path": c.ckpt_path}, strategy)
    objective = next(kind for kind in OBJECTIVES if kind.config_class is type(config))(config, strategy)
    tokenizer = building.build_tokenizer(config)
    if (reference := config.flat().get("ref_pretrain")) is not None:
        building.check_vocabulary(config, reference, "--ref_pretrain", tokenizer)

    def part_of(whole: Any, positions: Iterable[int]) -> Any:
        return objective.build_dataset(whole.dataset.select(whole.numbers(positions)), tokenizer)

    def dataset(paths: str, split: str, limit: int, flag: str) -> Any:
        rows = blending_datasets(paths, None, strategy, config.strategy.seed, train_split=split, flag=flag)
        found = objective.build_dataset(rows.select(range(min(len(rows), limit))), tokenizer)
        strategy.print(f"{flag} {paths}: {found.report}")
        return found

    rows = dataset(d.dataset, d.dataset_split, d.max_samples, "--dataset")
    held_out = dataset(d.eval_dataset, d.eval_split, d.eval_max_samples, "--eval_dataset") if d.eval_dataset else None
    building.check_lengths(config, building.model_config(config), int(rows.lengths.max()))
    size = t.micro_train_batch_size
    if t.dry_run:  # of a full micro batch of the longest rows, which take the most memory
        rehearse(asked, rows, held_out, None, strategy)
        longest, few = rows.lengths.argsort(kind="stable")[::-1], size * strategy.world_size
        rows, held_out = part_of(rows, longest[:few]), held_out and part_of(held_out, range(min(few, len(held_out))))
    elif told := fewer_rows(config, rows):
        strategy.print(f"warning: {told}")
    loader = strategy.setup_dataloader(rows, size, pin_memory=True, collate_fn=rows.collate_fn)

    model = objective.build_model()
    loading.fit_to_model(tokenizer, model, config.model.pretrain, "--pretrain")
    prepare_model(model, "actor", config, strategy.device)
    counted = parameter_count(model, trained_only=config.adapter.lora_rank > 0)
    building.check_disk_space(asked, {"actor": counted}, exported=parameter_count(model))
    strategy.print(f"model: {parameter_count(model):,} parameters, {counted:,} train\nfiles: {building.places(config)}")
    steps = schedule_steps(config, loader, strategy)
    prepared = strategy.prepare(building.with_optimizer(model, t.learning_rate, steps, config, strategy))
    models = objective.attach(prepared[0])
    if config.training.packing_samples is None and not objective.gains_by_packing(rows):
        strategy.print("note: batches are padded: all rows have about the same length")
    else:
        building.settle_packing(config, strategy, *models)
    check_padding(dict(zip(("--pretrain", "--ref_pretrain"), models)), strategy)
    objective.begin(prepared[0], filter(None, (rows, held_out)))
    evaluator = held_out and HeldOut(objective, prepared[0], held_out, size)
    made = trainer.of_parts(objective, *prepared, loader, config=config, tokenizer=tokenizer, evaluator=evaluator)
    made.content = content_of(config, {"dataset": rows.dataset}, strategy)
    return made


def check_packages(config: SupervisedConfig) -> None:
    """ModelLoadError where adapters or weights in 4 bits need a package that is not installed."""
    if config.adapter.lora_rank > 0:
        check_peft()
    if config.adapter.load_in_4bit:
        check_bitsandbytes()


def schedule_steps(config: SupervisedConfig, train_dataloader: DataLoader, strategy: DeepspeedStrategy) -> int:
    """Optimizer steps that the schedule of the learning rate stretches over."""
    t, rows = config.training, train_dataloader.sampler.num_samples  # of this rank, in a whole epoch
    per_epoch = -(-rows // (strategy.accumulated_gradient * strategy.micro_train_batch_size))
    return t.max_steps or (t.num_epochs or 1) * per_epoch


def dry_run_config(config: SupervisedConfig, strategy: DeepspeedStrategy) -> SupervisedConfig:
    """``--dry_run``: one step of few rows, with all files in a folder that goes at the end. Collective."""
    folder = building.temporary_folder(strategy)
    strategy.train_batch_size = strategy.micro_train_batch_size * strategy.world_size
    small = {"train_batch_size": strategy.train_batch_size, "num_epochs": None, "max_steps": 1, "benchmark_steps": None}
    places = {"save_path": folder, "ckpt_path": None, "log_file": None}
    return config.with_options(**small, **NOTHING_KEPT, **places).resolved()
