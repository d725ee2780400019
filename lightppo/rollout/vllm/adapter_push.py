"""Whether adapters travel to vLLM alone (``--vllm_lora_push``), and what an engine needs for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightppo.callbacks import Callback
from lightppo.errors import ConfigError

SLOTS = 2
"""Adapters of an engine at a time: the newest, and one that requests may still use."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's slots
# with adapters it runs all experts by Triton, also in models whose adapters are elsewhere
NO_EXPERTS = "vLLM takes no adapters for a mixture of experts without a GPU"


def chosen(asked: str, obstacle: str | None, strategy: Any, remedy: str = "") -> bool:
    """Whether adapters travel alone; rank 0 says what vLLM gets. A ConfigError where that was asked and cannot be.

    ``remedy`` says what would take the obstacle away, if anything would.
    """
    if asked == "adapter" and obstacle:
        remedies = [*([remedy] if remedy else []), "set --vllm_lora_push merged"]
        raise ConfigError(f"--vllm_lora_push adapter: {obstacle}; {', or '.join(remedies)}")
    why = f"{obstacle}; {remedy}" if remedy else obstacle
    strategy.print(
        f"LoRA: vLLM gets all weights after every step, with the adapter merged: {why}"
        if obstacle
        else "LoRA: vLLM gets the adapter alone after every step"
    )
    return not obstacle


def lora_arguments(config: Any) -> dict[str, Any] | str:
    """Arguments of ``vllm.LLM`` for adapters of a peft config; or why there are none."""
    rank = slot_rank(config.r)
    if rank is None:
        return f"vLLM takes no adapters of rank {config.r}"
    # By the ends of their names, because vLLM's names of the same layers may begin in another way.
    ends = sorted({name.rpartition(".")[2] for name in config.target_modules})
    return {
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_lora_rank": rank,
        "lora_target_modules": ends,
    }


def slot_rank(rank: int) -> int | None:
    """The smallest rank of vLLM's slots that holds this one; None: there is none."""
    return min((size for size in _RANKS if size >= rank), default=None)


def model_obstacle(described: Any) -> str | None:
    """Why vLLM's class of a model takes no adapters; ``described`` is vLLM's ``ModelConfig``."""
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and described.is_moe:
        return NO_EXPERTS
    kind, _ = ModelRegistry.resolve_model_cls(described.architectures, described)
    return None if supports_lora(kind) else f"vLLM has no adapters for {kind.__name__}"


class PushedBytes(Callback):
    """``perf/sync_megabytes``."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"perf/sync_megabytes": run.rollout_engine.last_stats["sync_bytes"] / 1e6}


def pushed_bytes(run: Any) -> PushedBytes | None:
    """The callback of runs whose engine counts what it sends."""
    engine = getattr(run, "rollout_engine", None)  # training on data has none
    counts = "sync_bytes" in getattr(engine, "last_stats", {})
    return PushedBytes() if counts else None
