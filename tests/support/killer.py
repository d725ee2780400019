"""Kills ranks at a random time."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path


class Killer(threading.Thread):
    """Kills ranks by their numbers, which they write into a folder, some seconds after they have."""

    def __init__(self, folder: Path, ranks: list[int], seconds: float) -> None:
        super().__init__(daemon=True)
        self.files, self.seconds, self.came = [folder / str(rank) for rank in ranks], seconds, False
        self.over = threading.Event()

    def run(self) -> None:
        while not all(file.is_file() and file.read_text() for file in self.files):
            if self.over.wait(0.005):
                return
        if not self.over.wait(self.seconds):
            for file in self.files:
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
                    self.came = True
