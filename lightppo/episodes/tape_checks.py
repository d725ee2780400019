"""What is looked at before a tape plays, and before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightppo.config.cli import exit_on_mistakes
from lightppo.episodes.tape_files import FOLDER, numbers_of_ranks
from lightppo.errors import ConfigError


def look(config: Any, prog: str) -> None:
    """For ``lightppo.plugin.BEFORE_IMPORTS``."""
    if os.environ.get("RANK", "0") == "0":
        with exit_on_mistakes(prog):
            check_folder(config, int(os.environ.get("WORLD_SIZE", "1")))


def check_folder(config: Any, ranks: int) -> None:
    """ConfigError where ``--tape_from`` names no tape, or one of another number of ranks."""
    run = config.flat().get("tape_from")
    if run is None:
        return
    folder = Path(run).expanduser() / FOLDER
    if not folder.is_dir():
        raise ConfigError(
            f"--tape_from {run}: there is no {folder}: name the --save_path of a run that wrote a tape"
        )
    if ranks not in (written := numbers_of_ranks(folder)):
        there = " or ".join(map(str, sorted(written))) or "no"
        raise ConfigError(
            f"--tape_from {run}: {there} ranks wrote its tape, and this run has {ranks}: take as many processes"
        )
