"""Names that may be on the Hugging Face hub: one quick look, where loaders would try for half a minute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lightppo.errors import DataError, ModelLoadError
from lightppo.suggestions import similar

SECONDS = 5.0  # that the hub has to answer

Kind = Literal["model", "tokenizer", "dataset"]
_ERROR = {"model": ModelLoadError, "tokenizer": ModelLoadError, "dataset": DataError}
_CACHED = {"model": ("config.json",), "tokenizer": ("tokenizer_config.json", "tokenizer.json")}


# on the hub, by this process: a run looks for the same model several times
_FOUND: set[tuple[str, Kind]] = set()


def check_on_hub(name: str, kind: Kind, flag: str) -> None:
    """Refuse a name that is no folder here, if it is neither in the hub's cache nor on the hub.

    Raises:
        ModelLoadError: of a model or a tokenizer.
        DataError: of a data set.
    """
    if (name, kind) in _FOUND or is_cached(name, kind) or (why := _why_not(name, kind)) is None:
        return
    missing = "no such folder here, not in the hub's cache, and"
    if kind == "dataset":
        missing = "no such file or folder here, not in the hub's cache, and"
    raise _ERROR[kind](f"{flag} {name}: {missing} {why}{mistyped_path(name)}")


def is_cached(name: str, kind: Kind) -> bool:
    """Return whether files of this name are on this machine."""
    import huggingface_hub
    from huggingface_hub import constants

    if kind != "dataset":
        paths = (huggingface_hub.try_to_load_from_cache(name, file) for file in _CACHED[kind])
        return any(isinstance(path, str) for path in paths)
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    files = Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "snapshots")
    return prepared.joinpath(name.replace("/", "___")).is_dir() or files.is_dir()


def _why_not(name: str, kind: Kind) -> str | None:
    """Return why a name cannot be read from the hub; None: it can, or the hub is busy, which is left to the loader."""
    from huggingface_hub import HfApi

    ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        ask(name, timeout=SECONDS)
    except Exception as error:  # the hub client and the network raise errors without a common base
        response = getattr(error, "response", None)
        if response is None:
            return f"{type(error).__name__}: the hub cannot be reached"
        if response.status_code in (401, 403):
            return "the hub does not have it, or not for you (HF_TOKEN)"
        if response.status_code == 404:
            return "the hub does not have it"
        return None
    _FOUND.add((name, kind))
    return None


def mistyped_path(path: str) -> str:
    """Return ``"; there is FOLDER/NAME"`` for a file or folder beside it with nearly this name; else an empty text."""
    named = Path(path).expanduser()
    beside = named.parent
    names: Sequence[str] = (
        os.listdir(beside) if beside.is_dir() and os.access(beside, os.R_OK) else ()
    )
    matches = similar(named.name, names)
    if matches:
        return f"; there is {Path(path).parent / matches[0]}"
    return ""
