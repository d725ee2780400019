"""Training on data: the one trainer under ``lightppo sft``, ``rm`` and ``dpo``. What it learns is an ``Objective``."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import DataLoader

from lightppo.callbacks import Callback, load_callbacks
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.config.supervised_options import SupervisedConfig
from lightppo.data.blends import read_rows
from lightppo.data.examples import SFTDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy, with_optimizer
from lightppo.logging.performance import PhaseTimer, perf_metrics
from lightppo.logging.step_metrics import checked_status
from lightppo.models import loading
from lightppo.models.batches import to_device
from lightppo.models.packing import settle_packing
from lightppo.models.wrapper import prepare_model
from lightppo.supervised.objectives import OBJECTIVES, Batch, Objective, shared_rows
from lightppo.trainer.build import begin
from lightppo.trainer.building import Building
from lightppo.trainer.loop import SkippedSteps, TrainerState, TrainingLoop
from lightppo.trainer.start_checks import check_data, check_models
from lightppo.zero3 import parameter_count

T = TypeVar("T")


class HeldOut:
    """Evaluation on rows that are not trained on: the means of the objective over all of them.

    Args:
        dataset: the same on every rank; ranks share its rows.
    """

    def __init__(
        self, objective: Objective, model: Any, dataset: Any, micro_batch_size: int
    ) -> None:
        self.objective = objective
        self.model = model
        self.dataset = dataset
        self.size = micro_batch_size
        self.strategy = objective.strategy
        self.ranks = objective.ranks

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro batches, each row once over all ranks; False: a filler, as ranks take equally many."""
        for rows, batch in shared_rows(self.dataset, self.ranks, self.size):
            yield batch, bool(rows)

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        """Return ``eval/loss``, further means and their count, the same on every rank. Collective."""
        sums = Counter()
        objective = self.objective
        ranks = self.ranks
        self.model.eval()
        for batch, is_counted in self.batches():
            with self.strategy.together:
                loss, metrics = objective.loss(self.model, batch, 1.0, ranks.world_size)
            count = {objective.unit: float(objective.count(batch)) * ranks.world_size}
            for name, value in ({"loss": loss} | metrics | count).items():
                sums[name] += float(value) * is_counted
        means = ranks.all_reduce(dict(sums), op="mean")
        total = means.pop(objective.unit)
        objective.finish(self.model, self.batches())
        return {f"eval/{name}": x / total for name, x in means.items()} | {
            f"eval/{objective.unit}": total
        }


def prompt_flags(data: Any, dataset: Any) -> str:
    """Return the options by which another command renders prompts as these rows were; chats need no template."""
    flags = ""
    are_chats = isinstance(dataset, SFTDataset) and dataset.examples(0)[0].prompt.messages
    if data.apply_chat_template or are_chats:
        flags += " --apply_chat_template"
    for name in ("input_template", "system_prompt", "chat_template_kwargs"):
        if (value := getattr(data, name)) is not None:
            flags += f" --{name} {shlex.quote(value)}"
    return flags


class SupervisedTrainer(TrainingLoop):
    """Trains a model on the batches of an objective.

    The loss is a mean over the whole optimizer step, over all ranks and micro batches, so that it does not depend on
    how the step is cut into micro batches. ``from_config(config).fit()`` builds everything; a script may bring parts.

    Args:
        model: prepared, with ``optim`` and ``scheduler``.
        train_dataloader: this rank's micro batches, from ``strategy.setup_dataloader``. The last step of an epoch has
            what is left: no row is dropped.
        config: resolved.
        evaluator: of held-out rows, or ``None``.
        more: arguments of :class:`lightppo.trainer.loop.TrainingLoop`.
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
        evaluator: Any | None = None,
        **more: Any,
    ) -> None:
        self.objective = objective
        self.model = model
        self.optim = optim
        self.scheduler = scheduler
        self.train_dataloader = train_dataloader
        self.tokens = 0.0
        self.status: dict[str, float] = {}  # metrics of the last step
        strategy = objective.strategy
        checkpoint = config.checkpoint
        state = TrainerState()
        super().__init__(
            config,
            strategy,
            tokenizer,
            RunCheckpointer(strategy, checkpoint, {"actor": model}, tokenizer),
            SkippedSteps(state, strategy),
            state=state,
            timer=PhaseTimer(),
            evaluator=evaluator,
            **more,
        )

    @classmethod
    def from_config(cls, config: SupervisedConfig, callbacks: Iterable[Callback] = ()) -> Self:
        """Build everything, and resume if there is something to resume. Collective."""
        trainer = build(config, cls, callbacks)
        trainer.resume()
        return trainer

    @classmethod
    def of_parts(cls, *parts: Any, **options: Any) -> Self:
        """Make a trainer of what ``build`` built: a subclass may have a constructor of its own."""
        return cls(*parts, **options)

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train, evaluate, save; return the metrics of the last step, see :meth:`training_step`. Collective."""
        if self.is_complete():
            self.tell_complete()
            return self.status
        with self.running():
            for step, (micro_batches, is_last) in self.steps():
                epoch = float(self.state.episode)
                with self.timer("step"), self.callbacks.around_step(self, step):
                    self.status = {**self.training_step(micro_batches), "train/epoch": epoch}
                self.skipped.end_step()
                self.state.finish_step(self.config.training.train_batch_size, is_last)
                if self.finish_step(step, self.status):
                    break
            self.finish()
        return self.status

    def training_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """Take one optimizer step. Collective; every rank has the same number of micro batches.

        Returns:
            Over all ranks: ``train/loss`` and the objective's means, ``train/<unit>`` counted, ``train/grad_norm``
            before clipping, ``train/lr`` of this step, and ``train/skipped``, 1 where a gradient that is not finite
            made all ranks skip the step; with --fp16 also ``train/overflow`` and ``train/loss_scale``.
        """
        objective = self.objective
        strategy = self.strategy
        ranks = objective.ranks
        learning_rate = self.optim.param_groups[0]["lr"]
        counts = {"total": sum(map(objective.count, micro_batches))}
        counts["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
        counts = ranks.all_reduce({name: float(count) for name, count in counts.items()}, op="sum")
        sums = Counter(loss=0.0)
        step_metrics = []
        self.model.train()
        self.skipped.minibatch = micro_batches
        with self.timer("train"), strategy.together:
            for batch in micro_batches:
                batch = {name: to_device(tensor, ranks.device) for name, tensor in batch.items()}
                loss, metrics = objective.loss(self.model, batch, counts["total"], ranks.world_size)
                strategy.backward(loss, self.model, self.optim)
                step_metrics.append({"loss": loss.detach()} | metrics)
            outcome = strategy.optimizer_step(self.optim, self.model, self.scheduler, name="model")
            for metrics in step_metrics:  # only now, so that no micro batch waits for a GPU
                sums.update(checked_status(metrics))
        self.skipped.add("model", outcome.skipped, outcome.overflow)
        means = ranks.all_reduce(dict(sums), op="mean")
        self.tokens = counts["tokens"]
        return (
            {f"train/{name}": means[name] for name in sums}
            | {
                "train/grad_norm": outcome.grad_norm,
                "train/lr": learning_rate,
                f"train/{objective.unit}": counts["total"],
            }
            | {f"train/{name}": value for name, value in outcome.metrics().items()}
        )

    def finish_step(self, step: int, status: Mapping[str, float]) -> bool:
        seconds = self.timer.reset()
        speed = perf_metrics(
            seconds,
            {"samples": 1.0, "total_length": self.tokens},
            epochs={"train": 1},
            world_size=self.strategy.world_size,
            parameters=parameter_count(self.model),
            peak_tflops=self.config.logging.peak_tflops,
        )
        return super().finish_step(step, dict(status) | seconds | speed)

    def episode_steps(self) -> Iterator[tuple[list[Batch], bool]]:
        """Yield the micro batches of each optimizer step of an epoch, and whether they are the last ones."""
        state = self.state
        size = self.strategy.accumulated_gradient
        self.train_dataloader.sampler.set_epoch(state.episode, state.consumed_prompts)
        batches_left = len(self.train_dataloader)
        batches = iter(self.train_dataloader)
        while batches_left:
            micro_batches = list(itertools.islice(batches, size))
            batches_left -= len(micro_batches)
            yield micro_batches, batches_left == 0

    def client_state(self) -> dict[str, Any]:
        return super().client_state() | self.objective.saved_settings(self.model)

    def count_steps(self) -> int:
        """Count the optimizer steps of the whole run."""
        limit = self.config.training.benchmark_steps
        total = schedule_steps(self.config, self.train_dataloader, self.strategy)
        return total if limit is None else min(total, limit)

    def limits(self) -> dict[str, tuple[int, int | None]]:
        training = self.config.training
        state = self.state
        epochs = training.num_epochs or (1 if training.max_steps is None else None)
        return {
            "num_epochs": (state.episode, epochs),
            "max_steps": (state.global_step, training.max_steps),
            "benchmark_steps": (state.global_step, training.benchmark_steps),
        }

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        if self.keeps_files:
            path = self.config.checkpoint.save_path
            flags = prompt_flags(self.config.data, self.train_dataloader.dataset)
            self.strategy.print(f"next: {self.objective.next.format(path=path)}{flags}")

    def save_model(self) -> None:
        """Save the model at ``save_path``, with what the objective finds out of it at the end. Collective."""
        self.model.eval()
        size = self.config.training.micro_train_batch_size
        rows = HeldOut(self.objective, self.model, self.train_dataloader.dataset, size)
        self.objective.finish(self.model, rows.batches())
        self.strategy.save_model(
            self.model,
            self.tokenizer,
            self.config.checkpoint.save_path,
            step=self.state.global_step,
        )

    def write_batch(
        self, path: Path, batch: Sequence[Batch], facts: Mapping[str, Any]
    ) -> Mapping[str, int]:
        """Keep this rank's micro batches of a step whose gradient is not finite."""
        texts = [
            self.tokenizer.batch_decode(part.get("sequences", part.get("input_ids")))
            for part in batch
        ]
        torch.save({"micro_batches": list(batch), "texts": texts, "facts": dict(facts)}, path)
        return {}

    def run_again(self, folder: str, batch: str) -> str:
        """Tell how to train on a batch that was kept."""
        return f"To train on the batch again alone: lightppo replay {folder} --batch {batch}"


# -- building ----------------------------------------------------------------------------------------------------------


def build(
    config: SupervisedConfig,
    trainer: type[T] = SupervisedTrainer,
    callbacks: Iterable[Callback] = (),
) -> T:
    """Build strategy, data, model and trainer; whatever cannot work is an error that names its flag. Collective."""
    callbacks = [*callbacks, *load_callbacks(config.training.callback)]
    building = begin(config)
    config = building.config
    strategy = building.strategy
    tokenizer = building.tokenizer
    objective = next(kind for kind in OBJECTIVES if kind.config_class is type(config))(
        config, strategy
    )
    rows, held_out = read_data(building, objective)
    training = config.training
    size = config.training.micro_train_batch_size
    loader = strategy.setup_dataloader(rows, size, pin_memory=True, collate_fn=rows.collate_fn)

    model = objective.build_model()
    loading.fit_to_model(tokenizer, model.hf_model, config.model.pretrain, "--pretrain")
    prepare_model(model, "actor", config, strategy.device)
    steps = schedule_steps(config, loader, strategy)
    prepared = strategy.prepare(
        with_optimizer(model, training.learning_rate, steps, config, strategy)
    )
    models = objective.attach(prepared[0])
    building.saved = {"actor": prepared[0]}
    gains = objective.gains_by_packing(rows) or strategy.sequence_group is not None
    if training.packing_samples is None and not gains:
        strategy.print("note: batches are padded: all rows have about the same length")
    else:
        settle_packing(config, strategy, models, objective.shares_prompts)
    building.models = dict(zip(("--pretrain", "--ref_pretrain"), models))
    check_models(building)
    objective.begin(prepared[0], filter(None, (rows, held_out)))
    return trainer.of_parts(
        objective,
        *prepared,
        loader,
        config=config,
        tokenizer=tokenizer,
        evaluator=held_out and HeldOut(objective, prepared[0], held_out, size),
        callbacks=callbacks,
        content=building.content,
        keeps_files=building.keeps_files,
        options=building.options,
    )


def read_data(building: Building, objective: Objective) -> tuple[Any, Any | None]:
    """Read rows to learn from, and held-out ones if there are any; of a trial the longest ones. Collective."""
    config = building.config
    strategy = building.strategy
    tokenizer = building.tokenizer

    def dataset(name: str, split: str, limit: int) -> Any:
        rows = read_rows(config, name, split, strategy)
        read = objective.build_dataset(rows.select(range(min(len(rows), limit))), tokenizer)
        strategy.print(f"--{name} {config.flat()[name]}: {read.report}")
        return read

    def part_of(whole: Any, positions: Iterable[int]) -> Any:
        return objective.build_dataset(whole.dataset.select(whole.numbers(positions)), tokenizer)

    data = config.data
    held_out = None
    rows = dataset("dataset", data.dataset_split, data.max_samples)
    if data.eval_dataset:
        held_out = dataset("eval_dataset", data.eval_split, data.eval_max_samples)
    building.rows = {"dataset": rows}
    building.held_out = held_out
    check_data(building)
    if (
        not building.keeps_files
    ):  # a full micro batch of the longest rows, which take the most memory
        few = config.training.micro_train_batch_size * strategy.world_size
        rows = part_of(rows, rows.lengths.argsort(kind="stable")[::-1][:few])
        held_out = held_out and part_of(held_out, range(min(few, len(held_out))))
    return rows, held_out


def schedule_steps(
    config: SupervisedConfig, train_dataloader: DataLoader, strategy: DeepspeedStrategy
) -> int:
    """Count the optimizer steps that the schedule of the learning rate stretches over."""
    training = config.training
    # of this rank, in a whole epoch
    rows = train_dataloader.sampler.num_samples
    per_epoch = -(-rows // (strategy.accumulated_gradient * strategy.micro_train_batch_size))
    return training.max_steps or (training.num_epochs or 1) * per_epoch
