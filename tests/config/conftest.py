"""The command line of a run, with the flags that every run needs already given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightppo.config import PPOConfig, parse_args

REQUIRED = {"pretrain": "model", "prompt_data": "prompts.jsonl", "reward_fn": "reward.py"}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def parse() -> Callable[..., PPOConfig]:
    """``parse("--gamma 0.9")``: the required flags, then these."""

    def run(flags: str | list[str] = "") -> PPOConfig:
        required = [f"--{name}={value}" for name, value in REQUIRED.items()]
        return parse_args([*required, *(flags.split() if isinstance(flags, str) else flags)])

    return run


@pytest.fixture
def refusal(parse, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """What is printed about flags that are refused with exit code 2."""

    def run(flags: str | list[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(flags)
        assert stopped.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return run


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], str]:
    """Path of a file with this text."""

    def write(text: str) -> str:
        path = tmp_path / "options.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
