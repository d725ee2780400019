"""No file of a checkpoint names anything to run: one error on all ranks, before a weight has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightppo import tensor_file
from lightppo.checkpoint.engine_state import deepspeed_classes
from lightppo.errors import CheckpointError
from lightppo.ranks import Ranks


def require_plain(ranks: Ranks, model: Any, path: Path, meta: Mapping[str, Any]) -> None:
    """CheckpointError on all ranks. Collective.

    Each rank looks at its share of the files; tensors are not read.
    """
    refused = []
    for file in sorted(path.rglob("*.pt"))[ranks.get_rank() :: ranks.world_size]:
        try:
            tensor_file.read(file, deepspeed_classes(), mapped=True)
        except CheckpointError as error:
            refused.append(str(error))
    of_all_ranks = sorted(text for texts in ranks.all_gather_object(refused) for text in texts)
    if of_all_ranks:
        more = f" ({len(of_all_ranks) - 1} more files are like it)" if len(of_all_ranks) > 1 else ""
        raise CheckpointError(f"{of_all_ranks[0]}{more}")
