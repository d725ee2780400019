"""ZeRO configuration dictionaries as pure functions of plain arguments.

Every field is a value, never "auto": nothing in DeepSpeed or transformers changes it later.
"""

from __future__ import annotations

from typing import Any

ZERO_STAGES = (0, 1, 2, 3)
_GRAD_ACCUM_DTYPES = ("fp32", "bf16")
# Small on CPU, where a bucket is a copy in main memory. On GPU DeepSpeed's own sizes stand.
_CPU_BUCKET_ELEMENTS = 1_000_000


def train_config(
    *,
    zero_stage: int,
    bf16: bool = False,
    max_norm: float = 1.0,
    micro_batch_size: int = 1,
    adam_offload: bool = False,
    param_offload: bool = False,
    zpg: int = 1,
    grad_accum_dtype: str | None = None,
    overlap_comm: bool = False,
    on_cpu: bool = False,
    persistence_threshold: int | None = None,
) -> dict[str, Any]:
    """Configuration of an engine that trains.

    Any number of ``backward`` calls make one step (``managed_gradient_accumulation: false``): the caller scales the
    loss, and DeepSpeed averages gradients over ranks.

    Args:
        zero_stage: 0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 parameters too.
        bf16: bf16 parameters with fp32 master weights; False is fp32 throughout.
        max_norm: largest L2 norm of the gradient over all parameters; 0 does not clip.
        micro_batch_size: samples per rank and forward; DeepSpeed only keeps count of samples with it.
        adam_offload: optimizer states and step on the CPU (stages 1 to 3).
        param_offload: parameters on the CPU until a layer needs them (stage 3).
        zpg: ranks over which stage 3 keeps its secondary parameter shards (ZeRO++ hpZ); 1 has none.
        grad_accum_dtype: "fp32" or "bf16", in which gradients add up over micro batches; None is fp32.
        overlap_comm: reduces gradients while the backward pass still runs (stages 2 and 3).
        on_cpu: the engine runs on CPU: small buckets, no pinned memory.
        persistence_threshold: stage 3 leaves parameters of at most so many elements unsharded; None is DeepSpeed's.

    Raises:
        ValueError: a value out of range, or two options that exclude each other; the message names the flags.
    """
    _check_stage(zero_stage)
    if max_norm < 0:
        raise ValueError(f"--max_norm must be >= 0 (0 does not clip), got {max_norm}")
    if adam_offload and zero_stage == 0:
        raise ValueError("--adam_offload needs sharded optimizer states: set --zero_stage 1, 2 or 3")
    if param_offload and zero_stage != 3:
        raise ValueError(f"--param_offload needs --zero_stage 3, got {zero_stage}")
    if zpg != 1 and zero_stage != 3:
        raise ValueError(f"--zpg {zpg} needs --zero_stage 3, got {zero_stage}")
    if overlap_comm and zero_stage < 2:
        raise ValueError(f"--overlap_comm needs --zero_stage 2 or 3, got {zero_stage}")
    if bf16 and zero_stage == 0:
        raise ValueError("--bf16 training needs fp32 master weights, which ZeRO keeps from stage 1: set --zero_stage 1")
    if grad_accum_dtype is not None and grad_accum_dtype not in _GRAD_ACCUM_DTYPES:
        raise ValueError(f"--grad_accum_dtype must be one of {', '.join(_GRAD_ACCUM_DTYPES)}, got {grad_accum_dtype!r}")
    if grad_accum_dtype == "bf16" and not bf16:
        raise ValueError("--grad_accum_dtype bf16 needs --bf16")

    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": overlap_comm}
    if on_cpu:
        zero |= {"reduce_bucket_size": _CPU_BUCKET_ELEMENTS, "allgather_bucket_size": _CPU_BUCKET_ELEMENTS}
    if adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not on_cpu}
    if zero_stage == 3:
        zero |= _stage3_fields(param_offload, on_cpu, persistence_threshold)
        if zpg != 1:
            zero["zero_hpz_partition_size"] = zpg
    return {
        **_common_fields(micro_batch_size, bf16),
        "managed_gradient_accumulation": False,
        # At stage 0 the strategy clips in a hook of the optimizer: the engine there does not report the norm.
        "gradient_clipping": 0.0 if zero_stage == 0 else max_norm,
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": grad_accum_dtype or "fp32"},
        # torch's AdamW also does the offloaded step: DeepSpeed's own is compiled at the first start.
        "zero_force_ds_cpu_optimizer": False,
    }


def eval_config(
    *,
    zero_stage: int,
    bf16: bool = False,
    offload: bool = False,
    micro_batch_size: int = 1,
    on_cpu: bool = False,
) -> dict[str, Any]:
    """Configuration of an engine without optimizer: reference, reward model, EMA.

    Without an optimizer there is nothing but parameters to shard, so stages 1 and 2 are stage 0.

    Args:
        zero_stage: 3 shards the parameters; 0, 1 and 2 replicate them.
        bf16: parameters in bf16, else fp32.
        offload: parameters live on the CPU and visit the device layer by layer; this is stage 3 at any ``zero_stage``.
        micro_batch_size: samples per rank and forward.
        on_cpu: the engine runs on CPU.

    Raises:
        ValueError: zero_stage is not 0, 1, 2 or 3.
    """
    _check_stage(zero_stage)
    zero: dict[str, Any] = {"stage": 0}
    if zero_stage == 3 or offload:
        # Threshold 0: the EMA is written into the shards, and a parameter kept unsharded would not notice.
        zero = {"stage": 3, **_stage3_fields(offload, on_cpu, persistence_threshold=0)}
    return {**_common_fields(micro_batch_size, bf16), "zero_optimization": zero}


def _common_fields(micro_batch_size: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
    }


def _stage3_fields(param_offload: bool, on_cpu: bool, persistence_threshold: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if param_offload:
        fields["offload_param"] = {"device": "cpu", "pin_memory": not on_cpu}
    if persistence_threshold is not None:
        fields["stage3_param_persistence_threshold"] = persistence_threshold
    if on_cpu:
        fields["stage3_prefetch_bucket_size"] = _CPU_BUCKET_ELEMENTS
    return fields


def _check_stage(zero_stage: int) -> None:
    if zero_stage not in ZERO_STAGES:
        raise ValueError(f"--zero_stage must be one of 0, 1, 2, 3, got {zero_stage!r}")
