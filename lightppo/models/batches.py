"""Batches for a model: how sequences lie in a forward, padded or packed; micro batches; copies that do not wait for a GPU.

A packed row is a batch without its padding: it has segments, and prompts that several samples share.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from lightppo.config.rules import MicroBatchSpec
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
    kept: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """(A,), the positions that are read."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[self.columns]

    def inputs(self, module: nn.Module, reads_mask: bool = False) -> dict[str, Any]:
        """Keyword arguments for a Hugging Face forward without a cache.

        ``reads_mask``: the model's forward itself reads the mask, as the load-balancing loss does.
        """
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if takes(module, "position_ids"):
            inputs["position_ids"] = position_ids_from_mask(self.mask)
        return inputs

    def reading(self) -> AbstractContextManager:
        """What is around a forward of which only ``places`` are read."""
        return nullcontext()

    def at_places(self, values: Tensor) -> Tensor:
        """(B, S, ·) -> (B, A, ·)."""
        return values[:, self.columns]

    def of_real(self, at_places: Tensor) -> Tensor:
        """(B, A, ·) -> (K, ·)."""
        return at_places.flatten(0, 1).index_select(0, self.kept)

    def returned(self, at_places: Tensor) -> Tensor:
        """What a caller gets of (B, A, ·)."""
        return at_places

    def scatter(self, values: Tensor) -> Tensor:
        """(K,) -> (B, A), 0 elsewhere."""
        return (
            values.new_zeros(self.real.numel()).index_copy(0, self.kept, values).view_as(self.real)
        )


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
        """A forward of which ``columns`` are read where ``real`` (B, A), on the CPU.

        ``num_actions``: prompts, which may be shared, end before as many last columns; None: none is shared.
        """
        device = sequences.device
        kept = to_device(real.flatten().nonzero()[:, 0], device)
        return Batch(sequences, attention_mask, columns, to_device(real, device), kept)

    def split(
        self,
        lengths: Sequence[tuple[int, int]],
        spec: MicroBatchSpec,
        ranks: Ranks,
        prompts: Sequence[Hashable] = (),
    ) -> list[list[int]]:
        """Row numbers of each micro batch, see :func:`micro_batches`; ``prompts`` may be shared. Collective."""
        return micro_batches(lengths, spec)


PADDED = PaddedLayout()


def layout_of_all(models: Iterable[Any]) -> PaddedLayout:
    """The layout of micro batches that all of these models run; what has none, as None, runs any."""
    layouts = [model.layout for model in models if hasattr(model, "layout")]
    return min(layouts, key=attrgetter("packs", "shares_prompts"), default=PADDED)


def micro_batches(lengths: Sequence[tuple[int, int]], spec: MicroBatchSpec) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    Rows of similar length are together, longest first, so that a lack of memory shows at once. By tokens, rows ×
    (longest prompt + longest response) stays within the budget; a row above the budget is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
    if spec.unit == "samples":
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    parts: list[list[int]] = []
    width = (0, 0)
    for i in order:
        wider = (max(width[0], lengths[i][0]), max(width[1], lengths[i][1]))
        if parts and (len(parts[-1]) + 1) * sum(wider) <= spec.size:
            parts[-1].append(i)
            width = wider
        else:
            parts.append([i])
            width = lengths[i]
    return parts


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """(first, end) of consecutive parts of the prompts, so that positions (with padding) plus calls cost least."""
    least, cut = [0], [0]  # of the first k prompts: their cost, and where the last part begins
    for end in range(1, len(lengths) + 1):
        best = (float("inf"), 0)
        longest = 0
        for first in range(end - 1, -1, -1):
            longest = max(longest, lengths[first])
            best = min(best, (least[first] + call_cost + longest * (end - first), first))
        least.append(best[0])
        cut.append(best[1])
    parts = []
    end = len(lengths)
    while end:
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Position of each real token among the real tokens of its row, (B, S) -> (B, S); left padding gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def check_num_actions(num_actions: int, sequence_length: int) -> None:
    """ValueError unless every action has a position before it to predict it."""
    if not isinstance(num_actions, int) or not 0 < num_actions < sequence_length:
        raise ValueError(
            f"num_actions = {num_actions} must be between 1 and {sequence_length - 1} (S - 1)"
        )


def refuse_ring(ring_attn_group: Any) -> None:
    """Raise ConfigError for a script that splits sequences over ranks."""
    if ring_attn_group is not None:
        raise ConfigError("ring_attn_group: sequences are not split over ranks here; leave it out")


def real_actions(attention_mask: Tensor, num_actions: int) -> Tensor:
    """(B, S) -> (B, A) bool: the action token and the token that predicts it are both real."""
    real = attention_mask.bool()
    return real[:, -num_actions:] & real[:, -num_actions - 1 : -1]


# bytes: the driver of a GPU puts so many aside before it copies, and need not wait
_KEPT_ASIDE = 1 << 16


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the CPU without waiting for what the GPU is doing; :func:`on_cpu` gives ``x`` again."""
    moved = _pinned(tensor, device).to(device, non_blocking=True)
    if moved is not tensor:
        moved.source = tensor, tensor._version + moved._version
    return moved


def _pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor from which the driver can copy to the device at its leisure; small ones it keeps aside by itself."""
    travels = tensor.device.type == "cpu" and torch.device(device).type not in ("cpu", "meta")
    if travels and tensor.nbytes > _KEPT_ASIDE and not tensor.is_pinned():
        return tensor.pin_memory()
    return tensor


def on_cpu(tensor: Tensor) -> Tensor:
    """On the CPU, without a wait for a GPU if it came by :func:`to_device` and nothing was written to it since."""
    source, version = getattr(tensor, "source", (None, 0))
    if source is None or source._version + tensor._version != version:
        return tensor.cpu()
    return source


# -- what a forward takes, and what a model is made of ----------------------------------------------------------------


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def recomputes(module: nn.Module) -> bool:
    """Whether layers run again in the backward pass: gradient checkpointing, a word that transformers has renamed."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def cache_argument(module: nn.Module) -> str | None:
    """What the module's forward, and its output, call the cache: transformers renamed it in 5.24. None: it takes none."""
    return next((name for name in ("past_key_values", "cache") if takes(module, name)), None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, by transformers' names for them; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


# -- packed rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of a batch in one row."""

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), restarting at 0 for each sequence
    # (B, S) on the CPU, the place of each token in the row; valid only where the attention mask is
    # 1
    slots: Tensor
    segments: Tensor  # the row's mask (segments_as_mask)


def pack(sequences: Tensor, attention_mask: Tensor) -> PackedRow:
    """Drop the padding, which may be on both sides: (B, S) -> (1, T)."""
    # Places and sizes are found on the CPU: one wait for a GPU instead of one for each.
    real = on_cpu(attention_mask).bool()
    lengths = [n for n in real.sum(1).tolist() if n]
    if not lengths:
        raise ValueError("cannot pack a batch whose attention_mask is 0 everywhere")
    slots = (real.flatten().long().cumsum(0) - 1).view_as(real)  # (B, S)
    return _row(sequences, real.flatten().nonzero()[:, 0], real, slots, lengths)


def _row(
    sequences: Tensor,
    kept: Tensor,
    real: Tensor,
    slots: Tensor,
    lengths: list[int],
    parents: list[int] | None = None,
) -> PackedRow:
    """The row of the places ``kept`` (T,) of the flat batch; all but ``sequences`` is on the CPU."""
    device = sequences.device
    positions = position_ids_from_mask(real).flatten()[kept]
    return PackedRow(
        input_ids=sequences.flatten()[to_device(kept, device)].unsqueeze(0),  # (1, T)
        position_ids=to_device(positions, device).unsqueeze(0),  # (1, T)
        slots=slots,
        segments=segments_as_mask(lengths, parents, device),
    )


def position_ids_from_lengths(lengths: list[int], row: Tensor) -> Tensor:
    """Position ids (1, T) of a row (1, T) that the caller packed."""
    if row.dim() != 2 or row.shape[0] != 1:
        raise ValueError(f"packed_seq_lens needs sequences of shape (1, T), got {tuple(row.shape)}")
    if any(n < 1 for n in lengths) or sum(lengths) != row.shape[1]:
        raise ValueError(
            f"packed_seq_lens {lengths} must be positive and add up to the {row.shape[1]} packed tokens"
        )
    return torch.cat([torch.arange(n, device=row.device) for n in lengths]).unsqueeze(0)


def action_predictors(
    lengths: list[int],
    num_actions: list[int],
    device: torch.device,
    include_last: bool = False,
) -> Tensor:
    """Places (K,) in a packed row that predict the last ``num_actions[i]`` tokens of sequence i."""
    fit = isinstance(num_actions, list) and len(num_actions) == len(lengths)
    if not fit or any(not 0 <= n < length for n, length in zip(num_actions, lengths)):
        raise ValueError(
            f"num_actions {num_actions} must be a list of numbers below the packed lengths {lengths}"
        )
    ends = zip(accumulate(lengths), num_actions)
    return torch.cat(
        [torch.arange(end - n - 1, end - (not include_last), device=device) for end, n in ends]
    )


# -- segments -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RowPlan:
    """What each layer's attention asks of a packed row's segments, made once: no layer waits for the GPU."""

    tokens: int
    lengths: list[int]
    parents: list[int]  # the earlier segment that each continues, -1: none
    borders: tuple[Tensor, Tensor]  # (N + 1,) int32, of queries, and of keys with their parents'
    longest: tuple[int, int]  # the most queries and keys of a segment
    keys: Tensor | None  # places of all keys in the row, segment by segment; None: as they stand
    has_flash: bool  # FlashAttention runs on this device
    seen: list[int]  # keys of each segment, with its parent's
    # What layers compute only once, such as masks by window and type.
    kept: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: list[int],
        parents: list[int],
        device: torch.device,
    ) -> RowPlan:
        seen = [n if p < 0 else lengths[p] + n for n, p in zip(lengths, parents)]
        borders = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (lengths, seen)]
        keys = None
        if seen != lengths:
            keys = to_device(
                torch.cat(continued(torch.arange(sum(lengths)).split(lengths), parents, 0)), device
            )
        return cls(
            tokens=sum(lengths),
            lengths=lengths,
            parents=parents,
            borders=(to_device(borders[0], device), to_device(borders[1], device)),
            longest=(max(lengths), max(seen)),
            keys=keys,
            seen=seen,
            has_flash=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0),
        )

    def masks(self, window: int | None, like: Tensor) -> list[Tensor | None]:
        """For each segment (new, seen): 0 where a new position sees another, else -inf; None: it is causal."""
        key = (window, like.dtype)
        if key not in self.kept:
            self.kept[key] = [
                _near(new, seen, window, like) for new, seen in zip(self.lengths, self.seen)
            ]
        return self.kept[key]

    def flash_options(self) -> dict[str, Any]:
        """transformers' ``FlashAttentionKwargs``."""
        (cu_q, cu_k), (max_q, max_k) = self.borders, self.longest
        return {
            "cu_seq_lens_q": cu_q,
            "cu_seq_lens_k": cu_k,
            "max_length_q": max_q,
            "max_length_k": max_k,
        }


def _near(new: int, total: int, window: int | None, like: Tensor) -> Tensor | None:
    if new == total and (window is None or total <= window):
        return None
    seen = torch.ones(new, total, dtype=torch.bool, device=like.device).tril_(total - new)
    if window is not None:
        seen.triu_(total - new + 1 - window)
    return torch.zeros(new, total, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, float("-inf")
    )


def segments_as_mask(
    lengths: list[int],
    parents: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A packed row's segments as its attention mask: (1, 1, 2, N) int64 on the CPU, with the plan for ``device``.

    A segment also sees all of its parent, the earlier segment that it continues; -1: none. Parents have no parents.
    """
    parents = [-1] * len(lengths) if parents is None else parents
    mask = torch.tensor([lengths, parents])[None, None]
    mask.plan = RowPlan.of(lengths, parents, torch.device(device))
    return mask


def plan_of(mask: Tensor, device: torch.device) -> RowPlan:
    """The plan of :func:`segments_as_mask`, also where something has copied the mask."""
    plan = getattr(mask, "plan", None)
    if plan is None:
        return RowPlan.of(*mask[0, 0].tolist(), device)
    return plan


def continued(
    segments: Sequence[Tensor],
    parents: list[int],
    dim: int,
) -> list[Tensor]:
    """Each segment after its parent. The backward pass sums the gradients that a prompt gets from its responses."""
    return [
        segment if parent < 0 else torch.cat([segments[parent], segment], dim)
        for segment, parent in zip(segments, parents)
    ]


# -- prompts that several samples share -------------------------------------------------------------------------------


def pack_shared(
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
) -> PackedRow | None:
    """:func:`pack`, but equal prompts (before the last A columns) stand once in the row. None: all differ."""
    split = sequences.shape[1] - num_actions
    if len(sequences) < 2 or split < 1:
        return None
    real = on_cpu(attention_mask).bool()
    prompts = on_cpu(sequences)[:, :split].masked_fill(~real[:, :split], -1)  # (B, S - A)
    group = torch.unique(prompts, dim=0, return_inverse=True)[1]  # (B,)
    of_prompt, of_response = real[:, :split].sum(1), real[:, split:].sum(1)  # (B,)
    shared = (group.bincount()[group] > 1) & (of_prompt > 0)  # (B,)
    if not bool(shared.any()):
        return None
    order = group.argsort(stable=True)  # rows of one prompt stand together
    is_first = group[order].diff(prepend=group.new_tensor([-1])) != 0
    leader = order[is_first][group]  # (B,), the row that brings the prompt
    leads = leader == torch.arange(len(leader))  # (B,)
    kept = real.clone()
    kept[:, :split] &= (leads | ~shared)[:, None]
    slots = (kept[order].flatten().long().cumsum(0) - 1).view_as(real)[order.argsort()]  # (B, S)
    slots[:, :split] = torch.where(shared[:, None], slots[leader, :split], slots[:, :split])
    # (length, parent) of each segment that is not empty. Rows of one prompt stand together.
    segments: list[tuple[int, int]] = []
    parent = -1
    of_rows = (x[order].tolist() for x in (of_prompt, of_response, shared, leads))
    for prompt, response, is_shared, brings_it in zip(*of_rows):
        if is_shared and brings_it:
            parent = len(segments)
            segments.append((prompt, -1))
        if new := response if is_shared else prompt + response:
            segments.append((new, parent if is_shared else -1))
    in_order = torch.arange(real.numel()).view_as(real)[order][kept[order]]  # (T,)
    lengths, parents = map(list, zip(*segments))
    return _row(sequences, in_order, real, slots, lengths, parents)


def distinct_places(places: Tensor) -> tuple[Tensor, Tensor | None]:
    """Places (K,) to read -> the distinct places (U,), and each read's index (K,) into them; None: K = U."""
    different, reads = torch.unique(places, return_inverse=True)
    if len(different) == len(places):
        return (places, None)
    return (different, reads)


def read(at_places: Tensor, reads: Tensor | None) -> Tensor:
    """(U, …) at the distinct places -> (K, …), one per read; ``reads`` from :func:`distinct_places`."""
    if reads is None:
        return at_places
    # The backward pass of an embedding always adds in the same order; that of indexing only in torch's deterministic
    # mode.
    return embedding(reads, at_places.reshape(len(at_places), -1)).view(
        len(reads), *at_places.shape[1:]
    )


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
    of_prompt: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i])):
        of_prompt.setdefault(prompts[i] if prompts else i, []).append(i)
    groups = sorted(of_prompt.values(), key=lambda group: -_tokens(group, lengths))
    if spec.unit == "samples":
        order = [i for group in groups for i in group]
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    units = []  # rows of one prompt, cut into as few parts as fit the budget
    for group in groups:
        cuts = _fitting([lengths[i][1] for i in group], max(1, spec.size - lengths[group[0]][0]))
        units += [[group[i] for i in cut] for cut in cuts]
    parts = _fitting([_tokens(unit, lengths) for unit in units], spec.size, at_least)
    return [[i for unit in part for i in units[unit]] for part in parts]


def _tokens(group: Sequence[int], lengths: Sequence[tuple[int, int]]) -> int:
    """Tokens of rows with one prompt, which counts once."""
    return lengths[group[0]][0] + sum(lengths[i][1] for i in group)


def _fitting(tokens: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Few parts of about equal sums within the budget; an item above the budget is a part of its own."""
    if not tokens:
        return []
    least = max(1, -(-sum(tokens) // budget), min(at_least, len(tokens)))
    # They fit at the latest when every part has one item.
    tries = (_even(tokens, n) for n in count(least))
    return next(
        t
        for t in tries
        if all(len(part) == 1 or sum(tokens[i] for i in part) <= budget for part in t)
    )


def _even(tokens: Sequence[int], number: int) -> list[list[int]]:
    """``number`` parts of about equal sums: the largest remaining item goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, part) for part in range(number)]
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + tokens[i], part))
    return [part for part in parts if part]
