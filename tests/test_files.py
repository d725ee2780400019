"""Files of a run: what is on disk before what, sealed folders, what a full disk says; and files of another package."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lightppo import files
from lightppo.errors import StorageError
from lightppo.files import Files, files_in_use, join, local_folder
from lightppo.plugin import FILES
from lightppo.table import Entry


def filled(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    (folder / "inner" / "note").write_text("abc")
    return folder


def test_another_package_puts_its_files_in_place_of_these(monkeypatch):
    assert type(files_in_use()) is Files

    class Elsewhere(Files):
        def local(self, folder):
            return Path("/elsewhere") / Path(folder).name

    monkeypatch.setitem(FILES, "elsewhere", Entry(Elsewhere))
    assert local_folder("/runs/one") == Path("/elsewhere/one")


def test_text_is_replaced_whole(tmp_path, monkeypatch):
    files.write_text(tmp_path / "latest", "old")

    def killed(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.write_text(tmp_path / "latest", "new")
    assert (tmp_path / "latest").read_text() == "old"
    files.write_text(tmp_path / "latest", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "new")]


def test_a_folder_that_older_versions_sealed_with_names_alone(tmp_path):
    folder = filled(tmp_path / "folder")
    content = {"files": ["inner/note", "weights"], "facts": {"step": 3}}
    (folder / files.MANIFEST).write_text(json.dumps(content))
    assert files.facts_of(folder) == {"step": 3}
    assert files.damage(folder) == []
    os.truncate(folder / files.MANIFEST, 20)
    assert files.facts_of(folder) == {}


def test_sums_show_damage(tmp_path):
    folder = filled(tmp_path / "folder")
    files.seal(folder, step=3)
    before = files.seal_of(folder)
    os.truncate(folder / "weights", 7)
    (folder / "inner" / "note").unlink()
    damage = files.damage(folder)
    assert sorted(damage) == ["inner/note is missing", "weights has 7 bytes, 1000 were written"]
    assert files.seal_of(folder) == before  # of what was written

    (folder / files.MANIFEST).write_text((folder / files.MANIFEST).read_text().replace("1000", "7"))
    assert files.damage(folder) == [f"{files.MANIFEST} has other content than was written"]
    assert files.facts_of(folder) == {}


def test_of_a_link_only_the_link_is_removed(tmp_path):
    folder = filled(tmp_path / "folder")
    (tmp_path / "link").symlink_to(folder)
    files.remove(tmp_path / "link")
    assert (folder / "weights").exists()
    files.remove(folder)
    assert not any(tmp_path.iterdir())


def test_names_of_local_folders():
    assert local_folder("file:///runs/one") == Path("/runs/one")
    assert files_in_use().bring("owner/name") == "owner/name"
    assert join("runs/one", "eval") == Path("runs/one/eval")
    assert join("s3://bucket/run/", "eval") == "s3://bucket/run/eval"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A folder with files of several sizes, one in a folder of its own."""
    folder = tmp_path / "sealed"
    (folder / "inner").mkdir(parents=True)
    known = {
        "big": files.write_file(
            folder / "big", lambda file: [file.write(b"x" * (5 << 20)), file.write(b"y")]
        )
    }
    (folder / "small.json").write_text("{}")
    (folder / "inner" / "empty").touch()
    files.seal(folder, known, step=3)
    return folder


def test_a_folder_is_as_it_was_sealed(sealed):
    assert files.damage(sealed) == []
    assert files.manifest(sealed)["facts"] == {"step": 3}
    written = json.loads((sealed / files.MANIFEST).read_text())["files"]
    assert {name: size for name, (size, _) in written.items()} == {
        "big": (5 << 20) + 1,
        "inner/empty": 0,
        "small.json": 2,
    }
    (sealed / "a note of the user's").touch()
    assert files.damage(sealed) == []


def test_the_digest_of_a_file_as_it_is_written_is_that_of_the_file(sealed):
    written = json.loads((sealed / files.MANIFEST).read_text())["files"]
    files.seal(sealed, step=3)  # now all are read
    assert json.loads((sealed / files.MANIFEST).read_text())["files"] == written


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
        (lambda folder: (folder / files.MANIFEST).unlink(), f"{files.MANIFEST} is missing"),
        (
            lambda folder: flip(folder / files.MANIFEST, 60),
            f"{files.MANIFEST} has other content than was written",
        ),
        (
            lambda folder: os.truncate(folder / files.MANIFEST, 60),
            f"{files.MANIFEST} has other content",
        ),
    ],
)
def test_what_is_altered_is_named(sealed, alter, told):
    alter(sealed)
    (found,) = files.damage(sealed)
    assert found.startswith(told)


def test_ranks_share_the_reading_and_together_see_all(sealed):
    flip(sealed / "small.json", 0)
    assert sorted(
        text for share in range(3) for text in files.damage(sealed, share, 3)
    ) == files.damage(sealed)
    assert [len(files.damage(sealed, share, 3)) for share in range(3)].count(1) == 1
    os.truncate(sealed / "big", 7)
    # a size, too, is one rank's to look at
    assert sum(len(files.damage(sealed, share, 3)) for share in range(3)) == 2


def test_a_file_of_another_rank_that_is_not_here_is_said(sealed):
    with pytest.raises(
        StorageError,
        match=r"rank1\.pt, which another rank wrote, is not here: all nodes must share it",
    ):
        files.seal(sealed, {"rank1.pt": files.Digest(1, "0")})


def test_text_is_replaced_only_once_it_is_on_disk(tmp_path, monkeypatch):
    files.write_text(tmp_path / "latest", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        files.write_text(tmp_path / "latest", "new")
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
        files.explained(tmp_path / "run", needed=3 * 10**9),
    ):
        raise error


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(KeyError), files.explained(tmp_path):
        raise KeyError("x")
    with pytest.raises(OSError, match="x"), files.explained(tmp_path):
        raise OSError(errno.EIO, "x")
