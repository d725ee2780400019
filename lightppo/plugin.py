"""The tables that packages of others add to, and how these are found. docs/extending.md has examples.

A plugin is a package with a function ``register()`` that adds entries to these tables; it is an entry point of the
group ``lightppo.plugins``. An entry names its object as ``"module:name"``: registering imports nothing of what it adds.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from lightppo.errors import UserError
from lightppo.metric_names import METRICS as METRICS
from lightppo.redaction import without_secrets
from lightppo.table import Entry, Table, load
from lightppo.user_code import error_text, is_users_fault

GROUP = "lightppo.plugins"


@dataclass(frozen=True)
class Command(Entry):
    """A command ``lightppo NAME``; the function takes its arguments, and its name in messages."""

    about: str = ""  # what it does, on one line of ``lightppo --help``
    config: str = ""  # "module:Class" of its options, an OptionSet, if it trains


@dataclass(frozen=True)
class Check(Entry):
    """A function of the run that is being built, :class:`lightppo.trainer.building.Building`; its lines are printed."""

    # It is called when the options are known, when the tokenizer is there, before folders are written to, before rewards
    # are made, when data are read, when models are in place, when the rollout engine is there.
    when: Literal["options", "tokenizer", "folders", "rewards", "data", "models", "engine"] = (
        "options"
    )


@dataclass(frozen=True)
class CallbackEntry(Entry):
    """A callback of every run, see :class:`lightppo.callbacks.Callback`."""

    after_yours: bool = False  # it sees what the callbacks of the user add


@dataclass(frozen=True)
class TokenWeight(Entry):
    """A factor of each token's policy loss; the loss is multiplied by the product of all of them.

    The entry's function takes the config. It returns None where the options ask for no such weight, or a function
    ``(experience, *, log_probs, entropy, all_reduce_sum, **_)`` → (B, A) or (B, 1), without gradient:

    - before the update, called once a rollout with all samples of this rank, on every rank, even one without samples
      (B = 0); ``log_probs`` are of the policy before the update, ``all_reduce_sum`` sums over ranks;
    - ``in_training``, called for each micro batch; ``log_probs`` are of the policy in training.
    """

    in_training: bool = False
    # It reads the entropy. Before the update, that takes a pass over the rollout; in training the entropy is always
    # there.
    needs_entropy: bool = False
    # It reads experience.rollout_log_probs, which some engines do not give.
    needs_rollout_log_probs: bool = False
    flag: str = ""  # the option that asks for it, for messages


@dataclass(frozen=True)
class RewardEntry(Entry):
    """A name in ``--reward_source``: its function makes a source of a :class:`lightppo.rewards.RewardRequest`."""

    flag: str = ""  # the option without which there is nothing to make it of: reward_fn
    # A function of a Prompt, "module:name" or itself: ValueError for a row that the source cannot judge.
    check_prompt: str | Callable | None = None
    # whether what it answers comes from outside the run, and another call may give something else
    outside: Literal["no", "perhaps", "yes"] = "no"


COMMANDS: Table[Command] = Table(
    "command",
    {
        "ppo": Command(
            "lightppo.cli.ppo:main",
            about="train a language model with PPO or a relative",
            config="lightppo.config.options:PPOConfig",
        ),
        "quickstart": Command(
            "lightppo.cli.quickstart:main",
            about="make a small model and a task, train with PPO, show what changed",
        ),
        "eval": Command("lightppo.cli.ppo:evaluate", about="score its answers to held-out prompts"),
        "push": Command("lightppo.logging.hub:main", about="upload its model to the hub"),
        "serve-vllm": Command("lightppo.cli.serve_vllm:main", about="serve rollouts by vLLM"),
        "serve-reward": Command("lightppo.cli.serve_reward:main", about="serve rewards over HTTP"),
        "memory": Command(
            "lightppo.cli.memory_command:main",
            about="what a run needs of GPUs and hosts, before anything loads",
        ),
        "report": Command(
            "lightppo.logging.report_page:main",
            about="show what runs did: tables, and a page with curves and samples",
        ),
        "watch": Command(
            "lightppo.cli.watch:main", about="look at a run in the terminal while it goes on"
        ),
        "replay": Command(
            "lightppo.cli.replay:main", about="do a step of a run again, look at it, debug it"
        ),
        "diff": Command(
            "lightppo.cli.diff:main", about="name the first number in which two runs differ"
        ),
        "audit": Command(
            "lightppo.cli.audit_command:main",
            about="check the numbers that any trainer wrote, by a formula",
        ),
        "what-if": Command(
            "lightppo.experiments.what_if:main",
            about="fork a run at a step with an option changed, and say what that does",
        ),
        "sweep": Command(
            "lightppo.experiments.sweep:main",
            about="run seeds and settings, and compare them with intervals",
        ),
        "sft": Command(
            "lightppo.cli.supervised:sft",
            about="train it on demonstrations",
            config="lightppo.config.supervised_options:SFTConfig",
        ),
        "rm": Command(
            "lightppo.cli.supervised:rm",
            about="train a reward model on pairs of answers",
            config="lightppo.config.supervised_options:RMConfig",
        ),
        "dpo": Command(
            "lightppo.cli.supervised:dpo",
            about="train it on pairs of answers, without a reward model",
            config="lightppo.config.supervised_options:DPOConfig",
        ),
        "data": Command(
            "lightppo.cli.data:main",
            about="look at rows as a model will see them; convert data sets",
        ),
        "chat": Command(
            "lightppo.cli.chat:main", about="talk to a model, in a terminal or through a pipe"
        ),
        "convert": Command(
            "lightppo.cli.convert:convert",
            about="write a training checkpoint as a Hugging Face folder",
        ),
        "merge": Command(
            "lightppo.cli.convert:merge", about="write a LoRA adapter and its base as one model"
        ),
        "tiny-model": Command(
            "lightppo.cli.tiny_model:main", about="make a small random model to try things with"
        ),
        "translate": Command(
            "lightppo.cli.translate:main", about="write a command of another trainer as one of ours"
        ),
    },
    kind=Command,
)
"""Commands ``lightppo NAME``."""

PUBLIC: dict[str, str] = {
    "PPOConfig": "lightppo.config",
    "PPOTrainer": "lightppo.trainer.ppo_trainer",
    "Callback": "lightppo.callbacks",
    "Experience": "lightppo.experience.experience",
    "ReplayBuffer": "lightppo.experience.batching",
    "ExperienceMaker": "lightppo.experience.maker",
    "Actor": "lightppo.models.actor",
    "Critic": "lightppo.models.critic",
    "RewardModel": "lightppo.models.critic",
    "DeepspeedStrategy": "lightppo.distributed.deepspeed",
    "Prompt": "lightppo.data.records",
    "Rollout": "lightppo.data.records",
    "PromptDataset": "lightppo.data.datasets",
    "RolloutBatchSampler": "lightppo.trainer.prompts",
    "HFRolloutEngine": "lightppo.rollout.hf",
    "SamplingParams": "lightppo.rollout.engine",
    "PolicyLoss": "lightppo.algorithms.losses",
    "ValueLoss": "lightppo.algorithms.losses",
    "estimator": "lightppo.algorithms.entries",
    "policy_loss": "lightppo.algorithms.entries",
    "FixedKLController": "lightppo.algorithms.kl",
    "AdaptiveKLController": "lightppo.algorithms.kl",
    "NaiveExperienceMaker": "lightppo.trainer.naive_experience_maker",
    "NaiveReplayBuffer": "lightppo.compat.script_names",
    "ActorLanguage": "lightppo.compat.script_names",
    "DistributedSampler": "lightppo.compat.script_names",
    "masked_mean": "lightppo.algorithms.masking",
    "unpacking_samples": "lightppo.compat.script_names",
    "compute_approx_kl": "lightppo.compat.script_names",
    "get_llm_for_sequence_regression": "lightppo.compat.script_names",
    "get_strategy": "lightppo.compat.script_names",
    "get_tokenizer": "lightppo.models.loading",
    "SFTTrainer": "lightppo.supervised.script_trainers",
    "RewardModelTrainer": "lightppo.supervised.script_trainers",
    "DPOTrainer": "lightppo.supervised.script_trainers",
    "GPTLMLoss": "lightppo.algorithms.losses",
    "SFTDataset": "lightppo.data.examples",
    "RewardDataset": "lightppo.supervised.pairs",
    "blending_datasets": "lightppo.data.blends",
    "EnvFailure": "lightppo.episodes.env_failures",
    "Reply": "lightppo.episodes.env_failures",
    "Step": "lightppo.episodes.env_failures",
    "ToolError": "lightppo.episodes.env_failures",
    "run_program": "lightppo.episodes.agents",
}
"""What ``from lightppo import NAME`` imports, by name: the module. A package may add names."""

ENGINES: Table = Table(
    "--rollout_engine",
    {
        "hf": Entry("lightppo.rollout.hf:build"),
        "vllm": Entry("lightppo.rollout.vllm.colocated:VLLMRolloutEngine"),
        "vllm_server": Entry("lightppo.rollout.vllm.servers:VLLMServerRolloutEngine"),
    },
    files=True,
)
"""Rollout engines. An entry's function makes a :class:`lightppo.rollout.engine.RolloutEngine`, on all ranks together,
of the config, the strategy, the actor and the tokenizer; it has the actor's present weights."""

PREPARATIONS: Table = Table("preparation of a model")
"""What changes a loaded model, in place and in this order, before it goes to its engine: functions
``(model, role, config, device)``. ``model.hf_model`` is the Hugging Face model; roles are in
:mod:`lightppo.models.wrapper`. They come after lightppo's own changes, which options ask for."""

LOSS_TERMS: Table = Table("term of the actor's loss", taken=("pretraining",))
"""Terms of the actor's loss that other packages add, under the names of their states. An entry's function gets the
:class:`lightppo.trainer.building.Building` whose prompts are read, and returns a
:class:`lightppo.trainer.training_losses.LossTerm`, or None where the options ask for no such term."""

TOKEN_WEIGHTS: Table[TokenWeight] = Table("token weight", kind=TokenWeight)
"""Factors of each token's policy loss that other packages add, beside the corrections and rejections that are shipped."""

CALLBACKS: Table[CallbackEntry] = Table("callback", kind=CallbackEntry)
"""Further callbacks of every run, after lightppo's own in ``lightppo/trainer/run_callbacks.py``: an entry's function
makes one of a trainer, or returns None where it has nothing to do."""

REWARDS: Table[RewardEntry] = Table(
    "--reward_source",
    {
        "function": RewardEntry(
            "lightppo.rewards.function:function_reward", flag="reward_fn", outside="perhaps"
        ),
        "model": RewardEntry("lightppo.rewards.reward_model:model_reward", flag="reward_pretrain"),
        "math": RewardEntry(
            "lightppo.verifiers.math:math_reward",
            check_prompt="lightppo.verifiers.math:check_prompt",
        ),
        "format": RewardEntry("lightppo.verifiers.formats:format_reward"),
        "code": RewardEntry(
            "lightppo.verifiers.programs:code_reward",
            check_prompt="lightppo.verifiers.code:find_tests",
        ),
        "server": RewardEntry(
            "lightppo.rewards.remote:server_reward", flag="remote_rm_url", outside="yes"
        ),
        "environment": RewardEntry("lightppo.episodes.rewards:environment_reward"),
    },
    kind=RewardEntry,
)
"""Sources of rewards, by the names that ``--reward_source``, ``--reward_routes`` and ``--eval_reward_source`` take."""

REWARD_STYLES: Table = Table(
    "--reward_fn_style",
    {
        "queries": Entry("lightppo.rewards.reward_styles:QUERIES"),
        "verl": Entry("lightppo.rewards.reward_styles:VERL"),
        "verl_batch": Entry("lightppo.rewards.reward_styles:VERL_BATCH"),
        "trl": Entry("lightppo.rewards.reward_styles:TRL"),
        "areal": Entry("lightppo.rewards.reward_styles:AREAL"),
    },
)
"""Conventions of reward functions: an entry names a :class:`lightppo.rewards.reward_styles.Style`."""


FILES: Table = Table("keeping of files", {"files": Entry("lightppo.files:Files")})
"""How files of a run are read, written, sealed and published. An entry's function makes :class:`lightppo.files.Files`;
those that were registered last are in use."""

CHECKS: Table[Check] = Table("check", kind=Check)
"""What else looks at a run while it is built, after lightppo's own checks in ``lightppo/trainer/start_checks.py``; an
error of the user's ends it before anything takes long."""


def trained_by() -> dict[str, Any]:
    """Return the options of each command that trains: its name → a :class:`lightppo.config.options.OptionSet`."""
    return {name: load(command.config) for name, command in COMMANDS.items() if command.config}


def public(name: str) -> Any:
    """Import what ``from lightppo import NAME`` gives."""
    return getattr(importlib.import_module(PUBLIC[name]), name)


class PluginError(UserError):
    """A plugin of another distribution cannot be registered."""


def load_plugins() -> None:
    """Register the plugins of other distributions that are installed, by their names.

    Raises:
        PluginError: another distribution's plugin fails; it names the distribution. Where nobody catches it, as in every
            command, this line is all that is shown.
    """
    for entry_point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            entry_point.load()()
        except BaseException as error:
            if not is_users_fault(error):
                raise
            owner = entry_point.dist.name if entry_point.dist else entry_point.value
            sys.excepthook = functools.partial(_tell_in_one_line, sys.excepthook)
            why = " ".join(without_secrets(error_text(error)).split())
            raise PluginError(
                f"the plugin {entry_point.name!r} of the package {owner} cannot be registered: {why}: mend it, or "
                f"uninstall {owner}"
            ) from error


def _tell_in_one_line(
    previous_hook: Callable, kind: type[BaseException], error: Any, trace: Any
) -> None:
    """Stand for ``sys.excepthook``: nothing of lightppo is imported, so that no command can tell the error."""
    if kind is not PluginError:
        return previous_hook(kind, error, trace)
    print(f"lightppo: error: {error}", file=sys.stderr)
