"""Durable files: what is on disk before what, sealed folders, and what a full disk says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lightppo.checkpoint import durable
from lightppo.errors import StorageError


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A folder with files of several sizes, one in a folder of its own."""
    folder = tmp_path / "sealed"
    (folder / "inner").mkdir(parents=True)
    known = {
        "big": durable.write_file(
            folder / "big", lambda file: [file.write(b"x" * (5 << 20)), file.write(b"y")]
        )
    }
    (folder / "small.json").write_text("{}")
    (folder / "inner" / "empty").touch()
    durable.seal(folder, known, step=3)
    return folder


def test_a_folder_is_as_it_was_sealed(sealed):
    assert durable.check(sealed) == []
    assert durable.manifest(sealed)["facts"] == {"step": 3}
    files = json.loads((sealed / durable.MANIFEST).read_text())["files"]
    assert {name: size for name, (size, _) in files.items()} == {
        "big": (5 << 20) + 1,
        "inner/empty": 0,
        "small.json": 2,
    }
    (sealed / "a note of the user's").touch()
    assert durable.check(sealed) == []


def test_the_digest_of_a_file_as_it_is_written_is_that_of_the_file(sealed):
    written = json.loads((sealed / durable.MANIFEST).read_text())["files"]
    durable.seal(sealed, step=3)  # now all are read
    assert json.loads((sealed / durable.MANIFEST).read_text())["files"] == written


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (lambda folder: flip(folder / "big", 4_000_000), "big has other content than was written"),
        (lambda folder: os.truncate(folder / "big", 7), "big has 7 bytes, 5242881 were written"),
        (lambda folder: (folder / "inner" / "empty").unlink(), "inner/empty is missing"),
        (lambda folder: (folder / durable.MANIFEST).unlink(), f"{durable.MANIFEST} is missing"),
        (
            lambda folder: flip(folder / durable.MANIFEST, 60),
            f"{durable.MANIFEST} has other content than was written",
        ),
        (
            lambda folder: os.truncate(folder / durable.MANIFEST, 60),
            f"{durable.MANIFEST} has other content",
        ),
    ],
)
def test_what_is_altered_is_named(sealed, alter, told):
    alter(sealed)
    (found,) = durable.check(sealed)
    assert found.startswith(told)


def test_ranks_share_the_reading_and_together_see_all(sealed):
    flip(sealed / "small.json", 0)
    assert sorted(
        text for share in range(3) for text in durable.check(sealed, share, 3)
    ) == durable.check(sealed)
    assert [len(durable.check(sealed, share, 3)) for share in range(3)].count(1) == 1
    os.truncate(sealed / "big", 7)
    # a size, too, is one rank's to look at
    assert sum(len(durable.check(sealed, share, 3)) for share in range(3)) == 2


def test_a_file_of_another_rank_that_is_not_here_is_said(sealed):
    with pytest.raises(
        StorageError,
        match=r"rank1\.pt, which another rank wrote, is not here: all nodes must share it",
    ):
        durable.seal(sealed, {"rank1.pt": durable.Digest(1, "0")})


def test_text_is_replaced_whole(tmp_path, monkeypatch):
    durable.write_text(tmp_path / "latest", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        durable.write_text(tmp_path / "latest", "new")
    assert (tmp_path / "latest").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "x"),
            r"/run: the disk is full: 3.0 GB are needed, .* are free: lower --max_ckpt_num",
        ),
        (
            Exception("I/O error: No space left on device (os error 28)"),
            r"the disk is full: 3.0 GB .*--ckpt_path",
        ),
        (
            OSError(errno.EROFS, "x"),
            r"/run: cannot be written \(Read-only file system\): .* another --ckpt_path",
        ),
        (
            PermissionError(errno.EACCES, "x"),
            r"cannot be written \(Permission denied\): make it writable",
        ),
    ],
)
def test_disks_that_take_nothing_are_explained(tmp_path, error, told):
    with (
        pytest.raises(StorageError, match=told),
        durable.explained(tmp_path / "run", needed=3 * 10**9),
    ):
        raise error


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(KeyError), durable.explained(tmp_path):
        raise KeyError("x")
    assert durable.problem(OSError(errno.EIO, "x"), tmp_path) is None
