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

from lightppo.errors import UserError
from lightppo.trainer.watchdog import Watchdog

_ALIKE = timedelta(seconds=2)  # between errors of ranks that are one


def run(main: Callable[[], None], prog: str | None = None, *, debug: bool = False) -> None:
    """Run a script's main function on every rank: quiet logs, one line for what a user can mend, a clean end.

    Its end has an order: ``main`` has closed what it opened; all ranks meet; the process groups go. After an error
    nobody waits for the other ranks, which may not come: the launcher ends them. ``prog`` is the program's name in
    messages; without it the script's. ``debug`` shows tracebacks too.

    Raises:
        SystemExit: code 1 after an error that the user can mend, told on standard error, and after another rank's end.
    """
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    logging.getLogger("lightppo").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    name = f"[rank {rank}] {prog or os.path.basename(sys.argv[0])}"
    with Watchdog() as watchdog:
        try:
            main()
            _meet_and_part()
        except UserError as error:
            if debug:
                traceback.print_exception(error)
            if not _told_by_rank_0(str(error)):
                print(f"{name}: error: {error}", file=sys.stderr, flush=True)
            _tell_torchrun(str(error))
            raise SystemExit(1) from error
        except Exception as error:
            if (lost := watchdog.lost_rank(error)) is None:
                _tell_torchrun(traceback.format_exc())
                raise
            if debug:
                traceback.print_exception(error)
            print(f"{name}: {lost}", file=sys.stderr, flush=True)
            raise SystemExit(1) from error


def _meet_and_part() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
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
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
