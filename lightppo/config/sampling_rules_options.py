"""Options of penalties, of words that are never sampled, and of stop strings; docs/rollouts.md."""

from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class SamplingRulesConfig(Section, adds_to="rollout"):
    """What may be sampled, and what ends a response."""

    repetition_penalty: float = option(
        1.0, "Divide the logits of tokens that already occurred by this; 1: off.", gt=0
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens that occur in the response; 0: off.", ge=-2, le=2
    )
    frequency_penalty: float = option(
        0.0, "The same for each occurrence of a token in the response.", ge=-2, le=2
    )
    stop: tuple[str, ...] = option(
        (), "Strings or special tokens that end a response and are removed from its text."
    )
    bad_words: tuple[str, ...] = option((), "Words that are never sampled.")

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if "" in options.stop:
            yield "--stop has an empty text: leave it out"
        if not all(map(str.strip, options.bad_words)):
            yield "--bad_words has an empty text: leave it out"
