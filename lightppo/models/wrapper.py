"""What actor, critic and reward model share: the Hugging Face model inside, how it is prepared and called, packed rows."""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from lightppo.algorithms.logprobs import TokenPlaces
from lightppo.config.options import OptionSet
from lightppo.config.rules import of_role
from lightppo.errors import ModelLoadError, PackingNotSupportedError, UserError
from lightppo.models.loading import decoder_layers, disable_dropout, untrainable
from lightppo.models.packing import (
    action_predictors,
    alike,
    attend_by,
    attention_for_rows,
    check_packing_layers,
    distinct_places,
    on_cpu,
    pack,
    pack_shared,
    packing_error,
    plan_of,
    position_ids_from_lengths,
    position_ids_from_mask,
    read,
    segments_as_mask,
    takes_segments,
    to_device,
    why_neighbours_are_seen,
)
from lightppo.plugin import MODULES, PREPARATIONS

logger = logging.getLogger(__name__)

Role = str
"""What a model does in a run: actor, critic, reference, reward, or a name of ``FROZEN_MODELS`` or ``FOLLOWERS`` in
:mod:`lightppo.plugin`. The model that SFT, RM or DPO train is the actor."""

# where more of a packed row is read, its last layer runs whole: gathering rows costs time too
READ_SHARE = 0.9


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward, and which of its positions are read."""

    # ids, mask, position ids; (B, S), or of one packed row (1, T)
    inputs: tuple[Tensor, Tensor | None, Tensor | None]
    places: Tensor  # (A,) or packed (U,), the distinct positions of a row that are read
    real: Tensor  # (B, A) bool, K of them True: what is read and not padding
    kept: Tensor  # (K,), their places in the flat (B·A,): a mask as an index would wait for the GPU
    # packed (K,), the number of the place that each reads; None: each its own
    reads: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether it is one row, without padding."""
        return self.inputs[2] is not None

    def of_real(self, at_places: Tensor) -> Tensor:
        """(B, A, ·), or packed (1, U, ·), -> (K, ·)."""
        return (
            read(at_places[0], self.reads)
            if self.packed
            else at_places.flatten(0, 1).index_select(0, self.kept)
        )

    def places_among_real(self, chosen: Tensor) -> TokenPlaces:
        """Of a mask (B, A) on the CPU, the numbers of its real places among all that are real."""
        index = chosen[on_cpu(self.real)].nonzero().squeeze(1)
        return TokenPlaces(to_device(index, self.kept.device), on_cpu=index)

    def scatter(self, values: Tensor) -> Tensor:
        """(K,) -> (B, A), 0 elsewhere."""
        return (
            values.new_zeros(self.real.numel()).index_copy(0, self.kept, values).view_as(self.real)
        )


class PretrainedWrapper(nn.Module):
    """A module around one Hugging Face model."""

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        load: Callable[..., PreTrainedModel],
        *,
        bf16: bool = False,
        dtype: torch.dtype = torch.float32,
        use_flash_attention_2: bool = False,
        ds_config: dict[str, Any] | None = None,
        packing_samples: bool | None = False,
        share_prompts: bool = True,
        **load_options: Any,
    ) -> None:
        super().__init__()
        if use_flash_attention_2:
            if load_options.get("attn_implementation", "auto") not in ("auto", "flash_attention_2"):
                raise ModelLoadError(
                    "use_flash_attention_2 (--flash_attn) contradicts attn_implementation: drop one"
                )
            load_options["attn_implementation"] = "flash_attention_2"
        if isinstance(pretrain_or_model, PreTrainedModel):
            given = sorted(load_options) + ["bf16"] * bf16 + ["dtype"] * (dtype != torch.float32)
            if given:
                raise ModelLoadError(
                    f"{', '.join(given)}: only for loading by path, but a built model was given"
                )
            disable_dropout(pretrain_or_model)
            if not hasattr(pretrain_or_model, "untrainable"):
                tensors = dict(pretrain_or_model.named_parameters())
                name = type(pretrain_or_model).__name__
                pretrain_or_model.untrainable = untrainable(pretrain_or_model.config, tensors, name)
            # strategy.prepare puts the DeepSpeed engine in its place
            self.model: nn.Module = pretrain_or_model
        else:
            dtype = torch.bfloat16 if bf16 else dtype
            self.model = load(pretrain_or_model, dtype=dtype, ds_config=ds_config, **load_options)
        # On an H100 torch prefers cuDNN's, which makes a plan for each new length (half a second): each decoded token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        for change in MODULES.values():
            change.fn(self.model)
        self.ds_config = ds_config  # for strategy.prepare; None: the strategy's own
        self.packing_samples = bool(packing_samples)  # None: as False until try_packing
        self.share_prompts = share_prompts
        self._own_attention = "sdpa"  # in place of which another one attends in packed rows
        # a context of each pass with gradients, of the weights and the device; None: there is none
        self.around_pass: Callable[..., AbstractContextManager] | None = None
        # run at the read positions only; None until the first packed forward has looked
        self.last_layer_parts: list[nn.Module] | None = None
        if packing_samples:
            self._attend_packed()
            if share_prompts and not takes_segments(self.hf_model):
                warn_that_nothing_is_shared(self.hf_model.config._attn_implementation)

    def _attend_packed(self) -> None:
        check_packing_layers(self.hf_model)
        attention = attention_for_rows(self.hf_model)
        if attention is not None:
            self._own_attention = self.hf_model.config._attn_implementation
            attend_by(self.hf_model, attention)

    def try_packing(self, device: torch.device) -> str | None:
        """Pack from now on; why not, if the model would not do it exactly. Under ZeRO-3 on all ranks together."""
        attention = self.hf_model.config._attn_implementation
        # eager: over all of a row, with a mask
        rows = attention == "flash_attention_2" or takes_segments(self.hf_model)
        if not rows and attention_for_rows(self.hf_model) is None:
            if not self.hf_model._supports_sdpa:
                return f"{type(self.hf_model).__name__} has no sdpa, and its eager attention does not keep rows apart"
            return f"it needs --attn_implementation sdpa or flash_attention_2, not {attention}"
        if reason := self.packing_obstacle(device):
            self.stop_packing()
            return reason
        self.packing_samples = True
        return None

    def packing_obstacle(self, device: torch.device) -> str | None:
        """Why the model does not pack exactly; None: it does. Under ZeRO-3 on all ranks together."""
        try:
            self._attend_packed()
            self._probe_packing(device)
        except (PackingNotSupportedError, NotImplementedError) as error:
            return str(error)
        return None

    def stop_packing(self) -> None:
        """Pad from now on."""
        self.packing_samples = False
        self.last_layer_parts = None
        if takes_segments(self.hf_model):
            attend_by(self.hf_model, self._own_attention)

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, taken out of the engine."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.module

    @property
    def untrainable(self) -> str | None:
        """Why ``strategy.create_optimizer`` refuses the model, see :func:`.loading.untrainable`."""
        return self.hf_model.untrainable

    @property
    def shares_prompts(self) -> bool:
        """Whether equal prompts go through the model once; needs packing and sdpa, and no load-balancing loss."""
        balances = getattr(self.hf_model.config, "output_router_logits", False)
        return (
            self.packing_samples
            and self.share_prompts
            and takes_segments(self.hf_model)
            and not balances
        )

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute activations in the backward pass; non-reentrant unless the kwargs say ``use_reentrant``."""
        if not self.hf_model.supports_gradient_checkpointing:
            raise ModelLoadError(
                f"{type(self.hf_model).__name__} does not support --gradient_checkpointing"
            )
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        self.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.hf_model.gradient_checkpointing_disable()

    def run_rows(self, ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
        """Logits or hidden states (B, S, ·) of all places: of a packed row (1, T), or padded ones (``positions``
        None)."""
        raise NotImplementedError

    @torch.no_grad()
    def _probe_packing(self, device: torch.device) -> None:
        """At the first packed forward: are sequences kept apart, and can the last layer run at some positions only?

        Then, because the passes run sharded, on the real device, with the real attention kernel, on all ranks together.
        """
        if self.last_layer_parts is not None:
            return
        model = self.hf_model
        parts = position_wise(self.hf_model)
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]], device=device)
        ids = (
            7 * torch.arange(9, device=device)[None] + 3
        ) % model.config.get_text_config().vocab_size
        places = torch.tensor([2, 5, 8], device=device)
        was_training = model.training
        model.eval()
        try:
            both = ids, segments_as_mask([5, 4], device=device), positions
            alone = self.run_rows(
                ids[:, 5:], segments_as_mask([4], device=device), positions[:, 5:]
            )
            row = self.run_rows(*both)
            with only_at(parts, places):
                partly = self.run_rows(*both)
        except Exception as error:
            if not is_models_own(error):
                raise
            raise packing_error(
                model, f"its code fails on a packed row: {one_line(error)}"
            ) from error
        finally:
            model.train(was_training)
        if not alike(row[:, 5:], alone):
            raise packing_error(model, why_neighbours_are_seen(model))
        self.last_layer_parts = parts if alike(partly[:, places], row[:, places]) else []

    def _batch(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        columns: slice,
        real: Tensor,
        num_actions: int | None,
    ) -> Batch:
        """A forward of which ``columns`` are read where ``real`` (B, A), on the CPU; ``num_actions`` None: no prompt is
        shared."""
        device = sequences.device
        row = None
        reads = None
        of_batch = to_device(real, device), to_device(real.flatten().nonzero()[:, 0], device)
        if not self.packing_samples:
            places = torch.arange(sequences.shape[1], device=device)[columns]  # (A,)
            return Batch((sequences, attention_mask, None), places, *of_batch)
        self._probe_packing(device)
        if num_actions is not None and self.shares_prompts:
            row = pack_shared(sequences, attention_mask, num_actions)
        row = pack(sequences, attention_mask) if row is None else row
        places, reads = distinct_places(row.slots[:, columns][real])  # (U,), (K,)
        reads = None if reads is None else to_device(reads, device)
        return Batch(
            (row.input_ids, row.segments, row.position_ids),
            to_device(places, device),
            *of_batch,
            reads,
        )

    def _packed_by_caller(
        self,
        row: Tensor,
        lengths: list[int],
        num_actions: list[int] | None,
        include_last: bool = False,
    ) -> Batch:
        """A row (1, T) of sequences; ``num_actions`` None: all positions are read."""
        position_ids = position_ids_from_lengths(lengths, row)
        self._probe_packing(row.device)
        if num_actions is None:
            places = torch.arange(row.shape[1], device=row.device)
        else:
            places = action_predictors(lengths, num_actions, row.device, include_last)  # (K,)
        real = torch.ones(1, len(places), dtype=torch.bool, device=row.device)
        kept = torch.arange(len(places), device=row.device)
        return Batch(
            (row, segments_as_mask(lengths, None, row.device), position_ids), places, real, kept
        )

    def _reading(self, places: Tensor, row: Tensor) -> AbstractContextManager:
        """Context for a forward of which only the positions ``places`` (K,) of a packed row (1, T) are read."""
        worth_it = 0 < len(places) < READ_SHARE * row.shape[1]
        # a checkpointed layer runs again in the backward pass, outside of this context
        if not worth_it or (
            torch.is_grad_enabled() and getattr(self.hf_model, "is_gradient_checkpointing", False)
        ):
            return nullcontext()
        return only_at(self.last_layer_parts, places)

    def _training_pass(self, device: torch.device) -> AbstractContextManager:
        """What is around a forward pass with gradients."""
        if self.around_pass is None or not torch.is_grad_enabled():
            return nullcontext()
        return self.around_pass(self.hf_model.parameters(), device)


def is_plain_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or a class that says of itself that it computes the same."""
    kind = type(module)
    return (kind is nn.Linear or "is_plain_linear" in vars(kind)) and "forward" not in vars(module)


def is_models_own(error: Exception) -> bool:
    """Whether an error is of the model's code, not of a lack of memory or of a lost rank."""
    others = (
        UserError,
        NotImplementedError,
        MemoryError,
        torch.OutOfMemoryError,
        torch.distributed.DistError,
    )
    return not isinstance(error, others) and "gloo/transport" not in str(error)


def one_line(error: Exception) -> str:
    """Its type and message, shortened."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")


@cache  # once per process and kind of attention
def warn_that_nothing_is_shared(attention: str) -> None:
    logger.warning(
        "--share_prompts needs --attn_implementation sdpa; with %s every sample brings its prompt along",
        attention,
    )


def model_inputs(
    module: nn.Module,
    ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    reads_mask: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for a Hugging Face forward without a cache, of a batch (B, S) or a packed row (1, T).

    A packed row's mask is its segments (:func:`segments_as_mask`). ``reads_mask``: the model's forward itself reads it,
    as the load-balancing loss does, so that segments would not do.
    """
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if position_ids is not None and (reads_mask or not takes_segments(module)):
        if module.config._attn_implementation == "flash_attention_2" and takes(module, "kwargs"):
            # else each layer finds the borders in the positions, and waits for the GPU
            inputs |= plan_of(attention_mask, ids.device).flash_options()
        attention_mask = None  # positions say it all
    inputs["attention_mask"] = attention_mask
    if takes(module, "position_ids"):
        inputs["position_ids"] = (
            position_ids_from_mask(attention_mask) if position_ids is None else position_ids
        )
    return inputs


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


# -- the last layer at the read positions only: takes 0.92 of the time of training, 0.91 of scoring -------------------

# model families' names in an attention
_QUERY_AND_OUTPUT = {"q_proj", "o_proj", "out_proj", "dense", "c_proj"}


def position_wise(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of the last layer that treat each position on its own: queries, attention output, MLP or experts.

    Norms and activations are left out: they cost less than moving their rows.
    """
    layer = (decoder_layers(model) or [nn.Module()])[-1]
    attention = next(
        (
            getattr(layer, part)
            for part in ("self_attn", "attention", "attn")
            if hasattr(layer, part)
        ),
        None,
    )
    if attention is None or layer._compiled_call_impl is not None:
        return []
    inside = [child for name, child in attention.named_children() if name in _QUERY_AND_OUTPUT]
    beside = [child for child in layer.children() if child is not attention]
    shapes = {
        child: [getattr(weight, "ds_shape", weight.shape) for weight in child.parameters()]
        for child in beside
    }
    return inside + [child for child in beside if any(len(shape) > 1 for shape in shapes[child])]


@contextmanager
def only_at(modules: list[nn.Module], places: Tensor) -> Iterator[None]:
    """Makes the modules run only at the distinct ``places`` (K,) of a packed row, and return zeros elsewhere."""
    places = places.sort().values
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        # hooks around the call stay (ZeRO-3, adapters)
        module.forward = partial(_at_places, module.forward, places)
    try:
        yield
    finally:
        for module, forward in zip(modules, before):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _at_places(
    forward: Callable[..., Any],
    places: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The one argument is (1, T, H), or (T, H) in some families. With others the module runs as usual."""
    if len(args) != 1 or kwargs:
        return forward(*args, **kwargs)
    (hidden,) = args
    shape = hidden.shape[:-1]
    # an embedding, because indexing has a slow backward pass
    rows = embedding(places, hidden.reshape(shape.numel(), -1))  # (K, H)
    output = forward(rows.view(*shape[:-1], *rows.shape))
    # experts may add their router's logits
    output, *rest = output if isinstance(output, tuple) else (output,)
    output = output.reshape(len(places), -1)
    # (T, H')
    spread = output.new_zeros(shape.numel(), output.shape[1]).index_copy_(0, places, output)
    return (spread.view(*shape, -1), *rest) if rest else spread.view(*shape, -1)


# -- before it goes to its engine ------------------------------------------------------------------------------------


def prepare_model(
    model: PretrainedWrapper,
    role: Role,
    config: OptionSet,
    device: torch.device,
) -> None:
    """Change a loaded model in place: save memory where it trains, then :data:`lightppo.plugin.PREPARATIONS`."""
    if role in ("actor", "critic"):
        keep_fewer_activations(model, role, config)
    for preparation in PREPARATIONS.values():
        preparation.fn(model, role, config, device)


def keep_fewer_activations(
    model: PretrainedWrapper, role: Literal["actor", "critic"], config: OptionSet
) -> None:
    """``--gradient_checkpointing``, of a model that trains."""
    if of_role(config, role).gradient_checkpointing:
        use_reentrant = config.model.gradient_checkpointing_use_reentrant
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
