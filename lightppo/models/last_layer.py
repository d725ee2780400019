"""The last layer of a decoder, run only at the positions that are read: nothing behind it looks at the others.

Keys and values are needed of all tokens of a packed row, and nothing else of the last layer is: queries, the
attention's output and the MLP are made at the read positions alone. The other positions hold values without meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.acceleration import decoder_layers

_QUERY, _OUTPUT = {"q_proj"}, {"o_proj", "out_proj", "dense", "c_proj"}  # an attention's layers, as families name them
_ATTENTION = ("self_attn", "attention", "attn")


def position_wise(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of the last layer that take one position at a time and give nothing to others.

    Returns:
        Queries and output of its attention, and what stands beside the attention (MLP or experts); none where the
        layer is not built of such parts, or is compiled.
    """
    try:
        layer = decoder_layers(model)[-1]
    except ModelLoadError:
        return []
    attention = next((getattr(layer, name) for name in _ATTENTION if hasattr(layer, name)), None)
    if attention is None or layer._compiled_call_impl is not None:
        return []
    inside = [child for name, child in attention.named_children() if name in _QUERY | _OUTPUT]
    beside = [child for child in layer.children() if child is not attention and _is_worth_it(child)]
    return inside + beside


@contextmanager
def only_at(modules: list[nn.Module], places: Tensor) -> Iterator[None]:
    """Meanwhile the modules run at some positions of a packed row and give zeros at the others.

    Args:
        modules: of :func:`position_wise`.
        places: (K,) positions, in any order; some may come several times.
    """
    places = places.unique()
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = partial(_at_places, module.forward, places)  # hooks around the call stay (ZeRO-3, adapters)
    try:
        yield
    finally:
        for module, forward in zip(modules, before):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@torch.no_grad()
def reads_alike(
    model: PreTrainedModel, modules: list[nn.Module], run: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> bool:
    """Whether the model says the same at some positions when its last layer runs at these alone.

    Args:
        model: for its vocabulary.
        modules: of :func:`position_wise`.
        run: (input_ids (1, T), position_ids (1, T)) -> outputs (1, T, ·). Every rank of a sharded model runs it at the
            same moment.
        device: where the inputs go.
    """
    positions = torch.arange(9, device=device).unsqueeze(0)
    ids = (7 * positions + 3) % model.config.get_text_config().vocab_size
    places = torch.tensor([2, 5, 8], device=device)
    was_training = model.training
    model.eval()
    try:
        whole = run(ids, positions)[:, places].float()
        with only_at(modules, places):
            part = run(ids, positions)[:, places].float()
    finally:
        model.train(was_training)
    tolerance = 3e-3 if model.dtype == torch.float32 else 1e-1  # rounding, as for packed rows
    return bool((part - whole).abs().mean() <= tolerance * whole.abs().mean())


def _is_worth_it(module: nn.Module) -> bool:
    """Norms and activations cost less than moving their rows."""
    return any(parameter.dim() > 1 for parameter in module.parameters()) or any(
        hasattr(parameter, "ds_id") and len(parameter.ds_shape) > 1 for parameter in module.parameters()
    )


def _at_places(forward: Callable[..., Any], places: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``hidden`` (1, T, H), or (T, H) as some families flatten it. A module that is given more runs as ever."""
    if args or kwargs:
        return forward(hidden, *args, **kwargs)
    shape = hidden.shape[:-1]
    rows = _Rows.apply(hidden.reshape(shape.numel(), -1), places)  # (K, H)
    output = forward(rows.view(*shape[:-1], *rows.shape))
    output, *rest = output if isinstance(output, tuple) else (output,)  # experts may add what their router said
    output = _Spread.apply(output.reshape(len(places), -1), places, shape.numel()).view(*shape, -1)  # (1, T, H')
    return (output, *rest) if rest else output


class _Rows(torch.autograd.Function):
    """(T, H) -> (K, H). As indexing, but the backward pass writes rows instead of adding them one by one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = hidden.shape[0]
        return hidden.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).index_copy_(0, places, gradient), None


class _Spread(torch.autograd.Function):
    """(K, H) -> (T, H), zeros elsewhere: the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(count, rows.shape[1]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None
