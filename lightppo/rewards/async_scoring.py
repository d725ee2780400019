"""Scoring in the background: the first samples are scored while the engine still generates the others."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.source import RewardOutput, RewardSource, check_output, join_outputs, write_output


@dataclass
class _Part:
    """Samples that were submitted together, and what came of them."""

    rollouts: list[Rollout]
    output: RewardOutput | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class AsyncScorer:
    """Scores finished samples in threads of its own, part by part.

    ``submit`` what is finished, as often as something is; ``collect`` waits for all of it. The source is called once
    per part, so it must judge each sample by itself: one that compares all samples of the rank sees only those of a
    part. With more than one worker it must stand several calls at a time.

    Args:
        source: makes the scores. It must not act on all ranks together, as reward models do: the threads of different
            ranks would meet in any order, and with the collectives of generation.
        max_workers: parts scored at a time.
        timeout: seconds that ``collect`` waits at most; ``None``: as long as it takes.

    Raises:
        ValueError: such a source, or a number out of range.
    """

    def __init__(self, source: RewardSource, max_workers: int = 1, *, timeout: float | None = None) -> None:
        if getattr(source, "needs_all_ranks", False):
            raise ValueError(
                f"--async_rewards: {source.name} is or has a reward model, which all ranks must call together and in "
                "the order of generation and training: leave --async_rewards out"
            )
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
        self.source = source
        self.timeout = timeout
        self._max_workers = max_workers
        self._parts: list[_Part] = []
        self._waiting: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = False

    def submit(self, rollouts: list[Rollout]) -> None:
        """Has samples scored; returns at once. What goes wrong is raised by :meth:`collect`.

        Raises:
            RuntimeError: after :meth:`close`, or after a time-out.
        """
        if self._ended:
            raise RuntimeError("this AsyncScorer has ended")
        part = _Part(list(rollouts))
        self._parts.append(part)
        self._waiting.put(part)
        if len(self._threads) < self._max_workers:
            # daemons: a source that hangs must not keep a failed run alive
            thread = threading.Thread(target=self._work, name=f"async-reward-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def collect(self) -> RewardOutput:
        """Waits for everything submitted since the last call, and writes the scores into the samples.

        Returns:
            One answer about all samples, in the order in which they were submitted.

        Raises:
            RewardError: the source failed on a part (the first one submitted), or the time limit. No sample is changed
                then. Whatever else the source raises comes as it is.
        """
        parts, self._parts = self._parts, []
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        for part in parts:
            if not part.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                self.close()
                left = sum(len(p.rollouts) for p in parts if not p.done.is_set())
                raise RewardError(
                    f"{self.source.name}: {left} of {sum(len(p.rollouts) for p in parts)} samples were not scored "
                    f"{self.timeout:g} s after the end of generation"
                )
        for part in parts:
            if part.error is not None:
                raise part.error
        output = join_outputs([part.output for part in parts if part.output is not None])
        write_output(output, [rollout for part in parts for rollout in part.rollouts])
        return output

    def close(self) -> None:
        """Ends the threads once they have scored what they are at; nothing more can be submitted."""
        self._ended = True
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (part := self._waiting.get()) is not None:
            if self._ended:
                part.error = RewardError(f"{self.source.name}: scoring was ended before these samples")
            else:
                try:
                    part.output = check_output(self.source.score(part.rollouts), part.rollouts, self.source.name)
                except BaseException as error:  # SystemExit of a user's function too: it would end this thread unseen
                    part.error = error
            part.done.set()
