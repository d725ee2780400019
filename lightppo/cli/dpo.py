"""``lightppo dpo``: training on pairs of answers, without a reward model."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.cli.sft import train
from lightppo.config.supervised_options import DPOConfig


def main(argv: Sequence[str] | None = None, prog: str = "lightppo dpo") -> None:
    """``lightppo dpo``."""
    train(DPOConfig, argv, prog)
