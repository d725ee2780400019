"""What is around the main function of each rank: signals are taken, and a process that hangs is ended."""

from __future__ import annotations

import os
from collections.abc import Callable

from lightppo.distributed import signals
from lightppo.distributed.watchdog import Watchdog, is_lost_connection
from lightppo.errors import UserError
from lightppo.trainer import meet_and_part, tell, tell_error


def guarded(main: Callable[[], None], name: str, debug: bool) -> Callable[[], None]:
    """The main function of a rank, which a signal, a launcher's end or a hang can end.

    Raises:
        SystemExit: code 1 after another rank's end; 128 + its number after a signal, as ``signals`` tells.
    """

    def run() -> None:
        with Watchdog() as watchdog:
            try:
                with signals.watched(to_the_end=True):
                    main()
            except signals.Stopped as stop:
                if stop.together:
                    meet_and_part()
                elif os.environ.get("RANK", "0") == "0":
                    tell(f"{name}: stopped by {stop.name}; there was nothing to save")
                raise
            except Exception as error:
                _explain(error, name, debug, watchdog)
                raise

    return run


def _explain(error: Exception, name: str, debug: bool, watchdog: Watchdog) -> None:
    """SystemExit where a signal or another rank's end is the cause of an error."""
    number = signals.asked()
    lost = None if number or isinstance(error, UserError) else watchdog.lost_rank(error)
    if not number and lost is None:
        return
    if debug:
        tell_error(type(error), error, error.__traceback__)
    if lost is not None:
        tell(f"{name}: {lost}")
        raise SystemExit(1) from error
    # What a launcher signals may fail first: another rank, which tells why, or what a reward has started.
    if isinstance(error, UserError) or not is_lost_connection(error):
        why = f"the step under way is lost: {type(error).__name__}: {error}"
        tell(f"{name}: stopped by signal {number}, {why}")
    raise SystemExit(128 + number) from error
