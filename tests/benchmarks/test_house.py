"""What benchmarks/house.py counts, on a package of a few lines."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILES = {
    "lightppo/__init__.py": '_PUBLIC = {"A": "lightppo.low.a"}\n',
    "lightppo/errors.py": "class E(Exception):\n    pass\n",
    "lightppo/low/__init__.py": "",
    "lightppo/low/a.py": "from lightppo.low import b, same\n",
    "lightppo/low/b.py": "from . import c\nfrom lightppo.errors import E\n",
    "lightppo/low/c.py": "def f():\n    from lightppo.low.b import x\n",
    "lightppo/low/same.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightppo import A\n",
    "lightppo/config/__init__.py": "",
    "lightppo/config/same.py": "import lightppo.low.same\nkl_estimator = 1\n# my_advantages\n",
    "tests/test_a.py": "1\n2\n",
    "docs/a.md": "four words are here\n",
}

CHECKS = """
def check_options():
    look()


def look():
    pass
"""

LOOP = """
from followed.start_checks import check_options


class PPOTrainer:
    @classmethod
    def from_config(cls):
        before()
        check_options()
        return cls()

    def fit(self):
        before()
        for step in range(2):
            with open("/dev/null"):
                prompts()
            self.sync_weights(step)
        after()

    def sync_weights(self, step):
        after()


def before():
    pass


def prompts():
    return [x for x in
            "ab"]


def after():
    pass
"""


@pytest.fixture
def house(benchmark_script) -> ModuleType:
    return benchmark_script("house")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ('"""Doc."""\n\n# comment\nx = 1  # why\n', 1),
        (
            'def f():\n    """One.\n\n    Two.\n    """\n    return (\n        1,\n        # no\n    )\n',
            4,
        ),
    ],
)
def test_lines_of_code(house, source, lines):
    assert house.code_lines(source) == lines


def test_writing_by_hand(house):
    source = (
        '"""Doc."""\nlimit = 1  # why\n\n\ndef call(value, *, other):\n    x, y = value, other\n'
        "    return x if y else value\n"
    )
    # limit = 1 | def call ( value , * , other ) : | x , y = value , other | return x if y else value: 3 + 10 + 7 + 6
    numbers = house.writing([source])
    assert (numbers["files"], numbers["lines"], numbers["tokens of code"]) == (1, 7, 26)
    assert numbers["tokens per line of code"] == 6.5
    # limit; value, other, x, y
    assert numbers["letters per name"] == round((5 + 5 + 5 + 1 + 1) / 5, 1)
    assert numbers["`a, b = x, y` per 1,000 lines of code"] == 250.0
    assert numbers["conditional expressions per 1,000 lines of code"] == 250.0


def test_rooms_are_counted_by_folder(house, tree):
    for name in ("plugins/records/alarms.py", "plugins/vllm/__init__.py", "low/deep/x.py"):
        path = tree / "lightppo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("alarm = 1\n")
    rooms = house.rooms_of(house.sources_of(tree))
    assert {room: len(texts) for room, texts in rooms.items()} == {
        "lightppo": 2,
        "config": 2,
        "low": 6,
        "plugins/records": 1,
        "plugins/vllm": 1,
    }
    assert "| low | 6 | " in house.rooms_table(tree)


def test_the_shape_of_a_tree(house, tree):
    more = (
        'PUBLIC.update({"A": "lightppo.low.b"})\nT = Table("t", {"x": 1})\nT["x"] = Entry("lightppo.low.b:f")\n'
        'where = "lightppo.low"\nU: Table = Table("u")\nU.register("y", Entry(f"{where}.b:g"))\n\n\nclass One:\n    pass\n'
    )
    (tree / "lightppo" / "low" / "b.py").write_text(more)
    (tree / "lightppo" / "config" / "same.py").write_text("class One:\n    pass\n\n\nos.fork()\n")
    numbers = house.shape(tree)
    assert numbers["rooms"] == 2
    assert numbers['texts `"module:name"`'] == 2
    assert numbers["names with two classes"] == ["One: config/same.py, low/b.py"]
    assert numbers["public classes replaced at import"] == ["A"]
    assert numbers["entries of tables that are replaced"] == ["T['x']"]
    assert numbers["files that start processes"] == ["config/same.py"]
    assert numbers["names of files in several rooms"] == ["same.py: config, low"]
    tables = house.tables_of(house.sources_of(tree))
    assert tables == [("lightppo.low.b", "T", 1), ("lightppo.low.b", "U", 0)]


def test_circles(house, tree):
    imports = house.Imports(tree / "lightppo")
    in_functions = "lightppo.low.b ⇄ lightppo.low.c"
    assert imports.circles(house.MODULE) == []
    assert imports.circles(house.FUNCTION) == [in_functions]
    assert imports.circles(house.TYPES) == ["lightppo.low.a ⇄ lightppo.low.same", in_functions]


def test_what_runs(house, tmp_path, monkeypatch):
    package = tmp_path / "followed"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    (package / "loop.py").write_text(LOOP)
    (package / "start_checks.py").write_text(CHECKS)
    (package / "late.py").write_text("x = 1\ny = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trace, before = house.Trace(package), sys.gettrace()
    sys.settrace(trace)
    try:
        importlib.import_module("followed.loop").PPOTrainer.from_config().fit()
        importlib.import_module("followed.late")
    finally:
        sys.settrace(before)
        for name in ("followed", "followed.loop", "followed.start_checks", "followed.late"):
            sys.modules.pop(name, None)
    numbers = trace.numbers()
    assert numbers["building a run: functions"] == 2  # before, check
    assert numbers["building a run: lines of functions"] == 2 + 2
    assert numbers["checks of a run: functions"] == 1  # look
    assert numbers["one GRPO step: files"] == 1
    assert numbers["one GRPO step: functions"] == 3  # prompts, sync_weights, after
    assert numbers["one GRPO step: lines of functions"] == 3 + 2 + 2


@pytest.mark.slow
@pytest.mark.long  # a run of twenty seconds, whose numbers change slowly
def test_building_a_run_and_a_step_of_it_can_be_traced(house):
    numbers = house.count_one_step(Path(__file__).parents[2])
    for phase in house.Trace.PHASES:
        assert numbers[f"{phase}: files"] > 10


def test_table(house):
    text = house.markdown({"lines": 1200, "circles": ["a ⇄ b"]}, {"lines": 3400, "circles": 0})
    assert "| | before | now |" in text
    assert "| lines | 3,400 | 1,200 |" in text
    assert "| circles | 0 | 1 |" in text
    assert text.endswith("circles:\n\n- a ⇄ b")
