"""Evaluation: answers to held-out prompts are scored at times of their own; ``lightppo eval`` trains nothing."""

from lightppo.option import register_section
from lightppo.plugin import (
    CALLBACKS,
    CHECKS,
    COMMANDS,
    METRICS,
    NOTES,
    PREPARATIONS,
    CallbackEntry,
    Check,
    Command,
)
from lightppo.table import Entry

_METRICS = {
    "accuracy": "mean acc (or accuracy) of the source; without, the share of scores ≥ --eval_correct_threshold",
    "reward": "mean score",
    "response_length": "mean tokens per response",
    "truncated": "share of responses truncated by --generate_max_len",
    "samples": "samples drawn",
    "unscored": "samples that the reward source left unscored; only if there are any",
    "mean@<n>": "mean over prompts of the mean score of their n samples (--eval_n_samples)",
    "pass@<k>": "chance that at least one of k samples is correct (Chen et al. 2021, eq. 1), k = 1, 2, 4, …, n",
    "best@<n>": "mean over prompts of the best score of their n samples",
    "worst@<n>": "mean over prompts of the worst score of their n samples",
    "std@<n>": "mean over prompts of the standard deviation of their n scores",
    "maj@<n>": "share of prompts whose most frequent answer is correct; the source gives answers as `pred`",
    "<name>": "mean of an extra metric of the reward source; it cannot replace the names above",
    "<source>/<metric>": "any of the above for one data source, if the evaluation data has several",
}


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
    CHECKS.register("held_out", Check("lightppo.trainer.held_out:read_prompts", when="data"))
    CHECKS.register("judge", Check("lightppo.trainer.held_out:build_judge", when="rewards"))
    CHECKS.register("evaluator", Check("lightppo.trainer.held_out:build_evaluator", when="engine"))
    PREPARATIONS.register("only_reads", Entry("lightppo.trainer.held_out:let_it_read"))
    CALLBACKS.register(
        "evaluation", CallbackEntry("lightppo.trainer.evaluation_schedule:Evaluation")
    )
    METRICS.register("eval", _METRICS, about="held-out prompts of `--eval_data`")
    METRICS.register("perf", {"time_eval": "seconds of an evaluation, in the evaluation's row"})
