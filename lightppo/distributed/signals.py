"""SIGTERM, SIGINT, SIGUSR1 and a launcher that died: a run stops at its next safe point, within a limited time.

Signals come to some ranks, or to one after the other, and a rank that waits for another one runs no Python. So a thread
takes them, and ends the process when its time is over; where all ranks are safe, :func:`votes` and :func:`elected` make
them stop together. Outside of :func:`safe_points` there is nothing to save: the main thread ends at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightppo.callbacks import Callback
from lightppo.ranks import stop_signs

logger = logging.getLogger(__name__)

# seconds; torchrun, DeepSpeed's launch.py, Slurm and Kubernetes kill 30 s after SIGTERM
GRACE = 25.0
# Launchers add SIGTERM to what they get, so it comes last.
SIGNALS = {number.name: number for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)}
# variables that launchers set
_MARKS = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_SIZE": "deepspeed"}
_REPEAT = 2.0  # seconds in which further signals are the first one, handed on by a launcher
_LAUNCHER = re.compile(  # python -u -m MODULE, python FOLDER/PROGRAM, PROGRAM
    r"(\S*python\S* (-\S+ )*?)?(-m |\S*/)?"
    r"(?P<name>(deepspeed\.launcher|torch\.distributed|accelerate)\.\S+|(deepspeed|torchrun|accelerate)(\.pt)?)( |$)"
)


class Stopped(SystemExit):
    """Ends the process for a signal, with exit code 128 + its number; ``on_all_ranks``: all ranks raise it."""

    def __init__(self, number: int, on_all_ranks: bool = False) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name
        self.on_all_ranks = on_all_ranks


class _Watch:
    """Handlers and thread of one process."""

    def __init__(self) -> None:
        self.number, self.since = 0, 0.0  # of the signal that asks to stop
        self.grace = GRACE
        self.deferred = False  # the main thread looks by itself
        self.saved = False  # nothing is lost any more
        self._raised = False
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._launchers, self._gone = self._open_launchers()
        self._before = {
            number: signal.signal(number, self._in_main_thread)
            for number in SIGNALS.values()
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        }
        # Bytes of a signal arrive also while the main thread waits in a collective, where no handler runs.
        self._outer = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _open_launchers(self) -> tuple[dict[int, str], str]:
        """Open pidfds: the kernel's signal at a parent's death comes with the end of a thread, and not of grandparents."""
        launchers, ended_launcher = _launchers()
        open_descriptors = {}
        for process_id, name in launchers:
            try:
                open_descriptors[os.pidfd_open(process_id)] = f"{name} (process {process_id})"
            except ProcessLookupError:
                ended_launcher = name
            except (AttributeError, OSError) as error:  # macOS has no pidfds
                logger.warning(
                    "the end of %s (process %d) will not be noticed: %s",
                    name,
                    process_id,
                    getattr(error, "strerror", error),
                )
        return open_descriptors, ended_launcher

    def restore(self) -> None:
        signal.set_wakeup_fd(self._outer)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def close(self) -> None:
        self.restore()
        self._outbox.close()  # ends the thread

    def _in_main_thread(self, number: int, frame: Any) -> None:
        if not self.number:  # the thread has not had it yet
            self.ask(number)
        if not (self.deferred or self._raised):
            self._raised = True
            raise Stopped(self.number)

    def _listen(self) -> None:
        poller = select.poll()
        for descriptor in (self._inbox.fileno(), *self._launchers):
            poller.register(descriptor, select.POLLIN)
        if self._gone:
            self._stop_without_launcher(self._gone)
        while True:
            seconds_left = self.since + self.grace - time.monotonic()
            wait = None
            if self.number:
                wait = 1000 * seconds_left + 1
                for stream in (1, 2):
                    # poll tells when the reader has ended, as `tee` does at a Ctrl-C.
                    poller.register(stream, 0)
                if seconds_left <= 0:
                    self._end(f"not at a safe point within {self.grace:g} s (--signal_grace)")
            for descriptor, _ in poller.poll(wait):
                if descriptor in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                    continue
                if descriptor != self._inbox.fileno():
                    poller.unregister(descriptor)
                    os.close(descriptor)
                    self._stop_without_launcher(self._launchers.pop(descriptor))
                    continue
                if not (numbers := self._inbox.recv(64)):
                    return self._inbox.close()
                for number in SIGNALS.values():
                    if number in numbers and number in self._before:
                        self.ask(number)

    def _stop_without_launcher(self, launcher: str) -> None:
        self.ask(signal.SIGTERM, f"{launcher}, which started this, has ended")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    def ask(self, number: int, launcher: str = "") -> None:
        """Note the first one. A later one ends the process, but for what a launcher hands on."""
        current_time = time.monotonic()
        name = signal.Signals(number).name
        if not self.number:
            self.since = current_time
            self.number = number
            with contextlib.suppress(OSError):
                self._outbox.send(b"\0")  # wakes the thread, whose time runs from now on
            if self.deferred and os.environ.get("RANK", "0") == "0":
                stop_time = (
                    f"when the step under way is done, or in {self.grace:g} s (--signal_grace)"
                )
                self._say(f"{launcher or name}: stopping {stop_time}; another signal ends at once")
        elif current_time - self.since <= _REPEAT:
            self.number = next(
                signal_number
                for signal_number in SIGNALS.values()
                if signal_number in (number, self.number)
            )
        elif not (launcher or self.saved):
            self._end(f"{name} came again")

    def _end(self, why: str) -> None:
        lost_text = ": the step under way is lost" if self.deferred and not self.saved else ""
        self._say(f"stopped by {signal.Signals(self.number).name}, {why}{lost_text}")
        os._exit(128 + self.number)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # whoever read it has ended
            os.write(2, f"[rank {os.environ.get('RANK', '0')}] {text}\n".encode())


class _NotebookWatch:
    """Interrupts of a notebook's cell: the first one waits for the end of the step, a second one is Python's own."""

    def __init__(self) -> None:
        self.number = 0
        self.saved = False
        self.deferred = True
        self._before = signal.signal(signal.SIGINT, self._interrupted)

    def restore(self) -> None:
        signal.signal(signal.SIGINT, self._before)

    close = restore

    def _interrupted(self, number: int, frame: Any) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.ask(number)

    def ask(self, number: int) -> None:
        self.number = self.number or number
        with contextlib.suppress(RuntimeError):  # in the midst of another print
            print(
                "interrupted: stopping when the step under way is done; another interrupt ends at once",
                file=sys.stderr,
            )


def _is_notebook() -> bool:
    """Tell whether this is IPython, where a SystemExit ends the cell and not the session."""
    ipython_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_main = threading.current_thread() is threading.main_thread()
    interrupt_handler = signal.getsignal(signal.SIGINT)
    return ipython_shell is not None and is_main and interrupt_handler is signal.default_int_handler


_watch: _Watch | _NotebookWatch | None = None


@contextlib.contextmanager
def watched(to_the_end: bool = False) -> Iterator[None]:
    """Take signals meanwhile, in the main thread of a program that is no interactive session.

    A handler of the program's own stays; it may call :func:`request`. An ignored signal stays ignored. ``to_the_end``:
    the program ends now, if a signal has come, and the time for it stays limited.
    """
    global _watch
    if to_the_end:
        atexit.register(_leave)  # early, so that it is called last
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    if (
        _watch is not None
        or interactive
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    _watch = _Watch()
    try:
        yield
    finally:
        if not (to_the_end and _watch.number):
            _watch.close()
            _watch = None


def _leave() -> None:
    """End without Python's clearing up, which takes seconds on a busy machine. vLLM's shared memory goes at its very end."""
    if _watch is not None and _watch.number and "vllm" not in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + _watch.number)


@contextlib.contextmanager
def safe_points(grace: float = GRACE) -> Iterator[None]:
    """Let a signal wait inside until the main thread looks, ``grace`` seconds at most; in a notebook an interrupt."""
    global _watch
    with watched():
        if _watch is None and _is_notebook():
            _watch = _NotebookWatch()
            try:
                yield
            finally:
                _watch.close()
                _watch = None
            return
        if (watch := _watch) is None:
            yield
            return
        watch.grace = grace
        watch.deferred = True
        yield
        watch.deferred, watch.number = False, 0  # a signal that came at the end has nothing to stop


def stop_signal() -> int:
    """Return the number of the signal that asks this process to stop; 0: none."""
    return 0 if _watch is None else _watch.number


stop_signs.append(stop_signal)


def request(number: int) -> None:
    """Do what a signal does, for a handler of the program's own."""
    if _watch is not None:
        _watch.ask(number)


def votes() -> dict[str, int]:
    """Return what this rank brings to a collective whose sum or mean :func:`elected` reads."""
    return {name: int(stop_signal() == number) for name, number in SIGNALS.items()}


def elected(counts: Mapping[str, float]) -> int:
    """Return the signal that stops all ranks; 0: none."""
    number = next((number for name, number in SIGNALS.items() if counts[name] > 0), 0)
    if number and _watch is not None:
        if not _watch.number:  # it came to other ranks
            _watch.ask(number)
        _watch.number = number
    return number


def mark_saved() -> None:
    """Note that all that a stop needs is saved: a further signal changes nothing."""
    if _watch is not None:
        _watch.saved = True


class StopAtSignal(Callback):
    """Saves, and ends the process, where a signal asks for it."""

    safe_points: contextlib.AbstractContextManager | None = None
    stopping = False

    def on_start(self, run: Any) -> None:
        self.safe_points = safe_points(run.config.checkpoint.signal_grace)
        self.safe_points.__enter__()

    def votes(self, run: Any) -> Mapping[str, float]:
        return votes()

    def on_votes(self, run: Any, step: int, votes: Mapping[str, float]) -> None:
        if any(votes[name] for name in SIGNALS):
            self.stop(run, step, elected(votes))

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        self._look(run, step)

    def on_save(self, run: Any, step: int) -> None:
        self._look(run, step)

    def _look(self, run: Any, step: int) -> None:
        """Look after what took long: a signal that has come since need not wait for the end of another step. Collective."""
        if step > 0 and not self.stopping:
            self.on_votes(run, step, run.strategy.all_reduce(votes(), "sum"))

    def stop(self, run: Any, step: int, number: int) -> None:
        """Save and end the process. Collective."""
        self.stopping = True
        checkpoint = run.config.checkpoint
        stop = Stopped(number, on_all_ranks=True)
        saved_text = "nothing is saved"
        if run.keeps_files and not checkpoint.disable_ds_ckpt:
            run.save_checkpoint(step)
            saved_text = f"saved in {run.ckpt_path}: the same command goes on"
            saved_text += ", without --resume never" * (checkpoint.resume == "never")
        mark_saved()
        total_text = f" of {run.total_steps}" if run.total_steps is not None else ""
        run.strategy.print(f"stopped by {stop.name} after step {step}{total_text}; {saved_text}")
        raise stop

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if isinstance(error, Stopped) and error.on_all_ranks:
            run.strategy.barrier()  # a launcher ends the others when the first one has ended
        if self.safe_points is not None:
            self.safe_points.__exit__(None if error is None else type(error), error, None)


def _launchers() -> tuple[list[tuple[int, str]], str]:
    """Return the processes from this rank's parent up to the launcher's first, and the name of one that has ended."""
    import psutil

    parents: list[tuple[int, str]] = []
    if "LOCAL_RANK" in os.environ:
        for process in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                parents.append((process.pid, " ".join(process.cmdline())))
    matches = [_LAUNCHER.match(command) for _, command in parents]
    if launchers := [i for i, match in enumerate(matches) if match]:
        last_launcher = launchers[-1]
        command = parents[last_launcher][1]
        # On a single node it is `deepspeed` that starts launch.py, and so.
        is_single_node = (
            " --enable_each_rank_log=None " in f"{command} " and " --node_rank" not in command
        )
        if is_single_node and matches[last_launcher]["name"] == "deepspeed.launcher.launch":
            ended_launcher = "deepspeed"
        else:
            ended_launcher = ""
        matched_parents = zip(parents[: last_launcher + 1], matches)
        return [
            (process_id, match["name"] if match else command)
            for (process_id, command), match in matched_parents
        ], ended_launcher
    if parents and not re.match(r"\S*python", parents[0][1]):  # which may be a launcher of its own
        return [], next((name for variable, name in _MARKS.items() if variable in os.environ), "")
    return [], ""


def _leave_to_parent() -> None:
    """Leave the end of a process that was forked off to its parent."""
    global _watch
    if _watch is not None:
        _watch.restore()
        signal.set_wakeup_fd(-1)
        _watch = None


os.register_at_fork(after_in_child=_leave_to_parent)
