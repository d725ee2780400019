"""``lightppo COMMAND``, also ``python -m lightppo COMMAND``: what runs a command.

Launchers start it as a module: ``deepspeed --module lightppo ppo …``, ``torchrun -m lightppo ppo …``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from lightppo import __version__
from lightppo.config.option_errors import nearest
from lightppo.plugin import COMMANDS


def help_text() -> str:
    lines = [
        "usage: lightppo COMMAND [flags]",
        "",
        *(f"  {name:<14}{command.about}" for name, command in COMMANDS.items()),
    ]
    lines += [
        "",
        "lightppo COMMAND --help shows its flags, lightppo --version the version. On several ranks:",
    ]
    lines += [
        "deepspeed --num_gpus 2 --module lightppo ppo …, torchrun --nproc_per_node 2 -m lightppo ppo …"
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: the command and its arguments; ``None`` for the arguments of this process.

    Raises:
        SystemExit: code 2 without a command, or with an unknown one; otherwise as the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # DeepSpeed's launcher puts --local_rank before the command.
    rank = list(takewhile(lambda word: word.startswith("--local_rank="), words))
    name, *arguments = words[len(rank) :] or [""]
    if name in COMMANDS:
        COMMANDS[name].fn([*rank, *arguments], f"lightppo {name}")
    elif name in ("--version", "--help", "-h"):
        print(f"lightppo {__version__}" if name == "--version" else help_text())
    else:
        if os.environ.get("RANK", "0") == "0":
            known = [*COMMANDS, "--version", "--help"]
            unknown = f"unknown command {name!r}{nearest(name, known, 'command')}"
            problem = unknown if name else "a command is missing"
            print(f"{help_text()}\nlightppo: error: {problem}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
