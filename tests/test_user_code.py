"""Files of the user's own: found, run anew, and refused by what was found instead."""

import os
import pickle
import sys

import pytest

from lightppo.user_code import (
    error_place,
    error_text,
    load_python_function,
    load_python_objects,
    without_copies,
)

MODULE = """
from dataclasses import dataclass
from os.path import join

CONSTANT = 1

@dataclass
class Scorer:
    weight: float = 1.0

def reward_func(queries, prompts, labels):
    return [Scorer(2.0).weight for _ in queries]

def other(queries, prompts, labels):
    return [0.0 for _ in queries]
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "math.py"  # a name that hides nothing and is hidden by nothing
    path.write_text(MODULE)
    return path


def test_load_default_and_named(module):
    assert load_python_function(str(module), "reward_func")([1], [], []) == [2.0]
    assert load_python_function(f"{module}:other", "reward_func")([1], [], []) == [0.0]
    import math

    assert math.pi > 3


def test_load_relative_and_anew(module, monkeypatch):
    monkeypatch.chdir(module.parent)
    assert load_python_function("math.py", "reward_func")([1], [], []) == [2.0]
    module.write_text(MODULE.replace("Scorer(2.0)", "Scorer(33.0)"))
    assert load_python_function("./math.py", "reward_func")([1], [], []) == [33.0]


def test_load_leaves_the_search_path_alone(module):
    (module.parent / "neighbour_of_math.py").write_text("")
    module.write_text("import neighbour_of_math")
    before = list(sys.path)
    with pytest.raises(ValueError, match=r"math.py .*ModuleNotFoundError"):
        load_python_function(str(module), "reward_func")
    assert sys.path == before


def test_load_with_relative_imports(tmp_path):
    """In a plain folder, and in a package with one above it; what is imported runs anew too."""
    package = tmp_path / "mine" / "rewards"
    package.mkdir(parents=True)
    for path in (package, package.parent):
        (path / "__init__.py").write_text("")
    (package.parent / "common.py").write_text("VALUE = 1.0")
    (package / "parts.py").write_text("from ..common import VALUE\nPARTS = [VALUE, 2.0]")
    (package / "my-reward.py").write_text(
        "from .parts import PARTS\ndef reward_func(*_):\n    return PARTS"
    )
    assert load_python_function(str(package / "my-reward.py"), "reward_func")() == [1.0, 2.0]
    (package.parent / "common.py").write_text("VALUE = 33.0")
    function = load_python_function(str(package / "my-reward.py"), "reward_func")
    assert function() == [33.0, 2.0]
    assert pickle.loads(pickle.dumps(function)) is function
    (tmp_path / "parts.py").write_text("PARTS = [3.0]")
    (tmp_path / "plain.py").write_text(
        "from .parts import PARTS\nfrom . import parts\ndef reward_func(*_):\n    return PARTS"
    )
    assert load_python_function(str(tmp_path / "plain.py"), "reward_func")() == [3.0]
    assert not {"parts", "common", "mine"} & sys.modules.keys()


def test_load_does_not_look_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "away"))
    with pytest.raises(ValueError, match=r"mine.py"):
        load_python_function(str(tmp_path / "mine.py"), "reward_func")


def test_load_names_what_was_found(module):
    folder = module.parent
    with pytest.raises(
        ValueError, match=r"--reward_fn: .*math.py .*'rewrad'.* Scorer, reward_func, other"
    ):
        load_python_function(f"{module}:rewrad", "x", option="--reward_fn")
    with pytest.raises(ValueError, match=r"math.py:CONSTANT' .* int"):
        load_python_function(f"{module}:CONSTANT", "x")
    with pytest.raises(ValueError, match=f"--reward_fn: .* {folder}/maths.py.* math.py"):
        load_python_function(f"{folder}/maths.py", "x", option="--reward_fn")
    with pytest.raises(ValueError, match=f"{folder}/none"):
        load_python_function(f"{folder}/none/math.py", "x")


@pytest.mark.parametrize(
    "spec", ["reward.json", "reward", "reward.py:", "reward.py:a b", "", ":name", "reward:name"]
)
def test_load_refuses_other_forms(spec):
    with pytest.raises(ValueError, match=r"path.py:name"):
        load_python_function(spec, "reward_func")


def test_a_file_that_fails_leaves_nothing_behind(module):
    module.write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"math.py .*ZeroDivisionError") as caught:
        load_python_function(str(module), "reward_func")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert set(sys.modules) == before


FAILING = """
import json
def inner(label):
    return json.loads(label)

def reward_func(queries, prompts, labels):
    return [inner(label) for label in labels]

async def slowly(queries, prompts, labels):
    return inner(labels[0])
"""


@pytest.mark.parametrize(
    ("name", "lines"), [("reward_func", "7 in reward_func"), ("slowly", "10 in slowly")]
)
def test_an_error_is_placed_in_the_users_own_file(tmp_path, name, lines):
    """Neither our frames nor those of the library that it called."""
    import asyncio

    path = tmp_path / "mine.py"
    path.write_text(FAILING)
    function = load_python_function(f"{path}:{name}", "x")
    with pytest.raises(ValueError, match="Expecting value") as caught:
        asyncio.run(function([], [], ["?"])) if name == "slowly" else function([], [], ["?"])
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this test's
    place = error_place(caught.value)
    assert place.startswith(f" ({path}:{lines}: return ")
    assert place.endswith(f" → {path}:4 in inner: return json.loads(label))")
    assert place.count("mine.py") <= 3


def test_an_error_outside_of_any_file_has_no_place():
    assert error_place(ValueError("x")) == ""


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("x = 1\nimport no_such_module\n", ":2 in <module>: import no_such_module)"),
        ("x = (\n", ":1: x = ("),
    ],
)
def test_a_file_that_fails_says_where(tmp_path, source, place):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match="fails when run") as caught:
        load_python_function(str(tmp_path / "mine.py"), "f", option="--reward_fn")
    assert f"{tmp_path}/mine.py{place}" in str(caught.value)


def test_several_objects_of_a_file_that_runs_once(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("made = []\nclass A:\n    made.append(1)\ndef f():\n    return made\n")
    kind, function = load_python_objects(path, ["A", "f"])
    assert (kind.__name__, function()) == ("A", [1])
    with pytest.raises(ValueError, match=r"--env: .*own.py has no 'B'; it has A, f"):
        load_python_objects(path, ["A", "B"], option="--env")


@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(0)", "raise BaseException('no')"])
def test_a_file_that_ends_the_program_is_an_error(tmp_path, ending):
    (tmp_path / "ends.py").write_text(f"import sys\n{ending}\n")
    with pytest.raises(ValueError, match=r"--reward_fn: .*ends.py fails when run: .*ends.py:2 in"):
        load_python_function(str(tmp_path / "ends.py"), "f", option="--reward_fn")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, type("Stopped", (SystemExit,), {})])
def test_a_signal_while_a_file_is_run_ends_the_program(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sys, "handler_of_the_test", kind, raising=False)
    (tmp_path / "slow.py").write_text("import sys\nraise sys.handler_of_the_test")
    with pytest.raises(kind):
        load_python_function(str(tmp_path / "slow.py"), "f")


def test_the_text_of_an_error_ends_nothing():
    class Ends(Exception):
        def __str__(self):
            raise SystemExit

    assert error_text(Ends()) == "Ends (and SystemExit while its text was made)"


@pytest.mark.parametrize("ending", [None, ValueError("the child"), SystemExit(0)])
def test_a_forked_process_ends_where_the_users_code_does(ending, capfd):
    with without_copies("reward.py:f"):
        child = os.fork()
        if not child and ending is not None:
            raise ending
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    told = (
        "reward.py:f: a process that it has forked came back, and is ended: end it with os._exit\n"
    )
    assert capfd.readouterr().err == told
