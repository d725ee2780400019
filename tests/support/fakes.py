"""Stand-ins for a strategy, a rollout engine and a reward source, and rollouts made by hand. No process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import UserError
from lightppo.rewards.reward_source import RewardOutput
from lightppo.rollout.engine import SamplingParams

T = TypeVar("T")
MEETING_SECONDS = 60  # a rank that never comes to a collective fails the test instead of hanging it


class FakeStrategy:
    """Collectives of one rank alone, or of several ranks that are threads; see :func:`on_ranks`."""

    zero_stage = 0
    sequence_group = None
    together = nullcontext()

    def __init__(
        self, rank: int = 0, world_size: int = 1, exchange: Callable[[int, Any], list] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.printed: list[str] = []
        self.collectives = 0
        self.exchange = exchange or (lambda rank, value: [value])

    @property
    def data_parallel(self) -> FakeStrategy:
        return self

    def has_finite_weights(self, model: Any) -> bool:
        return True

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.collectives += 1
        return self.exchange(self.rank, obj)

    def gather_object(self, obj: Any) -> list[Any] | None:
        found = self.all_gather_object(obj)
        return found if self.rank == 0 else None

    def exchange_objects(self, parts: Mapping[int, Any]) -> list[Any]:
        return [part[self.rank] for part in self.all_gather_object(parts) if self.rank in part]

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        parts = self.all_gather_object(data)
        if isinstance(data, dict):
            return {key: _reduced([part[key] for part in parts], op) for key in data}
        return _reduced(parts, op)

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.all_gather_object(data))

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.all_gather_object(obj)[src]

    def same_count(self, count: int) -> int:
        return max(self.all_gather_object(count))

    def barrier(self) -> None:
        self.all_gather_object(None)

    def get_rank(self) -> int:
        return self.rank

    def is_rank_0(self) -> bool:
        return self.rank == 0

    def on_rank_0(self, action: Callable[[], Any], what: str) -> Any:
        result = error = None
        try:
            result = action() if self.is_rank_0() else None
        except UserError as user_error:
            error = user_error
        error, result = self.broadcast_object((error, result))
        if error is not None:
            raise error
        return result

    def print(self, *parts: Any) -> None:
        if self.is_rank_0():
            self.printed.append(" ".join(map(str, parts)))


def _reduced(parts: Sequence[Any], op: str) -> Any:
    if isinstance(parts[0], torch.Tensor):
        stacked = torch.stack(list(parts))
        reducers = {
            "sum": stacked.sum,
            "mean": stacked.mean,
            "max": stacked.amax,
            "min": stacked.amin,
        }
        return reducers[op](0)
    return {
        "sum": sum(parts),
        "mean": sum(parts) / len(parts),
        "max": max(parts),
        "min": min(parts),
    }[op]


def on_ranks(world_size: int, fn: Callable[[FakeStrategy], T]) -> list[T]:
    """What ``fn(strategy)`` returns on each rank. The ranks are threads, every collective waits for all of them.

    Raises:
        what ``fn`` raised on a rank; BrokenBarrierError where a rank left others waiting in a collective.
    """
    meeting, slots = threading.Barrier(world_size), [None] * world_size
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def exchange(rank: int, value: Any) -> list:
        slots[rank] = value
        meeting.wait(MEETING_SECONDS)
        values = list(slots)
        meeting.wait(MEETING_SECONDS)
        return values

    def run(rank: int) -> None:
        try:
            results[rank] = fn(FakeStrategy(rank, world_size, exchange))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in [*own, *errors]:
        raise error
    return results


def make_rollout(
    prompt_ids: Sequence[int] = (5,),
    response_ids: Sequence[int] = (6, 7),
    *,
    sample_index: int = 0,
    **fields: Any,
) -> Rollout:
    """A finished rollout; ``index``, ``data_source`` and ``label`` go into its prompt."""
    own = {name: fields.pop(name) for name in ("index", "data_source", "label") if name in fields}
    prompt = Prompt(f"prompt {own.get('index', 0)}", list(prompt_ids), **own)
    return Rollout(
        prompt,
        sample_index,
        list(response_ids),
        fields.pop("response_text", f"answer {sample_index}"),
        fields.pop("finish_reason", "stop"),
        **fields,
    )


class FakeEngine:
    """Answers to prompt i, sample j with response ids ``[10 + i, 10 + j]``; keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], SamplingParams]] = []

    def generate(self, prompts: list[Prompt], sampling: SamplingParams) -> list[Rollout]:
        self.calls.append(([p.index for p in prompts], sampling))
        return [
            Rollout(p, j, [10 + p.index, 10 + j], f"answer {p.index}.{j}", "stop")
            for p in prompts
            for j in range(sampling.n)
        ]

    def sync_weights(self, actor: Any) -> None:
        pass

    def close(self) -> None:
        pass


class FixedReward:
    """A source that says the same of whatever it is asked."""

    def __init__(self, name: str, output: RewardOutput | None) -> None:
        self.name = name
        self.output = output

    def score(self, rollouts: Sequence[Rollout]) -> RewardOutput | None:
        return self.output


class FakeReward:
    """Scores of a table {(prompt index, sample index): score}; samples that are not in it stay unscored."""

    name = "table"

    def __init__(self, table: dict[tuple[int, int], float]) -> None:
        self.table = table

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        return RewardOutput([self.table.get((r.prompt.index, r.sample_index)) for r in rollouts])
