"""What tests of this room share with those of other rooms, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.fixtures.small_runs import assets, make_config, world
from support.runs import fitted

from lightppo.config import parse_args
from lightppo.experiments import sweep, what_if
from lightppo.experiments.members import Member, record_contents
from lightppo.logging.run_folder import release

__all__ = ["assets", "make_config", "world"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were started, in this process instead of ones of their own."""
    names: list[str] = []

    def run_here(members: Sequence[Member], *_: Any) -> dict[str, int]:
        for member in members:
            names.append(member.name)
            record_contents(member)
            config = parse_args(["--config", str(member.config_file)])
            fitted(config)
            release([config.checkpoint.save_path, f"{config.checkpoint.save_path}/checkpoints_ppo"])
        return dict.fromkeys([member.name for member in members], 0)

    for command in (sweep, what_if):
        monkeypatch.setattr(command, "run_members", run_here)
    return names
