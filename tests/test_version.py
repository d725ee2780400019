"""What is said of releases of other packages that are too old, or newer than what was tested."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lightppo import version
from lightppo.errors import ModelLoadError
from lightppo.models.adapters.lora import check_peft
from lightppo.preflight.before_imports import before_imports

ROOT = Path(__file__).parents[1]


@pytest.fixture
def releases(monkeypatch):
    """``releases(torch="1.0")``: these are installed, and all others in the newest tested release."""
    installed = {package: newest for package, (_, newest) in version.TESTED.items()}
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    return installed.update


def test_the_lowest_releases_are_those_of_the_package():
    bounds = re.findall(r'"(\w+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {package: lowest for package, (lowest, _) in version.TESTED.items()} == {
        package: lowest for package, lowest in bounds if package in version.TESTED
    }


@pytest.mark.parametrize(
    ("installed", "is_old", "is_new"),
    [
        ("5.6.0", True, False),
        ("4.57.6", True, False),
        ("5.6.1", False, False),
        ("5.24.0+local.7", False, False),
        ("5.24.1", False, True),
        ("6.0.0.dev0", False, True),
        ("6", False, True),
    ],
)
def test_releases_in_their_order(releases, monkeypatch, installed, is_old, is_new):
    monkeypatch.setitem(version.TESTED, "transformers", ("5.6.1", "5.24.0"))
    releases(transformers=installed)
    assert bool(version.too_old("transformers")) is is_old
    assert bool(version.too_new()) is is_new
    assert not version.too_old("torch")


def test_a_release_that_is_too_old_ends_a_run_at_the_start(releases, capsys):
    releases(transformers="4.57.6", torch="2.5.1+cu124")
    with pytest.raises(SystemExit) as ended:
        before_imports(lambda: pytest.fail("it went on"), "lightppo ppo")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" work: ")[0].rpartition(" to ")[0] for line in lines] == [
        "lightppo ppo: error: torch 2.5.1+cu124 is too old, 2.6",
        "lightppo ppo: error: transformers 4.57.6 is too old, 5.6.1",
    ]
    assert lines[1].endswith("pip install 'transformers>=5.6.1'")


def test_an_old_peft_matters_to_adapters_alone(releases, capsys):
    releases(peft="0.17.1")
    before_imports(lambda: None, "lightppo ppo")
    with pytest.raises(ModelLoadError, match=r"peft 0\.17\.1 is too old, 0\.18 to .* work: pip "):
        check_peft()


SCRIPT = """
import sys
from importlib import metadata
from lightppo.errors import ModelLoadError
from lightppo.trainer import run
from lightppo.version import TESTED

def fail(failure):
    if failure == "import":
        from transformers.cache_utils import NoCache
    if failure == "call":
        sys.modules["transformers"].no_such_thing()
    if failure == "keyword":
        sys.modules["torch"].zeros(2, no_keyword=1)
    raise ModelLoadError("--pretrain: its forward takes no cache")

version = metadata.version
for release in ("9.1.0", TESTED["transformers"][1]):
    newest = {package: newest for package, (_, newest) in TESTED.items()} | {"transformers": release}
    metadata.version = lambda name: newest.get(name) or version(name)
    for failure in ("import", "call", "keyword", "model"):
        print("FAILURE", release, failure, file=sys.stderr, flush=True)
        try:
            run(lambda: fail(failure), "lightppo ppo")
        except SystemExit as ended:
            print("ENDED", ended.code, file=sys.stderr, flush=True)
        except Exception as error:
            print(type(error).__name__, file=sys.stderr, flush=True)
"""


def test_what_a_new_release_breaks_is_said_in_one_line():
    script = [sys.executable, "-c", SCRIPT]
    output = subprocess.run(script, capture_output=True, text=True, check=True).stderr
    told = dict(part.split("\n", 1) for part in output.split("FAILURE ")[1:])
    newest = version.TESTED["transformers"][1]
    for failure, code in {"import": 1, "call": 1, "keyword": 1, "model": 2}.items():
        line, end = told[f"9.1.0 {failure}"].splitlines()
        assert line.startswith("[rank 0] lightppo ppo: error: ")
        assert f"Newer than what was tested: transformers 9.1.0 (5.6.1 to {newest} work)" in line
        assert f"pip install 'transformers<={newest}'" in line
        assert end == f"ENDED {code}"
    # with the tested releases these are lightppo's own errors, whose calls are needed
    kinds = {"import": "ImportError", "call": "AttributeError", "keyword": "TypeError"}
    assert {name: told[f"{newest} {name}"].splitlines() for name in kinds} == {
        name: [kind] for name, kind in kinds.items()
    }
    assert "Newer" not in told[f"{newest} model"]
