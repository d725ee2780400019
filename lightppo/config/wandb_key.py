"""``--use_wandb KEY``: the key must not be seen by others, nor be recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_KEY = "WANDB_API_KEY"


def take_wandb_key(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the key of ``--use_wandb KEY``, which goes where wandb looks."""
    kept: list[str] = []
    for before, text in zip(["", *arguments], arguments):
        with_key = text.startswith("--use_wandb=")
        if with_key:
            key = text.partition("=")[2]
        elif before == "--use_wandb":
            key = text
        else:
            key = ""
        if not key or key.startswith("-") or key in ("True", "False", "None"):
            kept.append(text)
            continue
        kept += ["--use_wandb"] * with_key
        os.environ[_KEY] = key
        sys.argv = [word.replace(key, "…") for word in sys.argv]  # wandb records them
        _hide_argument(key)
    return kept


def _hide_argument(secret: str) -> None:
    """Overwrite an argument of this process where Linux shows it (/proc/PID/cmdline, ps)."""
    try:
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        with open("/proc/self/mem", "r+b") as memory:
            memory.seek(start)
            at = memory.read(end - start).find(secret.encode())
            if at >= 0:
                memory.seek(start + at)
                memory.write(b"*" * len(secret.encode()))
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            note = f"note: --use_wandb KEY stays visible in the process list ({error}); set {_KEY} instead"
            print(note, file=sys.stderr)
