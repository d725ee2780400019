"""What tests of this room share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightppo.__main__ import main


@pytest.fixture
def audit(capsys) -> Callable[..., tuple[int, str]]:
    """``audit(path, flags)``: exit code and output of the command."""

    def command(path: Path | str, flags: str = "") -> tuple[int, str]:
        capsys.readouterr()
        try:
            main(["audit", str(path), *flags.split()])
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return command


@pytest.fixture
def departures(audit) -> Callable[..., dict[str, Any]]:
    """``departures(path, flags)``: the findings that depart, by quantity; the exit code is as the list says."""

    def found(path: Path | str, flags: str = "") -> dict[str, Any]:
        code, out = audit(path, f"{flags} --json")
        findings = {each["quantity"]: each for each in json.loads(out)["findings"]}
        departing = {name: each for name, each in findings.items() if each["departing"]}
        assert code == bool(departing)
        return departing

    return found
