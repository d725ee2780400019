"""``lightppo COMMAND``, also ``python -m lightppo COMMAND``: the table of commands.

Launchers start it as a module: ``deepspeed --module lightppo ppo …``, ``torchrun -m lightppo ppo …``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from lightppo import __version__
from lightppo.suggestions import nearest

COMMANDS = {  # name: module, function of (arguments, name in messages), what it does
    "ppo": ("lightppo.commands.ppo", "main", "train a language model with PPO or a relative"),
    "sft": ("lightppo.commands.sft", "main", "train it on demonstrations"),
    "rm": ("lightppo.commands.rm", "main", "train a reward model on pairs of answers"),
    "dpo": ("lightppo.commands.dpo", "main", "train it on pairs of answers, without a reward model"),
    "eval": ("lightppo.commands.ppo", "evaluate", "score its answers to held-out prompts"),
    "data": ("lightppo.commands.data", "main", "look at rows as a model will see them; convert data sets"),
    "report": ("lightppo.trainer.report", "main", "show what runs did: tables, and a page with curves and samples"),
    "watch": ("lightppo.commands.watch", "main", "look at a run in the terminal while it goes on"),
    "replay": ("lightppo.commands.replay", "main", "do a step of a run again, look at it, debug it"),
    "diff": ("lightppo.commands.diff", "main", "name the first number in which two runs differ"),
    "chat": ("lightppo.commands.chat", "main", "talk to a model, in a terminal or through a pipe"),
    "convert": ("lightppo.commands.convert", "convert", "write a training checkpoint as a Hugging Face folder"),
    "merge": ("lightppo.commands.convert", "merge", "write a LoRA adapter and its base as one model"),
    "tiny-model": ("lightppo.commands.tiny_model", "main", "make a small random model to try things with"),
    "memory": ("lightppo.commands.memory", "main", "what a run needs of GPUs and hosts, before anything loads"),
    "serve-reward": ("lightppo.commands.serve_reward", "main", "serve rewards over HTTP"),
    "serve-vllm": ("lightppo.commands.serve_vllm", "main", "serve rollouts by vLLM"),
}


def help_text() -> str:
    lines = ["usage: lightppo COMMAND [flags]", "", *(f"  {name:<14}{text}" for name, (*_, text) in COMMANDS.items())]
    lines += ["", "lightppo COMMAND --help shows its flags, lightppo --version the version. On several ranks:"]
    lines += ["deepspeed --num_gpus 2 --module lightppo ppo …, torchrun --nproc_per_node 2 -m lightppo ppo …"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: the command and its arguments; ``None`` for the arguments of this process.

    Raises:
        SystemExit: code 2 without a command, or with an unknown one; otherwise as the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rank = list(takewhile(lambda word: word.startswith("--local_rank="), words))  # deepspeed puts it first
    name, *arguments = words[len(rank) :] or [""]
    if name in COMMANDS:
        module, function, _ = COMMANDS[name]
        getattr(importlib.import_module(module), function)([*rank, *arguments], f"lightppo {name}")
    elif name in ("--version", "--help", "-h"):
        print(f"lightppo {__version__}" if name == "--version" else help_text())
    else:
        if os.environ.get("RANK", "0") == "0":
            problem = f"unknown command {name!r}{_meant_by(name)}" if name else "a command is missing"
            print(f"{help_text()}\nlightppo: error: {problem}", file=sys.stderr)
        raise SystemExit(2)


def _meant_by(name: str) -> str:
    """What an unknown command may have meant; names of algorithms are no commands."""
    from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

    tables = {"advantage_estimator": ADVANTAGE_ESTIMATORS, "policy_loss": POLICY_LOSSES}
    for flag, names in tables.items():
        if name.lower() in names and name.lower() not in COMMANDS:
            return f": write lightppo ppo --{flag} {name.lower()}"
    return nearest(name, [*COMMANDS, "--version", "--help"], "command")


if __name__ == "__main__":
    main()
