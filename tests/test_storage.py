"""URLs copied once per node, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from lightppo.data.blends import blending_datasets
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError, StagingError
from lightppo.storage import check_scheme, content_folder, stage_to_local


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def test_local_paths_are_not_copied(tmp_path: Path) -> None:
    assert stage_to_local("a/b") == "a/b"
    assert stage_to_local(f"file://{tmp_path}/x.json") == f"{tmp_path}/x.json"


def test_a_file_is_copied_once_until_it_changes(memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/d/rows.jsonl", b'{"input": "a"}\n')
    first = stage_to_local("memory://d/rows.jsonl")
    assert Path(first).name == "rows.jsonl"
    assert Path(first).read_bytes() == b'{"input": "a"}\n'
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get", None)  # a second copy would fail
        assert stage_to_local("memory://d/rows.jsonl") == first
    memory.pipe("/d/rows.jsonl", b'{"input": "b"}\n')  # same size, later
    second = stage_to_local("memory://d/rows.jsonl")
    assert Path(second).read_bytes() == b'{"input": "b"}\n'
    assert second != first


def test_folders(memory) -> None:
    memory.pipe({"/m/config.json": b"{}", "/m/sub/train.jsonl": b'{"input": "a"}\n'})
    local = Path(stage_to_local("memory://m"))
    assert sorted(str(p.relative_to(local)) for p in local.rglob("*") if p.is_file()) == [
        "config.json",
        "sub/train.jsonl",
    ]


def test_data_from_a_url_is_named_by_the_url(memory) -> None:
    memory.pipe("/d/rows.jsonl", b'{"input": "a"}\n{"input"\n')
    with pytest.raises(DataError, match=r"memory://d/rows.jsonl:2: "):
        blending_datasets("memory://d/rows.jsonl")
    assert (
        blending_datasets("memory://d/rows.jsonl", max_count=1)[ORIGIN_COLUMN][0]
        == "memory://d/rows.jsonl:1"
    )


def test_a_failed_or_short_copy_leaves_nothing(
    memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory.pipe("/d/x.bin", b"12345")

    def short(self, remote, local, **_):
        Path(local).write_bytes(b"123")

    def broken(self, remote, local, **_):
        Path(local).write_bytes(b"1")
        raise OSError("connection lost")

    for get, message in ((short, "3 bytes of 5"), (broken, "connection lost")):
        monkeypatch.setattr(type(memory), "get", get)
        with pytest.raises(StagingError, match=f"memory://d/x.bin.*{message}"):
            stage_to_local("memory://d/x.bin", cache_dir=tmp_path)
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]


def test_what_is_not_there(memory) -> None:
    with pytest.raises(StagingError, match=r"memory://no/such.jsonl .*FileNotFoundError"):
        stage_to_local("memory://no/such.jsonl")
    with pytest.raises(DataError, match=r"--prompt_data: memory://no/such.jsonl"):
        blending_datasets("memory://no/such.jsonl")
    with pytest.raises(StagingError, match=r"--pretrain nowhere://x: .*memory"):
        check_scheme("nowhere://x", "--pretrain")


def test_a_waiting_process_gives_up_in_time(memory, tmp_path: Path) -> None:
    from filelock import FileLock

    memory.pipe("/d/x.bin", b"12345")
    target = Path(stage_to_local("memory://d/x.bin", cache_dir=tmp_path))
    target.unlink()
    with (
        FileLock(target.parent / ".lock"),
        pytest.raises(TimeoutError, match=r"memory://d/x.bin: .*0.1 s"),
    ):
        stage_to_local("memory://d/x.bin", cache_dir=tmp_path, timeout_s=0.1)


RANK = """
import sys, time
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Counted(LocalFileSystem):
    protocol = "counted"
    def get(self, remote, local, **options):
        with open(sys.argv[2], "a") as log:
            log.write("copy\\n")
        time.sleep(0.5)  # long enough for the other process to arrive
        super().get(remote, local, **options)
    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counted://"))

fsspec.register_implementation("counted", Counted)
from lightppo.storage import stage_to_local
print(open(stage_to_local("counted://" + sys.argv[1], timeout_s=250)).read())
"""


def test_two_processes_copy_once(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("whole")
    log = tmp_path / "log"
    command = [sys.executable, "-c", RANK, str(tmp_path / "x.txt"), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [rank.communicate(timeout=300)[0].strip() for rank in ranks] == ["whole", "whole"]
    assert log.read_text() == "copy\n"


def test_a_folder_named_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path))

    def holding(text):
        return content_folder("kind", lambda folder: (folder / "a.json").write_text(text))

    first = holding("1")
    assert first == holding("1")
    assert first != holding("2")
    assert (first / "a.json").read_text() == "1"
    (first / "a.json").write_text("by somebody else")
    assert holding("1") == first
    assert (first / "a.json").read_text() == "1"
    with ThreadPoolExecutor(8) as threads:  # as ranks do at the same time
        assert len(set(threads.map(lambda _: holding("3"), range(16)))) == 1
    assert len(list((tmp_path / "kind").iterdir())) == 3  # nothing half made is left


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "file"))
    with pytest.raises(StagingError, match="set LIGHTPPO_CACHE to another folder"):
        content_folder("kind", lambda folder: None)
