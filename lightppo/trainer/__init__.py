"""Training: PPO (``ppo_trainer``), supervised (``supervised``), and running a script of either on every rank."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from lightppo.errors import UserError


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
        print(f"[rank {rank}] {prog or os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # rank 0 may hold the store, and others may still read from it
        dist.destroy_process_group()
