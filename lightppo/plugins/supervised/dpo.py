"""``lightppo dpo``: training on pairs of answers, without a reward model."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.plugins.supervised.sections import DPOConfig
from lightppo.plugins.supervised.sft import train


def main(argv: Sequence[str] | None = None, prog: str = "lightppo dpo") -> None:
    """``lightppo dpo``."""
    train(DPOConfig, argv, prog)
