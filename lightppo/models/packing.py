"""The layout of a model's batches, packed rows or padded ones; whether a model runs them exactly is tried out."""

from __future__ import annotations

import logging
import textwrap
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.config.rules import MicroBatchSpec
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.sequence_parallel import SequenceGroup
from lightppo.errors import ModelLoadError, PackingNotSupportedError, UserError
from lightppo.models.attention.chunks import PACKED_CHUNKS, attends_in_chunks, why_no_chunks
from lightppo.models.attention.eager import PACKED_EAGER, attends_by_own_code
from lightppo.models.attention.recurrent import before_known_code, has_mixers, why_not_by_segment
from lightppo.models.attention.row_attention import PACKED_SDPA, has_alibi
from lightppo.models.batches import (
    Batch,
    PackedRow,
    PaddedLayout,
    action_predictors,
    decoder_layers,
    distinct_places,
    pack,
    packed_micro_batches,
    piece_of,
    plan_of,
    position_ids_from_lengths,
    recomputes,
    segments_as_mask,
    select_rows,
    takes,
    to_device,
)
from lightppo.ranks import Ranks

# -- which models can be packed, and what attends in their packed rows ------------------------------------------------

# attentions of packed rows that are code of a family's own, each with whether it stands in for a model's attention
_OF_FAMILIES = {
    PACKED_CHUNKS: attends_in_chunks,
    PACKED_EAGER: attends_by_own_code,
}


def takes_segments(model: PreTrainedModel) -> bool:
    """Tell whether :func:`segments_as_mask` may replace the mask of a packed row."""
    return model.config._attn_implementation in (PACKED_SDPA, *_OF_FAMILIES)


def attention_for_rows(model: PreTrainedModel) -> str | None:
    """Return the attention that does the same as the model's, and takes :func:`segments_as_mask`; None: there is none."""
    for name, stands_in in _OF_FAMILIES.items():
        if stands_in(model):
            return name
    return PACKED_SDPA if model.config._attn_implementation == "sdpa" else None


def check_packing_layers(model: nn.Module) -> None:
    """Refuse families that cannot be packed, judging by the model's class and config alone."""
    if has_alibi(model.config):
        reason = "its attention has alibi, which would count positions from the start of the row"
        raise packing_error(model, reason)
    if not takes(model.base_model, "position_ids"):
        reason = f"{type(model.base_model).__name__}.forward takes no position_ids"
        raise packing_error(model, reason)
    # DeepSeek-like configs have no layer_types; then all layers are of one kind, and a first forward tells.
    layer_kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for layer_kind in sorted(set(layer_kinds)):
        if reason := why_not_packed(model, layer_kind):
            raise packing_error(model, f"it has layers of type {layer_kind}: {reason}")


def why_not_packed(model: nn.Module, kind: str) -> str | None:
    """Return why layers of this type in ``layer_types`` cannot be packed, or None."""
    if kind in ("full_attention", "sliding_attention", "mlp", "moe"):
        return None
    if kind == "chunked_attention":
        return why_no_chunks(model)
    if kind in ("linear_attention", "conv", "hybrid"):
        return why_not_by_segment(model)
    return f"it is not known{before_known_code()}"


def packing_error(model: nn.Module, reason: str) -> PackingNotSupportedError:
    model_type = model.config.get_text_config().model_type
    return PackingNotSupportedError(
        f"--packing_samples does not work with model type {model_type!r}: {reason}. Leave it out."
    )


def why_neighbours_are_seen(model: PreTrainedModel) -> str:
    """Return why packed sequences are not as alone."""
    attention = model.config._attn_implementation
    reason = f"with {attention} attention a packed sequence sees its neighbour"
    if attention != "eager":
        return reason
    if model._supports_sdpa:
        return f"{reason} (--attn_implementation sdpa may pack)"
    return f"{reason}, and {type(model).__name__} has no sdpa, which keeps sequences apart"


# -- the last layer at the read positions only: 0.92 of the time of training, 0.91 of scoring ------------------------

# model families' names in an attention
_QUERY_AND_OUTPUT = {"q_proj", "o_proj", "out_proj", "dense", "c_proj"}


def position_wise(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of the last layer that treat each position alone: queries, attention output, MLP or experts.

    Norms and activations are left out: they cost less than moving their rows.
    """
    layer = (decoder_layers(model) or [nn.Module()])[-1]
    names = ("self_attn", "attention", "attn")
    attention = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    if attention is None or layer._compiled_call_impl is not None:
        return []
    projections = [part for name, part in attention.named_children() if name in _QUERY_AND_OUTPUT]
    siblings = [part for part in layer.children() if part is not attention]
    return projections + [part for part in siblings if _has_matrix(part)]


def _has_matrix(module: nn.Module) -> bool:
    shapes = (getattr(weight, "ds_shape", weight.shape) for weight in module.parameters())
    return any(len(shape) > 1 for shape in shapes)


@contextmanager
def only_at(modules: list[nn.Module], places: Tensor) -> Iterator[None]:
    """Make the modules run only at the distinct ``places`` (K,) of a packed row, and return zeros elsewhere."""
    places = places.sort().values
    previous_forwards = [vars(module).get("forward") for module in modules]
    for module in modules:
        # Only forward changes, so that hooks around the call stay (ZeRO-3, adapters).
        module.forward = partial(_at_places, module.forward, places)
    try:
        yield
    finally:
        for module, forward in zip(modules, previous_forwards):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _at_places(forward: Callable[..., Any], places: Tensor, *arguments: Any, **options: Any) -> Any:
    """Run a module at some places of its one argument, (1, T, H) or (T, H); with other arguments as usual."""
    if len(arguments) != 1 or options:
        return forward(*arguments, **options)
    (hidden,) = arguments
    shape = hidden.shape[:-1]
    rows = select_rows(hidden.flatten(0, -2), places)  # (K, H)
    output = forward(rows.view(*shape[:-1], *rows.shape))
    # Experts may return the logits of their router, too.
    output, *router_outputs = output if isinstance(output, tuple) else (output,)
    output = output.reshape(len(places), -1)
    spread = output.new_zeros(shape.numel(), output.shape[1]).index_copy_(0, places, output)
    spread = spread.view(*shape, -1)  # (1, T, H')
    return (spread, *router_outputs) if router_outputs else spread


logger = logging.getLogger(__name__)

# -- rows and batches -------------------------------------------------------------------------------------------------

# where more of a packed row is read, its last layer runs whole: gathering rows costs time too
READ_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class PackedBatch(Batch):
    """One packed row: ``ids`` are (1, T), and ``mask`` has its segments (:func:`.batches.segments_as_mask`)."""

    positions: Tensor  # (1, T)
    places: Tensor | None = None  # (U,), the distinct ones that are read; None: all are
    reads: Tensor | None = None  # (K,), the number of the place that each reads; None: each its own
    row: PackedRow | None = None  # None: a row that the caller packed
    layout: PackedLayout

    def at_places(self, values: Tensor) -> Tensor:
        return values[:, self.places]  # (1, U, ·)

    def of_real(self, at_places: Tensor) -> Tensor:
        if self.reads is None:
            return at_places[0]
        return select_rows(at_places[0], self.reads)

    def of_tokens(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[to_device(self.row.tokens, values.device)]

    def of_sequences(self, values: Tensor, blank: Tensor) -> Tensor:
        slots = to_device(self.row.slots.clamp(min=0), values.device)
        is_real = to_device(self.row.real, values.device)[..., None, None]
        return torch.where(is_real, values[slots], blank)

    def returned(self, at_places: Tensor) -> Tensor:
        return self.of_real(at_places)[None]  # (1, K, ·)

    def inputs(self, module: nn.Module, reads_mask: bool = False) -> dict[str, Any]:
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if reads_mask or not takes_segments(module):
            inputs["attention_mask"] = None  # positions say it all
            is_flash = module.config._attn_implementation == "flash_attention_2"
            if is_flash and takes(module, "kwargs"):
                # Otherwise each layer would find the borders in the positions, and wait for the GPU.
                plan = plan_of(self.mask, self.ids.device)
                names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
                inputs |= zip(names, (*plan.borders, *plan.longest))
        if takes(module, "position_ids"):
            inputs["position_ids"] = self.positions
        return inputs

    def reading(self) -> AbstractContextManager:
        reads_few = 0 < len(self.places) < READ_SHARE * self.ids.shape[1]
        # A checkpointed layer runs again in the backward pass, which is outside of this context.
        runs_again = torch.is_grad_enabled() and recomputes(self.layout.model.hf_model)
        if runs_again or not reads_few:
            return nullcontext()
        return only_at(self.layout.last_layer_parts, self.places)


@dataclass(frozen=True, kw_only=True)
class PieceBatch(PackedBatch):
    """This rank's piece of a packed row: of it are ids, positions and what is read, but the segments of all of the row."""

    is_piece = True

    group: SequenceGroup

    def of_tokens(self, values: Tensor) -> Tensor:
        of_row = super().of_tokens(values)
        length = self.ids.shape[1]
        filling = of_row[:1].expand(length * self.group.size - len(of_row), *of_row.shape[1:])
        return torch.cat([of_row, filling]).split(length)[self.group.rank]

    def of_sequences(self, values: Tensor, blank: Tensor) -> Tensor:
        return super().of_sequences(self.group.joined_pieces(values), blank)

    def scatter(self, values: Tensor) -> Tensor:
        return self.whole(super().scatter(values))

    def of_rows(self, values: Tensor) -> Tensor:
        return self.scatter(values).sum(1)

    def whole(self, of_piece: Tensor) -> Tensor:
        return self.group.sum_of_pieces(of_piece)


class PackedLayout(PaddedLayout):
    """Packed rows as soon as ``packs`` is True, padded batches until then.

    Args:
        packing_samples: pack, or raise PackingNotSupportedError; None: not before :meth:`try_packing`.
        share_prompts: run equal prompts of a batch once, where the attention can.
    """

    def __init__(
        self,
        model: Any,
        packing_samples: bool | None = False,
        share_prompts: bool = True,
    ) -> None:
        self.model = model  # the :class:`~lightppo.models.wrapper.PretrainedWrapper`
        self.share_prompts = share_prompts
        self.group: SequenceGroup | None = None  # the ranks that may hold a row together
        self.own_attention = "sdpa"  # in place of which another one attends in packed rows
        # What runs at the read positions only. None until the first packed forward has looked.
        self.last_layer_parts: list[nn.Module] | None = None
        if packing_samples:
            self.pack()

    @property
    def shares_prompts(self) -> bool:
        """Tell whether it packs, its attention takes segments, and there is no load-balancing loss."""
        model = self.model.hf_model
        balances = getattr(model.config, "output_router_logits", False)
        return self.packs and self.share_prompts and takes_segments(model) and not balances

    # -- packed or padded ----------------------------------------------------------------------------------------

    def pack(self) -> None:
        """Pack from now on; PackingNotSupportedError for a family that cannot, as far as its config tells."""
        self._attend()
        self.packs = True
        if self.share_prompts and not takes_segments(self.model.hf_model):
            warn_that_nothing_is_shared(self.model.hf_model.config._attn_implementation)

    def try_packing(self, device: torch.device) -> str | None:
        """Pack from now on; why not, if the model would not do it exactly. Under ZeRO-3 on all ranks together."""
        model = self.model.hf_model
        attention = model.config._attn_implementation
        # Eager attention goes over all of a row, with a mask.
        keeps_sequences_apart = attention == "flash_attention_2" or takes_segments(model)
        if not (keeps_sequences_apart or attention_for_rows(model) or has_alibi(model.config)):
            if not model._supports_sdpa:
                return f"{type(model).__name__} has no sdpa, and its eager attention does not keep rows apart"
            return f"it needs --attn_implementation sdpa or flash_attention_2, not {attention}"
        if reason := self.obstacle(device):
            self.stop_packing()
            return reason
        self.packs = True
        return None

    def obstacle(self, device: torch.device) -> str | None:
        """Return why the model does not pack exactly; None: it does. Under ZeRO-3 on all ranks together."""
        try:
            self._attend()
            if self.last_layer_parts is None:
                self._probe(device)
        except (PackingNotSupportedError, NotImplementedError) as error:
            return str(error)
        return None

    def stop_packing(self) -> None:
        """Pad from now on."""
        self.packs = False
        self.last_layer_parts = None
        if takes_segments(self.model.hf_model):
            self.model.hf_model.set_attn_implementation(self.own_attention)

    def _attend(self) -> None:
        model = self.model.hf_model
        check_packing_layers(model)
        attention = attention_for_rows(model)
        if attention is not None:
            self.own_attention = model.config._attn_implementation
            model.set_attn_implementation(attention)

    @torch.no_grad()
    def _probe(self, device: torch.device) -> None:
        """Try at the first packed forward whether sequences are kept apart and the last layer runs at some positions.

        Then, because the passes run sharded, on the real device, with the real attention kernel, on all ranks together.
        """
        model = self.model.hf_model
        position_wise_parts = position_wise(model)
        vocabulary = model.config.get_text_config().vocab_size
        token_ids = (7 * torch.arange(9, device=device)[None] + 3) % vocabulary
        places = torch.tensor([2, 5, 8], device=device)
        was_training = model.training
        model.eval()
        try:
            pair_row = self._whole_row(token_ids, [5, 4])
            second_output = self.model.run_rows(self._whole_row(token_ids[:, 5:], [4]))
            row_output = self.model.run_rows(pair_row)
            with only_at(position_wise_parts, places):
                partial_output = self.model.run_rows(pair_row)
        except Exception as error:
            if not is_models_own(error):
                raise
            raise packing_error(
                model, f"its code fails on a packed row: {one_line(error)}"
            ) from error
        finally:
            model.train(was_training)
        if not alike(row_output[:, 5:], second_output):
            raise packing_error(model, why_neighbours_are_seen(model))
        runs_partly = alike(partial_output[:, places], row_output[:, places])
        self.last_layer_parts = position_wise_parts if runs_partly else []

    # -- batches -------------------------------------------------------------------------------------------------

    def batch(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        columns: slice,
        real: Tensor,
        num_actions: int | None,
    ) -> Batch:
        if not self.packs:
            return super().batch(sequences, attention_mask, columns, real, num_actions)
        device = sequences.device
        if self.last_layer_parts is None:
            self._probe(device)
        shared_actions = num_actions if self.shares_prompts else None
        row = pack(sequences, attention_mask, shared_actions)
        slots = row.slots[:, columns]
        batch_of = PackedBatch
        if self.group is not None and self.group.is_active:
            batch_of = partial(PieceBatch, group=self.group)
            row, first = piece_of(row, self.group)
            slots = slots - first
            real = real & (slots >= 0) & (slots < row.input_ids.shape[1])
        places, reads = distinct_places(slots[real])  # (U,), (K,)
        return batch_of(
            ids=row.input_ids,
            mask=row.segments,
            real=to_device(real, device),
            real_places=to_device(real.flatten().nonzero()[:, 0], device),
            positions=row.position_ids,
            places=to_device(places, device),
            reads=None if reads is None else to_device(reads, device),
            row=row,
            layout=self,
        )

    def batch_of_row(
        self,
        row: Tensor,
        lengths: list[int],
        num_actions: list[int] | None,
        include_last: bool = False,
    ) -> Batch:
        whole_row = self._whole_row(row, lengths)
        if self.last_layer_parts is None:
            self._probe(row.device)
        if num_actions is None:
            places = torch.arange(row.shape[1], device=row.device)
        else:
            places = action_predictors(lengths, num_actions, row.device, include_last)  # (K,)
        return replace(
            whole_row,
            real=torch.ones(1, len(places), dtype=torch.bool, device=row.device),
            real_places=torch.arange(len(places), device=row.device),
            places=places,
        )

    def _whole_row(self, row: Tensor, lengths: list[int]) -> PackedBatch:
        """Return a row (1, T) of sequences that is read everywhere."""
        positions = position_ids_from_lengths(lengths, row)
        segments = segments_as_mask(lengths, device=row.device)
        return PackedBatch(ids=row, mask=segments, positions=positions, layout=self)

    def split(
        self,
        lengths: Sequence[tuple[int, int]],
        spec: MicroBatchSpec,
        ranks: Ranks,
        prompts: Sequence[Hashable] = (),
    ) -> list[list[int]]:
        """Split rows into micro batches; all ranks make equally many if they have enough rows. Collective."""
        if not self.packs:
            return super().split(lengths, spec, ranks, prompts)
        micro_batches = packed_micro_batches(lengths, spec, prompts)
        if spec.unit == "samples":
            return micro_batches
        most_batches = ranks.same_count(len(micro_batches))
        return packed_micro_batches(lengths, spec, prompts, at_least=most_batches)


@cache  # once per process and kind of attention
def warn_that_nothing_is_shared(attention: str) -> None:
    logger.warning(
        "--share_prompts needs --attn_implementation sdpa; with %s every sample brings its prompt along",
        attention,
    )


# -- the models of a run, all together ---------------------------------------------------------------------------------


def settle_models(run: Any) -> None:
    """Pack the models of a PPO run, or pad all: a check of ``models``. Collective.

    Training on data settles it by itself, because it knows whether its rows gain by packing.
    """
    if not isinstance(run.config, PPOConfig):
        return
    models = [model for flag, model in run.models.items() if "--reward_pretrain" not in flag]
    shares_prompts = (
        run.config.training.share_prompts and run.config.rollout.n_samples_per_prompt > 1
    )
    settle_packing(run.config, run.strategy, models, shares_prompts)


def settle_packing(
    config: OptionSet,
    strategy: DeepspeedStrategy,
    models: Iterable[Any],
    share_prompts: bool = True,
) -> None:
    """Pack all models if each does it exactly on every rank, with ``--packing_samples`` they must. Collective."""
    packing_option = config.training.packing_samples
    if packing_option is False:
        return
    divides = strategy.sequence_group is not None
    # A critic has its engine around it.
    wrappers = [getattr(model, "module", model) for model in models if model is not None]
    layouts = [wrapper.layout for wrapper in wrappers]
    for layout in layouts:
        layout.share_prompts = share_prompts
    obstacles = [
        layout.obstacle(strategy.device) if packing_option else layout.try_packing(strategy.device)
        for layout in layouts
    ]
    obstacle = next(filter(None, obstacles), None)
    if reason := next(filter(None, strategy.all_gather_object(obstacle)), None):
        if divides:
            reason = f"--sequence_parallel_size needs packed rows: {reason}"
        if packing_option or divides:
            raise PackingNotSupportedError(reason)
        for layout in layouts:
            layout.stop_packing()
        strategy.print(f"note: batches are padded: {reason}")
    elif packing_option:
        for layout in layouts:
            layout.pack()
    if divides:
        divide_rows(layouts, strategy)


def divide_rows(layouts: Iterable[PackedLayout], strategy: DeepspeedStrategy) -> None:
    """Let the ranks of a sequence group hold rows together, if each model does it exactly. Collective."""
    problems = [settle_pieces(layout, strategy) for layout in layouts]
    problem = next(filter(None, problems), None)
    if reason := next(filter(None, strategy.all_gather_object(problem)), None):
        raise ModelLoadError(f"--sequence_parallel_size: {reason}: leave it out")
    size = strategy.sequence_group.size
    groups = strategy.data_parallel.world_size
    strategy.print(
        f"--sequence_parallel_size {size}: {size} ranks train on each row together, in {groups} "
        f"{'groups' if groups > 1 else 'group'}"
    )


@torch.no_grad()
def settle_pieces(layout: PackedLayout, strategy: DeepspeedStrategy) -> str | None:
    """Let a packed model run pieces of rows; why not, if it would not do it exactly. Collective."""
    model = layout.model.hf_model
    group = strategy.sequence_group
    name = type(model).__name__
    heads = model.config.get_text_config().num_attention_heads
    if heads % group.size:
        return f"{group.size} ranks cannot share out the {heads} attention heads of {name}"
    attention = model.config._attn_implementation
    if attention == "sdpa" or attention in _OF_FAMILIES:
        return f"{name} attends by code of its own"
    if attention != PACKED_SDPA:
        return f"it needs --attn_implementation sdpa, not {attention}"
    if has_mixers(model):
        return f"{name} has recurrent layers or convolutions, which mix positions"
    tokens = 4 * group.size + 1
    vocabulary = model.config.get_text_config().vocab_size
    token_ids = (7 * torch.arange(tokens, device=strategy.device)[None] + 3) % vocabulary
    row = layout._whole_row(token_ids, [tokens - 4, 4])
    unused = torch.empty(0)
    packed = PackedRow(token_ids, row.positions, unused, unused, unused, row.mask)
    piece, first = piece_of(packed, group)
    was_training = model.training
    model.eval()
    try:
        whole = layout.model.run_rows(row)
        part = layout.model.run_rows(
            replace(row, ids=piece.input_ids, positions=piece.position_ids, mask=piece.segments)
        )
    finally:
        model.train(was_training)
    length = min(part.shape[1], tokens - first)
    if not alike(part[:, :length], whole[:, first : first + length]):
        return f"{name} mixes positions elsewhere than in its attention"
    layout.group = group
    return None


# -- trials of a model ------------------------------------------------------------------------------------------------


def is_models_own(error: Exception) -> bool:
    """Tell whether an error is of the model's code, not of a lack of memory or of a lost rank."""
    other_errors = (
        UserError,
        NotImplementedError,
        MemoryError,
        torch.OutOfMemoryError,
        torch.distributed.DistError,
    )
    return not isinstance(error, other_errors) and "gloo/transport" not in str(error)


def one_line(error: Exception) -> str:
    """Return an error's type and message, shortened; without a message the line of code that raised it."""
    text = str(error)
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}"
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200, placeholder=" …")


def alike(output: Tensor, expected: Tensor) -> bool:
    """Tell whether outputs are equal but for rounding; False where any is NaN."""
    difference = (output.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    # Rounding alone gives 1e-6 in fp32 (1e-3 with TF32) and 1e-2 in bf16; a neighbour in sight gives 0.1 and more.
    return difference.item() <= (3e-3 if output.dtype == torch.float32 else 1e-1)
