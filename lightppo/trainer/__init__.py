"""Training: PPO (``ppo_trainer``), supervised (``supervised``), and running a script of either on every rank."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightppo.errors import UserError
from lightppo.plugins.ops import signals
from lightppo.plugins.ops.watchdog import Watchdog, is_lost_connection
from lightppo.terminal import log_to_terminal, plain
from lightppo.urls import without_secrets

_ALIKE = timedelta(seconds=2)  # between errors of ranks that are one


def run(main: Callable[[], None], prog: str | None = None, *, debug: bool = False) -> None:
    """Run a script's main function on every rank: quiet logs, one line for what a user can mend, a clean end.

    Its end has an order: ``main`` has closed what it opened; all ranks meet; the process groups go. After an error
    nobody waits for the other ranks, which may not come: the launcher ends them. ``prog`` is the program's name in
    messages; without it the script's. ``debug`` shows tracebacks too.

    Raises:
        SystemExit: after an error that the user can mend, told on standard error, its ``exit_code``: 2 for a mistake
            in the options or in what they name, else 1; code 1 after another rank's end; 128 + its number after a
            signal, as ``lightppo.plugins.ops.signals`` tells.
    """
    rank = os.environ.get("RANK", "0")
    log_to_terminal(logging.WARNING, f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    sys.excepthook = _tell_error
    logging.getLogger("lightppo").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    name = f"[rank {rank}] {prog or os.path.basename(sys.argv[0])}"
    with Watchdog() as watchdog:
        try:
            with signals.watched(to_the_end=True):
                main()
            _meet_and_part()
        except signals.Stopped as stop:
            if stop.together:
                _meet_and_part()
            elif rank == "0":
                _tell(f"{name}: stopped by {stop.name}; there was nothing to save")
            raise
        except Exception as error:
            number, lost = signals.asked(), None
            if not number and not isinstance(error, UserError) and (lost := watchdog.lost_rank(error)) is None:
                _tell_torchrun(traceback.format_exc())
                raise
            if debug:
                _tell_error(type(error), error, error.__traceback__)
            if number:
                # What a launcher signals may fail first: another rank, which tells why, or what a reward has started.
                if isinstance(error, UserError) or not is_lost_connection(error):
                    why = f"the step under way is lost: {type(error).__name__}: {error}"
                    _tell(f"{name}: stopped by signal {number}, {why}")
            elif lost is not None:
                _tell(f"{name}: {lost}")
            else:
                if not _told_by_rank_0(plain(error)):
                    _tell(f"{name}: error: {error}")
                _tell_torchrun(str(error))
            code = error.exit_code if isinstance(error, UserError) else 1
            raise SystemExit(128 + number if number else code) from error


def _tell(text: str) -> None:
    """A text on standard error, as a terminal may show it and without what URLs must not show."""
    print(plain(without_secrets(text)), file=sys.stderr, flush=True)


def _tell_error(*error: Any) -> None:
    """The traceback of an error with its causes: type, error and traceback, as of ``sys.excepthook``."""
    _tell("".join(traceback.format_exception(*error)).rstrip())


def _meet_and_part() -> None:
    if (dist := sys.modules.get("torch.distributed")) is not None and dist.is_initialized():
        dist.barrier()  # rank 0 may hold the store, and others may still read from it
        dist.destroy_process_group()


def _told_by_rank_0(message: str) -> bool:
    """Whether rank 0, which tells all its errors, has the same one within ``_ALIKE``."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return False
    key = f"told/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set(key, "")
            return False
        store.wait([key], _ALIKE)
    except (RuntimeError, ValueError):  # it has not, has ended, or there are no ranks any more
        return False
    return True


def _tell_torchrun(text: str) -> None:
    """What its last lines show of this rank; other launchers show nothing."""
    text = plain(without_secrets(text))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
