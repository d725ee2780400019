"""`make gpu-check`: rows that stay, parts that go on, goals, the table. Its measurements run in tiny on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = dict.fromkeys(("out", "trl", "trl_of_ppo", "gsm8k", "real_model"))


@pytest.fixture
def gpu_check(benchmark_script):
    return benchmark_script("gpu_check")


@pytest.fixture
def rows_of(gpu_check, tmp_path):
    options = argparse.Namespace(device="cpu", run_dir=tmp_path, **FOLDERS)
    return lambda: gpu_check.Rows(tmp_path / "part.json", options)


def fails(error: BaseException) -> Any:
    raise error


def test_rows_are_written_at_once_and_never_measured_again(rows_of, tmp_path):
    rows = rows_of()
    rows("one", lambda: {"ms": 1.0})
    written = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert written["one"]["ms"] == 1.0
    rows("two", lambda: fails(RuntimeError("no kernel")))
    rows("three", lambda: fails(SystemExit("exit code 1")))  # of a command
    rows("four", pytest.fail, lacks="flash_attn not there")
    again = rows_of()
    for name in ("one", "two", "three", "four"):
        again(name, pytest.fail)
    assert again("two", pytest.fail)["error"] == "RuntimeError: no kernel"
    assert again("three", pytest.fail)["error"] == "SystemExit: exit code 1"
    assert again("four", pytest.fail)["skipped"] == "flash_attn not there"


def test_what_failed_or_could_not_be_measured_is_measured_anew_if_asked(
    rows_of, gpu_check, tmp_path
):
    rows = rows_of()
    for name, lacking in (("one", ""), ("two", "liger_kernel not there")):
        rows(name, lambda: {"ms": 1.0}, lacking)
    for _ in range(3):
        rows("three", lambda: fails(RuntimeError("no kernel")))
    gpu_check.forget_failures(tmp_path / "part.json", rows.options)
    again = rows_of()
    again("one", pytest.fail)
    assert [again(name, lambda: {"ms": 2.0})["ms"] for name in ("one", "two", "three")] == [
        1.0,
        2.0,
        2.0,
    ]


def test_a_row_that_was_stopped_is_measured_again_and_one_that_ends_its_process_twice_is_not(
    rows_of, gpu_check, tmp_path
):
    for _ in range(2):  # the time of a turn was over
        with pytest.raises(gpu_check.Stopped):
            rows_of()("slow", lambda: fails(gpu_check.Stopped()))
    assert rows_of()("slow", lambda: {"ms": 2.0})["ms"] == 2.0
    options = rows_of().options
    for _ in range(
        3
    ):  # as a killed process leaves it, and nobody saw it end: the whole call was killed
        with pytest.raises(KeyboardInterrupt):
            rows_of()("killed", lambda: fails(KeyboardInterrupt()))
    assert rows_of()("killed", lambda: {"ms": 3.0})["ms"] == 3.0
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rows_of()("deadly", lambda: fails(KeyboardInterrupt()))
        gpu_check.count_ended_process(tmp_path / "part.json", options)
    assert "ended the process twice" in rows_of()("deadly", pytest.fail)["error"]


def test_a_row_that_never_ends_in_a_whole_turn_lets_the_next_ones_pass(rows_of, gpu_check):
    for _ in range(4):  # behind another row it has not had the whole turn
        rows = rows_of()
        rows.measured = 1
        with pytest.raises(gpu_check.Stopped):
            rows("endless", lambda: fails(gpu_check.Stopped()))
    for _ in range(3):
        with pytest.raises(gpu_check.Stopped):
            rows_of()("endless", lambda: fails(gpu_check.Stopped()))
    assert rows_of()("endless", pytest.fail)["error"].startswith("did not end in 3 turns")


def test_results_are_in_the_callers_folder_as_they_come(gpu_check, tmp_path):
    options = argparse.Namespace(device="cpu", run_dir=tmp_path / "run", out=tmp_path / "out")
    folder = tmp_path / "run" / "gpu_check"
    gpu_check.keep(folder / "machine.json", json.dumps({"gpu": "H100"}), options)
    rows = gpu_check.Rows(folder / "head.json", options)
    rows("one", lambda: {"ms": 1.0})
    whole = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert whole["parts"]["head"] == json.loads((folder / "head.json").read_text())
    assert whole["parts"]["head"]["rows"]["one"]["ms"] == 1.0
    assert whole["machine"] == {"gpu": "H100"}


def test_logs_come_in_one_file_without_endless_ones(gpu_check, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "head.log").write_text("said")
    (logs / "endless.log").write_bytes(bytes(gpu_check.LARGE_LOG))
    gpu_check.bring_logs(tmp_path, tmp_path)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert archive.getnames() == ["head.log"]


def test_parts_take_turns_until_the_call_is_over(gpu_check, monkeypatch, tmp_path):
    """Each has one row in a turn; one is never done, and the call ends in time."""
    clock, turns = [gpu_check.BEGAN], []
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])

    def turn(words: list[object], *, timeout: float, **_: Any) -> None:
        part, minutes = words[words.index("--part") + 1], words[words.index("--minutes") + 1]
        assert 60 * minutes < timeout <= 60 * gpu_check.PARTS[part][0]
        turns.append(part)
        data = gpu_check.read(tmp_path / "gpu_check" / f"{part}.json")
        data["rows"][f"row {len(data['rows'])}"] = {"ms": 1.0}
        if part == "head" and len(data["rows"]) == 2:
            data["state"] = "done"
        gpu_check.keep(tmp_path / "gpu_check" / f"{part}.json", json.dumps(data), options)
        clock[0] += timeout

    monkeypatch.setattr(gpu_check, "run", turn)
    monkeypatch.setattr(gpu_check, "begin", lambda *_: None)
    options = argparse.Namespace(device="cuda", run_dir=tmp_path, minutes=9, **FOLDERS)
    options.parts, options.write = ["kernels", "head"], False
    (tmp_path / "gpu_check").mkdir()
    machine = {
        "cpu": "",
        "cores": 1,
        "threads": 1,
        "memory_bytes": 1,
        "gpu": "H100",
        "torch": "2",
        "peak_flops": 1e14,
    }
    (tmp_path / "gpu_check" / "machine.json").write_text(json.dumps(machine))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit) as ended:
        gpu_check.drive(options)
    assert ended.value.code == 3
    assert turns == ["kernels", "head", "kernels", "head", "kernels"]
    assert clock[0] - gpu_check.BEGAN <= 60 * 9


def test_an_error_of_the_gpu_itself_ends_the_process_for_a_new_one(rows_of):
    with pytest.raises(SystemExit):
        rows_of()("sticky", lambda: fails(RuntimeError("CUDA error: an illegal memory access")))
    assert "illegal" in rows_of()("sticky", pytest.fail)["error"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_run_has_a_command_line_that_is_accepted(
    benchmark_script, gpu_check, monkeypatch, tmp_path, device
):
    from lightppo.config import parse_args

    commands = []

    def note(words: list[object], **variables: Any) -> None:
        commands.append([str(word) for word in words])
        if "real_assets.py" not in commands[-1][1]:
            raise SystemExit("not run")

    assets = tmp_path / "assets"
    (assets / "reward").mkdir(parents=True)
    for module in ("gpu_runs", "gpu_real", "compare"):
        monkeypatch.setattr(benchmark_script(module), "run", note)
    for module in ("gpu_runs", "gpu_real"):
        monkeypatch.setattr(benchmark_script(module), "lacks", lambda *_: "")
    monkeypatch.setattr(gpu_check.Rows, "assets", lambda *_: assets)
    folders = FOLDERS | {"gsm8k": gsm8k(tmp_path), "trl": tmp_path}
    (tmp_path / "trl").mkdir()
    options = argparse.Namespace(device=device, run_dir=tmp_path, minutes=8, **folders)
    for part in ("zero", "adapters", "vllm", "bench_vllm", "real"):
        rows = gpu_check.Rows(tmp_path / f"{part}.json", options)
        rows.data["rows"]["CPU"] = {"by_step": []}
        gpu_check.PARTS[part][1](rows)
    runs = [words[2:] for words in commands if "examples/train_ppo.py" in words]
    assert len(runs) == 8 + 4 + 4 + 1 + 1
    for words in runs:
        parse_args(words)
    (trl,) = [words for words in commands if "benchmarks/trl_side.py" in words]
    assert "--vllm" in trl


def test_trl_is_unpacked_beside_vllm_where_none_is_named(
    benchmark_script, gpu_check, monkeypatch, tmp_path
):
    commands = []

    def note(words: list[object], **variables: Any) -> None:
        commands.append(([str(word) for word in words], variables.get("PYTHONPATH", "")))
        raise SystemExit("not run")

    monkeypatch.setattr(benchmark_script("compare"), "run", note)
    monkeypatch.setattr(benchmark_script("gpu_runs"), "lacks", lambda *_: "")
    monkeypatch.setattr(gpu_check.Rows, "assets", lambda *_: tmp_path)
    options = argparse.Namespace(device="cuda", run_dir=tmp_path, **FOLDERS)
    gpu_check.PARTS["bench_vllm"][1](gpu_check.Rows(tmp_path / "bench_vllm.json", options))
    (pip, _), (trl, path), _ = commands
    folder = str(tmp_path / "trl_beside_vllm")
    assert pip[pip.index("--target") + 1] == folder
    assert trl[0] == sys.executable
    assert path.split(os.pathsep)[0] == folder


def gsm8k(folder: Path) -> Path:
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    return folder


def test_the_real_model_needs_questions(benchmark_script, rows_of, tmp_path, monkeypatch):
    module = benchmark_script("gpu_real")
    monkeypatch.setattr(module, "lacks", lambda *_: "")
    for given, reason in ((None, "--gsm8k names no folder"), (tmp_path, "has no test.jsonl")):
        (tmp_path / "train.jsonl").touch()
        rows = rows_of()
        rows.data["rows"].clear()
        rows.options.gsm8k = given
        module.real(rows)
        assert reason in rows.data["rows"]["GRPO with vllm"]["skipped"]


def test_the_curve_of_a_real_run(benchmark_script):
    found = [
        {"step": 0, "time": 60.0, "eval/accuracy": 0.1},
        {"step": 1, "time": 70.0, "perf/time_step": 9.0, "rollout/samples": 8},
        {"step": 2, "time": 80.0, "perf/time_step": 9.0, "rollout/samples": 8},
        {"step": 2, "time": 90.0, "eval/accuracy": 0.5},
    ]
    row = benchmark_script("gpu_real").outcome(found, 100)
    assert row.pop("standard_error") == pytest.approx(((0.09 + 0.25) / 100) ** 0.5)
    curve = [[0, 0.1, 0.0], [2, 0.5, 0.5]]
    assert row == {"steps": 2, "answers": 16, "before": 0.1, "after": 0.5, "curve": curve}


def test_a_run_ends_when_its_time_is_over(benchmark_script, monkeypatch):
    module = benchmark_script("stop_after")
    now = [5.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("STOP_AFTER_SECONDS", "300")
    module.callback.on_start(None)
    now[0] = 304.0
    assert module.callback.votes(None) == {"stop": 0.0}
    now[0] = 306.0
    assert module.callback.votes(None) == {"stop": 1.0}


def test_all_parts_but_those_of_vllm_take_thirty_minutes_at_most(gpu_check):
    vllm = ["vllm", "bench_vllm", "real"]
    assert list(gpu_check.PARTS)[:3] == vllm
    minutes = {name: minutes for name, (minutes, _) in gpu_check.PARTS.items()}
    assert sum(minutes.pop(name) for name in vllm) <= 21
    assert sum(minutes.values()) <= 30


def test_goals_stand_beside_what_was_measured(gpu_check):
    train = {
        "1.5B varlen": {"mfu": 0.41},
        "1.5B torch.compile": {"mfu": 0.52},
        "7B checkpointing": {"mfu": 0.3},
    }
    parts = {
        "train": {"rows": train},
        "vllm": {"rows": {"lightppo": {"push_share": 0.03, "of_vllm_alone": 0.95}}},
    }
    found = {said: cells for said, *cells in gpu_check.goals(parts)}
    assert found["training MFU, 1.5B, bf16, packed"] == [
        "≥ 0.45",
        "0.52",
        "met: train, 1.5B torch.compile",
    ]
    missed = ["≥ 0.4", "0.3", "missed: train, 7B checkpointing"]
    assert found["training MFU, 7B, bf16, packed, checkpointing"] == missed
    assert found["a push / a step"] == ["≤ 0.02", "0.03", "missed: vllm, lightppo"]
    assert found["W1, TRL's time / lightppo's"] == ["≥ 3", "not measured", ""]


def test_the_table_goes_between_its_marks(benchmark_script, monkeypatch, tmp_path):
    report = benchmark_script("report")
    machine = {
        "cpu": "Xeon",
        "cores": 16,
        "threads": 16,
        "memory_bytes": 2**37,
        "gpu": "NVIDIA H100",
        "torch": "2.11",
    }
    rows = {
        "a": {"ms": 1234.5, "gb": 0.01234},
        "b": {"skipped": "not there"},
        "c": {"error": "bad\nnews"},
    }
    data = {"machine": machine | {"peak_flops": 7.9e14}, "date": "2026-12-01", "device": "cuda",
            "goals": [["MFU", "≥ 0.45", "0.5", "met"]], "parts": {"head": {"rows": rows, "state": "done"}}}  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu_check -->\nNot measured.\n<!-- end of gpu_check -->\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.write({"gpu_check": data})
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- gpu_check -->\n2026-12-01, Xeon, 16 cores, 16 threads, 128 GiB, NVIDIA H100;"
    )
    for part in ("MFU | ≥ 0.45 | 0.5 | met", "**head**", "a | 1,234 | 0.0123", "not measured: b (not there).",
                 "failed: c (bad news).", "<!-- end of gpu_check -->\nafter"):  # fmt: skip
        assert part in text
    assert report.replace_block(
        report.REPO.joinpath("docs/performance.md").read_text(), "gpu_check", "x"
    )


def test_without_a_gpu_one_line_says_what_is_needed(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = argparse.Namespace(device="cuda", run_dir=tmp_path, minutes=1, parts=["head"])
    with pytest.raises(
        SystemExit, match=r"^gpu-check needs one CUDA GPU of 80 GB, .*DEVICE=cpu[^\n]*$"
    ):
        gpu_check.drive(options)


def test_measurements_run_in_tiny(benchmark_script):
    import torch

    kernels, workloads = benchmark_script("gpu_kernels"), benchmark_script("workloads")
    found = kernels.sdpa_backends(torch.float32, "masked", "expanded", "cpu")
    assert found["chosen_ms"] > 0
    assert found["cudnn_ms"] == "refused"
    apart, shared = (
        kernels.packed_attention(torch.float32, how, "cpu")
        for how in ("by sequence", "shared prompts")
    )
    assert apart["sequences"] == shared["sequences"] == 16
    assert shared["tokens"] == apart["tokens"] - 14 * 16  # 2 of 16 prompts of 16 tokens are left
    assert apart["ms"] > 0
    assert kernels.head_once(16, 32, 130, 101, "cpu")["both_ms"] > 0
    scale = workloads.SCALES["tiny"]
    assert kernels.train_once(scale, 1e12, "cpu", apart=True, checkpoints=True)["mfu"] > 0
    ids, mask, prompt, response = kernels.batches_of(scale, "cpu")[0]
    assert (
        scale.micro_batch_tokens <= mask.sum() == prompt + response < scale.micro_batch_tokens + 32
    )
    assert ids.shape == mask.shape


@pytest.mark.long
def test_a_killed_call_is_gone_with_all_its_processes_and_the_next_one_goes_on(tmp_path):
    command = [
        sys.executable,
        "benchmarks/gpu_check.py",
        "--device",
        "cpu",
        "--parts",
        "head,decode",
    ]
    command += ["--run_dir", str(tmp_path)]
    file = tmp_path / "gpu_check" / "head.json"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 300
        while (
            not (file.is_file() and json.loads(file.read_text())["rows"]) and time.monotonic() < end
        ):
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    first = json.loads(file.read_text())["rows"]
    assert first
    end = time.monotonic() + 60
    while (alive := _children_of(tmp_path)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    head, decode = (
        json.loads((tmp_path / "gpu_check" / f"{part}.json").read_text())
        for part in ("head", "decode")
    )
    assert (head["state"], decode["state"]) == ("done", "done")
    assert {name: head["rows"][name] for name in first} == first
    assert all(row["tokens_per_second"] > 0 for row in decode["rows"].values())
    # on another machine, with this file alone
    for path in (tmp_path / "gpu_check").glob("*e*d*.json"):
        path.unlink()
    again = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert json.loads((tmp_path / "gpu_check" / "head.json").read_text()) == head
    whole = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(whole["parts"]) == ["head", "decode"]
    assert "**decode**" in done.stdout


def _children_of(folder: Path) -> list[str]:
    """Command lines of processes that measure into a folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if str(folder) in words and "--part" in words:
            found.append(" ".join(words))
    return found
