"""Marks of what a run has read: the same content has the same mark, wherever it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers.utils import cached_file

_MARKED = ("config.json", "tokenizer*.json", "*.safetensors", "pytorch_model*.bin")


def checkpoint_mark(path: str, blocks: int = 16, size: int = 1 << 16) -> str:
    """A mark of a checkpoint's content: config and tokenizer whole, of each weight file its length and some blocks.

    Cheap for any size, and the same wherever and whenever the files were copied.
    """
    folder = Path(path).expanduser()
    folder = folder if folder.is_dir() else Path(cached_file(path, "config.json")).parent
    digest = hashlib.sha256()
    for file in sorted(file for kind in _MARKED for file in folder.glob(kind)):
        length = file.stat().st_size
        digest.update(f"{file.name} {length}".encode())
        with file.open("rb") as stream:
            for i in range(blocks if file.suffix != ".json" else 1):
                stream.seek(max(0, length - size) * i // (blocks - 1))
                digest.update(stream.read(size if file.suffix != ".json" else -1))
    return digest.hexdigest()[:16]
