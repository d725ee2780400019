"""``--router_replay``: which experts each token went to is recorded in one forward pass, and used again in another.

A router of any family ends in one choice, ``topk`` of a row of scores over all experts. Here that choice is taken over:
the family's own code runs on, so that weights are normalised as it does, with gradients to the replayed experts' scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lightppo.errors import ConfigError
from lightppo.models.batches import decoder_layers

_TOPK = (torch.topk, Tensor.topk)


def unknown(dtype: torch.dtype) -> int:
    """Return what stands where no choice is known, in tensors of choices of this type: the router chooses there."""
    return torch.iinfo(dtype).max


@dataclass(eq=False)
class ReplayPass:
    """One forward pass over T tokens whose choices are recorded, or replaced by ``choices``."""

    choices: Tensor | None = None  # (T, L, k) small integers, for the L routers of a model
    places: Tensor | None = None  # (U,), where the last layer may run alone
    recorded: dict[int, Tensor] = field(default_factory=dict)  # router → (T or U, k)
    # router → (T or U,) bool: the router would have chosen other experts
    replaced: dict[int, Tensor] = field(default_factory=dict)
    repeats: bool = False  # layers run again, in the backward pass


class RouterReplay:
    """The routers of a model, which use choices of a :class:`ReplayPass` while one is :meth:`entered`.

    Raises:
        ConfigError: the model has no experts, or its routers are not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers = find_routers(model)
        self.layers = list(routers)  # numbers of their layers
        self.top_k, self.experts = _size(next(iter(routers.values())))
        # the largest value says that no choice is known
        self.dtype = torch.uint8 if self.experts < 256 else torch.int16
        self.current: ReplayPass | None = None
        for number, router in enumerate(routers.values()):
            # on the instance, so that hooks around the call stay (ZeRO-3)
            router.forward = partial(self._route, number, router, router.forward)
        for module in model.modules():
            if checkpointing := vars(module).get("_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(self._checkpoint, checkpointing)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (L, k) of a token's choices."""
        return len(self.layers), self.top_k

    def blank(self, *shape: int, device: torch.device | str = "cpu") -> Tensor:
        """Return choices (*shape, L, k) of which none is known."""
        shape = (*shape, *self.shape)
        return torch.full(shape, unknown(self.dtype), dtype=self.dtype, device=device)

    @contextmanager
    def entered(self, replay_pass: ReplayPass) -> Iterator[ReplayPass]:
        """Have the routers record or replay."""
        previous = self.current
        self.current = replay_pass
        try:
            yield replay_pass
        finally:
            self.current = previous

    def recorded(self, replay_pass: ReplayPass, tokens: int) -> Tensor:
        """Return the choices of a pass over so many tokens, (T, L, k); unknown where the last layer did not run."""
        device = next(iter(replay_pass.recorded.values())).device
        choices = self.blank(tokens, device=device)
        for number, chosen in replay_pass.recorded.items():
            if len(chosen) == tokens:
                choices[:, number] = chosen
            else:
                choices[replay_pass.places, number] = chosen
        return choices

    def replaced(self, replay_pass: ReplayPass) -> Tensor:
        """Return the share of its routers that would have chosen other experts for each token, (T,)."""
        shares = torch.zeros(len(replay_pass.choices), device=replay_pass.choices.device)
        for differs in replay_pass.replaced.values():
            if len(differs) == len(shares):
                shares += differs
            else:
                shares.index_add_(0, replay_pass.places, differs.to(shares.dtype))
        return shares / len(self.layers)

    def _route(
        self,
        number: int,
        router: nn.Module,
        forward: Callable[..., Any],
        *inputs: Any,
        **options: Any,
    ) -> Any:
        """Run a router, with its choice taken over by the present pass."""
        if self.current is None:
            return forward(*inputs, **options)
        with _Choice(self, number, router) as choice:
            output = forward(*inputs, **options)
        if choice.made != 1:
            raise RuntimeError(
                f"--router_replay: {type(router).__name__} chose experts {choice.made} times in a pass: leave it out"
            )
        return output

    def _checkpoint(self, checkpointing: Callable[..., Any], layer: Any, *inputs: Any) -> Any:
        """Have a layer that runs again in the backward pass choose as in the pass that it is of."""
        if (replay_pass := self.current) is None:
            return checkpointing(layer, *inputs)

        def run(*inputs: Any) -> Any:
            nonlocal replay_pass
            with self.entered(replay_pass):
                replay_pass = ReplayPass(replay_pass.choices, replay_pass.places, repeats=True)
                return layer(*inputs)

        return checkpointing(run, *inputs)


class _Choice(TorchFunctionMode):
    """Take over the one ``topk`` of a router that chooses k of all its experts."""

    def __init__(self, replay: RouterReplay, number: int, router: nn.Module) -> None:
        super().__init__()
        self.replay = replay
        self.replay_pass = replay.current
        self.number = number
        self.experts = router.num_experts
        self.made = 0

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if function not in _TOPK:
            return result
        scores = arguments[0] if arguments else options["input"]
        if scores.dim() != 2 or scores.shape[-1] != self.experts:
            return result  # groups of experts are chosen first (DeepSeek-V3)
        self.made += 1
        return self._taken_over(scores, result)

    def _taken_over(self, scores: Tensor, result: Any) -> Any:
        """Return ``topk``'s result for the pass's choices (T, k); as computed where they are the same experts."""
        replay_pass = self.replay_pass
        computed = result.indices
        if replay_pass.choices is None:
            if not replay_pass.repeats:
                replay_pass.recorded[self.number] = computed.to(self.replay.dtype)
            return result
        choices = replay_pass.choices[:, self.number]
        if len(choices) != len(computed):
            if replay_pass.places is None or len(replay_pass.places) != len(computed):
                raise RuntimeError(
                    f"--router_replay: a router has {len(computed)} tokens for {len(choices)} choices: leave it out"
                )
            choices = choices[replay_pass.places]
        is_known = choices[:, :1] != unknown(choices.dtype)
        chosen = choices.long()
        # the order of the same experts decides on rounding
        is_same = (chosen.sort().values == computed.sort().values).all(-1, keepdim=True)
        is_replaced = is_known & ~is_same
        if not replay_pass.repeats:
            replay_pass.replaced[self.number] = is_replaced[:, 0]
        indices = torch.where(is_replaced, chosen, computed)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


# -- finding routers ---------------------------------------------------------------------------------------------------


def find_routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the routers of a model by the numbers of their layers. ConfigError: none, or none that are known."""
    text_config = model.config.get_text_config(decoder=True)
    kind = f"model type {text_config.model_type!r}"
    routers: dict[int, nn.Module] = {}
    for number, layer in enumerate(decoder_layers(model)):
        in_layer = [module for module in layer.modules() if _chooses(type(module))]
        if len(in_layer) > 1:
            raise ConfigError(
                f"--router_replay: {kind} has several routers in a layer: leave it out"
            )
        if in_layer:
            routers[number] = in_layer[0]
    if not routers:
        raise ConfigError(
            f"--router_replay: {kind} has no experts, or none that are known: leave it out"
        )
    # its scores are 0 outside of the groups that it chooses itself
    if getattr(text_config, "topk_method", None) == "group_limited_greedy":
        raise ConfigError(f"--router_replay: {kind} chooses groups of experts first: leave it out")
    sizes = {_size(router) for router in routers.values()}
    if len(sizes) > 1 or None in sizes:
        raise ConfigError(
            f"--router_replay: the routers of {kind} are not known, or differ: leave it out"
        )
    return routers


def _size(router: nn.Module) -> tuple[int, int] | None:
    """Return how many experts a router chooses, and of how many; None: it does not say."""
    sizes = getattr(router, "top_k", None), getattr(router, "num_experts", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None


@cache
def _chooses(module_class: type[nn.Module]) -> bool:
    """Tell whether a module's own code chooses by ``topk``."""
    try:
        return "topk(" in inspect.getsource(module_class)
    except (OSError, TypeError):  # its code is not in a file
        return False
