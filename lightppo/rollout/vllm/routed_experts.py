"""``--router_replay rollout`` inside vLLM's workers: the experts of each token, kept beside its keys and values.

vLLM 0.32 returns them from its second model runner alone, which cannot be given our sampler. So the choices of all layers
are written where the token's keys and values are, by the same slots: tokens of a cached prefix have theirs already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

_ATTRIBUTE = "lightppo_experts"  # of a model runner


class RoutedExperts:
    """The experts that tokens in the KV cache of a worker went to, for the routers of ``layers``.

    Raises:
        RuntimeError: this vLLM, or this model in it, does not say what its routers choose.
    """

    def __init__(self, runner: Any, layers: Sequence[int], top_k: int, dtype: torch.dtype) -> None:
        self._runner = runner
        self._group, spec, self._layer_name = _attending_group(runner.kv_cache_config)
        self._block_size = spec.block_size
        slots = runner.kv_cache_config.num_blocks * self._block_size
        # The last slot takes what belongs to no token, slot -1.
        shape = (slots + 1, len(layers), top_k)
        unknown = torch.iinfo(dtype).max
        self._store = torch.full(shape, unknown, dtype=dtype, device=runner.device)
        self._unknown = unknown
        self.records = True
        self._finished: dict[str, Tensor] = {}  # request → (at least its tokens, L, k)
        self._taken: set[str] = set()  # requests that vLLM has not removed yet
        numbers = {layer: number for number, layer in enumerate(layers)}
        bound = set()
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner) and module.layer_id in numbers:
                if module._quant_method.is_monolithic or not isinstance(module.router, BaseRouter):
                    raise RuntimeError(
                        f"{type(module.router).__name__} does not say what it chooses"
                    )
                module.router.set_capture_fn(partial(self._write, numbers[module.layer_id]))
                bound.add(module.layer_id)
        if bound != numbers.keys():
            missing = sorted(numbers.keys() - bound)
            raise RuntimeError(f"no router was found in layers {missing}")
        runner.execute_model = partial(self._execute, runner.execute_model)

    def _write(self, number: int, chosen: Tensor) -> None:
        """Write what a router chose for the tokens of the present step (T, k)."""
        slot_mapping = get_forward_context().slot_mapping
        if not slot_mapping:  # a trial run
            return
        slots = slot_mapping[self._layer_name]
        tokens = min(len(slots), len(chosen))
        self._store[slots[:tokens].long(), number] = chosen[:tokens].to(self._store.dtype)

    def _execute(
        self, execute_model: Callable[..., Any], step: Any, *more: Any, **options: Any
    ) -> Any:
        """Copy the experts of requests that have ended before a step writes over them."""
        for name in step.finished_req_ids:
            request = self._runner.requests.get(name)
            if self.records and name not in self._taken and request is not None:
                self._finished[name] = self._of_request(request)
            self._taken.discard(name)
        return execute_model(step, *more, **options)

    def _of_request(self, request: Any) -> Tensor:
        blocks = torch.tensor(request.block_ids[self._group], device=self._store.device)
        slots = blocks[:, None] * self._block_size + torch.arange(
            self._block_size, device=self._store.device
        )
        return self._store[slots.flatten()]

    def take(self, name: str, tokens: int) -> Tensor:
        """Return the experts of a request's first tokens (T, L, k), on the CPU, and forget it."""
        if (key := _key_of(name, self._runner.requests)) is not None:
            experts = self._of_request(self._runner.requests[key])
            self._taken.add(key)
        elif (key := _key_of(name, self._finished)) is not None:
            experts = self._finished.pop(key)
        else:
            raise RuntimeError(f"vLLM has forgotten which experts request {name} went to")
        experts = experts[:tokens].cpu()
        if len(experts) != tokens or (experts == self._unknown).any():
            raise RuntimeError(f"vLLM did not record the experts of all tokens of request {name}")
        return experts

    def forget(self) -> None:
        """Forget requests that nobody has asked for: they were given up."""
        self._finished.clear()


def _attending_group(kv_cache_config: Any) -> tuple[int, Any, str]:
    """Return number, spec and a layer of the cache whose blocks hold all tokens of a request."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if isinstance(spec, FullAttentionSpec) and getattr(spec, "sliding_window", None) is None:
            return number, spec, group.layer_names[0]
    raise RuntimeError("no layer attends to all tokens")


def _key_of(name: str, requests: Any) -> str | None:
    """Return vLLM's name of a request, of the last try: it puts a word before ours, and a random one behind."""
    return next(
        (
            key
            for key in reversed(list(requests))
            if name in (key, key.rpartition("-")[0].removeprefix(_PREFIX))
        ),
        None,
    )


_PREFIX = "generate-tokens-"  # of the route for token ids


def record_experts(worker: Any, layers: Sequence[int], top_k: int, dtype_name: str) -> None:
    """Have a worker record experts from now on."""
    runner = worker.model_runner
    if getattr(runner, _ATTRIBUTE, None) is None:
        dtype = getattr(torch, dtype_name)
        setattr(runner, _ATTRIBUTE, RoutedExperts(runner, layers, top_k, dtype))
    getattr(runner, _ATTRIBUTE).records = True
    getattr(runner, _ATTRIBUTE).forget()


def stop_recording(worker: Any) -> None:
    """Keep no experts for a trainer that does not ask for them."""
    if (routed_experts := getattr(worker.model_runner, _ATTRIBUTE, None)) is not None:
        routed_experts.records = False
        routed_experts.forget()


def take_experts(worker: Any, name: str, tokens: int) -> Tensor:
    """Return :meth:`RoutedExperts.take` of a worker."""
    return getattr(worker.model_runner, _ATTRIBUTE).take(name, tokens)
