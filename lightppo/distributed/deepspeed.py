"""DeepspeedStrategy: everything that depends on the number of processes and on how they share a model.

All ranks must call methods marked *collective*, in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightppo import zero3
from lightppo.checkpoint import engine_state as checkpoint
from lightppo.checkpoint import export
from lightppo.config.options import OptionSet
from lightppo.distributed.device import (
    compiling_at_first_call,
    import_deepspeed,
    on_cuda,
    report_memory,
)
from lightppo.distributed.distributed import DistributedStrategy
from lightppo.distributed.fused_zero import collects_nothing, fuse_gradient_calls, total_norm
from lightppo.errors import ModelLoadError
from lightppo.ranks import heartbeat
from lightppo.zero3 import (
    find_engine,
    forget_secondary_shard,
    full_shape,
    get_engine,
    is_sharded,
    shard_of,
    unwrap_model,
    zero_stage_of,
)

logger = logging.getLogger(__name__)

LOSS_SCALE_POWER, MOST_LOSS_SCALE = 16, 2.0**24  # of fp16: at the start 2^16
LOSS_SCALE_STEPS = 1000  # without an overflow, then the loss scale doubles
# on a CPU, where a bucket is a copy in main memory, and where it is not used; else DeepSpeed's own sizes
SMALL_BUCKET_ELEMENTS = 1_000_000


# -- one optimizer step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    # L2 norm over all parameters and ranks, before clipping; inf for a skipped step
    grad_norm: float
    skipped: bool  # the gradient was not finite, so no rank changed anything
    # a skipped step that says nothing but that fp16's loss scale was too large
    overflow: bool = False
    loss_scale: float | None = None  # fp16: of the next step

    def metrics(self) -> dict[str, float]:
        """Return what records keep beside the norm; ``skipped`` is of steps that were no mere overflow."""
        metrics = {"skipped": float(self.skipped and not self.overflow)}
        if self.loss_scale is not None:
            metrics |= {"overflow": float(self.overflow), "loss_scale": self.loss_scale}
        return metrics


def drop_gradients(engine: Any) -> None:
    """Remove all traces of the backward passes since the last step, without communication.

    DeepSpeed 0.19.8 leaves traces even after a step: ZeRO-3 and the offloaded ZeRO-1 and ZeRO-2 keep a parameter's
    gradient until the first backward pass of the next step overwrites it. A parameter that gets its gradient only from
    a later pass would add to the old one; a parameter without a new gradient would be stepped with the old one.
    """
    optimizer = engine.optimizer
    kind = type(engine.optimizer).__name__
    engine.zero_grad()
    engine._unmanaged_backward_count = 0  # the next step counts samples by it
    if isinstance(optimizer, torch.optim.Optimizer):  # stage 0: has only the parameters' gradients
        return
    if kind not in ("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        raise TypeError(
            f"no way known to drop the gradients of DeepSpeed's {kind}: use deepspeed 0.19"
        )
    optimizer.zero_grad()  # enough for bf16 at stage 1: fp32 gradients of the whole model
    if kind == "DeepSpeedZeroOptimizer":
        _drop_sums_of_shards(optimizer)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        _drop_gradients_of_stage_3(optimizer)


def _drop_gradients_of_stage_3(optimizer: Any) -> None:
    optimizer.averaged_gradients = {}
    optimizer._offload_boundary_param_ids.clear()
    optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:  # the step takes a copy in fp32
        optimizer.reset_cpu_buffers()
        for shard in optimizer.fp32_partitioned_groups_flat:
            shard.grad.zero_()


def _drop_sums_of_shards(optimizer: Any) -> None:
    """Remove those of stages 1 and 2: on the device or, offloaded, in main memory."""
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    for gradient_sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        # None instead of clear(): views of the gradients still look up the dictionary's keys
        for group in gradient_sums:
            gradient_sums[group] = None
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    if optimizer.cpu_offload:
        _drop_offloaded_sums(optimizer)


def _drop_offloaded_sums(optimizer: Any) -> None:
    if torch.cuda.is_initialized():
        # Otherwise copies of gradients that are under way would overwrite the zeros.
        torch.cuda.synchronize()
    optimizer.reset_cpu_buffers()
    optimizer._offload_accumulated_param_ids.clear()
    for gradient in optimizer.accumulated_grads_in_cpu.values():
        gradient.zero_()
    for shard in optimizer.single_partition_of_fp32_groups:
        shard.grad.zero_()


@dataclass
class _ClipAndCheck:
    """Stage 0's pre-step hook for a plain optimizer: clips the averaged gradient, or drops it if it is not finite.

    ZeRO does this inside its own optimizers. At stage 0 the engine reads the two attributes set here to report the
    norm and to decide whether to move the scheduler. All ranks have the same gradient, so they decide alike.
    """

    max_norm: float

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = total_norm(p.grad for p in parameters)
        optimizer._global_grad_norm = float(norm)  # the only wait for a GPU
        optimizer.overflow = not math.isfinite(optimizer._global_grad_norm)
        if optimizer.overflow:
            optimizer._global_grad_norm = math.inf
            for parameter in parameters:
                parameter.grad = None  # AdamW passes over parameters without gradient
        elif self.max_norm > 0 and optimizer._global_grad_norm > 0.999 * self.max_norm:
            # With a smaller norm torch would multiply by 1.
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)


def _double_when_due(scaler: Any) -> None:
    """Double fp16's loss scale after a step, instead of DeepSpeed: it would do so before it unscales the gradient."""
    steps_without_overflow = (
        scaler.cur_iter - scaler.last_overflow_iter - 1
    )  # steps since the last overflow
    if steps_without_overflow and steps_without_overflow % LOSS_SCALE_STEPS == 0:
        scaler.cur_scale = min(2 * scaler.cur_scale, MOST_LOSS_SCALE)


@dataclass(eq=False, repr=False)
class DeepspeedStrategy(DistributedStrategy):
    """One process per GPU, or per CPU rank, on DeepSpeed ZeRO. ValueError names options that exclude each other."""

    max_norm: float = 1.0  # largest L2 norm of a gradient; 0 does not clip
    micro_train_batch_size: int = 1  # samples per rank and forward in training
    train_batch_size: int = 1  # samples over all ranks per optimizer step
    zero_stage: int = 2  # 0 to 3, unless a model has a configuration of its own
    bf16: bool = False  # bf16 parameters, fp32 masters; False is fp32
    args: Any = None  # of scripts in the seed's style
    _: KW_ONLY
    fp16: bool = False  # fp16 parameters, fp32 masters, and a loss scale
    zpg: int = 1  # ranks per secondary ZeRO-3 shard group (hpZ); 1 has none
    adam_offload: bool = False  # optimizer states on the CPU
    param_offload: bool = False  # ZeRO-3 parameters on the CPU
    # "fp32" or "bf16", for the sum of micro batches' gradients; None is fp32
    grad_accum_dtype: str | None = None
    # Reduce gradients while the backward pass runs, and gather ZeRO-3's weights on a stream of their own, without which
    # its prefetches wait for the computation. None: at stage 3 on CUDA, DeepSpeed's own default there.
    overlap_comm: bool | None = None
    # engine → [calls of optimizer_step since the last step, calls that make a step]
    _accumulation: WeakKeyDictionary[Any, list[int]] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    # engine → factor on the losses that ``backward`` gets; none: they are taken as they are
    loss_weights: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary, init=False)
    trained_engines: WeakSet[Any] = field(default_factory=WeakSet, init=False)
    # engine at stage 0 → what clips its gradient
    _clips: WeakKeyDictionary[Any, _ClipAndCheck] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    # engine → sum of the losses since the last step
    _losses: WeakKeyDictionary[Any, torch.Tensor] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    def __post_init__(self) -> None:
        stage = self.zero_stage
        problems = {
            f"--zero_stage must be 0, 1, 2 or 3, got {stage!r}": stage not in (0, 1, 2, 3),
            f"--max_norm must be >= 0 (0 does not clip), got {self.max_norm}": self.max_norm < 0,
            "--adam_offload needs sharded optimizer states: set --zero_stage 1, 2 or 3": self.adam_offload
            and not stage,
            f"--param_offload needs --zero_stage 3, got {stage}": self.param_offload and stage != 3,
            f"--zpg {self.zpg} needs --zero_stage 3, got {stage}": self.zpg != 1 and stage != 3,
            f"--overlap_comm needs --zero_stage 2 or 3, got {stage}": bool(self.overlap_comm)
            and stage not in (2, 3),
            "--bf16 and --fp16 contradict each other": self.bf16 and self.fp16,
            f"--{'bf16' if self.bf16 else 'fp16'} needs fp32 master weights, which ZeRO keeps: set --zero_stage 1, 2 "
            "or 3": (self.bf16 or self.fp16) and not stage,
            f"--grad_accum_dtype must be fp32 or bf16, and bf16 needs --bf16, got {self.grad_accum_dtype!r}": (
                self.grad_accum_dtype not in (None, "fp32", *(["bf16"] if self.bf16 else []))
            ),
        }
        for problem, is_present in problems.items():
            if is_present:
                raise ValueError(problem)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that models are held and run in."""
        if self.bf16:
            return torch.bfloat16
        if self.fp16:
            return torch.float16
        return torch.float32

    @property
    def accumulated_gradient(self) -> int:
        """Return micro batches per rank and optimizer step."""
        ranks = self.data_parallel.world_size
        per_forward = self.micro_train_batch_size * ranks
        if self.train_batch_size % per_forward:
            raise ValueError(
                f"--train_batch_size {self.train_batch_size} must be a multiple of "
                f"--micro_train_batch_size {self.micro_train_batch_size} × {ranks} ranks"
            )
        return self.train_batch_size // per_forward

    # -- models and optimizers -----------------------------------------------------------------------------------

    # sequences are never split over ranks; trainers in OpenRLHF's style ask for it
    ring_attn_group = None

    unwrap_model = staticmethod(zero3.unwrap_model)

    @staticmethod
    def _unwrap_model(model: Any) -> nn.Module:
        """Return the Hugging Face model inside, by the name that OpenRLHF's scripts call."""
        return zero3.find_hf_model(model)[0]

    gathered_parameters = staticmethod(zero3.gathered_parameters)

    def create_optimizer(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> torch.optim.AdamW:
        """Make AdamW over the trainable parameters; vectors (biases, norms) do not decay. Call it before ``prepare``.

        ModelLoadError for a model with an image or audio tower (``lightppo.models.loading``).
        """
        hf_model = unwrap_model(model)
        if (reason := getattr(hf_model, "untrainable", None)) is not None:
            raise ModelLoadError(reason)
        parameters = [parameter for parameter in hf_model.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no trainable parameter")
        matrices = [parameter for parameter in parameters if len(zero3.full_shape(parameter)) > 1]
        vectors = [parameter for parameter in parameters if len(zero3.full_shape(parameter)) <= 1]
        decays = ((matrices, weight_decay), (vectors, 0.0))
        groups = [
            {"params": members, "weight_decay": decay} for members, decay in decays if members
        ]
        # Fused: one pass over the flat shards and no temporaries, four times as fast on a CPU too. Needs no compiling,
        # unlike FusedAdam and CPUAdam.
        return torch.optim.AdamW(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    def prepare(self, *models_or_tuples: Any, is_rlhf: bool = False) -> Any:
        """Put models, or tuples ``(model, optimizer, scheduler or None)``, into engines; None stays None. Collective.

        One result per argument, a single one unpacked: the engine, or a model whose class has ``engine_attribute``.
        ``is_rlhf`` changes nothing.
        """
        if not dist.is_initialized():
            raise RuntimeError("call strategy.setup_distributed() before strategy.prepare()")
        prepared = [self._prepare_one(item) for item in models_or_tuples]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any) -> Any:
        """Prepare one by the model's own ``ds_config``; alone and without one for evaluation, by this strategy's."""
        trains = isinstance(item, tuple)
        if trains and len(item) != 3:
            raise ValueError(
                f"prepare takes a model or (model, optimizer, scheduler), got a tuple of {len(item)}"
            )
        model, optimizer, scheduler = item if trains else (item, None, None)
        if model is None:
            return item
        config = getattr(model, "ds_config", None)
        is_for_training = config is not None and not config.get(
            "managed_gradient_accumulation", True
        )
        if not trains:
            # DeepSpeed refuses a configuration for training without an optimizer
            if config is None or is_for_training:
                config = self.get_ds_eval_config(offload=getattr(model, "_offload", False))
            return self._attach_engine(model, None, None, config)
        if config is not None and not is_for_training:
            raise ValueError(
                f"{type(model).__name__} is prepared with an optimizer but its ds_config is one for evaluation; "
                "load it with strategy.get_ds_train_config()"
            )
        return (
            self._attach_engine(model, optimizer, scheduler, config or self.get_ds_train_config()),
            optimizer,
            scheduler,
        )

    def _attach_engine(
        self, model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any]
    ) -> Any:
        import deepspeed

        config = copy.deepcopy(config)
        gradient_clip = None
        # the engine would not report the norm
        if config.get("zero_optimization", {}).get("stage", 0) == 0:
            gradient_clip = _ClipAndCheck(config.get("gradient_clipping", self.max_norm))
            config["gradient_clipping"] = 0.0  # DeepSpeed's default is 1
        # DeepSpeed's bf16 optimizer prints memory tables, whatever the log level.
        with contextlib.redirect_stdout(None), compiling_at_first_call():
            engine, *_ = deepspeed.initialize(
                model=unwrap_model(model),
                optimizer=optimizer,
                lr_scheduler=scheduler,
                config=config,
                dist_init_required=False,
            )
        if optimizer is not None:
            self.trained_engines.add(engine)
        if optimizer is None:
            engine.eval()
        else:
            self._change_steps(engine, optimizer, gradient_clip)
        attribute = getattr(type(model), "engine_attribute", None)
        if attribute is None:
            return engine
        setattr(model, attribute, engine)
        return model

    def _change_steps(
        self, engine: Any, optimizer: torch.optim.Optimizer, gradient_clip: _ClipAndCheck | None
    ) -> None:
        """Change what DeepSpeed does in a step, in this engine alone."""
        if engine.fp16_enabled():
            # At the lowest scale an overflow means a broken step, and optimizer_step reports that.
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        if gradient_clip is not None:
            optimizer.register_step_pre_hook(gradient_clip)
            self._clips[engine] = gradient_clip
        fuse_gradient_calls(engine.optimizer)
        # at stage 0, and in bf16 at stage 1, where DeepSpeed would also round the fp32 sum to bf16
        averages_whole = engine.optimizer is optimizer or hasattr(
            engine.optimizer, "get_grads_for_reduction"
        )
        if self.world_size == 1 and averages_whole:
            # There is nobody to average with. This spares two copies of the whole gradient.
            engine.allreduce_no_retain = lambda gradients, **_: None

    def get_ds_train_config(
        self,
        is_actor: bool = False,
        *,
        zero_stage: int | None = None,
        adam_offload: bool | None = None,
        param_offload: bool | None = None,
        max_norm: float | None = None,
    ) -> dict[str, Any]:
        """Return the configuration of a model that trains; None means the strategy's value. ``is_actor`` changes nothing.

        Any number of ``backward`` calls make one step (``managed_gradient_accumulation: false``): the caller scales the
        loss, and DeepSpeed averages gradients over ranks.
        """
        if zero_stage is None:
            zero_stage = self.zero_stage
        if param_offload is None:
            param_offload = self.param_offload
        if adam_offload is None:
            adam_offload = self.adam_offload
        config = self._config(self.dtype, sharded=zero_stage == 3, offload=param_offload)
        zero_config = config["zero_optimization"]
        if self.overlap_comm is None:
            overlaps = on_cuda() and zero_stage == 3
        else:
            overlaps = self.overlap_comm and zero_stage > 1
        zero_config |= {"stage": zero_stage, "overlap_comm": overlaps}
        if not on_cuda():
            zero_config |= {
                "reduce_bucket_size": SMALL_BUCKET_ELEMENTS,
                "allgather_bucket_size": SMALL_BUCKET_ELEMENTS,
            }
        sums_in_fp32 = self.dtype.itemsize == 2 and self.grad_accum_dtype != "bf16"
        if collects_nothing(zero_stage, self.world_size, sums_in_fp32, adam_offload):
            zero_config["reduce_bucket_size"] = SMALL_BUCKET_ELEMENTS
        if adam_offload:
            zero_config["offload_optimizer"] = {"device": "cpu", "pin_memory": on_cuda()}
        if zero_stage == 1 and self.bf16 and sums_in_fp32 and not adam_offload:
            # the sum of all passes is averaged once; DeepSpeed would round it to bf16 for that
            config["communication_data_type"] = "fp32"
        if self.zpg != 1 and zero_stage == 3:
            zero_config["zero_hpz_partition_size"] = self.zpg
            share_groups_of_hpz()
        return config | {
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.max_norm if max_norm is None else max_norm,
            "data_types": {"grad_accum_dtype": self.grad_accum_dtype or "fp32"},
            # torch's AdamW also takes the offloaded step: DeepSpeed's own would be compiled at the first start.
            "zero_force_ds_cpu_optimizer": False,
        }

    def get_ds_eval_config(
        self,
        offload: bool = False,
        *,
        zero_stage: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the configuration of a model that only runs forward: stage 3 at ZeRO-3 or with ``offload``, else 0.

        None means the strategy's value. An EMA needs float32.
        """
        if zero_stage is None:
            zero_stage = self.zero_stage
        sharded = offload or zero_stage == 3
        config = self._config(dtype or self.dtype, sharded=sharded, offload=offload)
        config["zero_optimization"]["stage"] = 3 if sharded else 0
        if sharded:
            # The EMA is written into the shards; a parameter that is kept unsharded would miss the change.
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    def _config(self, dtype: torch.dtype, *, sharded: bool, offload: bool) -> dict[str, Any]:
        zero_config: dict[str, Any] = {}
        if sharded and offload:
            zero_config["offload_param"] = {"device": "cpu", "pin_memory": on_cuda()}
        if sharded and not on_cuda():
            zero_config["stage3_prefetch_bucket_size"] = SMALL_BUCKET_ELEMENTS
        return {
            "train_micro_batch_size_per_gpu": self.micro_train_batch_size,
            "gradient_accumulation_steps": 1,
            "steps_per_print": None,
            # DeepSpeed's timer waits for the GPU at each pass, also of a decoding step
            "timers": {"throughput": {"enabled": False}},
            "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
            "fp16": {
                "enabled": dtype == torch.float16,
                "initial_scale_power": LOSS_SCALE_POWER,
                # the first overflow halves the scale: a second one would cost a step
                "hysteresis": 1,
                "loss_scale_window": 1 << 62,  # see _double_when_due
            },
            "zero_optimization": zero_config,
        }

    # -- steps ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, model: Any, optim: Any = None) -> None:
        """Add a loss's gradient, averaged over ranks, to the step. Collective from ZeRO-2 on. ``optim`` is unused."""
        engine = get_engine(model, "backward")
        if (weight := self.loss_weights.get(engine)) is not None:
            loss = loss * weight
        if self.sequence_group is not None and self.sequence_group.is_active:
            # Each rank has the gradient through its piece, and the mean over ranks would be of pieces.
            loss = loss * self.sequence_group.size
        self._losses[engine] = self._losses.get(engine, 0.0) + loss.detach().double()
        engine.backward(loss)
        heartbeat.beat()

    def accumulate(self, model: Any, micro_batches: int) -> None:
        """Take the step only at every ``micro_batches``-th call of :meth:`optimizer_step` from now on."""
        if (engine := find_engine(model)) is not None:
            self._accumulation[engine] = [0, micro_batches]

    def completes_step(self, model: Any) -> bool:
        """Tell whether the next call of :meth:`optimizer_step` takes the step."""
        engine = get_engine(model, "completes_step")
        calls_done, calls_needed = self._accumulation.get(engine, (0, 1))
        return calls_done + 1 >= calls_needed

    def optimizer_step(
        self, optim: Any, model: Any, scheduler: LRScheduler | None = None, name: str = "model"
    ) -> StepOutcome | None:
        """Clip, take one optimizer step with the gradient from ``backward``, then move the scheduler. Collective.

        If a gradient or a loss is not finite on any rank, all ranks skip the step and drop the gradient. Returns None
        before the last micro batch of a step (:meth:`accumulate`). ``scheduler`` moves in addition to the one given to
        ``prepare``. An overflow of fp16 also halves the loss scale.
        """
        engine = get_engine(model, "optimizer_step")
        if (accumulation := self._accumulation.get(engine)) is not None:
            accumulation[0] = (accumulation[0] + 1) % accumulation[1]
            if accumulation[0]:
                return None
        # A loss of NaN may have a finite gradient: that of a clamp is 0.
        loss = self.all_reduce(self._losses.pop(engine, torch.zeros(())), "sum")
        scaler = None
        if engine.fp16_enabled():
            scaler = engine.optimizer.loss_scaler
            previous_scale = scaler.cur_scale
        skipped = True
        grad_norm = math.inf
        overflow = False
        if math.isfinite(loss):
            engine.step()  # moves the engine's own scheduler
            skipped = not engine.was_step_applied()
            if not skipped:
                grad_norm = float(engine.get_global_grad_norm())
            if scaler is not None:
                overflow = skipped and scaler.cur_scale < previous_scale
                _double_when_due(scaler)
        drop_gradients(engine)
        if not skipped:
            if scheduler is not None and scheduler is not engine.lr_scheduler:
                scheduler.step()
        elif self.is_rank_0() and overflow:
            text = "a step of %s is skipped: overflow at the loss scale %g, which is halved"
            logger.info(text, name, previous_scale)
        elif self.is_rank_0():
            logger.warning("a step of %s is skipped: gradient or loss not finite", name)
        return StepOutcome(grad_norm, skipped, overflow, scaler and scaler.cur_scale)

    def skip_step(self, model: Any, name: str = "model") -> None:
        """Drop the gradient since the last step. Collective: all ranks must decide alike."""
        engine = get_engine(model, "skip_step")
        self._losses.pop(engine, None)
        if not zero3.has_optimizer(engine):
            raise ValueError(
                f"skip_step: {name} was prepared without an optimizer, so it has no gradient"
            )
        drop_gradients(engine)
        if engine in self._accumulation:
            self._accumulation[engine][0] = 0
        if self.is_rank_0():
            logger.info("a step of %s is not taken: its gradient is thrown away", name)

    def set_max_norm(self, model: Any, max_norm: float) -> None:
        """Set the largest L2 norm of a model's gradient from the next step on; 0 does not clip."""
        if not max_norm >= 0:
            raise ValueError(f"--max_norm must be >= 0 (0 does not clip), got {max_norm}")
        engine = get_engine(model, "set_max_norm")
        if (clips := self._clips.get(engine)) is not None:
            clips.max_norm = max_norm
        else:
            engine.optimizer.clip_grad = max_norm

    def moving_average(
        self,
        model: Any,
        ema_model: Any,
        beta: float = 0.992,
        device: torch.device | str | None = None,
    ) -> None:
        """Set ema ← beta · ema + (1 − beta) · model; beta 0 copies. See ``average_into``.

        Does nothing between an optimizer step's micro batches. Collective if a sharded model goes into a whole average.
        Where engines run on the CPU, so does this, also for ``device="cuda"``.
        """
        if device is not None and torch.device(device).type == "cuda" and not on_cuda():
            device = None
        engine = find_engine(model)
        if engine is None or not self._accumulation.get(engine, (0,))[0]:
            average_into(model, ema_model, beta, device)

    report_memory = report_memory

    # -- files ---------------------------------------------------------------------------------------------------

    save_ckpt = checkpoint.save_checkpoint
    load_ckpt = checkpoint.load_checkpoint
    has_finite_weights = staticmethod(checkpoint.has_finite_weights)
    save_model = export.save_model
    load_model = checkpoint.load_model


@torch.no_grad()
def share_groups_of_hpz() -> None:
    """Let a second model have ``--zpg``, too: DeepSpeed 0.19 makes its groups while the first one loads, and only once."""
    groups = import_deepspeed().utils.groups
    create = groups._create_zero_param_parallel_group

    def create_or_keep(size: int) -> None:
        group = groups._get_zero_param_intra_parallel_group()
        if group is None or dist.get_world_size(group) != size:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
            create(size)

    if create.__module__ == groups.__name__:
        groups._create_zero_param_parallel_group = create_or_keep


def average_into(
    model: Any, ema_model: Any, beta: float, device: torch.device | str | None = None
) -> None:
    """Set ema ← beta · ema + (1 − beta) · model, parameter by parameter, on ``device``; beta 0 copies.

    Only a sharded model averaged into a whole one is gathered, one parameter at a time. The weights are the forward's:
    under bf16 not the optimizer's fp32 masters. Keep the average in fp32: at beta near 1 the steps vanish in bf16.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"ema beta must lie in [0, 1], got {beta}")
    import deepspeed

    source = unwrap_model(model)
    target = unwrap_model(ema_model)
    source_parameters = dict(source.named_parameters())
    target_parameters: dict[str, Any] = dict(target.named_parameters())
    shapes = [
        {name: full_shape(p) for name, p in parameters.items()}
        for parameters in (source_parameters, target_parameters)
    ]
    if mismatched_names := sorted(
        name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)
    ):
        raise ValueError(
            f"the model and its EMA differ in {len(mismatched_names)} parameters, first {mismatched_names[0]!r}"
        )
    gathers = zero_stage_of(find_engine(model)) == 3 and not any(
        map(is_sharded, target_parameters.values())
    )
    for name, ema_parameter in target_parameters.items():
        parameter = source_parameters[name]
        if gathers:
            with deepspeed.zero.GatheredParameters([parameter]):
                new_values = parameter.detach().clone()
        else:
            new_values = _matching_part(parameter, ema_parameter)
        old_values = ema_parameter.ds_tensor if is_sharded(ema_parameter) else ema_parameter.data
        if beta != 0.0:  # at 0 the old values do not count, even if they are not finite
            average_device = device or old_values.device
            dtype = torch.promote_types(old_values.dtype, new_values.dtype)
            new_values = torch.lerp(
                old_values.to(average_device, dtype),
                new_values.to(average_device, dtype),
                1.0 - beta,
            )
        old_values.copy_(new_values)
        forget_secondary_shard(ema_parameter)
    saved_names = target.state_dict(keep_vars=True).keys()
    buffers = dict(source.named_buffers())
    for name, ema_buffer in target.named_buffers():
        if name in saved_names:  # the others are derived, some in every forward
            ema_buffer.copy_(buffers[name])


def _matching_part(parameter: Any, ema_parameter: Any) -> torch.Tensor:
    """Return the elements of ``parameter`` that belong to this rank's part of ``ema_parameter``."""
    if is_sharded(parameter) == is_sharded(ema_parameter):
        if not is_sharded(parameter):
            return parameter.data
        if parameter.ds_tensor.numel() != ema_parameter.ds_tensor.numel():
            raise ValueError(
                "the model and its EMA are sharded over different numbers of ranks; set the same --zpg"
            )
        return parameter.ds_tensor
    return shard_of(ema_parameter, parameter.data.flatten())


# -- the optimizer of a model that trains, and its learning rate over the run ------------------------------------------


def with_optimizer(
    model: Any,
    learning_rate: float,
    steps: int,
    config: OptionSet,
    strategy: DeepspeedStrategy,
) -> tuple[Any, Any, Any]:
    """Return (model, optimizer, scheduler) for ``strategy.prepare``; three times ``None`` without a model."""
    if model is None:
        return None, None, None
    training = config.training
    optimizer = strategy.create_optimizer(
        model,
        lr=learning_rate,
        betas=training.adam_betas,
        weight_decay=training.l2,
    )
    warmup = training.lr_warmup_steps
    if warmup is None:
        warmup = math.ceil(steps * training.lr_warmup_ratio)
    rate_share = partial(
        share_of_peak_rate,
        kind=training.lr_scheduler,
        steps=steps,
        warmup=warmup,
        least=training.min_lr_ratio,
    )
    return model, optimizer, LambdaLR(optimizer, rate_share)


def share_of_peak_rate(step: int, kind: str, steps: int, warmup: int, least: float) -> float:
    """Return the learning rate of an optimizer step, counted from 0, as a share of the highest one.

    The warm-up is ``(step + 1) / (warmup + 1)``, so that its first step trains too; behind it the rates are those of
    ``transformers.get_scheduler``, and behind the last step the last one's.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return max(0, steps - step) / max(1, steps - warmup)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    if kind == "cosine":
        return cosine
    return cosine * (1 - least) + least
