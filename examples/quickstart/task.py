"""The quickstart's task: two-digit addition as text, ``07+35=`` → ``042``.

There are 100 x 100 prompts. One in ten is held out by a hash of its two numbers, so that the split is the same on
every machine and no held-out prompt, nor the same sum the other way round, is ever in supervised or PPO data.

The demonstrations come from a careless pupil: six in ten answers have one wrong digit. A model that copies them well is
right about half of the time when sampled: 1 - 0.6 / 3 = 0.8 for each digit, 0.8³ = 0.51 for all three. That is what PPO
has to mend, from the reward alone.
"""

from __future__ import annotations

import hashlib
import random
import re

CHARACTERS = "0123456789+="
HELD_OUT_PERCENT = 10
ANSWER_DIGITS = 3
WRONG_SHARE = 0.6  # of the demonstrations

_PROMPT = re.compile(r"(\d\d)\+(\d\d)=")


def format_prompt(a: int, b: int) -> str:
    """``(7, 35)`` → ``"07+35="``."""
    return f"{a:02d}+{b:02d}="


def format_answer(total: int) -> str:
    """``42`` → ``"042"``: the same number of digits always, as in the prompts."""
    return f"{total:0{ANSWER_DIGITS}d}"


def solve(prompt: str) -> str:
    """The right answer to a prompt.

    Raises:
        ValueError: not a prompt of this task.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(
            f"{prompt!r} is not a prompt of this task; one looks like {format_prompt(7, 35)!r}"
        )
    return format_answer(int(match[1]) + int(match[2]))


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair is for evaluation only; ``(a, b)`` and ``(b, a)`` go together."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def split_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs for training, and all held-out pairs, each in order."""
    train: list[tuple[int, int]] = []
    held_out: list[tuple[int, int]] = []
    for a in range(100):
        for b in range(100):
            (held_out if is_held_out(a, b) else train).append((a, b))
    return train, held_out


def imperfect_answer(a: int, b: int, rng: random.Random) -> str:
    """A demonstration: the sum, with probability ``WRONG_SHARE`` with another digit at one place."""
    digits = list(format_answer(a + b))
    if rng.random() < WRONG_SHARE:
        place = rng.randrange(ANSWER_DIGITS)
        digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def demonstrations(seed: int) -> list[dict[str, str]]:
    """One demonstration of every training prompt, ``{"input", "output"}``, shuffled."""
    rng = random.Random(seed)
    train, _ = split_pairs()
    rows = [{"input": format_prompt(a, b), "output": imperfect_answer(a, b, rng)} for a, b in train]
    rng.shuffle(rows)
    return rows


def labelled_prompts(pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Prompts with the right answer, ``{"input", "label"}``."""
    return [{"input": format_prompt(a, b), "label": format_answer(a + b)} for a, b in pairs]
