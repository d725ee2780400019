"""``--callback`` of a run that ends by the clock: after the step in which ``$STOP_AFTER_SECONDS`` are over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from lightppo import Callback


class StopAfter(Callback):
    """The clock starts before the first evaluation, when all is loaded."""

    def on_start(self, run: Any) -> None:
        self.end = time.monotonic() + float(os.environ["STOP_AFTER_SECONDS"])

    def votes(self, run: Any) -> Mapping[str, float]:
        return {"stop": float(time.monotonic() > self.end)}


callback = StopAfter()
