"""The error of this room, and the checks that give it the flag and the path to name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightppo.errors import ModelLoadError

_REASON_CHARS = 1000


def resolve_model_path(path: str, flag: str, needed_file: str | None = "config.json") -> str:
    """The path as transformers takes it (``~`` expanded); hub ids are left to the hub.

    Raises:
        ModelLoadError: plainly a path on disk (or a URL), but not there, or the folder lacks ``needed_file``.
    """
    if not path:
        raise ModelLoadError(f"{flag} is empty: give a folder with a Hugging Face model, or a hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if needed_file is not None and not (folder / needed_file).is_file():
            raise ModelLoadError(f"{flag} {path}: the folder has no {needed_file}, so it is not a Hugging Face model")
        return str(folder)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or folder.exists():
        raise ModelLoadError(f"{flag} {path}: no such folder. Give a folder with a Hugging Face model, or a hub id")
    return path


@contextmanager
def errors_name(path: str, flag: str) -> Iterator[None]:
    """Put the flag and the path in front of what transformers says."""
    try:
        yield
    except ModelLoadError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        # One line, and not all of the pages of class names that transformers may list.
        reason = textwrap.shorten(str(error), _REASON_CHARS, placeholder=" …")
        raise ModelLoadError(f"{flag} {path} could not be loaded: {reason}") from error
