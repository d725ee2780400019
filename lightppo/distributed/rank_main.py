"""The main function of each rank: quiet logs, one line for an error, ended by signals or when it hangs."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightppo.distributed import signals
from lightppo.distributed.watchdog import Watchdog, is_lost_connection
from lightppo.errors import ModelLoadError, UserError
from lightppo.redaction import log_to_terminal, plain, without_secrets
from lightppo.user_code import error_text, is_from_users_file
from lightppo.version import too_new

_ALIKE = timedelta(seconds=2)  # between errors of ranks that are one


def run(main: Callable[[], None], prog: str | None = None, *, debug: bool = False) -> None:
    """Run a script's main function on every rank: quiet logs, one line for what a user can mend, a clean end.

    Its end has an order: ``main`` has closed what it opened; all ranks meet; the process groups go. After an error
    nobody waits for the other ranks, which may not come: the launcher ends them. ``prog`` is the program's name in
    messages; without it the script's. ``debug`` shows tracebacks too.

    Raises:
        SystemExit: after an error that the user can mend, told on standard error, its ``exit_code``: 2 for a mistake
            in the options or in what they name, else 1; 1 after another rank's end; 128 + its number after a signal.
    """
    rank = os.environ.get("RANK", "0")
    log_to_terminal(logging.WARNING, f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
    sys.excepthook = tell_error
    logging.getLogger("lightppo").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    name = f"[rank {rank}] {prog or os.path.basename(sys.argv[0])}"

    try:
        _watched(main, name, debug)
    except UserError as error:
        if debug:
            tell_error(type(error), error, error.__traceback__)
        if not _is_error_of_rank_0(plain(error)):
            # the checks at the start blame a model for what a new release has renamed
            newer = too_new() if isinstance(error, ModelLoadError) else ""
            tell(f"{name}: error: {error}{newer}")
        _tell_torchrun(str(error))
        raise SystemExit(error.exit_code) from error
    except Exception as error:
        note_memory(error)
        _tell_torchrun(traceback.format_exc())
        owner = "your code failed: " if is_from_users_file(error) else ""
        reason = "" if owner else _newer_release(error)
        if debug or not (owner or reason):
            raise
        text = error_text(error) if owner else " ".join(error_text(error).split())  # of one line
        tell(f"{name}: error: {owner}{text}{reason}; --debug shows all calls")
        raise SystemExit(1) from error


def note_memory(error: Exception) -> None:
    """Say at the end of a traceback what to set, if a GPU has no memory left."""
    if (torch := sys.modules.get("torch")) and isinstance(error, torch.OutOfMemoryError):
        error.add_note(
            "Lower --max_tokens_per_micro_batch where training or scoring ran out of memory (of lightppo sft, rm and dpo: "
            "--micro_train_batch_size), --micro_rollout_batch_size where generation did; for ppo, lightppo memory says "
            "what else would help"
        )


def _newer_release(error: Exception) -> str:
    """Return what to say of an import or a call that a release which no test has seen may lack; empty: another error.

    With the tested releases it is one of lightppo's own, whose traceback is needed.
    """
    return too_new() if isinstance(error, ImportError | AttributeError | TypeError) else ""


@contextmanager
def importing() -> Iterator[None]:
    """Import with Python's garbage collector off, which then passes over what is there until the process ends.

    What is imported stays. Looking through it again and again took a fifth of the time to the first rollout.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise extension modules report leaks
    finally:
        if was_on:
            gc.enable()


def _watched(main: Callable[[], None], name: str, debug: bool) -> None:
    """Call ``main``, which a signal, a launcher's end or a hang can end; then meet the other ranks."""
    with Watchdog() as watchdog:
        try:
            with signals.watched(to_the_end=True):
                main()
                leave_ranks()
        except signals.Stopped as stop:
            if stop.on_all_ranks:
                leave_ranks()
            elif os.environ.get("RANK", "0") == "0":
                tell(f"{name}: stopped by {stop.name}; there was nothing to save")
            raise
        except Exception as error:
            _explain(error, name, debug, watchdog)
            raise


def _explain(error: Exception, name: str, debug: bool, watchdog: Watchdog) -> None:
    """Raise SystemExit where a signal or another rank's end is the cause of an error."""
    signal_number = signals.stop_signal()
    lost_rank = None if signal_number or isinstance(error, UserError) else watchdog.lost_rank(error)
    if not signal_number and lost_rank is None:
        return
    if debug:
        tell_error(type(error), error, error.__traceback__)
    if lost_rank is not None:
        tell(f"{name}: {lost_rank}")
        raise SystemExit(1) from error
    # What a launcher signals may fail first: another rank, which tells why, or what a reward has started.
    if isinstance(error, UserError) or not is_lost_connection(error):
        reason = f"the step under way is lost: {type(error).__name__}: {error}"
        tell(f"{name}: stopped by signal {signal_number}, {reason}")
    raise SystemExit(128 + signal_number) from error


def tell(text: str) -> None:
    """Write a text to standard error, as a terminal may show it and without what URLs must not show."""
    print(plain(without_secrets(text)), file=sys.stderr, flush=True)


def tell_error(*error: Any) -> None:
    """Write the traceback of an error with its causes: type, error and traceback, as of ``sys.excepthook``."""
    tell("".join(traceback.format_exception(*error)).rstrip())


def leave_ranks() -> None:
    """Meet all ranks at the end of what they did together, and leave them. Collective."""
    if (dist := sys.modules.get("torch.distributed")) is not None and dist.is_initialized():
        dist.barrier()  # rank 0 may hold the store, and others may still read from it
        dist.destroy_process_group()


def _is_error_of_rank_0(message: str) -> bool:
    """Tell whether rank 0, which tells all its errors, has the same one within ``_ALIKE``."""
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
    """Write what torchrun's last lines show of this rank; other launchers show nothing."""
    text = plain(without_secrets(text))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra_info = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra_info}}))
