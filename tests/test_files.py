"""Plain files: what the core alone does with folders; and a plugin's files in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightppo.checkpoint.durable import seal_of
from lightppo.checkpoint.run_files import KeptFiles
from lightppo.errors import StagingError
from lightppo.files import (
    MANIFEST,
    Files,
    files_in_use,
    join,
    local_folder,
)
from lightppo.plugin import FILES
from lightppo.ranks import Ranks
from lightppo.table import Entry


@pytest.fixture
def plain(monkeypatch) -> Files:
    """The files of a core without plugins."""
    monkeypatch.delitem(FILES, "kept")
    return files_in_use()


def filled(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    (folder / "inner" / "note").write_text("abc")
    return folder


def test_plugins_put_their_files_in_place_of_plain_ones(monkeypatch):
    assert isinstance(files_in_use(), KeptFiles)

    class Elsewhere(Files):
        def local(self, folder):
            return Path("/elsewhere") / Path(folder).name

    monkeypatch.setitem(FILES, "elsewhere", Entry(Elsewhere))
    assert local_folder("/runs/one") == Path("/elsewhere/one")


def test_text_is_replaced_whole(plain, tmp_path, monkeypatch):
    plain.write_text(tmp_path / "latest", "old")

    def killed(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            plain.write_text(tmp_path / "latest", "new")
    assert (tmp_path / "latest").read_text() == "old"
    plain.write_text(tmp_path / "latest", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "new")]


@pytest.mark.parametrize("seals", [Files(), KeptFiles()])
@pytest.mark.parametrize("reads", [Files(), KeptFiles()])
def test_whoever_sealed_a_folder_others_know_its_facts(tmp_path, seals, reads):
    folder = filled(tmp_path / "folder")
    assert reads.manifest(folder)["facts"] == {}
    seals.seal(folder, step=3)
    assert reads.manifest(folder)["facts"] == {"step": 3}
    assert sorted(reads.manifest(folder)["files"]) == ["inner/note", "weights"]
    assert reads.damage(folder) == []
    os.truncate(folder / MANIFEST, 20)
    assert reads.manifest(folder)["facts"] == {}


def test_sums_tell_of_damage(tmp_path):
    folder = filled(tmp_path / "folder")
    kept = KeptFiles()
    kept.seal(folder, step=3)
    before = seal_of(folder)
    os.truncate(folder / "weights", 7)
    (folder / "inner" / "note").unlink()
    damage = kept.damage(folder)
    assert sorted(damage) == ["inner/note is missing", "weights has 7 bytes, 1000 were written"]
    assert sorted(kept.damage(folder, 0, 2) + kept.damage(folder, 1, 2)) == sorted(damage)
    assert seal_of(folder) == before  # of what was written
    (folder / "inner" / "note").write_text("xyz")
    assert "inner/note has other content than was written" in kept.damage(folder)

    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("1000", "7"))
    assert kept.damage(folder) == [f"{MANIFEST} has other content than was written"]
    assert kept.manifest(folder)["facts"] == {}


def test_of_a_link_only_the_link_is_removed(plain, tmp_path):
    folder = filled(tmp_path / "folder")
    (tmp_path / "link").symlink_to(folder)
    plain.remove(tmp_path / "link")
    assert (folder / "weights").exists()
    plain.remove(folder)
    assert not any(tmp_path.iterdir())


def test_a_url_asks_for_the_plugin(plain):
    told = r"s3://user:…@bucket/run|s3://…@bucket/run: URLs are read and written by a plugin \(lightppo\.plugins\.ops\)"
    for use in (plain.local, plain.bring, plain.publish, lambda url: plain.fetch(url, bool)):
        with pytest.raises(StagingError, match=told) as refused:
            use("s3://user:secret@bucket/run")
        assert "secret" not in str(refused.value)
    with pytest.raises(StagingError, match="--save_path s3://bucket: URLs"):
        plain.check("s3://bucket", "--save_path")


def test_names_of_local_folders(plain):
    assert plain.local("file:///runs/one") == Path("/runs/one")
    assert plain.bring("owner/name") == "owner/name"
    assert join("runs/one", "eval") == Path("runs/one/eval")
    assert join("s3://bucket/run/", "eval") == "s3://bucket/run/eval"


def test_all_ranks_have_written_before_rank_0_goes_on(plain, tmp_path):
    met = []

    class Counted(Ranks):
        def barrier(self):
            met.append("barrier")

    with plain.written_together(Counted(), None, tmp_path):
        assert met == []
    assert met == ["barrier"]
