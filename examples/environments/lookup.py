"""A look-up that cannot be answered without its tool: which number lies in a drawer?

    --env examples/environments/lookup.py:Drawers --reward_source environment

The model asks ``?07.``, is told ``58.`` and answers ``58.``. The numbers in the drawers change with every row, so that
an answer without a question is right once in a hundred. There is no chat template: turns end with a full stop
(``--stop .``), and what the environment says stands behind them as it is.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from lightppo import Step

CHARACTERS = "0123456789?=."


class Drawers:
    """A hundred drawers; ``drawer`` and ``label`` of a row are the one asked for and what lies in it."""

    def reset(self, drawer: str, label: str, **row: object) -> None:
        self.drawer, self.number = drawer, label

    def step(self, text: str) -> Step:
        """A question is answered; anything else is the model's answer, and ends the episode."""
        text = text.removesuffix(".")
        if text.startswith("?"):
            return Step(f"{self._look(text[1:])}.")
        return Step(None, reward=float(text == self.number), done=True)

    def _look(self, drawer: str) -> str:
        """What lies in a drawer; in one that is not asked for lies another number, always the same."""
        if drawer == self.drawer:
            return self.number
        digest = hashlib.sha256(f"{self.number}/{drawer}".encode()).digest()
        return f"{digest[0] % 100:02d}"


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """``{"input", "drawer", "label"}``, with drawers and numbers drawn at random."""
    rng = random.Random(seed)
    drawn = [(f"{rng.randrange(100):02d}", f"{rng.randrange(100):02d}") for _ in range(count)]
    return [{"input": f"{drawer}=", "drawer": drawer, "label": label} for drawer, label in drawn]


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """Conversations to copy, ``{"input", "output"}``; six in ten have a mistake, such as an answer without a question."""
    rng = random.Random(seed)
    return [
        {"input": row["input"], "output": _conversation(row["drawer"], row["label"], rng)}
        for row in rows(count, seed + 1)
    ]


def _conversation(drawer: str, number: str, rng: random.Random) -> str:
    other = f"{rng.randrange(100):02d}"
    mistake = rng.random()
    if mistake < 0.3:  # it does not ask
        return f"{other}."
    if mistake < 0.6:  # it does not believe what it is told
        return f"?{drawer}.{number}.{other}."
    return f"?{drawer}.{number}.{number}."


def main(output_dir: Path, seed: int = 1, head_dim: int = 16) -> None:
    """Make model, tokenizer and data for ``make quickstart ENV=lookup``.

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
    write_task(output_dir, data, CHARACTERS, seed, head_dim=head_dim)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, use_underscores=True)
