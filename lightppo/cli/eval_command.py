"""``lightppo eval``: as ``lightppo ppo --val_only``."""

from __future__ import annotations

from collections.abc import Sequence

from lightppo.cli import ppo
from lightppo.config.evaluation_options import EvaluationConfig
from lightppo.config.help_page import section_help


def main(argv: Sequence[str], prog: str = "lightppo eval") -> None:
    """Score a model's answers to ``--eval_data``, and train nothing."""
    if "-h" in argv or ("--help" in argv and "all" not in argv):
        usage = f"{prog} --pretrain MODEL --eval_data FILE --reward_fn FILE.py [flags]"
        return print(section_help(usage, EvaluationConfig) + "--help all shows all options.")
    return ppo.main([*argv, "--val_only"], prog)
