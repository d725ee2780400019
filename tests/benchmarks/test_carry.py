"""Packages for a machine that reaches nothing: what it needs beyond what is there, pieces, and the way back."""

import argparse
import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.scripts import beside

ROOT = Path(__file__).parents[2]


@pytest.fixture
def carry():
    with beside(ROOT / "benchmarks"):
        import carry

        yield carry


def wheel(folder, name, *requirements, content=b""):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", content)
        archive.writestr(f"{info}/METADATA", f"{metadata}\nRequires-Dist: of the description\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_what_is_there(carry):
    text = (
        "torch==2.11.0+cu130\n# a comment\nMy_Tool @ file:///tmp/x\nnumpy==2.3.5 ; marker\n-e .\n"
    )
    assert carry.frozen(text) == {"torch": "2.11.0", "my-tool": "", "numpy": "2.3.5"}


def test_packages_that_are_there_are_not_asked_for_whatever_release_is_wanted(carry, tmp_path):
    path = wheel(
        tmp_path,
        "engine",
        'torch==2.11.0+cpu; platform_machine == "x86_64"',
        "Num_Py>=2",
        "tokens<3,>=1",
        'zen; extra == "zen"',
    )
    assert list(carry.needed([path], {"torch": "2.11.0", "num-py": "2.0"})) == ["tokens<3,>=1"]


def test_what_is_missing_is_downloaded(carry, tmp_path, monkeypatch):
    asked = []

    def pip(*words):
        asked.append(list(map(str, words)))
        if words[0] == "install":
            names = {"tokens": "2.0", "torch": "2.11.0", "numpy": "2.3", "torch-vision": "1"}
            install = [{"metadata": {"name": n, "version": v}} for n, v in names.items()]
            Path(words[words.index("--report") + 1]).write_text(json.dumps({"install": install}))
            return
        wheel(tmp_path / "out/wheels", "engine" if len(asked) == 1 else "tokens", "tokens", "torch")

    monkeypatch.setattr(carry, "pip", pip)
    options = argparse.Namespace(
        folder=tmp_path / "out",
        packages=["engine==1.0"],
        alone=["model==3"],
        replace=["numpy"],
        leave=["Torch_Vision"],
    )
    carry.bring(options, {"torch": "2.11.0", "numpy": "1.0", "mine": ""})
    assert (tmp_path / "out/needs.txt").read_text() == "tokens\n"
    assert (tmp_path / "out/there.txt").read_text() == "torch==2.11.0\nengine==1.0\n"
    assert asked[-1][-3:] == ["tokens==2.0", "numpy==2.3", "model==3"]


def test_what_pip_says_of_a_conflict_is_shown(carry, tmp_path):
    """Pip's own resolver, offline: what is wanted needs another release of what is there."""
    path = wheel(tmp_path, "engine", "tokens<1")
    wheel(tmp_path, "tokens")
    (tmp_path / "there.txt").write_text("tokens==1.0\n")
    pins = ("-c", tmp_path / "there.txt")
    with pytest.raises(SystemExit, match=r"tokens==1\.0(?s:.*)pip install failed with 1"):
        carry.pip("install", "--dry-run", "--no-index", "--find-links", tmp_path, path, *pins)


def test_pieces_travel_and_are_put_together(carry, tmp_path):
    """By the printed commands and join.sh, as on the other machine; pip there is another program."""
    folder = tmp_path / "a folder"
    wheel(folder / "wheels", "engine", content=bytes(range(256)) * 40)
    files = carry.cut(folder, 4096)
    assert [path.name for path in files[:2]] == ["piece.0000", "piece.0001"]
    assert all(path.stat().st_size <= 4096 for path in files)
    there = tmp_path / "there"
    there.mkdir()
    for command in carry.commands(files, f"cp {{piece}} {shlex.quote(str(there))}"):
        subprocess.run(command, shell=True, check=True)
    python = there / "python"
    python.write_text('#!/bin/sh\necho "$@" > told\n')
    python.chmod(0o755)
    join = ["sh", str(there / "join.sh"), str(python)]
    subprocess.run(join, check=True, capture_output=True)
    name = "wheels/engine-1.0-py3-none-any.whl"
    assert (there / name).read_bytes() == (folder / name).read_bytes()
    told = (there / "told").read_text()
    assert told == f"-m pip install --quiet --no-index --no-deps {name}\n"
    (there / "told").unlink()
    piece = there / "piece.0001"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    broken = subprocess.run(join, capture_output=True, text=True)
    assert broken.returncode != 0
    assert "piece.0001: FAILED" in broken.stdout
    assert not (there / "told").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--mib", "0"], "--mib"), (["--copy", "scp"], r"{piece}"), ([], "is there already")],
)
def test_mistakes(carry, tmp_path, monkeypatch, capsys, options, message):
    there = tmp_path / "there.txt"
    there.touch()
    words = [str(tmp_path), "engine==1.0", "--there", str(there), *options]
    monkeypatch.setattr(sys, "argv", ["carry.py", *words])
    with pytest.raises(SystemExit) as ended:
        carry.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
