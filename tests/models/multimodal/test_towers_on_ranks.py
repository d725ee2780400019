"""Towers under ZeRO on two real ranks; see ranks/."""

from __future__ import annotations

import pytest


@pytest.mark.long
def test_every_stage_leaves_the_towers(run_checks):
    run_checks("towers.py", "check_exports", "check_convert", timeout=400)
    run_checks("towers.py", "check_resume", timeout=400)
