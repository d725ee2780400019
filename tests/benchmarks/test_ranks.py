"""What many ranks send each other, counted on processes of their own; more of them: ``benchmarks/ranks.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.ranks import ENVIRONMENT, REPO


@pytest.mark.long
def test_what_comes_to_a_rank_does_not_grow_with_their_number(tmp_path):
    command = [
        sys.executable,
        "benchmarks/ranks.py",
        "--ranks",
        "4",
        "8",
        "--tokens",
        "400",
        "--output_dir",
        tmp_path,
    ]
    subprocess.run(
        command,
        cwd=REPO,
        env=os.environ | ENVIRONMENT,
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
    )
    few, many = (json.loads((tmp_path / "ranks.json").read_text())[n] for n in ("4", "8"))
    for part in ("dump", "record", "evaluation", "checkpoint"):
        assert many[part]["bytes_0"] > 100_000, part
        assert many[part]["bytes"] < 2000, part
    assert few["balance"]["bytes"] > 10_000  # a rank's own samples have about 150,000
    assert many["balance"]["bytes"] < 150_000
    assert many["metrics"]["bytes"] < 2 * few["metrics"]["bytes"]


def test_a_line_is_continued_to_the_target(benchmark_script):
    script = benchmark_script("ranks")
    cost = lambda n: {"bytes_0": 1e6 * n, "bytes": 1e6, "seconds_0": 0.0, "seconds": 1e-3 * n}  # noqa: E731
    text = script.table({n: dict.fromkeys(script.PARTS, cost(n)) for n in (32, 16)})
    assert "dump | MB | 16 / 1 | 32 / 1 | 128 / 1\n" in text
    assert "dump | CPU ms | 0 / 16 | 0 / 32 | 0 / 128\n" in text
