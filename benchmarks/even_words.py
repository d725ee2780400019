"""The reward of the benchmark, on both sides: 1 for an even number of words in prompt and response together."""

from __future__ import annotations


def reward_of(words: int) -> float:
    """The reward of a sample with so many words."""
    return float(words % 2 == 0)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """One score per query, which is prompt and response; for ``--reward_fn``."""
    return [reward_of(len(query.split())) for query in queries]
