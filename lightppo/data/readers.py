"""From ``--prompt_data rows.jsonl`` to a dataset; other sources and formats come by :data:`lightppo.plugin.ROWS`.

The hidden column ``__origin__`` keeps each row's file and line, so that errors can name them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError
from lightppo.files import stage_to_local

if TYPE_CHECKING:
    from datasets import Dataset


def rows_of_file(config: Any, name: str, split: str, strategy: Any) -> Dataset:
    """A file with one JSON object per line."""
    from datasets import Dataset

    source, rows = config.flat()[name], []
    path = Path(stage_to_local(source)).expanduser()
    if not path.is_file():
        raise DataError(f"--{name} {source}: no such file (looked in {os.getcwd()})")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(json.loads(line) | {ORIGIN_COLUMN: f"{source}:{number}"})
            except (ValueError, TypeError) as error:
                raise DataError(f"{source}:{number}: not a JSON object: {error}") from error
    try:
        return Dataset.from_list(rows)
    except ValueError as error:  # of Arrow: columns of mixed types, halves of characters
        raise DataError(f"{source}: its rows make no table: {error}") from error
