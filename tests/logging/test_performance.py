"""Summaries of samples and tokens over ranks, speed, the line of a step, bars."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import pty
import re
import struct
import sys
import termios

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks

from lightppo.experience.experience import Experience
from lightppo.logging import performance
from lightppo.logging import step_metrics as sums
from lightppo.logging.performance import PhaseTimer, minibatch_on_bar, perf_metrics
from lightppo.logging.step_metrics import (
    Summary,
    with_namespace,
)
from lightppo.metric_names import _ROLLOUT, METRICS
from lightppo.rollout import engine

NAN = math.nan


def rows(masked: bool = False) -> list[Experience]:
    """Responses of 2 and 1 tokens, padded to 2; with every tensor. ``masked``: the 2nd token of the first is a hole."""
    batch = Experience.from_rollouts(
        [
            make_rollout([1], [2, 3], log_probs=[-1.0, -2.0], finish_reason="length"),
            make_rollout([1, 2, 3], [4], log_probs=[-3.0]),
        ]
    )
    # differ from the engine's by 0.5, 0, 1
    batch.action_log_probs = torch.tensor([[-1.5, -2.0], [-4.0, NAN]])
    batch.base_action_log_probs = batch.action_log_probs - torch.tensor([[0.3, 0.1], [0.5, NAN]])
    batch.loss_weights = torch.tensor([[1.0, 0.5], [0.0, NAN]])
    batch.kl = torch.tensor([[0.2, 0.4], [0.9, NAN]])
    batch.advantages = torch.tensor([[1.0, -2.0], [4.0, NAN]])
    batch.returns = torch.tensor([[1.0, 2.0], [3.0, NAN]])
    batch.values = torch.tensor([[1.0, 1.0], [3.0, NAN]])
    batch.info |= {
        "reward": torch.tensor([1.0, 3.0]),
        "return": torch.tensor([0.5, 2.5]),
        "kl": torch.zeros(2),
    }
    batch.info |= {
        "reward/format": torch.tensor([NAN, 1.0]),
        "prompt_clip_ratio": torch.tensor([0.0, 1.0]),
        "reward_clip_ratio": torch.tensor([0.0, 1.0]),
        "equal_groups": torch.tensor([1.0, 1.0]),
    }
    if masked:
        batch.action_mask[0, 1] = False
    return batch.split()


def status_of(items: list[Experience]) -> dict[str, float]:
    return sums.rollout_status(sums.merge_summaries([sums.rollout_summaries(items)]))


def test_summary_leaves_nan_out():
    summary = Summary.of(torch.tensor([[1.0, NAN], [3.0, 5.0]]))
    assert (summary.count, summary.total, summary.squares) == (3, 9.0, 35.0)
    assert (summary.low, summary.high, summary.mean) == (1.0, 5.0, 3.0)
    assert summary.variance == pytest.approx(8 / 3)  # biased: (4 + 0 + 4)/3


@pytest.mark.parametrize(
    "values", [torch.tensor([]), torch.tensor([NAN, NAN])], ids=["empty", "nan"]
)
def test_summary_of_nothing(values):
    summary = Summary.of(values)
    assert summary == Summary()
    assert math.isnan(summary.mean)
    assert math.isnan(summary.variance)
    assert summary + Summary.of(torch.tensor([2.0])) == Summary(1, 2.0, 4.0, 2.0, 2.0)


def test_summaries_add_up_to_that_of_all_numbers():
    values = torch.tensor([1.0, -4.0, 2.5, 7.0])
    assert Summary.of(values[:1]) + Summary.of(values[1:]) == Summary.of(values)


def test_variance_of_equal_numbers_is_not_negative():
    assert Summary.of(torch.full((1000,), 0.1)).variance >= 0


def test_half_precision_is_summed_exactly():
    assert Summary.of(torch.full((5000,), 1.0, dtype=torch.bfloat16)).total == 5000


def test_status_of_a_rollout_by_hand():
    status = status_of(rows())
    expected = {
        "reward": 2.0,  # (1 + 3)/2
        "reward_max": 3.0,
        "reward_min": 1.0,
        "reward_std": 1.0,  # biased
        "return": 1.5,  # (0.5 + 2.5)/2
        "response_length": 1.5,
        "response_length_max": 2.0,
        "response_length_min": 1.0,
        "total_length": 3.5,  # (3 + 4)/2
        "prompt_length": 2.0,  # (1 + 3)/2
        "prompt_length_max": 3.0,
        "prompt_length_min": 1.0,
        "prompt_clip_ratio": 0.5,
        "reward_clip_ratio": 0.5,
        "equal_groups": 1.0,
        "response_clip_ratio": 0.5,
        "reward/format": 1.0,  # of the one sample that has it
        "samples": 2,
        # over the three tokens
        "kl": 0.5,  # (0.2 + 0.4 + 0.9)/3
        "advantage_mean": 1.0,  # (1 - 2 + 4)/3
        "advantage_max": 4.0,
        "advantage_min": -2.0,
        "return_token_mean": 2.0,
        "return_token_max": 3.0,
        "return_token_min": 1.0,
        "value_mean": 5 / 3,
        "value_max": 3.0,
        "value_min": 1.0,
        "logp_diff_mean": 0.5,  # (0.5 + 0 + 1)/3
        "logp_diff_max": 1.0,
        "policy_kl": 0.3,  # (0.3 + 0.1 + 0.5)/3
        "loss_weight": 0.5,
        "loss_weight_zero": 1 / 3,
        # d = old - rollout is -0.5, 0 in one row, -1 in the other
        "mismatch_kl": 0.5,
        "mismatch_k3_kl": (0.106531 + 0 + 0.367879) / 3,  # e^d - d - 1
        "mismatch_ppl_ratio": (1.284025 + 2.718282) / 2,  # e^0.25, e^1
        "mismatch_chi2_token": (0.367879 + 1 + 0.135335) / 3 - 1,  # e^-1, 1, e^-2
        "mismatch_chi2_seq": (0.367879 + 0.135335) / 2 - 1,
        "mismatch_ess_token": 1.974410**2 / (3 * 1.503214),  # (Σρ)²/(n·Σρ²)
        "mismatch_ess_seq": 0.974410**2 / (2 * 0.503214),
        # residuals 0, 1, 0: variance 2/9; returns 1, 2, 3: variance 2/3; 1 - (2/9)/(2/3)
        "vf_explained_var": 2 / 3,
    }
    assert status == pytest.approx(expected, abs=2e-6)


def test_untrained_tokens_count_nowhere():
    status = status_of(rows(masked=True))
    assert status["kl"] == pytest.approx((0.2 + 0.9) / 2)
    assert status["advantage_min"] == 1.0
    assert status["value_mean"] == 2.0
    assert status["logp_diff_mean"] == pytest.approx(0.75)
    assert status["response_length"] == 1.5  # lengths are of tokens, trained or not


def test_what_a_run_does_not_have_is_not_reported():
    items = rows()
    for item in items:
        item.kl = item.values = item.rollout_log_probs = item.base_action_log_probs = (
            item.loss_weights
        ) = None
    names = status_of(items).keys()
    absent = ("kl", "value", "vf", "logp", "mismatch", "policy", "loss")
    assert not {name for name in names if name.split("_")[0] in absent}


def test_log_probs_that_came_with_the_training_pass_give_the_kl():
    items = rows()
    for item in items:
        item.kl = None
    assert status_of(items)["kl"] == status_of(items)["policy_kl"] == pytest.approx(0.3)
    squared = sums.rollout_summaries(
        items, sampled_kl=lambda log_probs, reference: (log_probs - reference).square() / 2
    )
    assert squared["kl"].mean == pytest.approx((0.3**2 + 0.1**2 + 0.5**2) / 6)
    assert squared["policy_kl"].mean == pytest.approx(0.3)


def test_explained_variance_of_equal_returns_is_undefined():
    items = rows()
    for item in items:
        item.returns = torch.full_like(item.returns, 2.0)
    assert math.isnan(status_of(items)["vf_explained_var"])


def test_ranks_merge_by_their_number_of_samples_also_one_without():
    shares = [rows()[:1], [], rows()[1:]]

    def status(strategy: FakeStrategy) -> dict[str, float]:
        local = sums.rollout_summaries(shares[strategy.rank])
        return sums.rollout_status(sums.merge_summaries(strategy.all_gather_object(local)))

    for found in on_ranks(3, status):
        assert found == pytest.approx(status_of(rows()), nan_ok=True)


def test_no_sample_anywhere_gives_no_status():
    assert sums.rollout_status(sums.merge_summaries([{}, {}])) == {}


def test_every_name_of_a_rollout_is_documented_and_every_documented_name_exists():
    logged = with_namespace(status_of(rows()))
    before_the_buffer = ("unscored", "small_group", "generated_samples", "generated_tokens")
    others = {*before_the_buffer, "logp_diff_on_policy"}
    assert set(logged) - {"reward/format"} == {f"rollout/{n}" for n in _ROLLOUT.keys() - others}


def test_phases_are_summed_until_the_reset(monkeypatch):
    times = iter([10.0, 12.0, 20.0, 20.5, 30.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    timer = PhaseTimer()
    with timer("rollout"):
        pass
    with timer("rollout"):
        pass
    with timer("train"):
        pass
    assert timer.reset() == {"time_rollout": 2.5, "time_train": 1.0}
    assert timer.reset() == {}


def test_nested_phases_both_count(monkeypatch):
    times = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    timer = PhaseTimer()
    with timer("step"), timer("train"):
        pass
    assert timer.reset() == {"time_train": 3.0, "time_step": 10.0}


def test_no_phase_waits_for_a_gpu(monkeypatch):
    """Marks in its stream tell the time; only the end of the step waits for the last of them."""
    marks, clock = [], iter([0.0, 5.0, 1000.0, 3500.0, 4000.0, 9000.0])  # ms

    class Mark:
        def __init__(self, enable_timing):
            self.known = False
            marks.append(self)

        def record(self):
            self.at = next(clock)

        def synchronize(self):
            self.known = True

        def elapsed_time(self, end):
            assert end.known
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits"))
    timer = PhaseTimer()
    with timer("rollout"):
        pass
    with timer("step"), timer("train"):
        pass
    assert not any(mark.known for mark in marks)
    assert timer.reset() == {"time_rollout": 0.005, "time_train": 0.5, "time_step": 8.0}
    assert timer.reset() == {}


def test_speed_by_hand():
    perf = perf_metrics(
        {
            "time_rollout": 2.0,
            "time_reference": 0.1,
            "time_actor_update": 2.0,
            "time_train": 4.0,
            "time_step": 7.0,
        },
        {"samples": 8, "response_length": 10.0, "total_length": 25.0, "generated_tokens": 80.0},
        epochs={"actor_update": 2, "critic_update": 1},
        world_size=4,
        parameters=10**9,
        peak_tflops=1.5,
    )
    assert perf == pytest.approx(
        {
            "rollout_tokens_per_second": 40.0,  # 8·10/2
            "rollout_ms_per_token": 25.0,
            "reference_ms_per_token": 0.5,  # 100 ms for 8·25 tokens, once
            "actor_update_ms_per_token": 5.0,  # 2 s for 400, in two epochs
            "train_tokens_per_second": 100.0,  # 8·25·2 = 400 tokens in 4 s
            "train_ms_per_token": 10.0,
            "train_tflops": 0.15,  # 6·1e9·400 / 4 s / 4 ranks = 1.5e11
            "mfu": 0.1,
        }
    )
    assert with_namespace(perf).keys() <= METRICS.keys()


def test_speed_of_a_step_without_samples_or_peak():
    assert (
        perf_metrics(
            {}, {}, epochs={"actor_update": 1}, world_size=1, parameters=1, peak_tflops=1.0
        )
        == {}
    )
    status = {"samples": 1, "response_length": 1.0, "total_length": 1.0}
    perf = perf_metrics(
        {"time_train": 1.0},
        status,
        epochs={"actor_update": 1},
        world_size=1,
        parameters=1,
        peak_tflops=None,
    )
    assert "mfu" not in perf
    assert "rollout_tokens_per_second" not in perf


def test_the_line_of_a_step(monkeypatch):
    now = iter([0.0, 2.0, 3.0, 13.0, 90000.0])
    pace = performance.Pace(4, clock=lambda: next(now))
    status = {
        "rollout/reward": 0.6123,
        "rollout/kl": -1e-9,
        "train/entropy": 1.25,
        "perf/time_step": 0.94,
    }
    # 95 · 2 s
    assert (
        pace.line(5, 100, status)
        == "step 5/100 · reward 0.612 · kl 0 · entropy 1.25 · 0.9 s · ETA 3:10"
    )
    # 94 · 3/2 s
    assert pace.line(6, 100, {"train/loss": 1.5}) == "step 6/100 · loss 1.5 · 1.0 s · ETA 2:21"
    # 10 s for 3 steps
    assert pace.line(9, None, {"rollout/response_length": 3.4}) == "step 9 · len 3.4 · 3.3 s"
    assert pace.line(10, 11, {}).endswith("ETA 4:10:00")  # 90000 s for 6 steps


def test_the_time_left_is_by_the_last_twenty_steps():
    now = iter([0.0, *(100.0 * i for i in range(1, 31)), *(3000.0 + i for i in range(1, 21))])
    pace = performance.Pace(clock=lambda: next(now))
    lines = [pace.line(step, 60, {}) for step in range(1, 51)]
    assert lines[29].endswith("ETA 50:00")
    assert lines[49].endswith("ETA 0:10")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_numbers_by_the_names_of_the_seed(monkeypatch):
    monkeypatch.setattr(performance.tqdm, "monitor_interval", 0)
    monkeypatch.setenv("COLUMNS", "200")
    first, second = rows()
    statuses = [
        {"policy_loss": 0.5, "actor_lr": 1e-6, "entropy": 1.0},
        {"critic_loss": 0.25, "values": 0.1, "critic_lr": 9e-6},
    ]
    with performance.progress_bar(None, "train", total=2, file=(file := Terminal())) as bar:
        bar.set_postfix(minibatch_on_bar([first, second], statuses))
    shown = "pg=0.5, rm=2, ret=1.5, glen=1.5, tlen=3.5, kl=0, act_lr=1e-6, cri=0.25, vals=0.1, cri_lr=9e-6"
    assert shown in file.getvalue()


def test_bars_are_for_terminals_and_fit_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(performance.tqdm, "monitor_interval", 0)
    for file, shown in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        with performance.progress_bar(
            None, "step", shown=shown, total=123456, initial=123, file=file
        ) as bar:
            bar.set_postfix(dict.fromkeys(map(str, range(30)), 0.5), refresh=False)
            bar.update()
        lines = re.split(r"[\r\n]+", file.getvalue())
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("step 124/123456 |") for line in lines) == (
            shown and file.isatty()
        )


@pytest.mark.parametrize("size", [(24, 80), (0, 0)])
@pytest.mark.parametrize("kind", ["step", "rollout"])
def test_bars_are_seen_in_a_terminal_without_a_size(kind, size, monkeypatch):
    """As in containers; tqdm 4.70 shows an empty line where a terminal has no rows."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(performance.tqdm, "monitor_interval", 0)
    with open(terminal, "w") as stderr, contextlib.redirect_stderr(stderr):
        monkeypatch.setattr(sys, "__stderr__", stderr)  # whose size Python asks for
        monkeypatch.setattr(sys, "__stdout__", stderr)
        if kind == "step":
            bar = performance.progress_bar(None, "step", total=3)
        else:
            bar = engine.progress_bar(3, shown=True)
        bar.update(3)
        bar.close()
    with contextlib.suppress(OSError), open(reader, "rb", buffering=0) as output:
        assert f"{kind}" in output.read(4096).decode()


def test_a_run_on_the_cpu_of_a_gpu_machine_leaves_the_gpu_alone(monkeypatch):
    """Its first use takes half a gigabyte of it, in every rank."""
    from lightppo.checkpoint.engine_state import restore_rng_state, rng_state

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("Event", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, **__: pytest.fail("the GPU is used"))
    with PhaseTimer()("train"):
        pass
    restore_rng_state({**rng_state(), "cuda": None})
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(pytest.fail.Exception), PhaseTimer()("train"):
        pass
