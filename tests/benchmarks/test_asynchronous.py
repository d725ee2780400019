"""What benchmarks/asynchronous.py makes of its steps, its table, and answers whose length a prompt decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

STEP = {
    "sampling": 2.0,
    "rewards": 0.5,
    "push": 0.1,
    "server_busy": 0.5,
    "trainer_busy": 1.0,
    "staleness": 0.0,
    "response_length": 96.0,
}
MACHINE = {
    "cpu": "a CPU",
    "cores": 2,
    "threads": 1,
    "memory_bytes": 2**30,
    "gpu": None,
    "torch": "2",
    "peak_flops": 1e11,
}


@pytest.fixture
def result(benchmark_script):
    """The result of a workload whose synchronous steps take 5 s."""
    script = benchmark_script("asynchronous")
    seconds = {"synchronous": [5.0, 5.0, 9.0], "ahead": [2.6, 2.6, 2.7], "in process": [4.0]}
    sides = {
        name: script.side_result([STEP | {"seconds": one} for one in of_side])
        for name, of_side in seconds.items()
    }
    return script.workload_result(script.ASYNC_WORKLOADS["plain"], sides)


def test_the_limit_is_of_the_parts_of_a_synchronous_step(result):
    assert result["parts"] == pytest.approx(
        {"sampling": 2.0, "rewards": 0.5, "training": 2.4, "push": 0.1}
    )
    assert result["limit"] == pytest.approx(2.6)  # sampling and rewards are the longer part
    ratios = [side["ratio"] for side in result["sides"].values()]
    assert ratios == pytest.approx([1.0, 0.52, 0.8])


def test_the_table_and_its_place(result, benchmark_script):
    report = benchmark_script("report")
    data = {"machine": MACHINE, "date": "2026-01-01", "load": 9.0, "steps": 3}
    text = report.asynchronous_block(data | {"workloads": {"plain": result}})
    assert "Other work was going on" in text
    assert "plain: 16 × 4 answers of 96 tokens | 2.00 s | 0.50 s | 2.40 s | 0.10 s | 2.60 s" in text
    assert "plain, ahead | 2.60 s | 0.52 | 1.00 | 50% | 0% | 0" in text
    assert "plain, in process | 4.00 s | 0.80 |  |  | 50% | 0" in text
    page = report.ASYNC_PAGE.read_text(encoding="utf-8")
    assert text in report.replace_block(page, "asynchronous", text)


def test_the_last_word_of_a_prompt_decides_over_the_length_of_its_answers(
    benchmark_script: Callable[[str], ModuleType],
):
    assets = benchmark_script("make_assets")
    scale = replace(benchmark_script("workloads").SCALES["tiny"], end_probability=1 / 8)
    model = assets.build_model(scale)
    assets.give_long_answers(model, scale)
    middle = scale.vocabulary // 2
    generator = torch.Generator().manual_seed(1)
    for lowest, highest, expected in ((3, middle, 1 / 8), (middle, scale.vocabulary, 0.0)):
        ids = torch.randint(lowest, highest, (8, 20), generator=generator)
        with torch.no_grad():
            probabilities = model(ids).logits[:, 4:].softmax(-1)
        end = probabilities[..., model.config.eos_token_id].mean().item()
        assert end == pytest.approx(expected, abs=0.03)
        same_half = probabilities[..., lowest:highest].sum(-1).mean().item()
        assert same_half == pytest.approx(1 - expected, abs=0.03)
