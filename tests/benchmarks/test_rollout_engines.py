"""The page's tables of rollout engines. Nothing is timed."""

import pytest

MACHINE = {
    "gpu": None,
    "cpu": "a CPU",
    "cores": 2,
    "threads": 2,
    "memory_bytes": 2**34,
    "torch": "2",
    "peak_flops": 1e11,
}
DATA = {
    "machine": MACHINE, "date": "2030-01-01", "load": 0.5, "rounds": 3,
    "engines": {"hf": {"32": 1000.0, "64": 1500.4, "build_seconds": 1.0}, "vllm": {"32": 1200.0, "64": 3000.0}},
    "push": {
        "vllm": {"5M": {"push_seconds": 0.05, "parameters": 5.3e6}, "100M": {"push_seconds": 0.8, "parameters": 1e8}}
    },
    "step": {"vllm": {"step_seconds": 10.0, "rollout_seconds": 3.0, "push_seconds": 0.2}},
}  # fmt: skip


def test_tables(benchmark_script):
    text = benchmark_script("report").rollout_engines_block(DATA)
    assert "vllm | 1,200 | 3,000\n" in text
    assert "engine | 5.3M parameters | 100.0M parameters\n" in text
    assert "vllm | 0.050 s | 0.800 s\n" in text
    assert "vllm | 10.00 s | 3.00 s | 0.20 s | 2.0%" in text
    assert "Other work" not in text
    assert "Other work" in benchmark_script("report").rollout_engines_block(DATA | {"load": 9.0})


def test_without_vllm_there_is_one_table(benchmark_script):
    text = benchmark_script("report").rollout_engines_block(
        DATA | {"engines": {"hf": DATA["engines"]["hf"]}, "push": {}, "step": {}}
    )
    assert "push" not in text
    assert "hf | 1,000 | 1,500" in text


def test_the_page_has_its_place(benchmark_script):
    report = benchmark_script("report")
    page = report.PAGE.read_text(encoding="utf-8")
    assert "new table" in report.replace_block(page, "rollout_engines", "new table")


@pytest.mark.parametrize(("model", "parameters"), [("5M", 5.3e6), ("100M", 97.6e6)])
def test_sizes_of_the_models(benchmark_script, model, parameters):
    from dataclasses import replace

    script, workloads = benchmark_script("rollout_engines"), benchmark_script("workloads")
    scale = replace(workloads.SCALES["cpu"], **script.MODELS[model])
    assert scale.body_parameters + 2 * scale.head_parameters == pytest.approx(parameters, rel=0.02)
    assert scale.hidden // scale.heads in (64, 128)  # heads that vLLM takes everywhere
