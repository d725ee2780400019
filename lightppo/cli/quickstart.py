"""``lightppo quickstart``: the example of that name, which the wheel brings along."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import tyro

PACKAGE = Path(__file__).parents[1]


def main(argv: Sequence[str], prog: str) -> None:
    """Make a model and a task in ``runs/quickstart``, train it with PPO, and show what changed."""
    examples = PACKAGE / "examples"
    if not examples.is_dir():
        examples = PACKAGE.parent / "examples"  # of a checkout
    run = runpy.run_path(str(examples / "quickstart" / "run.py"))["main"]
    tyro.cli(run, args=list(argv), prog=prog, use_underscores=True)
