"""No check of a run trips over an option that has another value: the run is built, or a sentence says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fixtures.option_files import config_of, option_files
from support.option_changes import BUILT, REFUSED_HERE, cases

from lightppo import PPOTrainer
from lightppo.errors import UserError

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("world")]

__all__ = ["config_of", "option_files"]


@pytest.mark.parametrize(("base", "name", "value"), cases(BUILT))
def test_a_run_passes_all_checks(
    config_of: Callable[..., Any], base: dict[str, Any], name: str, value: Any
) -> None:
    try:
        trainer = PPOTrainer.from_config(config_of(**base | {name: value}))
    except UserError:
        assert name in REFUSED_HERE
    else:
        trainer.close()
