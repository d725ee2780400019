"""What must be in the folder of a model or a tokenizer, looked at before anything is loaded. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from lightppo.errors import DataError, ModelLoadError
from lightppo.suggestions import similar

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".ckpt")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.*",
)
_TOKENIZER += ("*.tiktoken", "tiktoken.model", "tekken.json", "tokenization_*.py")
_LFS = b"version https://git-lfs"


def look(path: str, flag: str, kind: str) -> None:
    """Call :func:`check_model` or :func:`check_tokenizer`."""
    check = check_tokenizer if kind == "tokenizer" else check_model
    check(path, flag)


def check_model(
    model_path: str,
    flag: str,
    *,
    weights: bool = True,
    tokenizer: bool = False,
) -> None:
    """Refuse what is no model: a missing folder or hub id, a file, an adapter, missing or incomplete files.

    Args:
        weights: it needs them; random ones need the config alone.
        tokenizer: it needs one of its own.
    """
    folder = _local_folder(model_path, flag, "model")
    if folder is None:
        return
    has_adapter = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file():
        if has_adapter:
            raise ModelLoadError(
                f"{flag} {model_path} is an adapter: `lightppo merge {model_path} OUT` makes a model of it"
            )
        inner_folders = sorted(config.parent.name for config in folder.glob("*/config.json"))[:3]
        if inner_folders:
            raise ModelLoadError(
                f"{flag} {model_path} has no config.json, but folders in it have one: name one of "
                f"{', '.join(inner_folders)}"
            )
        if gguf_files := sorted(filter(is_gguf, folder.iterdir())):
            raise ModelLoadError(
                f"{flag} {model_path} has no config.json: `lightppo convert {gguf_files[0]} OUT` makes a folder to be named "
                "here"
            )
        content = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise ModelLoadError(
            f"{flag} {model_path} has no config.json: it is no Hugging Face model; it has {content}"
        )
    if weights and has_adapter:
        raise ModelLoadError(
            f"{flag} {model_path} has an adapter (adapter_config.json) beside its weights, which would be added to them: if "
            "it is merged already, remove its files, else move them to a folder of their own and run `lightppo merge`"
        )
    if weights and (problem := weights_problem(folder)):
        raise ModelLoadError(f"{flag} {model_path}: {problem}")
    if tokenizer:
        _check_tokenizer_files(folder, model_path, flag)


def check_tokenizer(tokenizer_path: str, flag: str) -> None:
    """Refuse a folder without the files of a tokenizer, and names that are neither here nor on the hub."""
    folder = _local_folder(tokenizer_path, flag, "tokenizer")
    if folder is not None:
        _check_tokenizer_files(folder, tokenizer_path, flag)


def _local_folder(path: str, flag: str, kind: str) -> Path | None:
    """Return the folder; None for a URL, which is copied later, and for a hub id that can be loaded."""
    if "://" in path:
        return None
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return folder
    if is_gguf(folder):
        raise ModelLoadError(
            f"{flag} {path} is a GGUF file: `lightppo convert {path} OUT` makes a folder of it, to be named here"
        )
    if folder.is_file():
        parent = folder.parent
        if (parent / "config.json").is_file() or (parent / "tokenizer_config.json").is_file():
            raise ModelLoadError(f"{flag} {path} is a file: name its folder, {Path(path).parent}")
        raise ModelLoadError(
            f"{flag} {path} is a file: give the folder of a Hugging Face {kind}, or a hub id"
        )
    if not _HUB_ID.fullmatch(path):
        raise ModelLoadError(
            f"{flag} {path}: no such folder. Give a folder with a Hugging Face {kind}, or a hub id{mistyped_path(path)}"
        )
    check_on_hub(path, "model" if kind == "model" else "tokenizer", flag)
    return None


def is_gguf(path: Path) -> bool:
    """Tell whether this is a file of llama.cpp's format, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def _check_tokenizer_files(folder: Path, path: str, flag: str) -> None:
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER):
        elsewhere = "name another folder" if flag == "--tokenizer_path" else "set --tokenizer_path"
        raise ModelLoadError(
            f"{flag} {path} has no files of a tokenizer (tokenizer.json, tokenizer.model, vocab.json): copy them there "
            f"from the model that it was made of, or {elsewhere}"
        )


# -- files of weights ------------------------------------------------------------------------------------------------


def weights_problem(folder: Path) -> str | None:
    """Return what is wrong with the files of weights in a folder, by their headers and sizes; None: nothing."""
    try:
        weight_files = list(_weight_files(folder))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"its index of weights cannot be read ({error}): download it again"
    if not weight_files and not any(file.suffix in _WEIGHTS for file in folder.iterdir()):
        return "it has config.json but no weights (model.safetensors): download the rest of it"
    for file in weight_files:
        if not file.is_file():
            return f"{file.name} is missing, which its index names: download it"
        if problem := file_problem(file):
            return f"{file.name} {problem}"
    return None


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a loader would read, as it chooses them."""
    for file_name in ("model.safetensors", "pytorch_model.bin"):
        index_file = folder / f"{file_name}.index.json"
        if (folder / file_name).is_file():
            yield folder / file_name
            return
        if index_file.is_file():
            file_names = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"].values()
            yield from (folder / file_name for file_name in sorted(set(file_names)))
            return


def file_problem(weight_file: Path) -> str | None:
    """Return what is wrong with one file of weights; None: nothing that its header and size would show."""
    file_size = weight_file.stat().st_size
    with weight_file.open("rb") as stream:
        first_bytes = stream.read(len(_LFS))
        if first_bytes == _LFS:
            return "is only a pointer of Git LFS, not the weights: run `git lfs pull` in its folder"
        if file_size == 0:
            return "is empty: download it again"
        if weight_file.suffix != ".safetensors":
            is_cut = first_bytes[:2] == b"PK" and not zipfile.is_zipfile(weight_file)
            if is_cut:
                return f"is not complete ({file_size:,} bytes): download it again"
            return None
        header_bytes = int.from_bytes(first_bytes[:8], "little")
        if header_bytes > file_size - 8:
            is_header = file_size > 8 and stream.seek(8) and stream.read(1) == b"{"
            problem = "not complete" if is_header else "no file of weights"
            return f"is {problem} ({file_size:,} bytes): download it again"
        stream.seek(8)
        try:
            tensors = json.loads(stream.read(header_bytes))
            tensor_ends = [
                tensor["data_offsets"][1]
                for tensor_name, tensor in tensors.items()
                if tensor_name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "is damaged (its header cannot be read): download it again"
    complete_size = 8 + header_bytes + max(tensor_ends, default=0)
    if file_size > complete_size:
        return f"is damaged: it has {file_size:,} bytes, and by its header {complete_size:,}: download it again"
    if file_size == complete_size:
        return None
    return f"is not complete: {file_size:,} of {complete_size:,} bytes; download it again"


# -- names that may be on the hub: one quick look, where loaders would try for half a minute -------------------------

Kind = Literal["model", "tokenizer", "dataset"]
_HUB_SECONDS = 5.0  # that the hub has to answer
_CACHED_FILES = {
    "model": ("config.json",),
    "tokenizer": ("tokenizer_config.json", "tokenizer.json"),
}
# by this process: a run looks for the same model several times
_on_hub: set[tuple[str, Kind]] = set()


def check_on_hub(name: str, kind: Kind, flag: str) -> None:
    """Refuse a name that is no folder here, if it is neither in the hub's cache nor on the hub.

    Raises:
        ModelLoadError: of a model or a tokenizer.
        DataError: of a data set.
    """
    if (name, kind) in _on_hub or is_cached(name, kind):
        return
    problem = _hub_problem(name, kind)
    if problem is None:
        return
    problem = f"not in the hub's cache, and {problem}{mistyped_path(name)}"
    if kind == "dataset":
        raise DataError(f"{flag} {name}: no such file or folder here, {problem}")
    raise ModelLoadError(f"{flag} {name}: no such folder here, {problem}")


def is_cached(name: str, kind: Kind) -> bool:
    """Return whether files of this name are on this machine."""
    import huggingface_hub
    from huggingface_hub import constants

    if kind != "dataset":
        cached_files = _CACHED_FILES[kind]
        cached_paths = [huggingface_hub.try_to_load_from_cache(name, file) for file in cached_files]
        return any(isinstance(cached_path, str) for cached_path in cached_paths)
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    snapshots = Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "snapshots")
    return prepared.joinpath(name.replace("/", "___")).is_dir() or snapshots.is_dir()


def _hub_problem(name: str, kind: Kind) -> str | None:
    """Return why a name cannot be read from the hub; None: it can, or the hub is busy, which is left to the loader."""
    from huggingface_hub import HfApi

    request = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        request(name, timeout=_HUB_SECONDS)
    except Exception as error:  # the hub client and the network raise errors without a common base
        response = getattr(error, "response", None)
        if response is None:
            return f"{type(error).__name__}: the hub cannot be reached"
        if response.status_code in (401, 403):
            return "the hub does not have it, or not for you (HF_TOKEN)"
        if response.status_code == 404:
            return "the hub does not have it"
        return None
    _on_hub.add((name, kind))
    return None


def mistyped_path(path: str) -> str:
    """Return ``"; there is FOLDER/NAME"`` for a file or folder beside it with nearly this name; else an empty text."""
    expanded = Path(path).expanduser()
    folder = expanded.parent
    file_names: Sequence[str] = ()
    if folder.is_dir() and os.access(folder, os.R_OK):
        file_names = os.listdir(folder)
    matches = similar(expanded.name, file_names)
    if matches:
        return f"; there is {Path(path).parent / matches[0]}"
    return ""
