"""Training on data: ``lightppo sft`` on demonstrations, ``rm`` and ``dpo`` on pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig, SupervisedConfig


def sft(argv: Sequence[str] | None = None, prog: str = "lightppo sft") -> None:
    """Train a language model on demonstrations."""
    _train(SFTConfig, argv, prog)


def rm(argv: Sequence[str] | None = None, prog: str = "lightppo rm") -> None:
    """Train a reward model on pairs of a chosen and a rejected answer."""
    _train(RMConfig, argv, prog)


def dpo(argv: Sequence[str] | None = None, prog: str = "lightppo dpo") -> None:
    """Train a language model on pairs of answers, without a reward model."""
    _train(DPOConfig, argv, prog)


def _train(kind: type[SupervisedConfig], argv: Sequence[str] | None, prog: str) -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(argv, prog, kind)

    from lightppo.trainer import run

    def train() -> None:
        # After the options are checked: this import takes a second.
        from lightppo.preflight import before_imports

        before_imports.look(config, prog)

        # Imported here, because its imports take seconds.
        from lightppo.supervised.trainer import SupervisedTrainer

        SupervisedTrainer.from_config(config).fit()

    run(train, prog, debug=config.logging.debug)
