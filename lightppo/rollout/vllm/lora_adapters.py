"""LoRA adapters that travel to vLLM alone (``--vllm_lora_push``): whether they may, on servers, and inside workers.

vLLM's own routes load adapters from any path, and leave them in the workers. Here the trainer pushes the matrices, the
workers hold them, and a server serves the newest adapter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightppo.callbacks import Callback
from lightppo.errors import ConfigError
from lightppo.rollout.vllm.versions import rename_mapper
from lightppo.rollout.vllm.weight_routes import GENERATE, answer, query_of, read_body

if TYPE_CHECKING:
    from torch import Tensor

ADAPTERS = "/lightppo/adapters"

SLOTS = 2
"""Adapters of an engine at a time: the newest, and one that requests may still use."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's slots
_PEFT_PREFIX = "base_model.model."  # before the names in an adapter's file
# with adapters it runs all experts by Triton, also in models whose adapters are elsewhere
NO_EXPERTS = "vLLM takes no adapters for a mixture of experts without a GPU"


def pushes_adapters_alone(
    requested: str, obstacle: str | None, strategy: Any, remedy: str = ""
) -> bool:
    """Return whether adapters travel alone; rank 0 says what vLLM gets. ConfigError where that was requested and cannot be.

    ``remedy`` says what would take the obstacle away, if anything would.
    """
    if requested == "adapter" and obstacle:
        remedies = [*([remedy] if remedy else []), "set --vllm_lora_push merged"]
        raise ConfigError(f"--vllm_lora_push adapter: {obstacle}; {', or '.join(remedies)}")
    reason = f"{obstacle}; {remedy}" if remedy else obstacle
    strategy.print(
        f"LoRA: vLLM gets all weights after every step, with the adapter merged: {reason}"
        if obstacle
        else "LoRA: vLLM gets the adapter alone after every step"
    )
    return not obstacle


def lora_arguments(config: Any) -> dict[str, Any] | str:
    """Return arguments of ``vllm.LLM`` for adapters of a peft config; or why there are none."""
    rank = slot_rank(config.r)
    if rank is None:
        return f"vLLM takes no adapters of rank {config.r}"
    # By the ends of their names, because vLLM's names of the same layers may begin in another way.
    module_ends = sorted({name.rpartition(".")[2] for name in config.target_modules})
    return {
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_lora_rank": rank,
        "lora_target_modules": module_ends,
    }


def slot_rank(rank: int) -> int | None:
    """Return the smallest rank of vLLM's slots that holds this one; None: there is none."""
    return min((size for size in _RANKS if size >= rank), default=None)


def model_obstacle(model_config: Any) -> str | None:
    """Return why vLLM's class of a model takes no adapters; ``model_config`` is vLLM's ``ModelConfig``."""
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and model_config.is_moe:
        return NO_EXPERTS
    model_class, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    if supports_lora(model_class):
        return None
    return f"vLLM has no adapters for {model_class.__name__}"


class PushedBytes(Callback):
    """Log ``perf/sync_megabytes``."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"perf/sync_megabytes": run.rollout_engine.last_stats["sync_bytes"] / 1e6}


# -- on a server -------------------------------------------------------------------------------------------------------


class AdapterRoutes:
    """ASGI middleware with the route ``ADAPTERS``. By ``{"name": NAME}`` an adapter that the workers hold is served, and
    all others end with their last request. The answer has the requests of each, and the problem if there is one.

    A request says whom it uses by its ``model`` and, since it is counted by that, in its query: ``?adapter=NAME``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._under_way: Counter[str] = Counter()  # requests, by adapter
        self._served: dict[str, Any] = {}  # name → vLLM's LoRARequest
        self._newest: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in (GENERATE, ADAPTERS):
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        if scope["path"] == ADAPTERS:
            adapter_name = json.loads(await read_body(receive)).get("name")
            problem = None if adapter_name is None else await self._serve(state, adapter_name)
            served = {adapter_name: self._under_way[adapter_name] for adapter_name in self._served}
            await answer(send, {"problem": problem, "served": served})
            return
        parameters = query_of(scope)
        adapter_name = parameters.get("adapter", [""])[0]
        self._under_way[adapter_name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way[adapter_name] -= 1
            if not self._under_way[adapter_name]:
                del self._under_way[adapter_name]
                await self._remove_unused(state)

    async def _serve(self, state: Any, adapter_name: str) -> str | None:
        """Serve an adapter; return why it cannot be served, or None."""
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        models = state.openai_serving_models
        # Without a path: the workers know the adapter by its name.
        loaded = await models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=adapter_name, lora_path=adapter_name)
        )
        # else vLLM's ErrorResponse, whose module is another one in each release
        if not isinstance(loaded, str):
            return loaded.error.message
        self._served[adapter_name] = models.lora_requests[adapter_name]
        self._newest = adapter_name
        for older_name in self._served:
            if older_name != adapter_name:
                models.lora_requests.pop(older_name, None)  # no new request gets it
        await self._remove_unused(state)
        return None

    async def _remove_unused(self, state: Any) -> None:
        used = {self._newest, *self._under_way}
        unused = [self._served.pop(name) for name in self._served.keys() - used]
        for request in unused:
            await state.engine_client.remove_lora(request.lora_int_id)
            names = [request.lora_name]
            await state.engine_client.collective_rpc("lightppo_forget_adapters", args=(names,))


# -- inside vLLM's workers ---------------------------------------------------------------------------------------------


class AdapterShelf:
    """Hold adapters in CPU memory by name, where vLLM would look for files.

    vLLM may take an adapter out of its slots while a request waits that needs it, and asks for it again.
    """

    def __init__(self, worker: Any) -> None:
        self._loader = worker.model_runner.lora_manager
        self._held: dict[str, Any] = {}  # vLLM's LoRAModel by name
        self._loader._load_adapter = self._again
        _multiply_by_slot(self._loader._adapter_manager.punica_wrapper_mapping.values())

    def hold(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]
    ) -> None:
        """Keep copies of an adapter's matrices; ``config`` is its ``adapter_config.json``.

        Raises:
            ValueError: vLLM does not know such adapters.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        loader = self._loader
        peft_helper = PEFTHelper.from_dict(config)
        peft_helper.validate_legal(loader.lora_config)
        self._held[name] = LoRAModel.from_lora_tensors(
            1,  # the one of the request, later
            {_PEFT_PREFIX + key: tensor.to("cpu", copy=True) for key, tensor in tensors},
            peft_helper,
            device="cpu",
            dtype=loader.lora_config.lora_dtype,
            model_vocab_size=loader.vocab_size,
            weights_mapper=_names_within(loader),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Free adapters that nobody will ask for."""
        for name in names:
            self._held.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of those that are held."""
        return list(self._held)

    def _again(self, request: Any) -> Any:
        """Return the adapter of a request, in place of vLLM's ``_load_adapter``."""
        return self._held[request.lora_name].clone(request.lora_int_id)


def _multiply_by_slot(wrappers: Iterable[Any]) -> None:
    """Have wrappers that multiply on a CPU use each matrix once. vLLM's own copy both for every token."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class ProductsBySlot(PunicaWrapperCPU):
        """Compute B A x, one product for all tokens of an adapter."""

        _rows: list[tuple[int, Tensor | None]] | None = None

        def update_metadata(self, *args: Any, **kwargs: Any) -> None:
            super().update_metadata(*args, **kwargs)
            self._rows = None

        def _rows_of_slots(self) -> list[tuple[int, Tensor | None]]:
            """Return the slots in use, each with the rows of its tokens; None: all rows."""
            if self._rows is None:
                slots = self.token_lora_indices  # (T,), -1: none
                used = slots.unique().tolist()
                self._rows = [
                    (slot, None if len(used) == 1 else (slots == slot).nonzero().squeeze(1))
                    for slot in used
                    if slot >= 0
                ]
            return self._rows

        def add_lora_linear(
            self,
            y: Tensor,
            x: Tensor,
            lora_a_stacked: tuple[Tensor, ...],
            lora_b_stacked: tuple[Tensor, ...],
            scale: float,
            output_slices: tuple[int, ...],
            **kwargs: Any,
        ) -> None:
            """Add to y (T, out), for x (T, in), by matrices (slots, 1, r, in) and (slots, 1, out, r) of fused layers."""
            x = x.view(-1, x.shape[-1])
            y = y.view(-1, y.shape[-1])
            for slot, rows in self._rows_of_slots():
                inputs = (x if rows is None else x[rows]).float()
                output_start = 0
                for matrix_a, matrix_b, output_size in zip(
                    lora_a_stacked, lora_b_stacked, output_slices
                ):
                    low_rank = scale * (inputs @ matrix_a[slot, 0].float().T)  # (T, r)
                    outputs = low_rank.to(y.dtype) @ matrix_b[slot, 0].to(y.dtype).T
                    if rows is None:
                        y[:, output_start : output_start + output_size] += outputs
                    else:
                        y[rows, output_start : output_start + output_size] += outputs
                    output_start += output_size

    for wrapper in wrappers:
        if isinstance(wrapper, PunicaWrapperCPU):
            wrapper.__class__ = ProductsBySlot


def shelf_of(worker: Any) -> AdapterShelf:
    """Return the shelf of a worker, which is made at the first call."""
    if not hasattr(worker, "lightppo_shelf"):
        worker.lightppo_shelf = AdapterShelf(worker)
    return worker.lightppo_shelf


def adapter_obstacle(worker: Any, names: Iterable[str], rank: int) -> str | None:
    """Return why a worker cannot take adapters with matrices of these names and this rank; None: it can."""
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.platforms import current_platform

    config = worker.model_runner.lora_config
    if not config:
        return "vLLM was started without LoRA"
    if rank > config.max_lora_rank:
        return f"vLLM was started for adapters of rank {config.max_lora_rank} at most"
    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    if current_platform.is_cpu() and any(
        isinstance(module, MoERunner) for module in manager.model.modules()
    ):
        return NO_EXPERTS
    within = set(manager.modules)
    for fused, parts in manager.packed_modules.items():
        if fused in within:
            within |= set(parts)
    mapper = _names_within(loader)
    for name in names:
        layer, _ = parse_fine_tuned_lora_name(_PEFT_PREFIX + name, mapper)
        if layer not in within:
            return f"vLLM has no adapters for {layer}"
    return None


def _names_within(loader: Any) -> Any | None:
    """Return the mapper from names in an adapter's file to vLLM's, where they differ."""
    mapper = getattr(loader._adapter_manager.model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return rename_mapper(mapper)


# -- for comparisons ---------------------------------------------------------------------------------------------------


def added_outputs(worker: Any, model: Any, probes: Any) -> dict[str, Tensor]:
    """Return what the newest adapter adds to the outputs of layers for inputs ``probes(width, device)``, by their names."""
    if not worker.model_runner.lora_config:
        return {}
    manager = worker.model_runner.lora_manager._adapter_manager
    numbers = [number or 0 for number in manager.lora_index_to_id]
    if not any(numbers):
        return {}
    slot = numbers.index(max(numbers))
    import torch

    outputs = {}
    for name, layer in model.named_modules():
        matrices_a = getattr(layer, "lora_a_stacked", None)
        matrices_b = getattr(layer, "lora_b_stacked", None)
        if matrices_a is None or matrices_b is None:
            continue
        if isinstance(matrices_a, torch.Tensor):
            matrices_a, matrices_b = (
                (matrices_a,),
                (matrices_b,),
            )  # of the head, or of an embedding, which gets no adapter here
        if matrices_a[0].dim() != 4:
            continue
        # A (slots, 1, r, in), B (slots, 1, out, r): one of each for every layer that is fused.
        fused_outputs = [
            matrix_b[slot, 0].float()
            @ (matrix_a[slot, 0].float() @ probes(matrix_a.shape[-1], matrix_a.device))
            for matrix_a, matrix_b in zip(matrices_a, matrices_b)
        ]
        output_layer = name.replace("logits_processor", "lm_head")
        outputs[output_layer] = torch.cat(fused_outputs)
    return outputs
