"""An engine that says what a script says, for episodes whose model must do something particular."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from lightppo.data.records import Prompt, Rollout
from lightppo.rollout.engine import Capabilities, SamplingParams, Turn, TurnSource

Script = Callable[[Turn], str]


class Puppet:
    """A :class:`lightppo.rollout.engine.RolloutEngine`; ``script`` gives the text of a turn, with its end.

    A text that is longer than the turn may be is cut, as a model's is. Every turn that was asked for is in ``asked``.
    """

    capabilities: ClassVar = Capabilities()
    last_stats: ClassVar[dict[str, float]] = {}

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.asked: list[Turn] = []
        self.sampling: list[SamplingParams] = []
        self.closed = 0

    def generate_turns(self, turns: TurnSource, sampling: SamplingParams) -> None:
        self.sampling.append(sampling)
        while (came := turns.take(wait=True)) is not None:
            for turn in came:
                self.asked.append(turn)
                turns.ended(turn, self._said(turn, sampling))

    def _said(self, turn: Turn, sampling: SamplingParams) -> Rollout:
        ids = self.tokenizer(self.script(turn), add_special_tokens=False).input_ids
        ends = {*sampling.stop_token_ids, self.tokenizer.eos_token_id}
        stops = next((i for i, id in enumerate(ids) if id in ends), None)
        ids = ids if stops is None else ids[: stops + 1]
        cut = ids[: turn.max_new_tokens]
        reason = "stop" if stops is not None and len(cut) == len(ids) else "length"
        log_probs = [-0.5] * len(cut)
        return Rollout(turn.prompt, turn.sample_index, cut, "", reason, log_probs)

    def sync_weights(self, actor: Any) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def prompt_of(question: str, tokenizer: Any, index: int = 0, **columns: Any) -> Prompt:
    """A row whose prompt is one message of the user."""
    messages = [{"role": "user", "content": question}]
    ids = tokenizer(question, add_special_tokens=False).input_ids
    return Prompt(question, ids, index=index, extra=columns, messages=messages)
