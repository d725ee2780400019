"""Python objects in the user's own files, named by flags as ``path.py`` or ``path.py:name``, and calls of them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from lightppo.errors import ConfigError
from lightppo.option import definition_of
from lightppo.redaction import plain

# Frames above the user's: what calls it, parses or runs its file, or its coroutine.
_CALLERS = (
    str(Path(__file__).parent),
    str(Path(sysconfig.get_path("stdlib"), "asyncio")),
    str(Path(sysconfig.get_path("stdlib"), "importlib")),
    ast.__file__,
    "<frozen",
)
_MOST_FRAMES = 4
_ROOT = "lightppo_file_"  # what the names of modules of the user's files begin with


def load_python_function(spec: str, default_name: str, *, option: str = "") -> Callable[..., Any]:
    """Load a function from ``path.py`` or ``path.py:name``; the file runs anew, from exactly that path.

    A ConfigError names the flag ``option``, and says what is missing and what is there, or how the file failed.
    """
    value = load_python_object(spec, default_name, option=option)
    if not callable(value):
        raise _error(option, f"{spec!r} is of type {type(value).__name__}, not a function")
    return value


def load_python_object(spec: str, *default_names: str, option: str = "") -> Any:
    """Load any object, e.g. a reward source, as :func:`load_python_function` does.

    If ``spec`` has no name, takes the first of ``default_names`` that the module has.
    """
    path, name = split_python_spec(spec, default_names[0], option=option)
    module = _run_file(path, option)
    if name == default_names[0]:
        defined = (default_name for default_name in default_names if hasattr(module, default_name))
        name = next(defined, name)
    return _object_of(module, path, name, option)


def load_python_objects(path: Path, names: Sequence[str], *, option: str = "") -> list[Any]:
    """Load several objects of one file, which runs once. Errors as of :func:`load_python_function`."""
    module = _run_file(path, option)
    return [_object_of(module, path, name, option) for name in names]


def _object_of(module: ModuleType, path: Path, name: str, option: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    names_of_file = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    raise no_such_name(path, name, names_of_file, option)


def error_place(error: BaseException) -> str:
    """Return where in the user's own file an error came from, as `` (reward.py:3 in f: code)``; else an empty text.

    Its file is the first one that a flag names, or else the first one below the frames that called it. The last calls
    inside it are named, outermost first.
    """
    frames = traceback.extract_tb(error.__traceback__)
    loaded = (_is_users(frame) for frame, _ in traceback.walk_tb(error.__traceback__))
    first_of_user = next((i for i, is_users in enumerate(loaded) if is_users), None)
    if first_of_user is None:
        frames = list(dropwhile(lambda f: f.filename.startswith(_CALLERS), frames))
    else:
        frames = frames[first_of_user:]
    frames_of_file = [f for f in frames if f.filename == frames[0].filename][-_MOST_FRAMES:]
    places = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames_of_file]
    if isinstance(error, SyntaxError) and error.filename and error.text:
        places.append(f"{error.filename}:{error.lineno}: {error.text.strip()}")
    return f" ({' → '.join(places)})" if places else ""


def error_text(error: BaseException) -> str:
    """Return type, text and place of an error of the user's code, whose ``__str__`` may raise too."""
    try:
        text = f"{error}"
        text = text and f": {text}"
    except BaseException as another:  # SystemExit, too: it would end what tells the error
        text = f" (and {type(another).__name__} while its text was made)"
    return plain(f"{type(error).__name__}{text[:2000]}{error_place(error)}")


def is_users_fault(error: BaseException) -> bool:
    """Tell whether the user's code raised it: ``sys.exit`` is its own, Ctrl-C and a signal's handler are not."""
    if isinstance(error, SystemExit):
        return type(error) is SystemExit
    return not isinstance(error, KeyboardInterrupt)


def is_from_users_file(error: BaseException) -> bool:
    """Tell whether code in a file of the user's raised it, or called what did."""
    return any(_is_users(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_ROOT)


def is_of_lightppo(function: Any) -> bool:
    """Tell whether a function or an object is lightppo's own, and not the user's."""
    definition = definition_of(function)
    return str(definition.__module__).partition(".")[0] == __package__


def place_of(function: Any) -> str:
    """Name, file and line of a function, or of the class of an object."""
    function = inspect.unwrap(function)
    definition = definition_of(function)
    try:
        file = inspect.getsourcefile(definition)
        line = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):
        return f"{definition.__qualname__} of {definition.__module__}"
    return f"{definition.__qualname__} ({file}:{line})"


class Checked:
    """A function of the user's, whose call and whose first result are looked at: a ConfigError says what is wrong.

    Args:
        option: the flag that names it.
        problem_of: what is wrong with a result, of the result and of the arguments by name; empty if nothing.
        called_with: the advice where the function does not take the arguments.
    """

    def __init__(
        self, function: Callable, option: str, problem_of: Callable[..., str], called_with: str
    ) -> None:
        self.function = function
        self.option = option
        self.problem_of = problem_of
        self.called_with = called_with
        self.is_known = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            result = self.function(*arguments, **options)
        except TypeError as error:
            if error.__traceback__.tb_next is not None:  # it began, and failed later
                raise
            raise ConfigError(
                f"{self.option}: {place_of(self.function)} cannot be called: {error}; {self.called_with}"
            ) from error
        if not self.is_known:
            if problem := self.problem_of(result, *arguments, **options):
                raise ConfigError(f"{self.option}: {place_of(self.function)} {problem}")
            self.is_known = True
        return result


@contextlib.contextmanager
def without_copies(description: str) -> Iterator[None]:
    """End a process that the user's code forks within, when it comes back: it would go on as a second one of this."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            message = f"{description}: a process that it has forked came back, and is ended: end it with os._exit\n"
            os.write(2, plain(message).encode())
            os._exit(1)


def split_python_spec(spec: str, default_name: str, *, option: str = "") -> tuple[Path, str]:
    """Split ``path.py[:name]`` and check that the file exists; a ConfigError names its neighbours if not."""
    head, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        head = spec
        name = default_name
    if not head.endswith(".py") or not name.isidentifier():
        raise _error(option, f"{spec!r} is not of the form path.py or path.py:name")
    path = Path(head).expanduser().absolute()
    if path.is_file():
        return path, name
    if not path.parent.is_dir():
        raise _error(option, f"no file {path}; there is no directory {path.parent}")
    neighbours = sorted(file.name for file in path.parent.glob("*.py"))
    listed = ", ".join(neighbours) or "no Python file"
    raise _error(option, f"no file {path}; {path.parent} has {listed}")


def _run_file(path: Path, option: str) -> ModuleType:
    # a name of its own, so that a file called math.py hides nothing; in sys.modules, for dataclasses and pickle
    stem = re.sub(r"\W", "_", path.stem)
    top = path.parent
    root = f"{_ROOT}{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    packages = []
    while (top / "__init__.py").is_file() and top.name.isidentifier():
        packages = [top.name, *packages]
        top = top.parent
    _forget(root)
    # so that the file can import relatively
    home = importlib.machinery.ModuleSpec(root, None, is_package=True)
    home.submodule_search_locations = [str(top)]
    sys.modules[root] = importlib.util.module_from_spec(home)
    spec = importlib.util.spec_from_file_location(".".join([root, *packages, stem]), path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(root)
        if not is_users_fault(error):
            raise
        raise fails_when_run(path, error, option) from error
    return module


def _forget(root: str) -> None:
    """Let a file run anew, with the neighbours that it imports."""
    for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
        del sys.modules[name]


def fails_when_run(path: Path, error: BaseException, option: str) -> ConfigError:
    """Return the error for a file that raises."""
    return _error(option, f"{path} fails when run: {error_text(error)}")


def no_such_name(path: Path, name: str, own: list[str], option: str) -> ConfigError:
    """Return the error for a file that lacks a name, and has others of its ``own``."""
    return _error(
        option,
        f"{path} has no {name!r}; it has {', '.join(own) or 'no function'}. Name one: {path}:name",
    )


def _error(option: str, text: str) -> ConfigError:
    return ConfigError(f"{option}: {text}" if option else text)


def finite(value: Any) -> float | None:
    """Return a finite number of Python or numpy, or a 0-d tensor, as a float; ``None`` for anything else, also a text."""
    number = _read_number(value)
    if isinstance(number, float) and math.isfinite(number):
        return number
    return None


def is_non_finite(value: Any) -> bool:
    """Return whether a value is a number, but NaN or infinite."""
    number = _read_number(value)
    return isinstance(number, float) and not math.isfinite(number)


def reading_error(value: Any) -> str:
    """Return what reading a value as a number raised, for error texts; empty if nothing."""
    error = _read_number(value)
    if isinstance(error, Exception):
        return f" (reading it raised {error_text(error)})"
    return ""


def _read_number(value: Any) -> float | Exception | None:
    """Return a number as a float, ``None`` for what is none, or what the value's own ``item`` or ``__float__`` raised."""
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            return float(value)
        return None
    except OverflowError:  # an int beyond float's range
        return None
    except Exception as error:  # code of the user
        return error


T = TypeVar("T")


# -- calls of a user's function ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserCall:
    """Hold the arguments of one call of a function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """Say how a call ended: one try, or all tries (:func:`lightppo.rewards.function.settle`)."""

    value: Any = None  # after settle: of the last answer that could be read, even if only in part
    error: str | None = None  # why the last try gave no full answer
    # The exception. If the call was in another process, it is one that holds its trace.
    cause: BaseException | None = None
    timeouts: int = 0  # tries that ran past the time limit
    failures: int = 0  # tries without a full answer, time-outs included


def late(timeout: float) -> Outcome:
    """Return the outcome of a call that ran past its limit."""
    return Outcome(error=f"no answer within {timeout:g} s", timeouts=1)


def raised(error: BaseException) -> Outcome:
    """Return the outcome of a call that raised."""
    return Outcome(error=error_text(error), cause=error)


def in_daemon_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of its own, which does not keep the program alive if the function hangs."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            # SystemExit of a user's function too: it would end this thread unseen
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Tell whether a call gives what must be awaited, be it a function or an object with ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )  # noqa: B004, RUF100


def importable_name(target: Any) -> str | None:
    """Return how another process finds a function or a class; None: it is not at the top level of a module."""
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not target:
        return None
    is_from_file = module.__name__.startswith("lightppo_file_")
    return f"{module.__file__ if is_from_file else module.__name__}:{name}"


def awaited(value: Any) -> Any:
    """Return the value, awaited to its end if it is awaitable."""

    async def run() -> Any:
        return await value

    if inspect.isawaitable(value):
        return asyncio.run(run())
    return value
