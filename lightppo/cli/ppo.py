"""``lightppo ppo``: train with PPO."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.config import parse_args
from lightppo.plugin import BEFORE_IMPORTS, public


def main(argv: Sequence[str] | None = None, prog: str = "lightppo ppo") -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(argv, prog)

    from lightppo.trainer import run

    def train() -> None:
        for look in BEFORE_IMPORTS.values():
            look.fn(config, prog)

        # After options, files and folders are checked: this import takes seconds.
        public("PPOTrainer").from_config(config).fit()

    run(train, prog, debug=config.logging.debug)
