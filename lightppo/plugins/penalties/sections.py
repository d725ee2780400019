"""Options of penalties and of words that are never sampled; docs/rollouts.md."""

from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class PenaltyConfig(Section, adds_to="rollout"):
    """Changes of the logits before the temperature."""

    repetition_penalty: float = option(
        1.0, "Divide the logits of tokens that already occurred by this; 1: off.", gt=0
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens that occur in the response; 0: off.", ge=-2, le=2
    )
    frequency_penalty: float = option(
        0.0, "The same for each occurrence of a token in the response.", ge=-2, le=2
    )
    bad_words: tuple[str, ...] = option((), "Words that are never sampled.")

    @staticmethod
    def problems(o: Any) -> Iterator[str]:
        if not all(map(str.strip, o.bad_words)):
            yield "--bad_words has an empty text: leave it out"
