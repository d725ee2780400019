"""``lightppo rm``: train a reward model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.commands.sft import train
from lightppo.config.sft_rm_dpo import RMConfig


def main(argv: Sequence[str] | None = None, prog: str = "lightppo rm") -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    train(RMConfig, argv, prog)
