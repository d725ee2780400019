"""Training on data: ``lightppo sft`` on demonstrations, ``rm`` and ``dpo`` on pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig, SupervisedConfig


def sft(arguments: Sequence[str] | None = None, prog: str = "lightppo sft") -> None:
    """Train a language model on demonstrations."""
    _train(SFTConfig, arguments, prog)


def rm(arguments: Sequence[str] | None = None, prog: str = "lightppo rm") -> None:
    """Train a reward model on pairs of a chosen and a rejected answer."""
    _train(RMConfig, arguments, prog)


def dpo(arguments: Sequence[str] | None = None, prog: str = "lightppo dpo") -> None:
    """Train a language model on pairs of answers, without a reward model."""
    _train(DPOConfig, arguments, prog)


def _train(
    config_class: type[SupervisedConfig], arguments: Sequence[str] | None, prog: str
) -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(arguments, prog, config_class)

    from lightppo.distributed.rank_main import importing
    from lightppo.trainer import run

    def train() -> None:
        # After the options are checked: this import takes a second.
        from lightppo.preflight import before_imports

        before_imports.look(config, prog)

        # Imported here, because its imports take seconds.
        with importing():
            from lightppo.supervised.trainer import SupervisedTrainer

        SupervisedTrainer.from_config(config).fit()

    run(train, prog, debug=config.logging.debug)
