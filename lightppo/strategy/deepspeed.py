"""DeepspeedStrategy: everything that depends on how many processes there are and how they share a model.

Knows modules, optimizers and collectives; no reinforcement learning. Every method marked *collective* must be called
by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lightppo.strategy import checkpoint, ds_config, engines, export, launch, steps, zero3
from lightppo.strategy.distributed import DistributedStrategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        grad_norm: L2 norm of the gradient over all parameters and ranks, before clipping; inf for a skipped step.
        skipped: the gradient was not finite, so that no rank changed anything.
    """

    grad_norm: float
    skipped: bool


class DeepspeedStrategy(DistributedStrategy):
    """One process per GPU, or per CPU rank, on DeepSpeed ZeRO.

    Args:
        seed: of Python, NumPy and torch on every rank, and of samplers.
        max_norm: largest L2 norm of a gradient; 0 does not clip.
        micro_train_batch_size: samples per rank and forward in training.
        train_batch_size: samples over all ranks per optimizer step.
        zero_stage: 0 to 3, for models whose own configuration does not say otherwise.
        bf16: bf16 parameters, fp32 masters; False is fp32.
        args: kept as ``.args`` for scripts in the seed's style; nothing in lightppo reads it.
        zpg: ranks per secondary ZeRO-3 shard group (hpZ); 1 has none.
        adam_offload: optimizer states on the CPU.
        param_offload: ZeRO-3 parameters on the CPU.
        grad_accum_dtype: "fp32" or "bf16", in which gradients of micro batches add up; None is fp32.
        overlap_comm: reduce gradients while the backward pass runs.
        full_determinism: deterministic kernels only, slower; an operation that has none raises.
        timeout_minutes: a collective that takes longer ends the job.

    Raises:
        ValueError: options that exclude each other; see ``ds_config.train_config``.
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        zero_stage: int = 2,
        bf16: bool = False,
        args: Any = None,
        *,
        zpg: int = 1,
        adam_offload: bool = False,
        param_offload: bool = False,
        grad_accum_dtype: str | None = None,
        overlap_comm: bool = False,
        full_determinism: bool = False,
        timeout_minutes: float = 30,
    ) -> None:
        super().__init__(seed=seed, full_determinism=full_determinism, timeout_minutes=timeout_minutes)
        self.args = args
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.zero_stage = zero_stage
        self.bf16 = bf16
        self.zpg = zpg
        self.adam_offload = adam_offload
        self.param_offload = param_offload
        self.grad_accum_dtype = grad_accum_dtype
        self.overlap_comm = overlap_comm
        if zpg != 1 and zero_stage != 3:
            raise ValueError(f"--zpg {zpg} needs --zero_stage 3, got {zero_stage}")
        if overlap_comm and zero_stage < 2:
            raise ValueError(f"--overlap_comm needs --zero_stage 2 or 3, got {zero_stage}")
        self.get_ds_train_config()  # an impossible combination fails here, before any process group

    @property
    def accumulated_gradient(self) -> int:
        """Micro batches per rank and optimizer step.

        Raises:
            ValueError: train_batch_size is not a multiple of micro_train_batch_size × ranks.
        """
        per_forward = self.micro_train_batch_size * self.world_size
        if self.train_batch_size % per_forward:
            raise ValueError(
                f"--train_batch_size {self.train_batch_size} must be a multiple of "
                f"--micro_train_batch_size {self.micro_train_batch_size} × {self.world_size} ranks"
            )
        return self.train_batch_size // per_forward

    # -- models and optimizers -----------------------------------------------------------------------------------

    def create_optimizer(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> torch.optim.AdamW:
        """AdamW over the trainable parameters; vectors (biases, norms) do not decay. Call it before ``prepare``.

        Args:
            model: an Actor-like wrapper or a module.
            lr: learning rate at the start.
            betas: decay of the first and second moment.
            weight_decay: decoupled weight decay of matrices.
            eps: added to the root of the second moment.

        Raises:
            ValueError: no parameter of the model is trainable.
        """
        params = [p for p in engines.unwrap_model(model).parameters() if p.requires_grad]
        if not params:
            raise ValueError(f"{type(model).__name__} has no trainable parameter")
        matrices = [p for p in params if len(zero3.full_shape(p)) > 1]
        vectors = [p for p in params if len(zero3.full_shape(p)) <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # Fused: one pass over the flat shards and no temporaries, four times as fast on a CPU too. Needs no compiling,
        # unlike FusedAdam and CPUAdam.
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def prepare(self, *models_or_tuples: Any, is_rlhf: bool = False) -> Any:
        """Puts models into engines. Collective.

        The configuration is the model's own ``ds_config`` where it carries one, else this strategy's: for training
        in a tuple with an optimizer, for evaluation (offloaded if the model says ``_offload = True``) alone.

        Args:
            *models_or_tuples: modules, ``(model, optimizer, scheduler)`` with the scheduler possibly None, or None.
            is_rlhf: accepted for scripts in the seed's style; the engines are the same.

        Returns:
            The like of every argument, a single one unpacked. A model of a class with ``engine_attribute`` comes
            back itself, with the engine under that attribute; any other comes back as its engine.

        Raises:
            RuntimeError: there is no process group yet.
            ValueError: a tuple that is not of three, or a training model with a configuration for evaluation.
        """
        if not dist.is_initialized():
            raise RuntimeError("call strategy.setup_distributed() before strategy.prepare()")
        prepared = [self._prepare_one(item) for item in models_or_tuples]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any) -> Any:
        if item is None:
            return None
        if not isinstance(item, tuple):
            config = getattr(item, "ds_config", None) or self.get_ds_eval_config(
                offload=getattr(item, "_offload", False)
            )
            return self._attach_engine(item, None, None, config)
        if len(item) != 3:
            raise ValueError(f"prepare takes a model or (model, optimizer, scheduler), got a tuple of {len(item)}")
        model, optimizer, scheduler = item
        if model is None:
            return None, None, None
        config = getattr(model, "ds_config", None) or self.get_ds_train_config()
        if config.get("managed_gradient_accumulation", True):
            raise ValueError(
                f"{type(model).__name__} is prepared with an optimizer but its ds_config is one for evaluation; "
                f"load it with strategy.get_ds_train_config()"
            )
        return self._attach_engine(model, optimizer, scheduler, config), optimizer, scheduler

    def _attach_engine(self, model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any]) -> Any:
        import deepspeed

        module = engines.unwrap_model(model)
        # Its bf16 optimizer prints memory tables from within, whatever the log level.
        with contextlib.redirect_stdout(None):
            engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                config=copy.deepcopy(config),
                dist_init_required=False,
            )
        if optimizer is None:
            engine.eval()
        elif engines.zero_stage_of(engine) == 0:
            optimizer.register_step_pre_hook(steps.clip_and_check(self.max_norm))
        attribute = engines.engine_attribute(model)
        if attribute is None:
            return engine
        setattr(model, attribute, engine)
        return model

    def unwrap_model(self, model: Any) -> nn.Module:
        """The module without its engine; for an Actor, the Hugging Face model."""
        return engines.unwrap_model(model)

    def get_ds_train_config(
        self,
        is_actor: bool = False,
        *,
        zero_stage: int | None = None,
        adam_offload: bool | None = None,
        param_offload: bool | None = None,
    ) -> dict[str, Any]:
        """DeepSpeed configuration of a model that trains.

        Args:
            is_actor: accepted for scripts in the seed's style; the roles need no different engines.
            zero_stage: of this role; None is the strategy's. So for ``adam_offload`` and ``param_offload``.
        """
        zero_stage = self.zero_stage if zero_stage is None else zero_stage
        return ds_config.train_config(
            zero_stage=zero_stage,
            bf16=self.bf16,
            max_norm=self.max_norm,
            micro_batch_size=self.micro_train_batch_size,
            adam_offload=self.adam_offload if adam_offload is None else adam_offload,
            param_offload=self.param_offload if param_offload is None else param_offload,
            zpg=self.zpg if zero_stage == 3 else 1,
            grad_accum_dtype=self.grad_accum_dtype,
            overlap_comm=self.overlap_comm and zero_stage > 1,
            on_cpu=not launch.on_cuda(),
        )

    def get_ds_eval_config(
        self, offload: bool = False, *, zero_stage: int | None = None, bf16: bool | None = None
    ) -> dict[str, Any]:
        """DeepSpeed configuration of a model that only runs forward: sharded at ZeRO-3, replicated below.

        Args:
            offload: parameters on the CPU until a layer needs them.
            zero_stage: of this role; None is the strategy's.
            bf16: of this role; None is the strategy's. An EMA wants False.
        """
        return ds_config.eval_config(
            zero_stage=self.zero_stage if zero_stage is None else zero_stage,
            bf16=self.bf16 if bf16 is None else bf16,
            offload=offload,
            micro_batch_size=self.micro_train_batch_size,
            on_cpu=not launch.on_cuda(),
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, model: Any, optim: Any = None) -> None:
        """Adds a loss's gradient to the step under way. Collective from ZeRO-2 on: the same number on all ranks.

        Gradients add up over calls and are averaged over ranks, with no other scaling.

        Args:
            loss: scalar, from a forward through the engine.
            model: the prepared model.
            optim: accepted for scripts in the seed's style; the engine knows its optimizer.
        """
        engines.get_engine(model, "backward").backward(loss)

    def optimizer_step(
        self, optim: Any, model: Any, scheduler: LRScheduler | None = None, name: str = "model"
    ) -> StepOutcome:
        """Clips and takes one optimizer step with what ``backward`` gathered, then moves the scheduler. Collective.

        A gradient that is not finite on any rank makes all ranks skip the step: weights, optimizer and scheduler
        stay, and the gradient is dropped.

        Args:
            optim: accepted for scripts in the seed's style; the engine knows its optimizer.
            model: the prepared model.
            scheduler: the one given to ``prepare``, or another to move along; None moves that of ``prepare`` too.
            name: of the model, for the warning about a skipped step.
        """
        engine = engines.get_engine(model, "optimizer_step")
        engine.step()  # moves the engine's own scheduler
        skipped = not engine.was_step_applied()
        grad_norm = float(engine.get_global_grad_norm())
        steps.drop_gradients(engine)
        if skipped:
            if self.is_rank_0():
                logger.warning("step %d of %s skipped: gradient not finite", engine.global_steps, name)
        elif scheduler is not None and scheduler is not engine.lr_scheduler:
            scheduler.step()
        return StepOutcome(grad_norm=math.inf if skipped else grad_norm, skipped=skipped)

    def skip_step(self, model: Any, name: str = "model") -> None:
        """Throws away what ``backward`` gathered since the last step, as if those calls had never been. Collective.

        Weights, optimizer and scheduler stay, and so does the count of steps. The ranks must decide alike; nothing is
        communicated here. Without any ``backward`` before, it does nothing.

        Args:
            model: the prepared model.
            name: of the model, for the message.

        Raises:
            ValueError: the model was not prepared with an optimizer.
        """
        engine = engines.get_engine(model, "skip_step")
        if not engines.has_optimizer(engine):
            raise ValueError(f"skip_step: {name} was prepared without an optimizer, so it has no gradient")
        steps.drop_gradients(engine)
        if self.is_rank_0():
            logger.info("a step of %s is not taken: its gradient is thrown away", name)

    def moving_average(
        self, model: Any, ema_model: Any, beta: float = 0.992, device: torch.device | str | None = None
    ) -> None:
        """ema ← beta · ema + (1 − beta) · model; beta 0 copies. See ``zero3.moving_average``.

        Collective where a sharded model goes into a whole average.
        """
        zero3.moving_average(model, ema_model, beta, device)

    def gathered_parameters(self, model: Any) -> AbstractContextManager[nn.Module]:
        """Context: the whole model on every rank, for generation. Collective. See ``zero3.gathered_parameters``."""
        return zero3.gathered_parameters(model)

    def on_rank_0(self, action: Callable[[], Any], what: str) -> None:
        """Runs ``action`` on rank 0 while the others wait. Collective.

        Raises:
            RuntimeError: ``action`` failed; on every rank, with ``what`` and rank 0's reason.
        """
        checkpoint.on_rank_0(action, what)

    # -- files ---------------------------------------------------------------------------------------------------

    def save_ckpt(
        self,
        model: Any,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict[str, Any] | None = None,
        protected_tags: Collection[str] = (),
    ) -> str:
        """Saves weights, optimizer and scheduler to ``save_dir/tag`` and marks it as the latest. Collective.

        Until all ranks have written, the directory has another name; older ones go only then.

        Args:
            model: prepared; one without optimizer (EMA, reference) too.
            save_dir: holds the checkpoints of this one model.
            tag: name of this one; None is ``global_step{optimizer steps}``.
            max_num: checkpoints to keep, this one included.
            max_mem: GB (1e9 bytes) that all of them may take; the oldest go first, this one never.
            client_state: plain values and tensors to get back from ``load_ckpt``; rank 0's is saved.
            protected_tags: never removed.

        Returns:
            The tag.

        Raises:
            RuntimeError: writing failed; the message has rank 0's reason.
        """
        return checkpoint.save_checkpoint(
            model,
            save_dir,
            tag,
            client_state=client_state,
            max_num=max_num,
            max_mem=max_mem,
            protected_tags=protected_tags,
        )

    def load_ckpt(
        self,
        model: Any,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Loads a checkpoint into a freshly prepared model, its optimizer and its scheduler. Collective.

        Args:
            model: prepared in the same way as the one that was saved.
            load_dir: as given to ``save_ckpt``.
            tag: which one; None is the latest.
            load_module_strict: refuse weights whose names do not fit.
            load_optimizer_states: False takes the weights alone.
            load_lr_scheduler_states: False leaves the scheduler where it is.

        Returns:
            The checkpoint's path, and the ``client_state`` saved with it.

        Raises:
            CheckpointError: no checkpoint there, or one of another world size, ZeRO stage or precision.
        """
        return checkpoint.load_checkpoint(
            model,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
        )

    def save_model(self, model: Any, tokenizer: Any | None, output_dir: str | os.PathLike[str]) -> None:
        """Writes weights, configuration, generation settings, tokenizer and model card for transformers. Collective.

        The folder appears as a whole; where it exists and is not empty, files are replaced one by one.

        Args:
            model: prepared or plain; itself a Hugging Face model, or a wrapper that holds one.
            tokenizer: saved along; None leaves it out.
            output_dir: the folder.

        Raises:
            RuntimeError: writing failed; the message has rank 0's reason.
            ValueError: there is no Hugging Face model inside.
        """
        export.save_model(model, tokenizer, output_dir)

    def load_model(self, model: Any, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Loads weights into a model, also into the optimizer's fp32 masters of a prepared one. Collective then.

        Args:
            model: prepared or plain.
            path: a Hugging Face folder, or a ``.safetensors``, ``.bin`` or ``.pt`` file.
            strict: refuse missing and unexpected weights.

        Raises:
            FileNotFoundError: no weights there.
            ValueError: names or shapes do not fit.
        """
        export.load_model(model, path, strict=strict)


_STRATEGY_OPTIONS = (
    "seed",
    "max_norm",
    "micro_train_batch_size",
    "train_batch_size",
    "zero_stage",
    "bf16",
    "zpg",
    "adam_offload",
    "param_offload",
    "grad_accum_dtype",
    "overlap_comm",
    "full_determinism",
    "timeout_minutes",
)


def get_strategy(args: Any) -> DeepspeedStrategy:
    """A strategy from any object with attributes named like ``DeepspeedStrategy``'s arguments; absent ones default.

    ``dist_timeout``, the flag's name, counts as ``timeout_minutes``.
    """
    options = {name: getattr(args, name) for name in _STRATEGY_OPTIONS if hasattr(args, name)}
    if hasattr(args, "dist_timeout"):
        options["timeout_minutes"] = args.dist_timeout
    return DeepspeedStrategy(args=args, **options)
