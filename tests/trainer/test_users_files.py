"""Checkpoints of a run with files of a user's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.runs import fitted

from lightppo.files import Files
from lightppo.plugin import FILES
from lightppo.table import Entry

pytestmark = pytest.mark.usefixtures("world")


def test_files_of_a_users_own_see_what_is_published(make_config, tmp_path, monkeypatch):
    class Mirrored(Files):
        """A second copy of everything that a run publishes, on another disk."""

        def publish(self, folder, *names, last=None, instead_of=()):
            for name in names:
                source, copy = Path(folder) / name, tmp_path / "mirror" / Path(folder).name / name
                if source.is_dir():
                    shutil.copytree(source, copy, dirs_exist_ok=True)
                elif source.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, copy)
                else:
                    shutil.rmtree(copy, ignore_errors=True)

    monkeypatch.setitem(FILES, "mirrored", Entry(Mirrored))
    fitted(make_config(save_path=str(tmp_path / "run"), save_steps=1, max_ckpt_num=1))
    saved, mirror = tmp_path / "ckpt" / "_actor", tmp_path / "mirror" / "_actor"
    assert list(mirror.glob("global_step*"))
    assert sorted(path.relative_to(mirror) for path in mirror.rglob("*")) == sorted(
        path.relative_to(saved) for path in saved.rglob("*")
    )
