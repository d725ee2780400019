"""A thread of each rank that ends a run which hangs, and says where every rank is. Started by ``rank_main.run``."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from lightppo.errors import UserError
from lightppo.ranks import heartbeat

EXIT_CODE = 124  # of a rank that was ended for a hang, as of timeout(1)
# Phases without signs of life from within: work of the process counts, on a core or a disk.
_WORKING = ("start", "sync", "save")
_LOOK = 5.0  # seconds between two looks
_PATIENCE = 10.0  # seconds that ranks wait for each other's reports
_ALLOW = "a longer wait, also of a single rank: --dist_timeout (minutes)"
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")


class Watchdog:
    """Looks whether the heartbeat of this process goes on; a context manager."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._store = None
        self._peers = {}
        self._rank = int(os.environ.get("RANK", "0"))
        self._world = 1
        # Asks the store, which never answers where the network is cut: torch waits for it without a limit.
        self._question: threading.Thread | None = None
        self._other_hangs = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        idle_seconds = 0.0
        last_signs = None
        current_work = self._work()
        while not self._done.wait(pause := min(_LOOK, (heartbeat.limit or 6) / 12)):
            if heartbeat.limit is None:
                continue
            # For code that keeps Python's lock, such as a regular expression: this thread cannot say anything then.
            faulthandler.dump_traceback_later(heartbeat.limit + 2 * pause)
            signs_of_life = (heartbeat.beats, heartbeat.phases)
            previous_work = current_work
            current_work = self._work()
            is_working = (
                current_work[0] - previous_work[0] > pause / 50
                or current_work[1] - previous_work[1] > 1 << 20
            )
            is_moving = (
                signs_of_life != last_signs
                or (is_working and heartbeat.phase in _WORKING)
                or _in_debugger()
            )
            # Looks, not a clock: a process that was stopped for a while is not late.
            last_signs = signs_of_life
            idle_seconds = 0.0 if is_moving else idle_seconds + pause
            if idle_seconds >= heartbeat.limit or self._peer_hangs():
                self._end(idle_seconds)
        faulthandler.cancel_dump_traceback_later()  # it may have been set since __exit__

    def _work(self) -> tuple[float, int]:
        """Return seconds on cores and bytes to and from disks, of this process and what it has started."""
        import psutil

        core_seconds = 0.0
        disk_bytes = 0
        if heartbeat.phase not in _WORKING:
            return core_seconds, disk_bytes
        own_process = psutil.Process()
        for process in (own_process, *own_process.children(recursive=True)):
            with suppress(psutil.Error, AttributeError):  # it has ended; no such counters here
                core_seconds += sum(process.cpu_times()[:2])
                files = process.io_counters()
                disk_bytes += files.read_bytes + files.write_bytes
        return core_seconds, disk_bytes

    # -- other ranks ---------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Open a connection of its own to the ranks' store, and find the process of every rank on this machine."""
        import torch.distributed as dist

        try:
            self._rank = dist.get_rank()
            self._world = dist.get_world_size()
            if self._world == 1:
                return
            store = _second_connection(dist.distributed_c10d._get_default_store())
            store.set_timeout(timedelta(seconds=_PATIENCE))
            store.set(f"process {self._rank}", json.dumps([socket.gethostname(), os.getpid()]))
            # One question for all ranks.
            processes = store.multi_get([f"process {rank}" for rank in range(self._world)])
            for rank, (host, process_id) in enumerate(map(json.loads, processes)):
                if rank != self._rank and host == socket.gethostname():
                    self._peers[rank] = process_id
            self._store = store
        except (RuntimeError, ValueError):  # the run ends already, or a rank is no run of ours
            self._store = None

    def _peer_hangs(self) -> bool:
        """Tell whether another rank hangs, as far as the store answers."""
        if 0 in self._peers and _how_it_ended(self._peers[0]) is not None:
            self._store = None  # torch would tell the lost connection at length
        if self._question is None:
            self._begin(self._meet)
        elif self._store is not None and not self._store_is_silent():
            self._begin(self._ask)
        return self._other_hangs.is_set()

    def _begin(self, question: Callable[[], None]) -> None:
        self._question = threading.Thread(target=question, name="watchdog's question", daemon=True)
        self._question.start()
        self._question.join(1)

    def _ask(self) -> None:
        store = self._store
        try:
            if store is not None and store.check(["hang"]):
                self._other_hangs.set()
        except RuntimeError:  # the rank that holds the store has ended, or is stopped
            self._store = None

    def _store_is_silent(self) -> bool:
        """Tell whether a question still waits for its answer; another one would wait behind it."""
        return self._question is not None and self._question.is_alive()

    def _end(self, idle: float) -> None:
        """End this process; rank 0 reports for all."""
        main_stack = _stacks()[threading.main_thread().ident]
        is_waiting = any(
            "torch/distributed" in stack_frame.filename or "/deepspeed/" in stack_frame.filename
            for stack_frame in main_stack[-8:]
        )
        own_report = {
            "phases": heartbeat.phases,
            "phase": heartbeat.phase,
            "waits": is_waiting,
            "collectives": _collectives(),
        }
        own_report["text"] = self._report(idle)
        try:
            is_reported = self._tell(own_report)
        except RuntimeError:  # no store any more
            is_reported = False
        if not is_reported:
            print(own_report["text"], _ALLOW, sep="\n", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    def _tell(self, own_report: dict[str, Any]) -> bool:
        """Report for all on rank 0, to it on others; whether somebody reported what this rank has to say."""
        if self._store is None or self._store_is_silent():
            return False
        self._store.set("hang", "")
        self._store.set(f"report {self._rank}", json.dumps(own_report))
        if self._rank:
            self._store.wait(["told"], timedelta(seconds=2 * _PATIENCE + 0.1 * self._world))
            return True
        reports: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _PATIENCE  # with all: a whole node may be silent
        for rank in range(self._world):
            try:
                seconds_left = max(0.1, deadline - time.monotonic())
                self._store.wait([f"report {rank}"], timedelta(seconds=seconds_left))
                reports[rank] = json.loads(self._store.get(f"report {rank}"))
            except RuntimeError:
                continue
        texts = [report["text"] for report in reports.values()]
        print(*texts, self._verdict(reports), _ALLOW, sep="\n", file=sys.stderr, flush=True)
        self._store.set("told", "")
        time.sleep(1)  # rank 0 holds the store
        return True

    def _verdict(self, reports: dict[int, dict[str, Any]]) -> str:
        silent_ranks = [rank for rank in range(self._world) if rank not in reports]
        fewest_phases = min(report["phases"] for report in reports.values())
        late_ranks = _behind({rank: report["collectives"] for rank, report in reports.items()})
        late_ranks = late_ranks or [rank for rank, report in reports.items() if not report["waits"]]
        late_ranks = late_ranks or [
            rank for rank, report in reports.items() if report["phases"] == fewest_phases
        ]
        if silent_ranks:
            ranks = ", ".join(map(str, silent_ranks))
            return f"rank {ranks} lags behind and says nothing: it has ended, is stopped, or keeps Python's lock"
        if len(late_ranks) == self._world:
            return "all ranks wait for each other: one may have called something marked Collective alone"
        names = ", ".join(f"rank {rank} (phase {reports[rank]['phase']})" for rank in late_ranks)
        return f"{names} lags behind: the others wait for it"

    def _report(self, idle: float) -> str:
        # Half the limit: ranks that wait for each other became silent at almost the same moment.
        is_hanging = idle >= (heartbeat.limit or 0) / 2
        if is_hanging:
            state_text = f"hangs, without a sign of life for {idle:.0f} s"
        else:
            state_text = "moves, but another rank hangs"
        lines = [
            f"[rank {self._rank}] {state_text}: step {heartbeat.step}, phase {heartbeat.phase}"
        ]
        own_lines = []
        for ident, stack in _stacks().items():
            if own_line := _own_code(stack):
                own_lines.append(own_line)
            if own_line or ident == threading.main_thread().ident:
                name = next(
                    (
                        f"thread {thread.name}"
                        for thread in threading.enumerate()
                        if thread.ident == ident
                    ),
                    "coroutine",
                )
                lines += [
                    f"  {name}:",
                    *("  " + line for line in "".join(stack.format()).rstrip().splitlines()),
                ]
        if heartbeat.phase in ("reward", "rollout", "eval"):
            remedy = "; --reward_timeout limits a call"
        else:
            remedy = ""
        lines += [
            f"[rank {self._rank}] your code is at {own_line}{remedy}"
            for own_line in dict.fromkeys(own_lines)
        ]
        return "\n".join(lines)

    # -- errors that only tell of another rank's end ---------------------------------------------------------------

    def lost_rank(self, error: BaseException) -> str | None:
        """Return what to say of an error that only tells that another rank has ended; None for any other error.

        Waits, so that the launcher ends this process without a word and the other rank's error stays the last one.
        """
        if not is_lost_connection(error):
            return None
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline = time.monotonic() + _PATIENCE
        ended_ranks = {}
        while not ended_ranks and time.monotonic() < deadline:
            ended_ranks = {
                rank: ending
                for rank, process_id in self._peers.items()
                if (ending := _how_it_ended(process_id)) is not None
            }
            time.sleep(0.1)
        reasons = {rank: ending for rank, ending in ended_ranks.items() if ending}
        if reasons and self._rank == min({self._rank, *self._peers} - ended_ranks.keys()):
            for rank, ending in reasons.items():
                print(
                    f"[rank {rank}] ended without an error of its own: {ending}",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(_PATIENCE)
        if ended_ranks:
            return "another rank ended, see its error"
        return f"the connection to another rank is lost, see its error: {str(error).partition(chr(10))[0]}"


def _collectives() -> dict[str, int]:
    """Return process group → how many collectives this rank has issued in it.

    With NCCL a rank waits wherever it reads a number from the GPU, so that its stack does not tell.
    """
    import torch.distributed as dist

    issued_counts = {}
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        for group in world.pg_map:
            with suppress(RuntimeError):  # a backend that does not count
                issued_counts[world.pg_names[group]] = group._get_sequence_number_for_group()
    return issued_counts


def _behind(issued: dict[int, dict[str, int]]) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody; ``issued``: of each rank, see :func:`_collectives`."""
    awaited = set()
    waiting = set()
    for group in set().union(*issued.values()):
        counts = {rank: of_rank[group] for rank, of_rank in issued.items() if group in of_rank}
        awaited |= {rank for rank, count in counts.items() if count < max(counts.values())}
        waiting |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(awaited - waiting)


def _second_connection(store: Any) -> Any:
    """Connect to the ranks' store, as the main thread may wait in its own; keys apart from others'."""
    from torch.distributed import PrefixStore, TCPStore

    if hasattr(store, "clone"):
        return PrefixStore("watchdog", store.clone())
    tcp = store._underlying_non_prefix_store  # older torch; it lacks torchrun's prefix of a restart
    prefix = f"watchdog {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    return PrefixStore(prefix, TCPStore(tcp.host, tcp.port, wait_for_workers=False))


def is_lost_connection(error: BaseException | None) -> bool:
    import torch.distributed as dist

    if error is None or isinstance(error, UserError):
        return False
    of_torch = isinstance(
        error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    )
    of_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return (
        of_torch
        or of_gloo
        or is_lost_connection(error.__cause__)
        or is_lost_connection(error.__context__)
    )


def _how_it_ended(process_id: int) -> str | None:
    """Return None if it lives; empty: with an error that it has told, or nobody knows; else what its exit code means."""
    try:
        stat_fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    if stat_fields[0] not in "ZX":
        return None
    signal_number = int(stat_fields[-1]) & 0x7F
    exit_code = int(stat_fields[-1]) >> 8
    if signal_number == signal.SIGKILL:
        return "killed by signal 9 (SIGKILL), by the system if memory ran out"
    if signal_number:
        return f"killed by signal {signal_number} ({signal.Signals(signal_number).name})"
    if exit_code in (1, EXIT_CODE) or exit_code > 128:
        return ""
    return f"exit code {exit_code}"


# -- stacks ------------------------------------------------------------------------------------------------------------


def _stacks() -> dict[int | None, traceback.StackSummary]:
    """Return the stack of each thread, by its number, and of each waiting coroutine."""
    frames = sys._current_frames()
    stacks = {ident: _summary(traceback.walk_stack(frame)) for ident, frame in frames.items()}
    event_loops = [frame.f_locals["self"] for top_frame in frames.values() for frame, _ in traceback.walk_stack(top_frame)
             if frame.f_code.co_name == "run_forever" and "self" in frame.f_locals]  # fmt: skip
    tasks = [
        task for event_loop in event_loops for task in sys.modules["asyncio"].all_tasks(event_loop)
    ]
    return stacks | {
        -number: _summary(list(_awaited(task.get_coro()))[::-1])
        for number, task in enumerate(tasks, 1)
    }


def _summary(frames: Iterable[tuple[FrameType, int]]) -> traceback.StackSummary:
    stack = traceback.StackSummary.extract(iter(frames))
    stack.reverse()  # outermost first
    return stack


def _awaited(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a coroutine and of what it waits for, outermost first."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = coroutine.cr_await


def _in_debugger() -> bool:
    """Tell whether the main thread waits for a person."""
    frame = sys._current_frames()[threading.main_thread().ident]
    return any(
        stack_frame.f_globals.get("__name__") == "bdb"
        for stack_frame, _ in traceback.walk_stack(frame)
    )


def _own_code(stack: traceback.StackSummary) -> str | None:
    """Return the innermost line of the user's code that this package calls, as ``file:line in function``."""
    last_call = max(
        (i for i, stack_frame in enumerate(stack) if stack_frame.filename.startswith(_PACKAGE)),
        default=len(stack),
    )
    frames_below = stack[last_call + 1 :]
    if not frames_below or frames_below[0].filename.startswith(_LIBRARIES):
        return None
    own_frame = [
        stack_frame
        for stack_frame in frames_below
        if not stack_frame.filename.startswith(_LIBRARIES)
    ][-1]
    return f"{own_frame.filename}:{own_frame.lineno} in {own_frame.name}"
