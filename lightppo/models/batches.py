"""Batches for a model: how sequences lie in a forward, padded or packed; micro batches; copies that do not wait for a GPU.

A packed row is a batch without its padding: it has segments, and prompts that several samples share.
"""

from __future__ import annotations

import heapq
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from lightppo.config.rules import MicroBatchSpec
from lightppo.distributed.sequence_parallel import SequenceGroup
from lightppo.errors import ConfigError
from lightppo.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Padded sequences for one forward, and which of their positions are read; by default all are."""

    ids: Tensor  # (B, S)
    mask: Tensor  # (B, S)
    columns: slice = field(default_factory=lambda: slice(None))  # the A positions that are read
    # (B, A) bool, K of them True: what is read and not padding; None: all
    real: Tensor | None = None
    # (K,), their places in the flat (B·A,): a mask as an index would wait for the GPU
    real_places: Tensor | None = None

    is_piece = False  # other ranks have the rest of it

    @property
    def places(self) -> Tensor:
        """Return the positions that are read, (A,)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[self.columns]

    def inputs(self, module: nn.Module, reads_mask: bool = False) -> dict[str, Any]:
        """Return keyword arguments for a Hugging Face forward without a cache.

        ``reads_mask``: the model's forward itself reads the mask, as the load-balancing loss does.
        """
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if takes(module, "position_ids"):
            inputs["position_ids"] = position_ids_from_mask(self.mask)
        return inputs

    def reading(self) -> AbstractContextManager:
        """Return a context for a forward of which only ``places`` are read."""
        return nullcontext()

    def at_places(self, values: Tensor) -> Tensor:
        """Select (B, S, ·) -> (B, A, ·)."""
        return values[:, self.columns]

    def of_real(self, at_places: Tensor) -> Tensor:
        """Select (B, A, ·) -> (K, ·)."""
        return at_places.flatten(0, 1).index_select(0, self.real_places)

    def returned(self, at_places: Tensor) -> Tensor:
        """Return (B, A, ·) as a caller gets it."""
        return at_places

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return what each token has of ``values`` (B, S, ·) as tokens lie in the forward, (T, ·)."""
        return values.flatten(0, 1)

    def of_sequences(self, values: Tensor, blank: Tensor) -> Tensor:
        """Invert :meth:`of_tokens`; ``blank`` (B, S, ·) is written over where a token is real."""
        return torch.where(self.mask.bool()[..., None, None], values.view_as(blank), blank)

    def scatter(self, values: Tensor) -> Tensor:
        """Spread (K,) -> (B, A), 0 elsewhere."""
        zeros = values.new_zeros(self.real.numel())
        return zeros.index_copy(0, self.real_places, values).view_as(self.real)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return (B,) values of a batch of which one position of each row is read, in the order of rows."""
        return values

    def whole(self, of_piece: Tensor) -> Tensor:
        """Return what is known of this rank's piece, and 0 elsewhere, (B, A, …), of all pieces."""
        return of_piece


class PaddedLayout:
    """How the sequences of a batch lie in a model's forward: padded, one below the other."""

    packs = False  # its rows have no padding
    shares_prompts = False  # a prompt runs once for all its sequences in a batch

    def batch(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        columns: slice,
        real: Tensor,
        num_actions: int | None,
    ) -> Batch:
        """Return a forward of which ``columns`` are read where ``real`` (B, A), on the CPU.

        ``num_actions``: prompts, which may be shared, end before as many last columns; None: none is shared.
        """
        device = sequences.device
        real_places = to_device(real.flatten().nonzero()[:, 0], device)
        return Batch(sequences, attention_mask, columns, to_device(real, device), real_places)

    def split(
        self,
        lengths: Sequence[tuple[int, int]],
        spec: MicroBatchSpec,
        ranks: Ranks,
        prompts: Sequence[Hashable] = (),
    ) -> list[list[int]]:
        """Return the row numbers of each micro batch, see :func:`micro_batches`; ``prompts`` may be shared."""
        return micro_batches(lengths, spec)


PADDED = PaddedLayout()


def layout_of_all(models: Iterable[Any]) -> PaddedLayout:
    """Return the layout of micro batches that all of these models run; what has none, as None, runs any."""
    layouts = [model.layout for model in models if hasattr(model, "layout")]
    return min(layouts, key=attrgetter("packs", "shares_prompts"), default=PADDED)


def micro_batches(lengths: Sequence[tuple[int, int]], spec: MicroBatchSpec) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    Rows of similar length are together, longest first, so that a lack of memory shows at once. By tokens, rows ×
    (longest prompt + longest response) stays within the budget; a row above the budget is alone.
    """
    if spec.unit == "samples":
        return packed_micro_batches(lengths, spec)
    batches: list[list[int]] = []
    longest = (0, 0)
    for row in sorted(range(len(lengths)), key=lambda row: -sum(lengths[row])):
        new_longest = tuple(map(max, longest, lengths[row]))
        if batches and (len(batches[-1]) + 1) * sum(new_longest) <= spec.size:
            batches[-1].append(row)
            longest = new_longest
        else:
            batches.append([row])
            longest = lengths[row]
    return batches


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """Return (first, end) of consecutive parts of prompts, so that positions (with padding) plus calls cost least."""
    # of the first k prompts: their cost, and where the last part begins
    least_costs = [0]
    cut_places = [0]
    for end in range(1, len(lengths) + 1):
        best_cut = (float("inf"), 0)
        longest_prompt = 0
        for first in range(end - 1, -1, -1):
            longest_prompt = max(longest_prompt, lengths[first])
            cost = least_costs[first] + call_cost + longest_prompt * (end - first)
            best_cut = min(best_cut, (cost, first))
        least_costs.append(best_cut[0])
        cut_places.append(best_cut[1])
    prompt_parts = []
    end = len(lengths)
    while end:
        prompt_parts.append((cut_places[end], end))
        end = cut_places[end]
    return prompt_parts[::-1]


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Return each real token's position among the real tokens of its row, (B, S) -> (B, S); left padding gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def check_num_actions(num_actions: int, sequence_length: int) -> None:
    """Raise ValueError unless every action has a position before it to predict it."""
    if not isinstance(num_actions, int) or not 0 < num_actions < sequence_length:
        raise ValueError(
            f"num_actions = {num_actions} must be between 1 and {sequence_length - 1} (S - 1)"
        )


def refuse_ring(ring_attn_group: Any) -> None:
    """Raise ConfigError for a script that splits sequences over ranks."""
    if ring_attn_group is not None:
        raise ConfigError("ring_attn_group: sequences are not split over ranks here; leave it out")


def real_actions(attention_mask: Tensor, num_actions: int) -> Tensor:
    """Return (B, S) -> (B, A) bool: the action token and the token that predicts it are both real."""
    real = attention_mask.bool()
    return real[:, -num_actions:] & real[:, -num_actions - 1 : -1]


# bytes: the driver of a GPU puts so many aside before it copies, and need not wait
_KEPT_ASIDE = 1 << 16


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the CPU without waiting for what the GPU is doing; :func:`on_cpu` gives the tensor again."""
    source = tensor
    leaves_host = tensor.is_cpu and torch.device(device).type not in ("cpu", "meta")
    if leaves_host and tensor.nbytes > _KEPT_ASIDE and not tensor.is_pinned():
        source = tensor.pin_memory()
    copy = source.to(device, non_blocking=True)
    if copy is not tensor:
        copy.source = tensor, tensor._version + copy._version
    return copy


def on_cpu(tensor: Tensor) -> Tensor:
    """Return it on the CPU, without a wait if it came by :func:`to_device` and nothing was written to it since."""
    source, version = getattr(tensor, "source", (None, 0))
    if source is None or source._version + tensor._version != version:
        return tensor.cpu()
    return source


# -- what a forward takes, and what a model is made of ----------------------------------------------------------------


def takes(module: nn.Module, name: str) -> bool:
    """Tell whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def recomputes(module: nn.Module) -> bool:
    """Tell whether layers run again in the backward pass: gradient checkpointing, which transformers renamed."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def cache_argument(module: nn.Module) -> str | None:
    """Return what the forward, and its output, call the cache: transformers renamed it in 5.24. None: it takes none."""
    return next((name for name in ("past_key_values", "cache") if takes(module, name)), None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's repeated blocks, by transformers' names for them; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


# -- packed rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of a batch in one row."""

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), restarting at 0 for each sequence
    # (B, S) on the CPU, the place of each token in the row; valid where the attention mask is 1
    slots: Tensor
    # (T,) on the CPU, the place of each token of the row in the flat (B·S,); of a shared prompt the first sample's
    tokens: Tensor
    real: Tensor  # (B, S) bool on the CPU, where the attention mask is 1
    segments: Tensor  # the row's mask (segments_as_mask)


def pack(sequences: Tensor, attention_mask: Tensor, num_actions: int | None = None) -> PackedRow:
    """Drop the padding, which may be on both sides: (B, S) -> (1, T).

    With ``num_actions`` A, equal prompts (before the last A columns) stand once in the row.
    """
    # Places and sizes are found on the CPU: one wait for a GPU instead of one for each.
    real = on_cpu(attention_mask).bool()
    if not real.any():
        raise ValueError("cannot pack a batch whose attention_mask is 0 everywhere")
    groups = torch.arange(len(real))  # (B,), equal for equal prompts
    width = 0
    if num_actions is not None and num_actions < real.shape[1]:
        width = real.shape[1] - num_actions
        prompts = on_cpu(sequences)[:, :width].masked_fill(~real[:, :width], -1)  # (B, S - A)
        groups = torch.unique(prompts, dim=0, return_inverse=True)[1]
    prompt_lengths = real[:, :width].sum(1)  # (B,)
    response_lengths = real[:, width:].sum(1)  # (B,)
    is_same = groups[:, None] == groups  # (B, B)
    leaders = is_same.to(torch.uint8).argmax(1)  # (B,), the row that brings the prompt
    leads = leaders == torch.arange(len(leaders))  # (B,)
    shares = (is_same.sum(1) > 1) & (prompt_lengths > 0)  # (B,)
    order = torch.arange(len(groups))
    if shares.any():
        order = groups.argsort(stable=True)  # rows of one prompt stand together
    in_row = real.clone()
    in_row[:, :width] &= (leads | ~shares)[:, None]
    slots = (in_row[order].flatten().long().cumsum(0) - 1).view_as(real)[order.argsort()]  # (B, S)
    slots[:, :width] = torch.where(shares[:, None], slots[leaders, :width], slots[:, :width])
    segments: list[tuple[int, int]] = []  # length and parent of each that is not empty
    parent = -1
    columns = (
        column[order].tolist() for column in (prompt_lengths, response_lengths, shares, leads)
    )
    for prompt_length, response_length, is_shared, is_leader in zip(*columns):
        if not is_shared:
            parent = -1
            response_length += prompt_length
        elif is_leader:
            parent = len(segments)
            segments.append((prompt_length, -1))
        if response_length:
            segments.append((response_length, parent))
    lengths, parents = map(list, zip(*segments))
    token_places = torch.arange(real.numel()).view_as(real)[order][in_row[order]]  # (T,)
    positions = position_ids_from_mask(real).flatten()[token_places]
    device = sequences.device
    return PackedRow(
        input_ids=sequences.flatten()[to_device(token_places, device)].unsqueeze(0),  # (1, T)
        position_ids=to_device(positions, device).unsqueeze(0),  # (1, T)
        slots=slots,
        tokens=token_places,
        real=real,
        segments=segments_as_mask(lengths, parents, device),
    )


def piece_of(row: PackedRow, group: SequenceGroup) -> tuple[PackedRow, int]:
    """Return this rank's piece of a row, and where it begins. Pieces are equally long: a segment of its own fills up."""
    plan = plan_of(row.segments, row.input_ids.device)
    length = -(-plan.tokens // group.size)
    filling = length * group.size - plan.tokens
    first = length * group.rank
    ids, positions = (
        pad(values, (0, filling))[:, first : first + length]
        for values in (row.input_ids, row.position_ids)
    )
    fillers = [filling] if filling else []
    segments = segments_as_mask(
        plan.lengths + fillers, plan.parents + [-1] * len(fillers), row.input_ids.device
    )
    segments.plan.group = group
    return replace(row, input_ids=ids, position_ids=positions, segments=segments), first


def position_ids_from_lengths(lengths: list[int], row: Tensor) -> Tensor:
    """Return position ids (1, T) of a row (1, T) that the caller packed."""
    if row.dim() != 2 or row.shape[0] != 1:
        raise ValueError(f"packed_seq_lens needs sequences of shape (1, T), got {tuple(row.shape)}")
    if any(length < 1 for length in lengths) or sum(lengths) != row.shape[1]:
        raise ValueError(
            f"packed_seq_lens {lengths} must be positive and add up to the {row.shape[1]} packed tokens"
        )
    return torch.cat([torch.arange(length, device=row.device) for length in lengths]).unsqueeze(0)


def action_predictors(
    lengths: list[int],
    num_actions: list[int],
    device: torch.device,
    include_last: bool = False,
) -> Tensor:
    """Return the places (K,) in a packed row that predict the last ``num_actions[i]`` tokens of sequence i."""
    has_fitting_lists = isinstance(num_actions, list) and len(num_actions) == len(lengths)
    if not has_fitting_lists or any(
        not 0 <= action_count < length for action_count, length in zip(num_actions, lengths)
    ):
        raise ValueError(
            f"num_actions {num_actions} must be a list of numbers below the packed lengths {lengths}"
        )
    sequence_ends = zip(accumulate(lengths), num_actions)
    return torch.cat(
        [
            torch.arange(end - action_count - 1, end - (not include_last), device=device)
            for end, action_count in sequence_ends
        ]
    )


# -- segments -----------------------------------------------------------------------------------------------------------


class RowPlan:
    """What each layer's attention asks of a packed row's segments, made once: no layer waits for the GPU.

    Args:
        parents: for each segment the earlier one that it continues, -1: none.
    """

    # the ranks that hold the row together; None: this one has it all
    group: SequenceGroup | None = None

    def __init__(self, lengths: list[int], parents: list[int], device: torch.device) -> None:
        self.lengths = lengths
        self.parents = parents
        self.tokens = sum(lengths)
        # keys of each segment, with its parent's
        self.key_counts = [
            length if parent < 0 else lengths[parent] + length
            for length, parent in zip(lengths, parents)
        ]
        # (N + 1,) int32, of queries, and of keys with their parents'
        self.borders = tuple(
            to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)
            for counts in (lengths, self.key_counts)
        )
        self.longest = (max(lengths), max(self.key_counts))
        # places of all keys in the row, segment by segment; None: as they stand
        self.keys: Tensor | None = None
        if self.key_counts != lengths:
            places = torch.arange(self.tokens).split(lengths)
            self.keys = to_device(torch.cat(continued(places, parents, 0)), device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.has_flash = capability >= (8, 0)  # FlashAttention runs on this device
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what was computed for the first layer that asked, such as masks by window and type."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def masks(self, window: int | None, states: Tensor) -> list[Tensor | None]:
        """Return for each segment (new, seen): 0 where a new position sees another, else -inf; None: it is causal."""
        cache_key = (window, states.dtype)
        if cache_key in self._results:
            return self._results[cache_key]
        masks: list[Tensor | None] = []
        for shape in zip(self.lengths, self.key_counts):
            queries, keys = shape
            if queries == keys and (window is None or keys <= window):
                masks.append(None)
                continue
            is_seen = torch.ones(shape, dtype=torch.bool, device=states.device)
            is_seen.tril_(keys - queries)
            if window is not None:
                is_seen.triu_(keys - queries + 1 - window)
            mask = torch.zeros(shape, dtype=states.dtype, device=states.device)
            masks.append(mask.masked_fill_(~is_seen, float("-inf")))
        self._results[cache_key] = masks
        return masks


def segments_as_mask(
    lengths: list[int], parents: list[int] | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a row's segments as its attention mask: (1, 1, 2, N) int64 on the CPU, with the plan for ``device``.

    A segment also sees all of its parent, the earlier segment that it continues; -1: none. Parents have no parents.
    """
    parents = [-1] * len(lengths) if parents is None else parents
    mask = torch.tensor([lengths, parents])[None, None]
    mask.plan = RowPlan(lengths, parents, torch.device(device))
    return mask


def plan_of(mask: Tensor, device: torch.device) -> RowPlan:
    """Return the plan of :func:`segments_as_mask`, also where something has copied the mask."""
    plan = getattr(mask, "plan", None)
    if plan is None:
        return RowPlan(*mask[0, 0].tolist(), device)
    return plan


def continued(segments: Sequence[Tensor], parents: list[int], dim: int) -> list[Tensor]:
    """Put each segment behind its parent; the backward pass sums a prompt's gradients from its responses."""
    return [
        segment if parent < 0 else torch.cat([segments[parent], segment], dim)
        for segment, parent in zip(segments, parents)
    ]


# -- places that are read -----------------------------------------------------------------------------------------------


def distinct_places(places: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the distinct ones (U,) of places (K,), and each read's index (K,) into them; None: K = U."""
    distinct, reads = torch.unique(places, return_inverse=True)
    if len(distinct) == len(places):
        return places, None
    return distinct, reads


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Select (R, …) -> (*index.shape, …).

    The backward pass of an embedding always adds in the same order; that of indexing only in torch's deterministic mode.
    """
    flat_rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return embedding(index, flat_rows).view(*index.shape, *rows.shape[1:])


# -- micro batches: a budget of real tokens, about the same load for all, a prompt once for its rows ------------------


def packed_micro_batches(
    lengths: Sequence[tuple[int, int]],
    spec: MicroBatchSpec,
    prompts: Sequence[Hashable] = (),
    *,
    at_least: int = 0,
) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    By samples: rows of similar length together, longest first, so that a lack of memory shows at once. By tokens: a
    micro batch holds at most the budget in real tokens, and all hold about the same number (``at_least`` is how many
    other ranks need). A row above the budget is alone.

    Rows with equal ``prompts`` stay together, and the prompt's tokens count once; without ``prompts`` each counts. Only
    a group above the budget is cut, into parts that each hold the prompt; by samples, also a group at the border of a
    micro batch.
    """
    rows_by_prompt: dict[Hashable, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -sum(lengths[row])):
        rows_by_prompt.setdefault(prompts[row] if prompts else row, []).append(row)
    prompt_groups = sorted(rows_by_prompt.values(), key=lambda group: -_tokens(group, lengths))
    if spec.unit == "samples":
        order = [row for group in prompt_groups for row in group]
        return [order[start : start + spec.size] for start in range(0, len(order), spec.size)]
    return _within_budget(prompt_groups, lengths, spec.size, at_least)


def _within_budget(
    prompt_groups: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int]],
    budget: int,
    at_least: int,
) -> list[list[int]]:
    """Return micro batches by tokens of rows in groups of one prompt, see :func:`packed_micro_batches`."""
    prompt_parts = []  # rows of one prompt, cut into as few parts as fit the budget
    for group in prompt_groups:
        group_cuts = _fitting(
            [lengths[row][1] for row in group], max(1, budget - lengths[group[0]][0])
        )
        prompt_parts += [[group[row] for row in cut] for cut in group_cuts]
    batches = _fitting([_tokens(part, lengths) for part in prompt_parts], budget, at_least)
    return [[row for part in batch for row in prompt_parts[part]] for batch in batches]


def _tokens(group: Sequence[int], lengths: Sequence[tuple[int, int]]) -> int:
    """Return the tokens of rows with one prompt, which counts once."""
    return lengths[group[0]][0] + sum(lengths[row][1] for row in group)


def _fitting(tokens: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Return few parts of about equal sums within the budget; an item above the budget is a part of its own."""
    if not tokens:
        return []
    fewest_parts = max(1, -(-sum(tokens) // budget), min(at_least, len(tokens)))
    for part_count in count(fewest_parts):  # at the latest every part has one item
        parts = _even(tokens, part_count)
        if all(len(part) == 1 or sum(tokens[item] for item in part) <= budget for part in parts):
            return parts


def _even(tokens: Sequence[int], number: int) -> list[list[int]]:
    """Return ``number`` parts of about equal sums: the largest item goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, part) for part in range(number)]
    for item in sorted(range(len(tokens)), key=lambda item: -tokens[item]):
        load, part = loads[0]
        parts[part].append(item)
        heapq.heapreplace(loads, (load + tokens[item], part))
    return [part for part in parts if part]
