"""Python objects in the user's own files, named by flags as ``path.py`` or ``path.py:name``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_python_function(spec: str, default_name: str, *, option: str = "") -> Callable[..., Any]:
    """Loads a function from ``path.py`` or ``path.py:name``; runs the file anew, from exactly that path.

    A ``ValueError`` names the flag ``option``, and says what is missing and what is there, or how the file failed.
    """
    value = load_python_object(spec, default_name, option=option)
    if not callable(value):
        raise _error(option, f"{spec!r} is of type {type(value).__name__}, not a function")
    return value


def load_python_object(spec: str, *default_names: str, option: str = "") -> Any:
    """Like :func:`load_python_function`, for any object, e.g. a reward source.

    If ``spec`` has no name, takes the first of ``default_names`` that the module has.
    """
    path, name = split_python_spec(spec, default_names[0], option=option)
    module = _run_file(path, option)
    if name == default_names[0]:
        name = next((known for known in default_names if hasattr(module, known)), name)
    if hasattr(module, name):
        return getattr(module, name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    raise _error(option, f"{path} has no {name!r}; it has {', '.join(own) or 'no function'}. Name one: {path}:name")


def split_python_spec(spec: str, default_name: str, *, option: str = "") -> tuple[Path, str]:
    """Splits ``path.py[:name]`` and checks that the file exists; a ``ValueError`` names its neighbours if not."""
    head, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        head, name = spec, default_name
    if not head.endswith(".py") or not name.isidentifier():
        raise _error(option, f"{spec!r} is not of the form path.py or path.py:name")
    path = Path(head).expanduser().absolute()
    if path.is_file():
        return path, name
    if not path.parent.is_dir():
        raise _error(option, f"no file {path}; there is no directory {path.parent}")
    found = ", ".join(sorted(p.name for p in path.parent.glob("*.py"))) or "no Python file"
    raise _error(option, f"no file {path}; {path.parent} has {found}")


def _run_file(path: Path, option: str) -> ModuleType:
    # a name of its own, so that a file called math.py hides nothing; in sys.modules, for dataclasses and pickle
    name = f"lightppo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _error(option, f"{path} fails when run: {type(error).__name__}: {error}") from error
    return module


def _error(option: str, text: str) -> ValueError:
    return ValueError(f"{option}: {text}" if option else text)
