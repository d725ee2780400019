"""``lightppo rm``: train a reward model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.cli.sft import train
from lightppo.config.supervised_options import RMConfig


def main(argv: Sequence[str] | None = None, prog: str = "lightppo rm") -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    train(RMConfig, argv, prog)
