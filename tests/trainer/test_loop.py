"""The loop of every trainer: what is logged, evaluated and saved, and when; never twice."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeStrategy, on_ranks
from support.loops import idle_loop
from support.runs import logged

from lightppo.callbacks import Callback
from lightppo.errors import StorageError
from lightppo.trainer.due_times import DueTimes, TimedSaves


def test_logs_have_namespaces_and_come_every_n_steps(tmp_path):
    mine = idle_loop(tmp_path, evaluates=False, logging_steps=2)
    mine.run(5)
    assert [
        (row["step"], row["rollout/reward"], row["perf/time_step"]) for row in logged(tmp_path)
    ] == [
        (2, 2.0, 0.5),
        (4, 4.0, 0.5),
    ]


def test_a_line_for_each_logged_step_and_alarms_when_they_begin(tmp_path):
    mine = idle_loop(tmp_path, evaluates=False, logging_steps=2)
    mine.total_steps = 6
    for step in range(1, 7):
        mine.step({"reward": 0.5, "policy_kl": 2.0 if step == 3 else 0.0, "time_step": 0.5})
    lines = [
        line.rpartition(" · ETA")[0] or line.partition(":")[0] for line in mine.strategy.printed
    ]
    told = [f"step {step}/6 · reward 0.5 · 0.5 s" for step in (2, 4, 6)]
    assert lines == [told[0], "[step 3] ALARM kl_explosion", *told[1:]]
    assert [row["alarm/kl_explosion"] for row in logged(tmp_path)] == [0.0, 0.0, 0.0]


def test_what_saving_took_is_logged_with_the_next_step_and_an_evaluation_with_its_time(tmp_path):
    mine = idle_loop(tmp_path, save_steps=2, hf_save_steps=3, eval_steps=4)
    mine.run(4)
    timed = [
        (row["step"], name)
        for row in logged(tmp_path)
        for name in row
        if name in ("perf/time_eval", "perf/time_save")
    ]
    assert timed == [(3, "perf/time_save"), (4, "perf/time_save"), (4, "perf/time_eval")]
    assert len(logged(tmp_path)) == 5  # no row that a kill after a save could take


def test_evaluation_is_logged_and_told(tmp_path):
    mine = idle_loop(tmp_path)
    assert mine.evaluation.evaluate_step(4) == {"eval/accuracy": 0.4, "eval/reward": 1.0}
    (row,) = logged(tmp_path)
    assert (row["step"], row["eval/accuracy"]) == (4, 0.4)
    assert mine.strategy.printed == ["[step 4] evaluation: accuracy 0.400, reward 1.000"]


def test_a_step_is_evaluated_once(tmp_path):
    mine = idle_loop(tmp_path, eval_steps=2)
    mine.run(4)
    assert mine.evaluation.evaluate_step(4) == {}
    mine.end()
    assert mine.evaluator.steps == [2, 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 6]),
        ({"eval_steps": 2}, [2, 4, 6]),
        ({"eval_steps": 0}, []),
    ],
)
def test_evaluation_comes_every_episode_unless_steps_or_seconds_are_set(
    tmp_path, options, expected
):
    mine = idle_loop(tmp_path, **options)
    mine.run(7)
    assert mine.evaluator.steps == expected


def test_without_an_evaluator_nothing_is_evaluated(tmp_path):
    mine = idle_loop(tmp_path, evaluates=False, eval_steps=1)
    mine.run(3)
    mine.end()
    mine.ask_for_evaluation(3)
    assert mine.evaluation.result is None
    assert "eval/accuracy" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "saved", "exported"),
    [
        ({}, [], []),
        ({"save_steps": 2}, [2, 4, 6], []),
        ({"save_epochs": 2}, [6], []),
        ({"save_steps": 4, "save_epochs": 1}, [3, 4, 6], []),
        ({"hf_save_steps": 3}, [], [3, 6]),
    ],
)
def test_checkpoints_and_exports_come_at_their_times(tmp_path, options, saved, exported):
    mine = idle_loop(tmp_path, **options)
    mine.run(7)
    assert mine.saved_steps == saved
    assert [step for _, step in mine.checkpointer.exported] == exported
    assert all(
        root == "CKPT" and state["trainer"]["global_step"] == n
        for root, n, state in mine.checkpointer.saved
    )


def saving_of(loop: Any) -> DueTimes:
    """When checkpoints are due."""
    return next(
        callback.due_times for callback in loop.callbacks if isinstance(callback, TimedSaves)
    )


def test_seconds_since_the_last_checkpoint(tmp_path):
    mine = idle_loop(tmp_path, save_seconds=10)
    now = [saving_of(mine).last]
    saving_of(mine).clock = lambda: now[0]
    for passed in (6, 6, 6, 6, 1):
        now[0] += passed
        mine.step()
    assert mine.saved_steps == [2, 4]  # after 12 s, and 12 s later


def test_ranks_save_together_by_rank_0s_clock(tmp_path):
    def saves(strategy: FakeStrategy) -> list[int]:
        mine = idle_loop(tmp_path / f"rank{strategy.rank}", strategy, save_seconds=10)
        due_times = saving_of(mine)
        start = due_times.last
        # Rank 1's clock says that much more time has passed.
        due_times.clock = lambda: start + (5 if strategy.rank == 0 else 500)
        mine.step()
        due_times.clock = lambda: start + (15 if strategy.rank == 0 else 1)
        mine.step()
        return mine.saved_steps

    assert on_ranks(2, saves) == [[2], [2]]


def test_the_state_is_only_taken_when_a_checkpoint_is_due(tmp_path):
    class Counted:
        taken = 0

        def state_dict(self) -> int:
            self.taken += 1
            return self.taken

        def load_state_dict(self, state: int) -> None:
            self.taken = state

    mine, counted = idle_loop(tmp_path, save_steps=2), Counted()
    mine.register_state("counted", counted)
    mine.run(5)
    assert counted.taken == 2
    assert [state["counted"] for _, _, state in mine.checkpointer.saved] == [1, 2]
    with pytest.raises(ValueError, match="'counted'"):
        mine.register_state("counted", counted)


class Numbers:
    """Numbers of one rank, which other ranks can take over."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def state_dict(self) -> list[int]:
        return self.numbers

    def load_state_dict(self, state: list[int]) -> None:
        self.numbers = list(state)

    def share_out(self, states: list[list[int]], world_size: int) -> list[list[int]]:
        everything = [number for numbers in states for number in numbers]
        return [everything[rank::world_size] for rank in range(world_size)]


@pytest.mark.parametrize(
    "early", [True, False], ids=["registered before the resume", "and after it"]
)
def test_a_state_of_each_rank_comes_back_to_it(tmp_path, early):
    def saved(strategy: FakeStrategy) -> dict[str, Any]:
        mine = idle_loop(tmp_path / f"rank{strategy.rank}", strategy)
        mine.register_state("numbers", Numbers(strategy.rank, strategy.rank + 10), per_rank=True)
        return mine.whole_state()

    def resumed(state: dict[str, Any], strategy: FakeStrategy) -> list[int]:
        mine, part = idle_loop(tmp_path / f"rank{strategy.rank}", strategy), Numbers()
        if early:
            mine.register_state("numbers", part, per_rank=True)
        mine.load_state(state)
        if not early:
            mine.register_state("numbers", part, per_rank=True)
        return part.numbers

    state = on_ranks(2, saved)[0]  # rank 0 writes it
    assert state["numbers"] == [[0, 10], [1, 11]]
    assert on_ranks(2, partial(resumed, state)) == [[0, 10], [1, 11]]
    assert on_ranks(1, partial(resumed, state)) == [[0, 10, 1, 11]]


def test_callbacks_vote_and_add_numbers(tmp_path):
    class Mine(Callback):
        seen: list[float] = []

        def on_step_end(self, run: Any, step: int, metrics: Any) -> dict[str, float]:
            self.seen.append(metrics["rollout/reward"])
            return {"mine/twice": 2 * metrics["rollout/reward"]}

        def votes(self, run: Any) -> dict[str, float]:
            last = self.seen[-1]
            return {
                "save": float(last == 2),
                "evaluate": float(last == 3),
                "stop": float(last == 4),
            }

    mine = idle_loop(tmp_path, callbacks=[Mine()], eval_steps=0)
    assert [mine.step() for _ in range(4)] == [False, False, False, True]
    assert (mine.saved_steps, mine.evaluator.steps) == ([2], [3])
    assert [row["mine/twice"] for row in logged(tmp_path) if "mine/twice" in row] == [
        2.0,
        4.0,
        6.0,
        8.0,
    ]


def test_a_callback_may_evaluate_where_it_likes(tmp_path):
    class Mine(Callback):
        evaluated: list[int] = []

        def votes(self, run: Any) -> dict[str, float]:
            return {"evaluate": float(run.state.global_step == 2)}

        def evaluate(self, run: Any, step: int) -> None:
            assert run.last_saved != step  # a checkpoint follows
            self.evaluated.append(step)

    mine = idle_loop(tmp_path, callbacks=[Mine()], evaluates=False, eval_steps=0, save_steps=1)
    mine.run(3)
    assert Mine.evaluated == [2]
    mine.run(4)
    mine.last_saved = None
    mine.end()
    assert Mine.evaluated == [2, 4]


def test_callbacks_have_all_started_before_the_first_step(tmp_path):
    times: list[str] = []

    class Mine(Callback):
        def on_start(self, run: Any) -> None:
            times.append("start")

        def before_steps(self, run: Any) -> None:
            times.append("before steps")

    with idle_loop(tmp_path, callbacks=[Mine(), Mine()], evaluates=False).running():
        assert times[-4:] == ["start", "start", "before steps", "before steps"]


def test_a_vote_of_any_rank_counts(tmp_path):
    class Rank1(Callback):
        def votes(self, run: Any) -> dict[str, float]:
            return {"stop": float(run.strategy.rank == 1)}

    def stops(strategy: FakeStrategy) -> bool:
        return idle_loop(tmp_path / str(strategy.rank), strategy, callbacks=[Rank1()]).step()

    assert on_ranks(2, stops) == [True, True]


def test_the_end_comes_to_all_callbacks_also_after_an_error(tmp_path):
    ends: list[str] = []

    class Ends(Callback):
        def on_end(self, run: Any, error: BaseException | None) -> None:
            ends.append(type(error).__name__)
            raise ValueError("of this callback")

    mine = idle_loop(tmp_path, callbacks=[Ends(), Ends()])
    with pytest.raises(KeyError, match="of the step"), mine.running():
        raise KeyError("of the step")
    assert ends == ["KeyError", "KeyError"]


def test_a_further_error_that_a_user_can_mend_is_one_line(tmp_path, caplog):
    class Ends(Callback):
        def on_end(self, run: Any, error: BaseException | None) -> None:
            raise StorageError("/run: the disk is full")

    mine = idle_loop(tmp_path, callbacks=[Ends()])
    with pytest.raises(KeyError, match="of the step"), mine.running():
        raise KeyError("of the step")
    (told,) = [record for record in caplog.records if record.name == "lightppo.callbacks"]
    assert (told.getMessage(), told.exc_info) == ("/run: the disk is full", None)


def test_the_end_saves_what_is_not_saved_yet(tmp_path):
    mine = idle_loop(tmp_path, save_steps=2, evaluates=False)
    mine.run(5)
    mine.end()
    assert mine.saved_steps == [2, 4, 5]
    mine = idle_loop(tmp_path, save_steps=2, evaluates=False)
    mine.run(4)
    mine.end()
    assert mine.saved_steps == [2, 4]


def test_a_run_that_keeps_no_checkpoints_saves_none_at_the_end(tmp_path):
    mine = idle_loop(tmp_path, evaluates=False)
    mine.run(4)
    mine.end()
    assert mine.saved_steps == []


def test_a_resumed_run_with_nothing_left_to_do_writes_no_checkpoint_again(tmp_path):
    first = idle_loop(tmp_path, save_steps=2)
    first.run(4)
    mine = idle_loop(tmp_path, save_steps=2, start_step=4, before=first)
    mine.end()
    assert mine.saved_steps == []


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    first = idle_loop(tmp_path, evaluates=False)
    first.run(4)
    second = idle_loop(tmp_path, evaluates=False, start_step=2)
    second.run(3)
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3]


def test_secrets_of_urls_do_not_reach_the_sinks(tmp_path, monkeypatch):
    seen = []

    def sinks(config: Any, folder: str, options: dict[str, Any], **more: Any) -> list:
        seen.append(options)
        return []

    monkeypatch.setattr("lightppo.logging.recorder.open_sinks", sinks)
    idle_loop(tmp_path, remote_rm_url=["https://host/reward?key=SECRET"], eps_clip=0.1)
    assert "SECRET" not in str(seen)
    assert seen[0]["eps_clip"] == 0.1


def test_only_rank_0_writes(tmp_path):
    options = {"use_tensorboard": str(tmp_path / "tb"), "use_wandb": True}
    mine = idle_loop(tmp_path / "run", FakeStrategy(rank=1, world_size=2), **options)
    mine.step()
    mine.end()
    assert list(tmp_path.iterdir()) == []


# -- what was recorded and is lost -----------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    """``recorded(change)``: what a start says after a run of four steps whose folder was changed."""
    folder = tmp_path / "run"

    def start(change: Any, **options: Any) -> None:
        (folder / "eval").mkdir(parents=True)
        (folder / "rollouts").mkdir()
        mine = idle_loop(folder, save_steps=2)
        for step in (1, 2):
            (folder / "rollouts" / f"step{step}.jsonl.gz").write_text(f"samples {step}")
            (folder / "eval" / f"step{step}.json").write_text(f"evaluation {step}")
        mine.run(3)  # the third step has no checkpoint
        (folder / "rollouts" / "step3.jsonl.gz").write_text("samples 3")
        change(folder)
        idle_loop(folder, save_steps=2, start_step=2, before=mine, **options)

    return start


LOST = {
    "nothing": (lambda folder: None, None),
    "metrics deleted": (
        lambda folder: (folder / "metrics.jsonl").unlink(),
        "metrics.jsonl is missing",
    ),
    "metrics torn": (
        lambda folder: (folder / "metrics.jsonl").write_bytes(
            (folder / "metrics.jsonl").read_bytes()[:40]
        ),
        r"metrics.jsonl has 40 bytes, \d+ were written",
    ),
    "a number altered": (
        lambda folder: altered(folder / "metrics.jsonl", b"1.0", b"9.0"),
        "metrics.jsonl has other content than was written",
    ),
    "a step altered": (
        lambda folder: altered(folder / "metrics.jsonl", b'"step": 1', b'"step": "'),
        "metrics.jsonl has other content than was written",
    ),
    "an evaluation deleted": (
        lambda folder: (folder / "eval/step1.json").unlink(),
        "eval/step1.json is missing",
    ),
    "samples torn": (
        lambda folder: (folder / "rollouts/step2.jsonl.gz").write_text("sam"),
        "rollouts/step2.jsonl.gz has 3 bytes, 9 were written",
    ),
    "all": (
        lambda folder: shutil.rmtree(folder),
        "metrics.jsonl is missing; (eval|rollouts)/.* is missing; .*is missing; .*is missing; .*is missing",
    ),
}


def altered(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize("case", LOST)
def test_a_resume_says_which_records_are_lost(recorded, tmp_path, caplog, case):
    change, told = LOST[case]
    recorded(change)
    said = [
        record.getMessage() for record in caplog.records if "was recorded" in record.getMessage()
    ]
    if told is None:
        assert said == []
        return
    assert len(said) == 1
    begin = f"{tmp_path}/run: of what was recorded until step 2, "
    assert re.match(
        begin + told + r"\. The run goes on without it; to have it back, stop, restore", said[0]
    ), said


@pytest.mark.parametrize("options", [{"resume": "/another/run"}, {"val_only": True}])
def test_records_of_another_folder_are_not_missed(recorded, caplog, options):
    recorded(lambda folder: (folder / "metrics.jsonl").unlink(), **options)
    assert "was recorded" not in caplog.text
