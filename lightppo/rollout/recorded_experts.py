"""``--router_replay rollout`` with the ``hf`` engine: the experts that decoding chose, by request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightppo.models.router_replay import ReplayPass, RouterReplay


class ExpertRecorder:
    """The experts that the requests of one ``generate`` went to, while they decode."""

    def __init__(self, replay: RouterReplay) -> None:
        self._replay = replay
        self._newest: Tensor | None = None  # (B, length, L, k) of the newest forward
        self._prompts: dict[int, Tensor] = {}  # request → (P, L, k)
        self._steps: dict[int, list[Tensor]] = defaultdict(list)  # request → (1, L, k) each

    @contextmanager
    def forward(self, rows: int, length: int) -> Iterator[None]:
        """Record a forward of so many rows and columns."""
        with self._replay.entered(ReplayPass()) as replay_pass:
            yield
        choices = self._replay.recorded(replay_pass, rows * length)
        self._newest = choices.view(rows, length, *choices.shape[1:])

    def add_prompts(self, groups: Sequence[tuple[list[int], list[int]]]) -> None:
        """Note that the newest forward was of these prompts, padded on the left: each one's ids and requests."""
        for choices, (ids, numbers) in zip(self._newest, groups):
            for number in numbers:
                self._prompts[number] = choices[len(choices) - len(ids) :]

    def add_steps(self, numbers: Sequence[int]) -> None:
        """Note that the newest forward was of one token of each of these requests."""
        for choices, number in zip(self._newest, numbers):
            self._steps[number].append(choices)

    def take(self, number: int, response_length: int) -> Tensor:
        """Return the experts of a request that has ended, (N - 1, L, k) of its N tokens, and forget it."""
        steps = self._steps.pop(number, [])[: response_length - 1]
        return torch.cat([self._prompts.pop(number), *steps]).cpu()
