"""``lightppo dpo``: training on pairs of answers, without a reward model."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.commands.sft import train
from lightppo.config.sft_rm_dpo import DPOConfig


def main(argv: Sequence[str] | None = None, prog: str = "lightppo dpo") -> None:
    """``lightppo dpo``."""
    train(DPOConfig, argv, prog)
