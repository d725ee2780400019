"""Tasksets of verifiers 0.4: ``verifiers:TASKSET@VENV``, in a process with the Python of ``VENV``.

verifiers pins versions that lightppo's environment cannot have, so it has an environment of its own
(``python -m venv VENV; VENV/bin/pip install verifiers uv``). ``verifiers_worker.py`` runs there, and
stands where verifiers has the token-in client that it trains with: each request of the agent program
is a turn of the episode, as with the programs of ``agents.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightppo.episodes.conversation import History, plain_message
from lightppo.episodes.env_failures import EnvFailure, Opening, Step
from lightppo.errors import ConfigError

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_LOAD_SECONDS = 300.0
_MOST_SECONDS = 86_400.0  # --env_timeout is shorter
_Answer = dict[str, Any]


class VerifiersEnvironment:
    """Play one episode of a taskset. The column ``task`` is the number of the task.

    Its first request must begin with the row's messages (``verifiers_worker.py --rows`` writes
    them), so that a task's number and its prompt fit. The whole reward comes with the turn that ends
    the episode; an episode that a limit of ours cuts has none.
    """

    _asks_model = True

    def __init__(self, process: Callable[[], VerifiersProcess]) -> None:
        self._process = process()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._id = self._process.add(self._answers)
        self._history = History()
        self._is_over = False

    def reset(self, task: int, prompt: Any = None, **row: Any) -> Opening:
        """Return how the task begins."""
        self._process.write({"open": self._id, "task": int(task)})
        answer = self._next()
        if "reward" in answer:
            raise EnvFailure("the episode ended before the model was asked")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if prompt else []
        opening = self._history.first(answer)
        row_messages = list(map(plain_message, prompt or ()))
        if opening.messages[: len(row_messages)] != row_messages:
            raise EnvFailure("a row needs the messages that its task begins with")
        return opening

    def step(self, model_turn: _Answer) -> Step:
        """Give the model's turn to the agent program."""
        if self._is_over:
            raise EnvFailure("the episode is over")
        self._process.write({"say": self._id} | self._history.add_turn(model_turn))
        answer = self._next()
        if "reward" in answer:
            self._is_over = True
            return Step(None, answer["reward"], done=True, metrics=answer["metrics"])
        return Step(self._history.further(answer))

    def close(self) -> None:
        """End the episode in the process."""
        self._process.remove(self._id)

    def _next(self) -> _Answer:
        answer = self._answers.get(timeout=_MOST_SECONDS)
        if "failure" in answer:
            raise EnvFailure(answer["failure"])
        return answer


class VerifiersProcess:
    """Run a process that plays episodes, and hand its answers to who waits for them."""

    def __init__(self, command: list[str]) -> None:
        self._numbers = itertools.count()
        self._queues: dict[str, queue.SimpleQueue[_Answer]] = {}
        self._lock = threading.Lock()  # of the queues
        self._writing = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=_variables(command[0]),
        )
        # The worker ends with this process, because its input ends.
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def add(self, answers: queue.SimpleQueue[_Answer]) -> str:
        """Return the id of a new episode, whose answers go there."""
        with self._lock:
            episode_id = str(next(self._numbers))
            self._queues[episode_id] = answers
        return episode_id

    def remove(self, episode_id: str) -> None:
        """End an episode; it may have ended."""
        with self._lock:
            episode_queue = self._queues.pop(episode_id, None)
        if episode_queue is not None and not self.has_ended:
            self.write({"close": episode_id})

    def write(self, message: _Answer) -> None:
        """Send a line; EnvFailure if the process has ended."""
        with self._writing:
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except (OSError, ValueError) as error:
                raise EnvFailure(f"verifiers' process has ended: {error}") from error

    def _read(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                answers = self._queues.get(answer["id"])
            if answers is not None:
                answers.put(answer)
        exit_code = self._process.wait()
        with self._lock:
            waiting_queues = self._queues
            self._queues = {}
        for answers in waiting_queues.values():
            answers.put({"failure": f"verifiers' process has ended with code {exit_code}"})


_running: dict[tuple[int, str], VerifiersProcess] = {}  # by own process and entry
_starting = threading.Lock()


def _process(command: tuple[str, ...]) -> VerifiersProcess:
    """Return the one of this process, started when the first episode needs it; not shared over a fork."""
    process_key = (os.getpid(), "\0".join(command))
    with _starting:
        if process_key not in _running or _running[process_key].has_ended:
            _running[process_key] = VerifiersProcess(list(command))
        return _running[process_key]


def verifiers(description: str) -> tuple[Callable[[], Any], type, str]:
    """Return what ``--env verifiers:TASKSET@VENV`` makes, its class and its name.

    Raises:
        ConfigError: there is no such environment, or the taskset cannot be loaded in it.
    """
    option = f"--env verifiers:{description}"
    taskset, _, venv_folder = description.rpartition("@")
    python = Path(venv_folder) / "bin" / "python"
    if not taskset or not python.is_file():
        raise ConfigError(
            f"{option}: give verifiers:TASKSET@VENV, where VENV/bin/python has verifiers "
            "(python -m venv VENV; VENV/bin/pip install verifiers uv)"
        )
    command = (str(python), str(_WORKER), taskset)
    if shutil.which("uv", path=_variables(command[0])["PATH"]) is None:
        raise ConfigError(f"{option}: verifiers needs uv; {python} -m pip install uv")
    try:
        load_check = subprocess.run(
            [*command, "--check"],
            capture_output=True,
            encoding="utf-8",
            timeout=_LOAD_SECONDS,
            env=_variables(command[0]),
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{option}: not loaded within {_LOAD_SECONDS:g} s") from error
    if load_check.returncode:
        reason = load_check.stderr.strip().splitlines()[-1:] or [f"code {load_check.returncode}"]
        raise ConfigError(f"{option}: {reason[0]}")
    return (
        partial(VerifiersEnvironment, partial(_process, command)),
        VerifiersEnvironment,
        taskset.rpartition("/")[2],
    )


def _variables(python: str) -> dict[str, str]:
    """Return the environment variables of the process: what is installed beside its Python comes first."""
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
