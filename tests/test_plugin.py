"""Plugins of other distributions that cannot be used: one line for every command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lightppo.errors import ConfigError
from lightppo.plugin import LOSS_TERMS, PUBLIC
from lightppo.table import Entry, load

REPO = Path(__file__).parents[1]


def install(folder: Path, code: str) -> None:
    """As pip would: a module, and an entry point."""
    (folder / "outside.py").write_text(code)
    info = folder / "outside_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightppo.plugins]\noutside = outside:register\n")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys\nsys.exit()", "SystemExit ({path}:2 in <module>: sys.exit())"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' ({path}:1"),
        (
            "def register():\n    raise ValueError('no\\x1b[2J\\nhttp://me:word@host/x?key=1')",
            "ValueError: no\\x1b[2J http://…@host/x?… ({path}:2 in register: raise ValueError(",
        ),
        (
            "class E(Exception):\n    def __str__(self): raise SystemExit\n\ndef register(): raise E",
            "E (and SystemExit while its text was made) ({path}:4",
        ),
    ],
)
def test_one_line_for_a_plugin_that_cannot_be_registered(tmp_path, code, why):
    install(tmp_path, code)
    done = subprocess.run(
        [sys.executable, "-m", "lightppo", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    start = (
        "lightppo: error: the plugin 'outside' of the package outside-plugin cannot be registered: "
    )
    assert line.startswith(start + why.format(path=tmp_path / "outside.py"))
    assert line.endswith(": mend it, or uninstall outside-plugin")
    assert "word" not in line


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3 "),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' "),
        ("", "AttributeError: module 'entry_of_a_plugin' has no attribute 'f'"),
    ],
)
def test_an_entry_that_cannot_be_loaded_is_named(tmp_path, monkeypatch, code, why):
    (tmp_path / "entry_of_a_plugin.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ConfigError) as caught:
            load("entry_of_a_plugin:f")
    finally:
        sys.modules.pop("entry_of_a_plugin", None)
    assert str(caught.value).startswith(
        f"entry_of_a_plugin:f, of a plugin, cannot be loaded: {why}"
    )


def test_a_name_of_lightppos_own_is_taken():
    with pytest.raises(ValueError, match="there is a 'pretraining' already"):
        LOSS_TERMS.register("pretraining", Entry("mine:term"))


def test_a_documented_name_works_at_its_old_place_with_a_warning():
    from lightppo.files import Files

    with pytest.warns(FutureWarning, match=r"import it from there"):
        from lightppo.plugins.ops.kept import KeptFiles
    assert KeptFiles is Files


def test_types_are_checked_of_what_users_import():
    """``make lint`` runs mypy over the files of every public name, and their types are in the package."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    files = {"lightppo/__init__.py", "lightppo/plugin.py"}
    for module in PUBLIC.values():
        path = module.replace(".", "/")
        files.add(f"{path}.py" if (REPO / f"{path}.py").is_file() else f"{path}/__init__.py")
    assert set(project["tool"]["mypy"]["files"]) == files
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["lightppo"]
