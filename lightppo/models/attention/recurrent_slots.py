"""Recurrent states in decoding slots: each row's state moves with it, a prompt's goes to all its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from lightppo.rollout.slots import SlotLayer, Span

KINDS = ("conv_states", "recurrent_states")


class RecurrentSlots(LinearAttentionLayer):
    """States of one layer, (slots, …); transformers' code writes the next ones into those of the rows in use."""

    is_croppable = False
    is_sliding = False
    keeps_tokens = False

    def __init__(self, span: Span, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.span = span
        self.buffers: list[Tensor] = []  # no keys and values
        self._pools: dict[tuple[str, int], Tensor] = {}

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """Adds the states of some prompts, as :meth:`lightppo.rollout.slots.SlotCache.append`."""
        new = slice(self.span.rows, self.span.rows + len(rows))
        for kind in KINDS:
            for i, states in getattr(source, kind).items():
                if states is None:  # short convolutions have no other state, experts have none
                    continue
                if (kind, i) not in self._pools:
                    self._pools[kind, i] = states.new_zeros(slots, *states.shape[1:])
                    getattr(self, f"is_{kind}_initialized")[i] = True
                index = torch.tensor(rows, device=states.device)
                self._pools[kind, i][new] = states.index_select(0, index)
        self.has_previous_state |= source.has_previous_state
        self.conv_kernel_size |= source.conv_kernel_size

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies some rows over others."""
        for pool in self._pools.values():
            index = torch.tensor([sources, targets], device=pool.device)
            pool[index[1]] = pool[index[0]]

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """The same states in ``slots`` rows."""
        for key, old in self._pools.items():
            if slots != len(old):
                self._pools[key] = old.new_zeros(slots, *old.shape[1:])
                self._pools[key][: self.span.rows] = old[: self.span.rows]

    def see_rows(self) -> None:
        """What transformers' code sees are the rows in use."""
        for (kind, i), pool in self._pools.items():
            getattr(self, kind)[i] = pool[: self.span.rows]


class AttendingRecurrentSlots(RecurrentSlots, SlotLayer):
    """Of a layer that also attends: keys and values, too."""

    def __init__(self, span: Span, number_of_states: int = 1) -> None:
        SlotLayer.__init__(self, span)
        RecurrentSlots.__init__(self, span, number_of_states)

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """Both."""
        SlotLayer.append(self, source, rows, width, slots, columns)
        RecurrentSlots.append(self, source, rows, width, slots, columns)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Both."""
        SlotLayer.move_rows(self, sources, targets)
        RecurrentSlots.move_rows(self, sources, targets)

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """Both."""
        SlotLayer.make_room(self, slots, columns, first, end, in_place)
        RecurrentSlots.make_room(self, slots, columns, first, end, in_place)


def slots_of(layer: Any, span: Span) -> RecurrentSlots:
    """In place of a layer of transformers' cache."""
    attends = isinstance(layer, LinearAttentionAndFullAttentionLayer)
    return (AttendingRecurrentSlots if attends else RecurrentSlots)(span, layer.number_of_states)
