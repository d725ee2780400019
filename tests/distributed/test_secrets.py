"""A signed URL and a reward server's key work, and no file or line of a run has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_server import JsonServer
from support.runs import fitted
from support.tiny import sums, write_jsonl

from lightppo.config import PPOConfig, parse_args
from lightppo.errors import ConfigError

_OF_LAUNCHER = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)
SIGNATURE = "X-Amz-Credential=SECRET%2F20261123%2Fregion&X-Amz-Signature=SECRET"


@pytest.fixture
def server(tmp_path) -> Iterator[JsonServer]:
    """Rows at a signed URL, as S3 gives them (no HEAD, no other query), and a reward server with a key."""
    (tmp_path / "served").mkdir()
    write_jsonl(tmp_path / "served" / "rows.jsonl", sums(12))

    def reply(path: str, body: Any, n: int) -> tuple[int, bytes]:
        name, _, query = path.partition("?")
        if name == "/score":
            return 200, json.dumps({"rewards": [1.0] * len(body["query"])}).encode()
        if query.removesuffix("2") != SIGNATURE:
            return 403, b"SECRET is no signature"
        return 200, (tmp_path / "served" / name.strip("/")).read_bytes()

    found = JsonServer()
    found.reply = reply
    yield found
    found.close()


def places_with_secrets(folder: Path) -> list[Path]:
    names = [path for path in folder.rglob("*") if "SECRET" in str(path)]
    return names + [
        path for path in folder.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()
    ]


@pytest.fixture
def asked(server, make_config, tmp_path, monkeypatch) -> Callable[..., Any]:
    """The config of a short run with these addresses."""
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "cache"))
    addresses = {
        "prompt_data": f"{server.url}/rows.jsonl?{SIGNATURE}",
        "remote_rm_url": f"{server.url}/score?key=SECRET",
    }
    short = {
        "reward_fn": None,
        "benchmark_steps": 1,
        "save_steps": 1,
        "use_tensorboard": str(tmp_path / "tb"),
    }
    return lambda **more: make_config(**addresses | short | more)


def test_a_run_and_its_resume(world, asked, server, tmp_path, capfd, caplog):
    fitted(asked())
    assert {path for path, _ in server.requests} == {
        f"/rows.jsonl?{SIGNATURE}",
        "/score?key=SECRET",
    }
    later = {"prompt_data": f"{server.url}/rows.jsonl?{SIGNATURE}2", "benchmark_steps": 2}
    assert fitted(asked(**later)).state.global_step == 2  # the same rows by a new signature
    write_jsonl(tmp_path / "served" / "others.jsonl", sums(8))
    with pytest.raises(
        ConfigError, match=r"--prompt_data .*/rows.jsonl\?… → .*/others.jsonl\?…"
    ) as error:
        fitted(asked(prompt_data=f"{server.url}/others.jsonl?{SIGNATURE}", benchmark_steps=2))
    said = capfd.readouterr()
    assert "SECRET" not in f"{error.value} {said.out} {caplog.text}"
    assert "prompt_data='http" in said.out
    assert places_with_secrets(tmp_path) == []


def test_a_config_of_a_run_asks_for_what_it_lacks(world, asked, server, tmp_path, capsys):
    config = asked(save_steps=-1)
    fitted(config)
    file = str(tmp_path / "run" / "run_config.yaml")
    with pytest.raises(SystemExit):
        parse_args(["--config", file])
    said = capsys.readouterr().err
    for name, path in {"prompt_data": "rows.jsonl", "remote_rm_url": "score"}.items():
        assert (
            f"--{name} {server.url}/{path}?…: a run keeps no login and nothing after ? of an address"
            in said
        )
    urls = {name: config.flat()[name] for name in ("prompt_data", "remote_rm_url")}
    again = parse_args(
        [
            "--config",
            file,
            "--prompt_data",
            urls["prompt_data"],
            "--remote_rm_url",
            *urls["remote_rm_url"],
        ]
    )
    assert {name: again.flat()[name] for name in urls} == urls


@pytest.mark.long
def test_trackers_record_no_secret(asked, tmp_path):
    """wandb keeps the arguments of the process, and logs of its own."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    usual = PPOConfig().flat()
    flat = {name: value for name, value in asked().flat().items() if value != usual[name]}
    words = [
        f"--{name}={' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in flat.items()
    ]
    words += ["--use_wandb", f"--use_mlflow={tmp_path / 'mlruns'}"]
    where = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb_cache"),
    }
    command = [sys.executable, "-m", "lightppo", "ppo", *words]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHER}
    done = subprocess.run(
        command, env=environment | where, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").rglob("*.wandb"))
    assert list((tmp_path / "mlruns").rglob("prompt_data"))
    assert "SECRET" not in done.stdout + done.stderr
    assert places_with_secrets(tmp_path) == []
