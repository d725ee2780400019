"""Evaluation: answers to held-out prompts are scored at times of their own; ``lightppo eval`` trains nothing."""

from lightppo.option import register_section
from lightppo.plugin import (
    COMMANDS,
    NOTES,
    Command,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("evaluation", "lightppo.config.evaluation_options:EvaluationConfig")
    register_section(
        "answers", "lightppo.config.evaluation_options:AnswersConfig", adds_to="evaluation"
    )
    register_section("held_out", "lightppo.config.evaluation_options:HeldOutConfig", adds_to="data")
    NOTES.register("evaluation", Entry("lightppo.config.evaluation_options:notes"))
    COMMANDS.register(
        "eval",
        Command("lightppo.cli.eval_command:main", about="score its answers to held-out prompts"),
    )
