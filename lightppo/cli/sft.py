"""Training on data: ``lightppo sft``, on demonstrations. :func:`train` is under ``rm`` and ``dpo``, too."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import SFTConfig, SupervisedConfig
from lightppo.plugin import BEFORE_IMPORTS


def train(kind: type[SupervisedConfig], argv: Sequence[str] | None, prog: str) -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(argv, prog, kind)

    from lightppo.trainer import run

    def checked() -> None:
        for look in BEFORE_IMPORTS.values():
            look.fn(config, prog)

        # Imported here, because its imports take seconds.
        from lightppo.supervised.trainer import SupervisedTrainer

        SupervisedTrainer.from_config(config).fit()

    run(checked, prog, debug=config.logging.debug)


def main(argv: Sequence[str] | None = None, prog: str = "lightppo sft") -> None:
    """``lightppo sft``."""
    train(SFTConfig, argv, prog)
