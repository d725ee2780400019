"""The actor's weights as safetensors files for servers that read them: in shared memory or in a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

from lightppo.errors import RolloutError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "lightppo-weights-"
_STALE_SECONDS = 3600.0  # longer than any push; a process that we cannot see may be at it
FILE_BYTES = 1 << 30
"""Weights of one file; so much is held in memory beside what is written."""


def new_folder(where: str, shared_folder: str | None, needed_bytes: int) -> Path:
    """A new folder, of this user alone, for the weights of one push.

    Args:
        where: "shm", "disk", or "auto": shared memory if there is room.
        shared_folder: for "disk", where the servers read too; ``None``: the folder for temporary files.
        needed_bytes: size of the weights.

    Raises:
        RolloutError: no room, or the folder cannot be written; names the flag.
    """
    in_memory = SHARED_MEMORY.is_dir() and _free(SHARED_MEMORY) > 1.1 * needed_bytes
    root = SHARED_MEMORY
    if where == "disk" or (where == "auto" and not in_memory):
        root = Path(shared_folder or tempfile.gettempdir())
    try:
        _remove_stale(root)
        if _free(root) <= needed_bytes:
            raise RolloutError(
                f"--vllm_server_sync {where}: the weights need {needed_bytes / 1e9:.1f} GB, {root} has "
                f"{_free(root) / 1e9:.1f} GB free: make room, or set --vllm_server_sync disk and --vllm_server_sync_dir"
            )
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    except OSError as error:
        raise RolloutError(f"--vllm_server_sync {where}: {root} cannot be written: {error.strerror}") from error


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path | None) -> tuple[list[str], str | None]:
    """Writes weights into files of about ``FILE_BYTES``. Reads ``weights`` to the end whatever happens: other ranks
    iterate along.

    Args:
        weights: names and whole tensors.
        folder: where to; ``None``: nothing is written.

    Returns:
        The files, and why they are not whole, or ``None``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files: list[str] = []
    held: dict[str, Tensor] = {}
    held_bytes, problem = 0, None

    def write() -> None:
        nonlocal held_bytes, problem
        path = str(folder / f"weights-{len(files):05d}.safetensors")
        try:
            save_file(held, path)
        except (OSError, SafetensorError) as error:
            problem = f"the weights cannot be written to {folder}: {error}"
        files.append(path)
        held.clear()
        held_bytes = 0

    for name, tensor in weights:
        if folder is None or problem is not None:
            continue
        if held and held_bytes + tensor.nbytes > FILE_BYTES:
            write()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()  # copies: tied ones may not share memory
        held_bytes += tensor.nbytes
    if held and problem is None:
        write()
    return files, problem


def remove_folder(folder: Path | None) -> None:
    """Removes what :func:`new_folder` made."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    """Removes what runs left that were killed in a push: it may be gigabytes of memory."""
    for folder in root.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):  # gone meanwhile, or another user's
            old = time.time() - folder.stat().st_mtime > _STALE_SECONDS
            if old and pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder)


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
