"""Guess a number: the fewer guesses, the more reward.

    --env examples/environments/guess.py:Guess --env_reward turns --use_dense_reward --reward_source environment

``Guess`` has a tool, for models with a chat template; a row has the number in its column ``n``,
from 1 to 99.

``Between`` is the same game for a model of single characters, from 1 to 31: told ``01-31=``, the
model says ``20.``, is told ``21-31=``, and so on. Turns end with a full stop (``--stop .``). The
demonstrations play by the rules but guess near the lower end, which takes 6.7 guesses on average;
always the middle takes 4.2. ``make quickstart ENV=guess`` trains it.
"""

from __future__ import annotations

import random
from pathlib import Path

from lightppo import Reply, Step, ToolError

COST = 0.1  # of a guess
CHARACTERS = "0123456789-=."
LAST = 31  # of Between
_MOST_SHOWN = 9  # guesses of a demonstration
_POSITIONS = 128  # of the model: a game is longer than a sum


class Guess:
    """One number and the guesses at it."""

    def reset(self, n: int, **row: object) -> str:
        self.number = n
        return "Guess a number from 1 to 99."

    def guess(self, x: int) -> Reply:
        """Guess the number.

        Args:
            x: your number.
        """
        if not 0 < x < 100:
            raise ToolError("it is between 1 and 99")
        if x == self.number:
            return Reply("right", done=True, reward=1.0)
        return Reply("too low" if x < self.number else "too high", reward=-COST)


class Between:
    """The number ``label`` of a row, and between which numbers it is by the guesses so far."""

    def reset(self, label: str, **row: object) -> None:
        self.number, self.low, self.high = int(label), 1, LAST

    def step(self, text: str) -> Step:
        """A guess. What is no number tells nothing, and costs as much."""
        guess = text.removesuffix(".")
        number = int(guess) if guess.isascii() and guess.isdigit() else None
        if number == self.number:
            return Step(None, reward=1.0, done=True, metrics={"accuracy": 1.0})
        if number is not None and number < self.number:
            self.low = max(self.low, number + 1)
        elif number is not None:
            self.high = min(self.high, number - 1)
        return Step(interval(self.low, self.high), reward=-COST, metrics={"accuracy": 0.0})


def interval(low: int, high: int) -> str:
    """``(21, 31)`` → ``"21-31="``."""
    return f"{low:02d}-{high:02d}="


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """``{"input", "label"}`` with numbers drawn at random."""
    rng = random.Random(seed)
    drawn = [f"{rng.randint(1, LAST):02d}" for _ in range(count)]
    return [{"input": interval(1, LAST), "label": label} for label in drawn]


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """Games to copy, ``{"input", "output"}``, by a pupil who guesses near the lower end."""
    rng = random.Random(seed)
    return [
        {"input": row["input"], "output": _game(row["label"], rng)} for row in rows(count, seed + 1)
    ]


def _game(label: str, rng: random.Random) -> str:
    game = Between()
    game.reset(label)
    said, told = "", ""
    for _ in range(_MOST_SHOWN):
        guess = f"{game.low + int((game.high - game.low + 1) * rng.random() ** 3):02d}."
        said += told + guess
        step = game.step(guess)
        if step.done:
            break
        told = step.observation
    return said


def main(output_dir: Path, seed: int = 1, head_dim: int = 16) -> None:
    """Make model, tokenizer and data for ``make quickstart ENV=guess``.

    Args:
        output_dir: folder to write to; made if missing.
        seed: of the initial weights and of the data.
        head_dim: width of each of the model's four attention heads.
    """
    from task import write_task

    data = {
        "sft": demonstrations(8000, seed),
        "prompts": rows(4000, seed + 2),
        "eval": rows(512, seed + 3),
    }
    write_task(output_dir, data, CHARACTERS, seed, head_dim=head_dim, positions=_POSITIONS)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, use_underscores=True)
