"""How a script ends: in which order, and with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from lightppo.errors import RolloutError
from lightppo.trainer import run
from lightppo.user_code import load_python_function


@pytest.fixture
def events(monkeypatch):
    """What happens to the process group, in order."""
    events = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("all ranks meet"))
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda: events.append("groups are destroyed")
    )
    return events


def test_all_ranks_meet_after_the_work_and_before_the_groups_are_destroyed(events):
    run(lambda: events.append("main"))
    assert events == ["main", "all ranks meet", "groups are destroyed"]


@pytest.mark.parametrize(
    ("error", "end"), [(RolloutError("no answer"), SystemExit), (KeyError("a bug"), KeyError)]
)
def test_after_an_error_nobody_waits_for_the_other_ranks(events, error, end):
    def main():
        raise error

    with pytest.raises(end) as caught:
        run(main)
    assert events == []
    if end is SystemExit:
        assert caught.value.code == 1


@pytest.mark.parametrize("debug", [False, True])
def test_debug_shows_the_whole_trace(capsys, debug):
    def main():
        try:
            {}["gold"]
        except KeyError as error:
            raise RolloutError("no answer") from error

    with pytest.raises(SystemExit):
        run(main, debug=debug)
    said = capsys.readouterr().err
    assert said.splitlines()[-1].endswith("error: no answer")
    assert ("Traceback" in said, '{}["gold"]' in said) == (debug, debug)


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_the_users_file_is_one_line(capsys, tmp_path, debug):
    path = tmp_path / "mine.py"
    path.write_text("def f(x):\n    return [][x]\n")
    function = load_python_function(str(path), "f")
    with pytest.raises(IndexError if debug else SystemExit) as caught:
        run(lambda: function(3), "lightppo ppo", debug=debug)
    if not debug:
        assert caught.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "lightppo ppo: error: your code failed: IndexError: list index out of range "
            f"({path}:2 in f: return [][x]); --debug shows all calls"
        )


def test_without_a_process_group_there_is_nothing_to_end(events, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    run(lambda: events.append("main"))
    assert events == ["main"]


def test_an_error_of_all_ranks_is_told_once_and_that_of_one_rank_by_it():
    output = run_ranks(Path(__file__).parent / "ranks" / "errors.py").output
    told = [line for line in output.splitlines() if "error: " in line]
    assert sorted(told) == [
        "[rank 0] train.py: error: rank 0's own",
        "[rank 0] train.py: error: the same",
        "[rank 1] train.py: error: rank 1's own",
    ]
