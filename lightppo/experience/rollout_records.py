"""Groups of rollouts as plain values, for checkpoints and files, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightppo.data.records import Prompt, Rollout

_OWN = [f.name for f in dataclasses.fields(Rollout) if f.name not in ("prompt", "baseline")]


def to_plain(group: Sequence[Rollout]) -> dict[str, Any]:
    """Samples of one prompt, which is kept once, as is their greedy baseline."""
    baseline = group[0].baseline
    return {
        "prompt": {f.name: getattr(group[0].prompt, f.name) for f in dataclasses.fields(Prompt)},
        "baseline": _sample(baseline) if baseline is not None else None,
        "samples": [_sample(rollout) for rollout in group],
    }


def from_plain(values: Mapping[str, Any]) -> list[Rollout]:
    """From :func:`to_plain`."""
    prompt = Prompt(**values["prompt"])
    baseline = Rollout(prompt, **values["baseline"]) if values["baseline"] is not None else None
    return [Rollout(prompt, **sample, baseline=baseline) for sample in values["samples"]]


def _sample(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in _OWN}
