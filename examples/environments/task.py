"""What a task of ``make quickstart`` consists of: data, and a small model of characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_task(
    output_dir: Path,
    data: Mapping[str, Iterable[Mapping[str, str]]],
    characters: str,
    seed: int,
    **sizes: Any,
) -> None:
    """Writes ``NAME.jsonl`` of each kind of ``data``, and the folder ``model`` with a tokenizer.

    Args:
        output_dir: made if missing.
        characters: of all texts.
        seed: of the initial weights.
        **sizes: of the model, see :func:`lightppo.cli.tiny_model.small_llama`.
    """
    from lightppo.cli.tiny_model import character_tokenizer, save, small_llama

    output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in data.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (output_dir / f"{name}.jsonl").write_text(text)
    tokenizer = character_tokenizer(characters)
    save(small_llama(tokenizer, seed, **sizes), tokenizer, output_dir / "model")
