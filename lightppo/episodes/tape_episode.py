"""One sample's episode on the tape, as plain values: it is written, or it answers."""

from __future__ import annotations

import array
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightppo.episodes.tape import END, Tape
from lightppo.episodes.tape_files import Entry, TapeError, described

_SLOW = 0.01  # seconds


class Reel:
    """The entries of one episode, tried once or more often.

    Entries are written together at the end of a try, as an episode that breaks off is played again, and a write of each
    would cost more than all else. What took long to get, such as a reply of a paid service, is written at once.

    Args:
        key: batch, prompt and sample.
        sample_index: of the sample, as files of samples show it.
        may_answer: else a tape that does not play is written anew, whatever it has.
    """

    def __init__(
        self, tape: Tape, key: tuple[int, int, int], sample_index: int, may_answer: bool = True
    ) -> None:
        self.tape, self.key = tape, key
        self.taken = tape.whole_take(key) if may_answer or tape.plays else None
        self.number = 0  # of the try
        self._next = 0  # entry
        self._waiting: list[Entry] = []  # to be written
        batch, prompt, sample = key
        self._place = {"batch": batch, "prompt": prompt, "sample": sample}
        self._place |= {"sample_index": sample_index, "take": tape.next_take(key)}

    @property
    def answers(self) -> bool:
        """Whether the entries answer; else they are written."""
        return self.taken is not None

    @property
    def tries(self) -> int | None:
        """How often the episode was tried; None: it was not ended."""
        ended = self.taken and self.taken[-1]["kind"] == END
        return self.taken[-1]["tries"] if ended else None

    def begin_try(self, number: int) -> None:
        """The next entries are of this try, from 0."""
        self.number = number

    def write(self, kind: str, turn: int, **content: Any) -> None:
        """Add an entry; at once, if it took ``seconds``."""
        place = {**self._place, "try": self.number, "turn": turn}
        self._waiting.append({"kind": kind, **place, **content})
        if content.get("seconds", 0.0) >= _SLOW:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.tape.write(*waiting)

    def end(self) -> None:
        """The episode has ended; from here on it answers as a whole."""
        if not self.answers:
            self._waiting.append({"kind": END, **self._place, "tries": self.number + 1})
            self.flush()

    def is_next(self, **content: Any) -> bool:
        """Whether the next entry is such a one."""
        following = self.taken[self._next] if self._next < len(self.taken) else {}
        return all(following.get(name) == value for name, value in content.items())

    def read(self, kind: str, turn: int, **content: Any) -> Entry:
        """The next entry, which must be of this kind, turn and content.

        Raises:
            TapeError: it is another one, or there is none.
        """
        asked = {**self._place, "try": self.number, "turn": turn, **content}
        if self._next >= len(self.taken):
            raise self.tape.lacks(described({"kind": kind, **asked}))
        entry = self.taken[self._next]
        wanted = {"kind": kind, "try": self.number, "turn": turn, **content}
        for name, value in wanted.items():
            if json.dumps(entry.get(name)) != json.dumps(value):  # NaN is equal to itself
                raise TapeError(
                    f"the tape goes another way than the run: it has {described(entry)}, with {name} "
                    f"{entry.get(name)!r}, and the run has {value!r} there"
                )
        self._next += 1
        self.tape.answered += 1
        return entry


def packed(numbers: Sequence[float]) -> Mapping[str, str]:
    """Numbers as text, exactly: four bytes each where that is exact, else eight."""
    short = array.array("f", numbers)
    if short.tolist() == list(numbers):
        return {"float32": base64.b64encode(short).decode()}
    return {"float64": base64.b64encode(array.array("d", numbers)).decode()}


def unpacked(text: Mapping[str, str]) -> list[float]:
    """Inverse of :func:`packed`."""
    ((name, data),) = text.items()
    numbers = array.array({"float32": "f", "float64": "d"}[name])
    numbers.frombytes(base64.b64decode(data))
    return numbers.tolist()
