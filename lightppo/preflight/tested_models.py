"""Self-tests of the user's models that need not be done again: a mark in this node's cache says what has passed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightppo.logging.run_folder import versions
from lightppo.logging.run_paths import MODELS
from lightppo.storage import in_cache

if TYPE_CHECKING:
    from lightppo.trainer.building import Building

_SECTIONS = ("model", "adapter", "strategy", "engine")  # whose options a self-test depends on
_OPTIONS = ("packing_samples", "share_prompts", "temperature", "pretrain_data")


def once_per_model(run: Building, what: str, test: Callable[[], None]) -> None:
    """Run a self-test in a dry run, and else where these models have not passed it with these options. Collective.

    A model with code of its own, whose files may change, is tested at each start.
    """
    strategy = run.strategy
    flat = run.config.flat()
    has_own_code = flat["trust_remote_code"] or flat["external_lib"] is not None
    if not run.keeps or has_own_code:
        return test()
    mark = in_cache("tested_models", tested(run), what)
    if strategy.broadcast_object(mark.exists()):
        return None
    test()
    strategy.on_rank_0(lambda: _write(mark), "mark what was tested")


def tested(run: Building) -> dict[str, Any]:
    """Return all that a self-test depends on: contents of models, options, versions and the device."""
    flat = run.config.flat()
    content = run.content
    kinds = run.config.sections()
    device = run.strategy.device
    is_gpu = device.type == "cuda"
    names = [name for title in _SECTIONS if title in kinds for name in kinds[title].options()]
    return {
        "models": {name: content[name] for name in MODELS if name in content},
        "options": {name: repr(flat[name]) for name in (*names, *_OPTIONS) if name in flat},
        "versions": dict(versions()),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "ranks": run.strategy.world_size,
    }


def _write(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:  # a cache that cannot be written: the next start tests again
        pass
