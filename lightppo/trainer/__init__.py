"""Training: PPO (``ppo_trainer``), supervised (``supervised``), and running a script of either on every rank."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

from lightppo.errors import UserError

_ALIKE = timedelta(seconds=2)  # between errors of ranks that are one


def run(main: Callable[[], None], prog: str | None = None, *, debug: bool = False) -> None:
    """Run a script's main function on every rank: quiet logs, one line for what a user can mend, a clean end.

    Its end has an order: ``main`` has closed what it opened; all ranks meet; the process groups go. After an error
    nobody waits for the other ranks, which may not come: the launcher ends them. ``prog`` is the program's name in
    messages; without it the script's. ``debug`` shows tracebacks too.

    Raises:
        SystemExit: code 1 after an error that the user can mend, told on standard error.
    """
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    logging.getLogger("lightppo").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    try:
        main()
    except UserError as error:
        if debug:
            traceback.print_exception(error)
        if not _told_by_rank_0(str(error)):
            print(f"[rank {rank}] {prog or os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
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
