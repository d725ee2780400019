"""What actor, critic and reward model share: where the Hugging Face model comes from, and how it is called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.acceleration import decoder_layers
from lightppo.models.cpu import use_cpu_linear
from lightppo.models.loading import disable_dropout
from lightppo.models.packing import (
    PackedRow,
    check_packing_layers,
    lengths_as_mask,
    lengths_from_position_ids,
    pack,
    pack_shared,
    position_ids_from_mask,
    probe_packing,
    segments_as_mask,
    takes_lengths,
    use_packed_attention,
)

logger = logging.getLogger(__name__)

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


READ_SHARE = 0.9
"""Where more of a packed row is read, its last layer runs whole: gathering rows costs time too."""


class PretrainedWrapper(nn.Module):
    """A module around one Hugging Face model.

    Attributes:
        model: the Hugging Face model, or the DeepSpeed engine that strategy.prepare put in its place.
        ds_config: the DeepSpeed config it was loaded under, for strategy.prepare; None: the strategy's own.
        packing_samples: forwards drop the padding and run one row.
        share_prompts: in such a row a prompt of several samples stands once, where the model can do so
            (:attr:`shares_prompts`).
        activation_offload: what a forward keeps for its backward pass waits in CPU memory.
    """

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        load: Callable[..., PreTrainedModel],
        *,
        bf16: bool,
        use_flash_attention_2: bool,
        ds_config: dict[str, Any] | None,
        packing_samples: bool,
        load_options: dict[str, Any],
        share_prompts: bool = True,
    ) -> None:
        super().__init__()
        if use_flash_attention_2:
            if load_options.get("attn_implementation", "auto") not in ("auto", "flash_attention_2"):
                raise ModelLoadError(
                    f"use_flash_attention_2 (--flash_attn) and attn_implementation "
                    f"{load_options['attn_implementation']!r} contradict each other: leave one out"
                )
            load_options = {**load_options, "attn_implementation": "flash_attention_2"}
        if isinstance(pretrain_or_model, PreTrainedModel):
            given = sorted(load_options) + ["bf16"] * bf16
            if given:
                raise ModelLoadError(f"{', '.join(given)}: only for loading by path, but a built model was given")
            disable_dropout(pretrain_or_model)
            self.model: nn.Module = pretrain_or_model
        else:
            dtype = "bf16" if bf16 else "fp32"
            self.model = load(pretrain_or_model, dtype=dtype, ds_config=ds_config, **load_options)
        use_cpu_linear(self.model)
        self.ds_config = ds_config
        self.packing_samples = packing_samples
        self.share_prompts = share_prompts
        self.activation_offload = False
        self._packing_probed = False
        self._last_layer: list[nn.Module] = []  # what of it runs at the read positions alone
        if packing_samples:
            check_packing_layers(self.hf_model)
            use_packed_attention(self.hf_model)
            if share_prompts and not takes_lengths(self.hf_model):
                _say_that_nothing_is_shared(self.hf_model.config._attn_implementation)

    @property
    def shares_prompts(self) -> bool:
        """Whether equal prompts of a batch go through the model once.

        That needs packed rows, and an attention that takes segments: sdpa. flash_attention_2 tells sequences by their
        position ids, which cannot say it. The load-balancing loss counts every token of every sample; a forward that
        makes it shares nothing.
        """
        balances = getattr(self.hf_model.config, "output_router_logits", False)
        return self.packing_samples and self.share_prompts and takes_lengths(self.hf_model) and not balances

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, taken out of the engine."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.module

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations in the backward pass; non-reentrant unless the kwargs say ``use_reentrant``.

        Raises:
            ModelLoadError: the family has no gradient checkpointing.
        """
        if not self.hf_model.supports_gradient_checkpointing:
            raise ModelLoadError(f"{type(self.hf_model).__name__} does not support --gradient_checkpointing")
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        self.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.hf_model.gradient_checkpointing_disable()

    def _probe_packing_once(self, run: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
        if self._packing_probed:
            return
        check_packing_layers(self.hf_model)
        probe_packing(self.hf_model, run, device)
        modules = position_wise(self.hf_model)
        if modules and reads_alike(self.hf_model, modules, run, device):
            self._last_layer = modules
        self._packing_probed = True

    def _pack(
        self, sequences: Tensor, attention_mask: Tensor, num_actions: int | None
    ) -> tuple[PackedRow, Tensor | None]:
        """The packed row of a batch, and what its attention is given; None: it follows from the position ids.

        Args:
            sequences, attention_mask: (B, S).
            num_actions: what stands before the last so many columns is a prompt; None: no prompt is shared.
        """
        if num_actions is not None and self.shares_prompts:
            row = pack_shared(sequences, attention_mask, num_actions)
            if row is not None:
                return row, segments_as_mask(row.lengths, row.parents)
        return pack(sequences, attention_mask), None

    def _reading(self, places: Tensor, row: Tensor) -> AbstractContextManager:
        """For a forward of which only some positions of a packed row are read: (K,) of (1, T)."""
        worth_it = 0 < len(places) < READ_SHARE * row.shape[1]
        # a checkpointed layer runs once more in the backward pass, outside of this
        if not worth_it or (torch.is_grad_enabled() and getattr(self.hf_model, "is_gradient_checkpointing", False)):
            return nullcontext()
        return only_at(self._last_layer, places)


@cache
def _say_that_nothing_is_shared(attention: str) -> None:
    """Once per process and kind of attention."""
    logger.warning(
        "--share_prompts needs --attn_implementation sdpa; with %s every sample brings its prompt along", attention
    )


def model_inputs(
    module: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    *,
    lengths: bool = True,
) -> dict[str, Any]:
    """Keyword arguments for a Hugging Face forward without a cache.

    Args:
        module: the module whose forward takes them; position ids are left out where it has none.
        input_ids: (B, S), or (1, T) packed.
        attention_mask: (B, S); of a packed row None, or its segments (:func:`segments_as_mask`).
        position_ids: (1, T) of a packed row; None: counted from the attention mask.
        lengths: a packed row may bring its lengths for the attention; False where the model's forward itself reads the
            mask (the load-balancing loss does): then it makes one of (T, T) from the position ids.
    """
    if attention_mask is None and lengths and takes_lengths(module):
        attention_mask = lengths_as_mask(lengths_from_position_ids(position_ids))
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if takes(module, "position_ids"):
        inputs["position_ids"] = position_ids_from_mask(attention_mask) if position_ids is None else position_ids
    return inputs


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters
