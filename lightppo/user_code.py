"""Python objects in the user's own files, named by flags as ``path.py`` or ``path.py:name``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_python_function(spec: str, default_name: str, *, option: str = "") -> Callable[..., Any]:
    """Loads a function from ``path.py`` or ``path.py:name``; runs the file anew, from exactly that path.

    A ``ValueError`` names the flag ``option``, and says what is missing and what is there, or how the file failed.
    """
    value = load_python_object(spec, default_name, option=option)
    if not callable(value):
        raise ValueError(f"{_prefix(option)}{spec!r} is of type {type(value).__name__}, not a function")
    return value


def load_python_object(spec: str, *default_names: str, option: str = "") -> Any:
    """Like :func:`load_python_function`, for any object, e.g. a reward source.

    If ``spec`` has no name, takes the first of ``default_names`` that the module has.
    """
    path, name = split_python_spec(spec, default_names[0], option=option)
    module = _run_file(path, option)
    if name == default_names[0]:
        name = next((known for known in default_names if hasattr(module, known)), name)
    try:
        return getattr(module, name)
    except AttributeError:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"{_prefix(option)}{path} has no {name!r}; it has {', '.join(own) or 'no function'}. "
            f"Name one as {path}:name"
        ) from None


def split_python_spec(spec: str, default_name: str, *, option: str = "") -> tuple[Path, str]:
    """Splits ``path.py[:name]`` and checks that the file exists; a ``ValueError`` names its neighbours if not."""
    head, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        head, name = spec, default_name
    if not head.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{_prefix(option)}{spec!r} is not of the form path.py or path.py:name")
    path = Path(head).expanduser().absolute()
    if path.is_file():
        return path, name
    if path.parent.is_dir():
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.py"))) or "no Python file"
        raise ValueError(f"{_prefix(option)}no file {path}; {path.parent} has {found}")
    raise ValueError(f"{_prefix(option)}no file {path}; there is no directory {path.parent}")


def _run_file(path: Path, option: str) -> Any:
    # a name of its own, so that a file called math.py hides nothing; in sys.modules, for dataclasses and pickle
    module_name = f"lightppo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{_prefix(option)}{path} fails when run: {type(error).__name__}: {error}") from error
    return module


def _prefix(option: str) -> str:
    return f"{option}: " if option else ""
