"""What actor, critic and reward model share: the Hugging Face model inside, how it is called, and packed rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.cpu import accelerate_on_cpu
from lightppo.models.loading import decoder_layers, disable_dropout
from lightppo.models.packing import (
    PackedRow,
    check_packing_layers,
    lengths_as_mask,
    lengths_from_position_ids,
    pack,
    pack_shared,
    position_ids_from_mask,
    probe_packing,
    relative_difference,
    rounding,
    segments_as_mask,
    takes_lengths,
    use_packed_attention,
)

logger = logging.getLogger(__name__)

READ_SHARE = 0.9
"""Where more of a packed row is read, its last layer runs whole: gathering rows costs time too."""


class PretrainedWrapper(nn.Module):
    """A module around one Hugging Face model."""

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        load: Callable[..., PreTrainedModel],
        *,
        bf16: bool = False,
        use_flash_attention_2: bool = False,
        ds_config: dict[str, Any] | None = None,
        packing_samples: bool = False,
        share_prompts: bool = True,
        **load_options: Any,
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
            self.model: nn.Module = pretrain_or_model  # strategy.prepare puts the DeepSpeed engine in its place
        else:
            dtype = "bf16" if bf16 else "fp32"
            self.model = load(pretrain_or_model, dtype=dtype, ds_config=ds_config, **load_options)
        accelerate_on_cpu(self.model)
        self.ds_config = ds_config  # for strategy.prepare; None: the strategy's own
        self.packing_samples = packing_samples
        self.share_prompts = share_prompts
        self.activation_offload = False  # activations wait for the backward pass in CPU memory
        self._packing_probed = False
        self.last_layer_parts: list[nn.Module] = []  # run at the read positions only; set at the first packed forward
        if packing_samples:
            check_packing_layers(self.hf_model)
            use_packed_attention(self.hf_model)
            if share_prompts and not takes_lengths(self.hf_model):
                warn_that_nothing_is_shared(self.hf_model.config._attn_implementation)

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, taken out of the engine."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.module

    @property
    def shares_prompts(self) -> bool:
        """Whether equal prompts go through the model once; needs packing and sdpa, and no load-balancing loss."""
        balances = getattr(self.hf_model.config, "output_router_logits", False)
        return self.packing_samples and self.share_prompts and takes_lengths(self.hf_model) and not balances

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations in the backward pass; non-reentrant unless the kwargs say ``use_reentrant``."""
        if not self.hf_model.supports_gradient_checkpointing:
            raise ModelLoadError(f"{type(self.hf_model).__name__} does not support --gradient_checkpointing")
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        self.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.hf_model.gradient_checkpointing_disable()

    def _run_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(1, T) token ids and positions of a packed row -> (1, T, ·), as the subclass reads them."""
        raise NotImplementedError

    def _probe_packing(self, device: torch.device) -> None:
        """At the first packed forward: are sequences kept apart, and can the last layer run at some positions only?"""
        if self._packing_probed:
            return
        check_packing_layers(self.hf_model)
        probe_packing(self.hf_model, self._run_rows, device)
        modules = position_wise(self.hf_model)
        if modules and reads_alike(self.hf_model, modules, self._run_rows, device):
            self.last_layer_parts = modules
        self._packing_probed = True

    def _pack(
        self, sequences: Tensor, attention_mask: Tensor, num_actions: int | None
    ) -> tuple[PackedRow, Tensor | None]:
        """The packed row of a batch (B, S), and its attention mask; None: it follows from the position ids."""
        if num_actions is not None and self.shares_prompts:
            row = pack_shared(sequences, attention_mask, num_actions)
            if row is not None:
                return row, segments_as_mask(row.lengths, row.parents)
        return pack(sequences, attention_mask), None

    def _reading(self, places: Tensor, row: Tensor) -> AbstractContextManager:
        """Context for a forward of which only the positions ``places`` (K,) of a packed row (1, T) are read."""
        worth_it = 0 < len(places) < READ_SHARE * row.shape[1]
        # a checkpointed layer runs again in the backward pass, outside of this context
        if not worth_it or (torch.is_grad_enabled() and getattr(self.hf_model, "is_gradient_checkpointing", False)):
            return nullcontext()
        return only_at(self.last_layer_parts, places)

    def _offloading(self) -> AbstractContextManager:
        """Keeps activations in CPU memory until the backward pass, page-locked if there is a GPU."""
        if not self.activation_offload or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


@cache
def warn_that_nothing_is_shared(attention: str) -> None:
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
    """Keyword arguments for a Hugging Face forward without a cache, of a batch (B, S) or a packed row (1, T).

    A packed row's mask is None, or its segments (:func:`segments_as_mask`). ``lengths`` is False if the model's forward
    itself reads the mask, as the load-balancing loss does.
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


# ---------------------------------------------------------------------------------------------------------------------
# the last layer at the read positions only: takes 0.92 of the time of training, 0.91 of scoring

_QUERY_AND_OUTPUT = {"q_proj", "o_proj", "out_proj", "dense", "c_proj"}  # model families' names in an attention


def position_wise(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of the last layer that treat each position on its own: queries, attention output, MLP or experts.

    Norms and activations are left out: they cost less than moving their rows.
    """
    try:
        layer = decoder_layers(model)[-1]
    except ModelLoadError:
        return []
    attention = next((getattr(layer, n) for n in ("self_attn", "attention", "attn") if hasattr(layer, n)), None)
    if attention is None or layer._compiled_call_impl is not None:
        return []
    inside = [child for name, child in attention.named_children() if name in _QUERY_AND_OUTPUT]
    beside = [child for child in layer.children() if child is not attention]
    shapes = {child: [getattr(p, "ds_shape", p.shape) for p in child.parameters()] for child in beside}
    return inside + [child for child in beside if any(len(shape) > 1 for shape in shapes[child])]


@contextmanager
def only_at(modules: list[nn.Module], places: Tensor) -> Iterator[None]:
    """Makes the modules run only at ``places`` (K,) of a packed row, in any order, and return zeros elsewhere."""
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


def _at_places(forward: Callable[..., Any], places: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``hidden`` is (1, T, H), or (T, H) in some families. With further arguments the module runs as usual."""
    if args or kwargs:
        return forward(hidden, *args, **kwargs)
    shape = hidden.shape[:-1]
    # an embedding, because indexing has a slow backward pass
    rows = embedding(places, hidden.reshape(shape.numel(), -1))  # (K, H)
    output = forward(rows.view(*shape[:-1], *rows.shape))
    output, *rest = output if isinstance(output, tuple) else (output,)  # experts may add their router's logits
    output = output.reshape(len(places), -1)
    spread = output.new_zeros(shape.numel(), output.shape[1]).index_copy_(0, places, output)  # (T, H')
    return (spread.view(*shape, -1), *rest) if rest else spread.view(*shape, -1)


@torch.no_grad()
def reads_alike(
    model: PreTrainedModel, modules: list[nn.Module], run: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> bool:
    """Whether outputs at some positions stay the same if ``modules`` of the last layer run only there."""
    positions = torch.arange(9, device=device).unsqueeze(0)
    ids = (7 * positions + 3) % model.config.get_text_config().vocab_size
    places = torch.tensor([2, 5, 8], device=device)
    was_training = model.training
    model.eval()
    try:
        whole = run(ids, positions)[:, places]
        with only_at(modules, places):
            part = run(ids, positions)[:, places]
    finally:
        model.train(was_training)
    return relative_difference(part, whole) <= rounding(model.dtype)
