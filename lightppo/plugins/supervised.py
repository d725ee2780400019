"""Training on data: ``lightppo sft``, ``rm`` and ``dpo``, and the PTX loss of PPO."""

from lightppo.option import register_section
from lightppo.plugin import (
    COMMANDS,
    METRICS,
    PUBLIC,
    Command,
)

SUPERVISED = {  # names in train/ and, but for those of the optimizer, in eval/
    "loss": "mean loss per labelled token, or per pair",
    "tokens": "labelled tokens in the step",
    "epoch": "passes over the data before this one",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "skipped": "1 if the step was skipped because a gradient or the loss was not finite",
    "overflow": "1 if the step was skipped because the loss scale of --fp16 was too large",
    "loss_scale": "loss scale of --fp16 after the step",
}
PAIRS = {  # the same, of training on pairs
    "pairs": "pairs in the step",
    "accuracy": "share of pairs whose chosen answer has the higher reward",
    "margin": "mean reward difference, chosen minus rejected; with `dpo` the reward is β·log(π / π_reference)",
    "chosen_reward": "mean reward of chosen answers",
    "rejected_reward": "mean reward of rejected answers",
    "chosen_log_prob": "mean log prob of chosen answers; per token for `ipo`",
    "rejected_log_prob": "mean log prob of rejected answers; per token for `ipo`",
}

_COMMANDS = (
    ("sft", "train it on demonstrations", "SFTConfig"),
    ("rm", "train a reward model on pairs of answers", "RMConfig"),
    ("dpo", "train it on pairs of answers, without a reward model", "DPOConfig"),
)


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    METRICS.register(
        "train",
        {name: f"`lightppo sft`, `rm`, `dpo`: {meaning}" for name, meaning in SUPERVISED.items()},
    )
    METRICS.register(
        "train",
        {
            name: f"`lightppo rm`, `dpo`, also in eval/: {meaning}"
            for name, meaning in PAIRS.items()
        },
    )
    METRICS.register(
        "eval",
        {
            "loss": "`lightppo sft`, `rm`, `dpo`: mean loss per labelled token, or per pair, on --eval_dataset",
            "tokens": "labelled tokens in --eval_dataset",
        },
    )
    register_section(
        "pretraining_data",
        "lightppo.config.supervised_options:PretrainingDataConfig",
        adds_to="data",
    )
    register_section(
        "pretraining", "lightppo.config.supervised_options:PretrainingConfig", adds_to="algorithm"
    )
    for name, about, config in _COMMANDS:
        function = f"lightppo.cli.{name}:main"
        options = f"lightppo.config.supervised_options:{config}"
        COMMANDS.register(name, Command(function, about=about, config=options))
    PUBLIC.update(
        {
            "SFTTrainer": "lightppo.supervised.script_trainers",
            "RewardModelTrainer": "lightppo.supervised.script_trainers",
            "DPOTrainer": "lightppo.supervised.script_trainers",
            "GPTLMLoss": "lightppo.algorithms.lm_loss",
            "SFTDataset": "lightppo.supervised.script_datasets",
            "RewardDataset": "lightppo.supervised.script_datasets",
        }
    )
