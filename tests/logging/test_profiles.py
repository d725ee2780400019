"""Traces of steps."""

from __future__ import annotations

import gzip
import json

import torch

from lightppo.logging.performance import PhaseTimer, profile


def test_a_profile_is_a_trace_with_the_phases(tmp_path):
    path = tmp_path / "profile" / "step3_rank0.json.gz"
    timer = PhaseTimer()
    with profile(path, timer), PhaseTimer()("reference"):
        torch.ones(3) + 1
    assert timer.reset().keys() == {"time_start_profile", "time_stop_profile"}
    names = {
        event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert {"reference", "aten::add"} <= names
