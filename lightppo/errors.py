"""Every error that a user can fix: shown in one line, while other errors keep their traceback.

The exit code is 2 for a mistake in the options or in what they name, 1 for what goes wrong later.

A message names the flag, file, line or rank, and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """An error that the user can fix."""

    exit_code = 1


class ConfigError(UserError, ValueError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


@contextmanager
def as_config_error() -> Iterator[None]:
    """Raise ConfigError where a part refuses arguments that are options."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


class DataError(UserError, ValueError):
    """Data that cannot be used; names the file, row or column."""

    exit_code = 2


class BadRowError(DataError):
    """One row that cannot be used. Reports count by ``reason``: missing, wrong_type, empty, overlong, template."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)  # both, so that it pickles between processes
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class StagingError(DataError, OSError):
    """A URL that cannot be read or copied."""

    exit_code = 1  # the network may be back soon


class ModelLoadError(UserError, ValueError):
    """A model or tokenizer that cannot be loaded as asked."""

    exit_code = 2


class PackingNotSupportedError(UserError, ValueError):
    """The model gives other results for a packed row than for its sequences alone."""

    exit_code = 2


class RequestError(UserError, RuntimeError):
    """A server gave no usable answer. Another try may help, except for :class:`RefusedError`."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        timed_out: bool = False,
        answer_error: type[Exception] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # HTTP status, if there was an answer
        self.timed_out = timed_out  # no connection, or no whole answer, within the limit
        # what the reader raised, if there was a whole answer that it could not use
        self.answer_error = answer_error


class UnreachableError(RequestError):
    """No connection: the server may still be starting."""


class SlowServerError(RequestError):
    """No whole answer within the limit."""


class RefusedError(RequestError):
    """An answer that no retry can change: a redirect or a client error."""


class RewardError(UserError, RuntimeError):
    """A reward source failed, or gave an unusable answer. It never becomes a score."""


class NonFiniteRewardError(RewardError):
    """A reward source gave a number that is NaN or infinite: the step is left out, the run goes on."""


class WorkerStartError(RewardError):
    """No worker process can load the function it should call."""


class SandboxError(RewardError):
    """The sandbox failed, not the program in it."""


class SandboxRefusedError(SandboxError, ValueError):
    """No sandbox works here, and running without one is not allowed."""


class RolloutError(UserError, RuntimeError):
    """A rollout engine cannot sample."""


class RolloutMismatchError(RolloutError):
    """The engine samples from other weights than the actor's."""


class CheckpointError(UserError, ValueError):
    """A directory is not a checkpoint, or its shape does not fit this run."""


class StorageError(UserError, OSError):
    """A disk is full, or a folder cannot be written."""


class TrainingError(UserError, RuntimeError):
    """A run trained nothing."""


class NonFiniteError(TrainingError):
    """A model or an engine gave numbers that are not finite, on some rank; every rank raises it."""

    def __init__(self, message: str, batch: Any = None) -> None:
        super().__init__(message)
        self.batch = batch  # this rank's Experience


class LaunchError(UserError, RuntimeError):
    """This process cannot become a rank: the environment, the port or the GPUs are not right."""


class ReportError(UserError, ValueError):
    """A file of a run is missing, damaged, or lacks what a report needs."""
