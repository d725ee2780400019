"""Trainers with the constructors of OpenRLHF's launcher era, for scripts that build models and data themselves.

They run the loop of ``trainer.supervised``. What differs: the script's ``args`` are the options, checkpoints lie in
``args.ckpt_path`` itself, where the script looks for them, and the script saves the model at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from lightppo.checkpoint.layout import tag_of
from lightppo.checkpoint.run_exports import save_hf
from lightppo.compat.constructor_options import fill_schedule, options_of_args
from lightppo.compat.script_members import recorder_of
from lightppo.config.supervised_options import SupervisedConfig
from lightppo.data.examples import SFTDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError
from lightppo.supervised.objectives import DPO, SFT, RewardModelling
from lightppo.supervised.pairs import PairDataset
from lightppo.supervised.trainer import HeldOut, SupervisedTrainer, schedule_steps
from lightppo.trainer.by_hand import refuse_pieces, state_after

# Attributes of ``args`` that the loop reads; optimizer, schedule, models and data are the script's own.
LOOP_OPTIONS = [
    "pretrain",
    "ref_pretrain",
    "bf16",
    "fp16",
    "dataset",
    "max_len",
    "packing_samples",
    "seed",
    "zero_stage",
    "train_batch_size",
    "micro_train_batch_size",
    "learning_rate",
    "l2",
    "max_norm",
    "max_skipped_steps",
    "save_path",
    "ckpt_path",
    "save_steps",
    "max_ckpt_num",
    "max_ckpt_mem",
    "eval_steps",
    "logging_steps",
    "use_wandb",
    "wandb_org",
    "wandb_group",
    "wandb_project",
    "wandb_run_name",
    "use_tensorboard",
    "log_file",
    "use_trackio",
    "use_mlflow",
    "peak_tflops",
    "metric_names",
    "preference_loss",
]
# What OpenRLHF's logs call a metric, beside its own name here.
SCRIPT_NAMES: dict[str, dict[str, Sequence[str]]] = {
    "sft": {"loss": ("gpt_loss", "loss_mean")},
    "pairs": {
        "loss": ("loss_mean",),
        "accuracy": ("acc", "acc_mean"),
        "rejected_reward": ("reject_reward",),
    },
}


class ScriptTrainer(SupervisedTrainer):
    """What the trainers below have in common; made by a script, or by ``from_config`` as a :class:`SupervisedTrainer`.

    An override of ``training_step``, ``save_logs_and_checkpoints``, ``_save_checkpoint`` or ``evaluate`` acts.
    """

    objective: Any  # one of objective_class
    objective_class: ClassVar[type[Any]]
    rows_class: ClassVar[type]  # of the data that the objective learns from
    script_names: ClassVar[Mapping[str, Sequence[str]]]
    config: Any  # of objective_class.config_class
    args: Any = None  # of the script; None: made by from_config

    def _take_parts(
        self,
        model: Any,
        strategy: DeepspeedStrategy,
        optim: torch.optim.Optimizer,
        train_dataloader: DataLoader,
        eval_dataloader: DataLoader | None,
        scheduler: Any,
        tokenizer: Any,
        **options: Any,
    ) -> None:
        """Take what the script made; ``options`` of the config win over ``strategy.args``."""
        refuse_pieces(strategy)
        self.args = strategy.args
        if self.args is None:
            raise ConfigError(
                f"{type(self).__name__} reads strategy.args: make the strategy by get_strategy(args)"
            )
        _refuse(self.args, options.pop("max_norm", None), strategy)
        config = script_config(self.objective_class.config_class, self.args, options)
        for name, loader in {
            "train_dataloader": train_dataloader,
            "eval_dataloader": eval_dataloader,
        }.items():
            self._check_rows(name, loader)
        objective = self.objective_class(config, strategy)
        parts = (objective, model, optim, scheduler, train_dataloader)
        super().__init__(*parts, config=config, tokenizer=tokenizer, evaluator=_Evaluation(self))
        if not _rows_of(eval_dataloader):
            self.evaluator = None
        self.optimizer = optim
        self.eval_dataloader = eval_dataloader
        self.epochs = config.training.num_epochs
        self.max_norm = strategy.max_norm
        self.client_states: dict[str, Any] = {}

    @classmethod
    def of_parts(cls, *parts: Any, **options: Any) -> ScriptTrainer:
        trainer = cls.__new__(cls)
        SupervisedTrainer.__init__(trainer, *parts, **options)
        return trainer

    def _check_rows(self, name: str, loader: DataLoader | None) -> None:
        rows = getattr(loader, "dataset", None)
        of_pairs = issubclass(self.rows_class, PairDataset)
        has_right_rows = (
            isinstance(rows, self.rows_class) and isinstance(rows, PairDataset) == of_pairs
        )
        if loader is not None and not has_right_rows:
            needed = "RewardDataset" if of_pairs else "SFTDataset"
            raise ConfigError(
                f"{name} has rows of {type(rows).__name__}: make them by lightppo.{needed}"
            )

    packing_samples = property(attrgetter("config.training.packing_samples"))
    save_hf_ckpt = property(attrgetter("config.checkpoint.save_hf_ckpt"))
    disable_ds_ckpt = property(attrgetter("config.checkpoint.disable_ds_ckpt"))
    # Of rank 0, from the first step on: the Weights & Biases run, the TensorBoard writer.
    _wandb = property(lambda self: self.recorder and self.recorder.wandb_run)
    _tensorboard = property(lambda self: self.recorder and self.recorder.tensorboard_writer)

    recorder = property(recorder_of)

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(
        self,
        args: Any = None,
        consumed_samples: int = 0,
        num_update_steps_per_epoch: int | None = None,
    ) -> dict[str, float]:
        """Train until all epochs are done; returns the metrics of the last step. Collective.

        Every row of an epoch is trained on, in a last, smaller step where they are no whole number of batches.

        Args:
            args: the script's, by default the strategy's: where checkpoints go, and how often.
            consumed_samples: rows used before, over all ranks, as the checkpoint's ``client_states`` say.
            num_update_steps_per_epoch: what ``args.eval_steps`` -1 becomes.
        """
        if self.args is None:
            return super().fit()
        self.args = args or self.args
        self.config = script_config(type(self.config), self.args, self._constructor_options())
        self.checkpointer.config = self.config.checkpoint
        fill_schedule(self.args, num_update_steps_per_epoch or -1)
        if consumed_samples and self.state.global_step == 0:
            batch_size = self.config.training.train_batch_size
            self.state.become(state_after(consumed_samples, self._steps_per_epoch(), batch_size))
        self._before_training()
        return super().fit()

    def _constructor_options(self) -> dict[str, Any]:
        checkpoint = self.config.checkpoint
        training = self.config.training
        options = {
            "num_epochs": training.num_epochs,
            "save_hf_ckpt": checkpoint.save_hf_ckpt,
            "disable_ds_ckpt": checkpoint.disable_ds_ckpt,
        }
        preference = getattr(self.config, "preference", None)
        if preference is None:
            return options
        return options | {"beta": preference.beta}

    def _steps_per_epoch(self) -> int:
        config = self.config.with_options(num_epochs=1)
        return schedule_steps(config, self.train_dataloader, self.strategy)

    def _before_training(self) -> None:
        """Find out what must be known before the first step. Collective."""

    def finish_step(self, step: int, status: Mapping[str, float]) -> bool:
        if self.args is None:
            return super().finish_step(step, status)
        logs = {name.removeprefix("train/"): value for name, value in status.items()}
        logs |= {
            script_name: logs[name]
            for name, script_names in self.script_names.items()
            for script_name in script_names
        }
        consumed = {"consumed_samples": step * self.config.training.train_batch_size}
        self.save_logs_and_checkpoints(self.args, step, None, logs, consumed)
        return False

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] | None = None,
        client_states: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a finished step; evaluate and checkpoint if due. ``logs_dict`` may have more numbers. Collective.

        It has each number by its name here and by OpenRLHF's (``gpt_loss``, ``acc``), which is not logged twice.
        """
        script_names = {
            script_name for names in self.script_names.values() for script_name in names
        }
        logs = {
            name: value for name, value in (logs_dict or {}).items() if name not in script_names
        }
        self.client_states = dict(client_states or {})
        super().finish_step(global_step, logs)

    def write_checkpoint(self, step: int) -> None:
        if self.args is None:
            return super().write_checkpoint(step)
        return self._save_checkpoint(step)

    def _save_checkpoint(self, step: int) -> None:
        """Write a checkpoint; OpenRLHF's name, so that an override acts. Collective."""
        self.checkpointer.require_finite(step)
        checkpoint = self.config.checkpoint
        root = self.args.ckpt_path
        consumed = {"consumed_samples": step * self.config.training.train_batch_size}
        states = consumed | self.client_states | {"trainer": asdict(self.state)}
        if not checkpoint.disable_ds_ckpt:
            limits = {"max_num": checkpoint.max_ckpt_num, "max_mem": checkpoint.max_ckpt_mem}
            self.strategy.save_ckpt(self.model, root, tag_of(step), **limits, client_state=states)
        if checkpoint.save_hf_ckpt:
            save_hf(self.checkpointer, root, step)

    def evaluate(self, eval_dataloader: Any, steps: int = 0) -> dict[str, float]:
        """Return ``eval/loss`` and further means over all rows of the dataloader. Collective."""
        size = self.config.training.micro_train_batch_size
        return HeldOut(self.objective, self.model, eval_dataloader.dataset, size).evaluate(steps)


class _Evaluation:
    """What the recorder calls: the trainer's own ``evaluate``, so that an override acts."""

    def __init__(self, trainer: ScriptTrainer) -> None:
        self.trainer = trainer

    def evaluate(self, step: int) -> dict[str, float]:
        metrics = self.trainer.evaluate(self.trainer.eval_dataloader, step) or {}
        return {
            name if "/" in name else f"eval/{name}": float(value) for name, value in metrics.items()
        }


class SFTTrainer(ScriptTrainer):
    """Supervised training of an actor on examples, with OpenRLHF's constructor.

    Args:
        model: an :class:`Actor`, and its ``optim`` and ``scheduler``, prepared by ``strategy.prepare``.
        train_dataloader, eval_dataloader: from ``strategy.setup_dataloader``, of :class:`lightppo.SFTDataset`.
        max_norm: the strategy's; another one is an error.
        pretrain_mode, batch_size: the data set and ``args.train_batch_size`` say so already; nothing reads them here.
    """

    objective_class = SFT
    rows_class = SFTDataset
    script_names = SCRIPT_NAMES["sft"]

    def __init__(
        self,
        model: Any,
        strategy: DeepspeedStrategy,
        optim: torch.optim.Optimizer,
        train_dataloader: DataLoader,
        eval_dataloader: DataLoader | None,
        scheduler: Any,
        max_norm: float | None = None,
        pretrain_mode: bool = False,
        batch_size: int = 1,
        max_epochs: int = 2,
        tokenizer: Any = None,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
    ) -> None:
        self.pretrain_mode = pretrain_mode
        self.batch_size = batch_size
        self._take_parts(
            model,
            strategy,
            optim,
            train_dataloader,
            eval_dataloader,
            scheduler,
            tokenizer,
            max_norm=max_norm,
            num_epochs=max_epochs,
            save_hf_ckpt=save_hf_ckpt,
            disable_ds_ckpt=disable_ds_ckpt,
        )


class RewardModelTrainer(ScriptTrainer):
    """Training of a reward model on pairs, with OpenRLHF's constructor. Arguments as of :class:`SFTTrainer`.

    An evaluation puts mean and standard deviation of the scores into the model's config. ``loss``: any but ``sigmoid``
    is OpenRLHF's LogExp, the same number without a margin.
    """

    objective_class = RewardModelling
    rows_class = PairDataset
    script_names = SCRIPT_NAMES["pairs"]

    def __init__(
        self,
        model: Any,
        strategy: DeepspeedStrategy,
        optim: torch.optim.Optimizer,
        train_dataloader: DataLoader,
        eval_dataloader: DataLoader | None,
        scheduler: Any,
        tokenizer: Any,
        max_norm: float | None = None,
        max_epochs: int = 2,
        loss: str = "sigmoid",
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
    ) -> None:
        self.margin_loss = bool(getattr(strategy.args, "margin_loss", False))
        self._take_parts(
            model,
            strategy,
            optim,
            train_dataloader,
            eval_dataloader,
            scheduler,
            tokenizer,
            max_norm=max_norm,
            num_epochs=max_epochs,
            save_hf_ckpt=save_hf_ckpt,
            disable_ds_ckpt=disable_ds_ckpt,
        )
        self.objective.uses_margins = loss == "sigmoid"
        if self.margin_loss and loss != "sigmoid":
            strategy.print(f"without effect here: --margin_loss needs --loss sigmoid, not {loss}")

    def _before_training(self) -> None:
        self.objective.begin(self.model, [self.train_dataloader.dataset])


class DPOTrainer(ScriptTrainer):
    """DPO, cDPO and IPO, with OpenRLHF's constructor. Arguments as of :class:`SFTTrainer`.

    ``ref_model`` judges all rows once, before the first step. Of ``strategy.args``, ``ipo`` (of sums over an answer's
    tokens, as OpenRLHF has it), ``label_smoothing`` and ``nll_loss_coef`` count.
    """

    objective_class = DPO
    rows_class = PairDataset
    script_names = SCRIPT_NAMES["pairs"]

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        strategy: DeepspeedStrategy,
        tokenizer: Any,
        optim: torch.optim.Optimizer,
        train_dataloader: DataLoader,
        eval_dataloader: DataLoader | None,
        scheduler: Any,
        max_norm: float | None = None,
        beta: float = 0.01,
        max_epochs: int = 2,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
    ) -> None:
        if ref_model is None:
            raise ConfigError("DPOTrainer needs ref_model, a frozen copy of the model at its start")
        self.ref_model = ref_model
        self.beta = beta
        self._take_parts(
            model,
            strategy,
            optim,
            train_dataloader,
            eval_dataloader,
            scheduler,
            tokenizer,
            max_norm=max_norm,
            beta=beta,
            num_epochs=max_epochs,
            save_hf_ckpt=save_hf_ckpt,
            disable_ds_ckpt=disable_ds_ckpt,
        )
        self.objective.nll_loss_coef = float(getattr(self.args, "nll_loss_coef", 0.0))

    def _before_training(self) -> None:
        self.objective.reference = self.ref_model
        loaders: list[Any] = [self.train_dataloader, self.eval_dataloader]
        self.objective.begin(self.model, [loader.dataset for loader in loaders if _rows_of(loader)])


# -- options -----------------------------------------------------------------------------------------------------------


def script_config(
    kind: type[SupervisedConfig], args: Any, options: Mapping[str, Any]
) -> SupervisedConfig:
    """Return the options that the loop reads, from the script's ``args``; ``options`` win over them.

    Raises:
        ConfigError: a value out of range.
    """
    known_options = list(kind.all_options())
    values = options_of_args(
        args, [option for option in known_options if option.name in LOOP_OPTIONS]
    )
    if "ipo" in vars(args) and "preference_loss" in {option.name for option in known_options}:
        values |= _preference(args)
    values["val_before_train"] = False  # OpenRLHF has no evaluation of the start
    return kind().with_options(**values, **options).resolved()


def _preference(args: Any) -> dict[str, Any]:
    if args.ipo:
        return {"preference_loss": "ipo", "average_log_probs": False}
    return {"preference_loss": "dpo", "label_smoothing": getattr(args, "label_smoothing", 0.0)}


def _refuse(args: Any, max_norm: float | None, strategy: DeepspeedStrategy) -> None:
    """Raise ConfigError for what a script asks for and lightppo does not have."""
    if max_norm is not None and max_norm != strategy.max_norm:
        raise ConfigError(
            f"max_norm {max_norm} is not the strategy's ({strategy.max_norm}): set it there"
        )
    if getattr(args, "aux_loss_coef", 0) > 1e-8:
        raise ConfigError(
            "--aux_loss_coef: supervised training has no load-balancing loss: leave it out"
        )
    if getattr(args, "ring_attn_size", 1) > 1:
        raise ConfigError(
            f"--ring_attn_size {args.ring_attn_size}: sequences are not split over ranks: leave it out"
        )


def _rows_of(loader: Any | None) -> int:
    return 0 if loader is None else len(loader.dataset)
