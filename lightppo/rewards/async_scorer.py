"""Scores of finished samples while the engine still generates the others (``--async_rewards``)."""

from __future__ import annotations

import queue
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, replace

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.processes.user_calls import in_daemon_thread
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardSource,
    check_output,
    join_outputs,
    write_output,
)


@dataclass(eq=False)
class AsyncScorer:
    """Score finished samples in threads, part by part, while the engine still generates the others.

    The source is called once per part, so it must judge each sample by itself, and with more than one worker it must be
    thread-safe. It must not act on all ranks together, as reward models do: the ranks' threads would meet in any order,
    and would mix with the collectives of generation.
    """

    source: RewardSource
    max_workers: int = 1
    _: KW_ONLY
    timeout: float | None = None  # seconds that collect waits

    def __post_init__(self) -> None:
        if getattr(self.source, "needs_all_ranks", False):
            raise ValueError(
                f"--async_rewards: {self.source.name} is or has a reward model, which all ranks must call together: "
                "leave --async_rewards out"
            )
        if self.max_workers < 1 or (self.timeout is not None and not self.timeout > 0):
            raise ValueError(
                f"max_workers must be ≥ 1 and timeout > 0, got {self.max_workers} and {self.timeout}"
            )
        self._parts: list[tuple[list[Rollout], Future[RewardOutput]]] = []
        self._waiting: queue.SimpleQueue[tuple[list[Rollout], Future[RewardOutput]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[Future[None]] = []
        self._ended = False

    def with_source(self, source: RewardSource) -> AsyncScorer:
        """Return the same for another source; this one ends."""
        self.close()
        return replace(self, source=source)

    def submit(self, rollouts: list[Rollout]) -> None:
        """Have samples scored and return at once; :meth:`collect` raises their errors."""
        if self._ended:
            raise RuntimeError("this AsyncScorer has ended")
        self._parts.append((list(rollouts), Future()))
        self._waiting.put(self._parts[-1])
        if len(self._threads) < self.max_workers:
            self._threads.append(in_daemon_thread(self._work))

    def collect(self) -> RewardOutput:
        """Wait for all samples submitted since the last call; write their scores into them and return them in order.

        If the source fails on a part, or the time limit has passed, it raises and no sample changes.
        """
        parts = self._parts
        self._parts = []
        late = wait([future for _, future in parts], self.timeout).not_done
        everything = [rollout for rollouts, _ in parts for rollout in rollouts]
        if late:
            self.close()
            left = sum(len(rollouts) for rollouts, future in parts if future in late)
            raise RewardError(
                f"{self.source.name}: {left} of {len(everything)} samples were not scored {self.timeout:g} s after the "
                "end of generation"
            )
        errors = [error for _, future in parts if (error := future.exception()) is not None]
        if errors:
            # The worst error is raised.
            raise min(errors, key=lambda error: isinstance(error, NonFiniteRewardError))
        output = join_outputs([future.result() for _, future in parts])
        write_output(output, everything)
        return output

    def close(self) -> None:
        """End the threads once they have scored their present part; nothing more can be submitted."""
        self._ended = True
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (part := self._waiting.get()) is not None:
            rollouts, future = part
            try:
                if self._ended:
                    raise RewardError(f"{self.source.name}: scoring was ended before these samples")
                future.set_result(
                    check_output(self.source.score(rollouts), rollouts, self.source.name)
                )
            except BaseException as error:  # SystemExit too: later parts are still to be scored
                future.set_exception(error)
