"""``lightppo ppo``: train with PPO; ``lightppo eval``: score the answers of a model, as ``--val_only``."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.config import EvaluationConfig, parse_args
from lightppo.config.cli import section_help
from lightppo.plugin import public


def main(arguments: Sequence[str] | None = None, prog: str = "lightppo ppo") -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(arguments, prog)

    from lightppo.distributed.rank_main import importing
    from lightppo.trainer import run

    def train() -> None:
        # After the options are checked: these imports take a second.
        from lightppo.episodes import tape_files
        from lightppo.preflight import before_imports

        tape_files.look(config, prog)
        before_imports.look(config, prog)

        # After options, files and folders are checked: this import takes seconds.
        with importing():
            trainer_class = public("PPOTrainer")
        trainer_class.from_config(config).fit()

    run(train, prog, debug=config.logging.debug)


def evaluate(arguments: Sequence[str], prog: str = "lightppo eval") -> None:
    """Score a model's answers to ``--eval_data``, and train nothing."""
    if "-h" in arguments or ("--help" in arguments and "all" not in arguments):
        usage = f"{prog} --pretrain MODEL --eval_data FILE --reward_fn FILE.py [flags]"
        return print(section_help(usage, EvaluationConfig) + "--help all shows all options.")
    return main([*arguments, "--val_only"], prog)
