"""What engines sample for episodes: turns, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightppo.data.records import Prompt, Rollout


@dataclass(frozen=True)
class Turn:
    """A request for the next tokens of a conversation."""

    prompt: Prompt  # whose sample it is; with sample_index it names the sample's random numbers
    sample_index: int
    token_ids: list[int]  # all that came before, prompt included
    max_new_tokens: int
    number: int = 0  # of the turn in its conversation
    sampled: int = 0  # tokens of the conversation that were sampled before: its random numbers go on behind them
    final: bool = False  # no turn follows it; False: one may


class TurnSource(Protocol):
    """Where an engine takes turns from, and brings them to when they have ended.

    An engine for episodes has a method ``generate_turns(turns, sampling)``: it samples the turns of a source until no
    more come, and takes new ones while others decode.
    """

    longest: int  # most tokens of a conversation, prompt included
    left: int  # conversations that have not ended: so many turns may wait or decode at a time

    def take(self, wait: bool) -> list[Turn] | None:
        """Return turns that can be sampled now; None: no more will come. ``wait``: at least one, if more will come."""

    def ended(self, turn: Turn, rollout: Rollout) -> None:
        """Take a turn and its new tokens; ``rollout.prompt`` is the turn's, its response the new tokens alone."""

    def goes_on(self, turn: Turn) -> bool:
        """Tell whether another turn may follow one that the engine has sampled."""
