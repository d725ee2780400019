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
        ('class A:\n    """Doc."""\n\n    x = """a\n\nb"""\n', 3),
    ],
)
def test_lines_of_code(house, source, lines):
    assert house.code_lines(source) == lines


def test_density_by_hand(house):
    source = '"""Doc."""\nlimit = 1  # why\n\n\ndef call(value, *, other):\n    x = f(*(value, other))\n    return x\n'
    # limit = 1 | def call ( value , * , other ) : | x = f ( * ( value , other ) ) | return x: 3 + 10 + 11 + 2
    found = house.density([source])
    assert (found["files"], found["lines"], found["tokens of code"]) == (1, 7, 26)
    assert found["tokens per line of code"] == 6.5
    # limit; value, other, x
    assert found["letters per variable name"] == round((5 + 5 + 5 + 1) / 4, 1)
    assert found["argument tuples"] == 1


def test_core_and_plugins_are_counted_apart(house, tree):
    for name in ("records/alarms.py", "records/__init__.py", "vllm/__init__.py"):
        path = tree / "lightppo" / "plugins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("alarm = 1\n")
    parts = house.parts_of(tree)
    assert [*parts] == ["core", "logging", "rollout/vllm", "all"]
    assert parts["logging"]["tokens of code"] == 6
    assert parts["all"]["files"] == parts["core"]["files"] + 3
    assert "| rollout/vllm | 1 | 1 | 3 |" in house.parts_table(parts)


def test_what_can_be_read(house, tree):
    numbers = house.count_files(tree)
    assert numbers["files"] == 9
    assert numbers["lines"] == sum(
        text.count("\n") for name, text in FILES.items() if name.startswith("lightppo")
    )
    assert numbers["files that mention kl_estimator"] == 1
    assert numbers["files that mention advantages"] == 0
    assert numbers["files of config/"] == 2
    assert numbers["names of files in several rooms"] == ["same.py: config, low"]
    assert numbers["lines of tests/"] == 2
    assert numbers["words of docs/"] == 4


def test_one_importer_in_the_own_room(house, tree):
    """errors has one in another room, a has none but the public name and a type checker, b and same have two."""
    assert house.Imports(tree / "lightppo").single() == ["lightppo.low.c ← lightppo.low.b"]


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
    assert numbers["building the run: functions"] == 2  # before, check
    assert numbers["building the run: lines of functions"] == 2 + 2
    assert numbers["checks of the run: functions"] == 1  # look
    assert numbers["one GRPO step: files"] == 1
    assert numbers["one GRPO step: functions"] == 3  # prompts, sync_weights, after
    assert numbers["one GRPO step: lines of functions of the core"] == 3 + 2 + 2
    assert numbers["one GRPO step: tokens of functions of the core"] == 13 + 11 + 6


@pytest.mark.slow
@pytest.mark.long  # a run of twenty seconds, whose numbers change slowly
def test_building_a_run_and_a_step_of_it_can_be_read_in_an_afternoon(house):
    numbers = house.count_one_step(Path(__file__).parents[2])
    for phase in ("building the run", "one GRPO step"):
        assert numbers[f"{phase}: files of the core"] <= 30
        assert numbers[f"{phase}: lines of functions of the core"] <= 2500


def test_table(house):
    text = house.markdown({"lines": 1200, "circles": ["a ⇄ b"]}, {"lines": 3400, "circles": []})
    assert "| | before | now |" in text
    assert "| lines | 3,400 | 1,200 |" in text
    assert "| circles | 0 | 1 |" in text
    assert text.endswith("circles:\n\n- a ⇄ b")
