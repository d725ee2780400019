"""What differs between the releases of vLLM that work (``lightppo.version.TESTED``). All other files know one vLLM."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from lightppo.errors import ConfigError
from lightppo.version import release_of, too_old


def check_release(option: str) -> None:
    """Raise ConfigError, with what to install, where vLLM is too old. Nothing is imported."""
    if outdated := too_old("vllm"):
        raise ConfigError(f"{option}: {outdated[0]}")


def server_options() -> dict[str, str]:
    """Return options of vLLM's command line that turn on its route for token ids; older ones always have it."""
    return {"--enable-scale-out": ""} if _is_since(0, 30) else {}


def rename_mapper(mapper: Any) -> Any:
    """Return what renames an adapter's matrices, of a model's ``hf_to_vllm_mapper``: without fusing layers."""
    if hasattr(mapper, "get_rename_mapper"):
        return mapper.get_rename_mapper()
    return mapper.get_unstacked_mapper()  # before 0.29


def reset_lora_state(runner: Any) -> None:
    """Have a model runner take its adapters and tables anew after a push, as vLLM's own routes for weights do since 0.28:
    memory that was dropped in a sleep had them too."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
        return
    import torch
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

    runner.lora_manager.remove_all_adapters()
    for module in runner.get_model().modules():
        if isinstance(module, LogitsProcessorWithLoRA):
            table = module.sharded_to_full_mapping_gpu
            if table is not None:
                table.copy_(torch.tensor(module.sharded_to_full_mapping))


def load_below_adapters() -> None:
    """Have layers with adapters take weights under the names of the layers themselves, as they do since vLLM 0.28."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.model_executor.models.utils import AutoWeightsLoader

    def load_weights(layer: Any, weights: Iterable[tuple[str, Any]]) -> Iterable[str]:
        base_layer = layer.base_layer
        load = (
            getattr(base_layer, "load_weights", None) or AutoWeightsLoader(base_layer).load_weights
        )
        return load(weights)

    if not hasattr(BaseLayerWithLoRA, "load_weights"):
        BaseLayerWithLoRA.load_weights = load_weights


def reported_name(name: str) -> str:
    """Return how vLLM before 0.32 names a loaded parameter: without the module that has the experts of a mixture."""
    return name.replace(".routed_experts.", ".")


def pack_tied_heads(model: Any) -> None:
    """Have heads whose weight is the embedding's use the one that has come, after a push. On a CPU they multiply by a
    packed copy, which vLLM before 0.30 makes at their first loading only."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _is_since(0, 30):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def unpacked_convolution(layer: Any) -> Any | None:
    """Return the weights of a convolution as they were before vLLM packed them for a CPU that multiplies bf16 (by AMX, and
    since 0.29 by AVX-512, too); None: they are as they were."""
    return getattr(layer, "_cpu_unpacked_conv_weight", None)


def renew_convolutions(model: Any) -> None:
    """Have Mamba's layers convolve by the weights that have come, after a push. They hold what was there before the
    packing, and a push reaches only what is packed."""
    for module in model.modules():
        weights = unpacked_convolution(getattr(module, "conv1d", None))
        if weights is not None and hasattr(module, "conv_weights"):
            module.conv_weights.copy_(weights)


def nccl_communicator(unique_id: bytes, rank: int, size: int, device: Any) -> Any:
    """Return vLLM's NCCL communicator of the members that have this id."""
    from vllm.distributed.weight_transfer import nccl_common

    if hasattr(nccl_common, "uid_init_process_group"):
        return nccl_common.uid_init_process_group(unique_id, rank, size, device)
    # before 0.30 its communicators ask a group for the id
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    class WithTheId(StatelessProcessGroup):
        def broadcast_obj(self, own_id: Any, src: int) -> Any:
            ctypes.memmove(own_id.internal, unique_id, len(unique_id))
            return own_id

    return PyNcclCommunicator(WithTheId(rank, size, store=None), device=device)


def _is_since(*release: int) -> bool:
    """Tell whether the installed vLLM is of this release or later; one without a version is taken for the newest."""
    installed = release_of("vllm")
    return installed is None or installed >= release
