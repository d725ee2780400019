"""What stands where checkpoints are to be written is refused before training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.fakes import FakeStrategy

from lightppo.config import PPOConfig
from lightppo.errors import CheckpointError
from lightppo.preflight.run_checks import check_places


@pytest.fixture
def look(tmp_path):
    """The check of a run that writes into ``tmp_path``."""

    def look(**options) -> None:
        config = PPOConfig.from_flat(ckpt_path=str(tmp_path), **options)
        sizes = dict.fromkeys(("actor", "critic", "ema", "export"), 1)
        building = SimpleNamespace(
            config=config, sizes=sizes, strategy=FakeStrategy(), keeps_files=True
        )
        check_places(building)

    return look


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["latest", "_actor/latest", "_critic/latest"])
def test_a_folder_in_place_of_a_mark(look, tmp_path, name, resume):
    look(resume=resume)
    (tmp_path / name).mkdir(parents=True)
    told = f"^{tmp_path / name} is a folder, and must be a file with the name of"
    with pytest.raises(CheckpointError, match=told):
        look(resume=resume)
    look(disable_ds_ckpt=True)


@pytest.mark.parametrize("link", [False, True])
def test_what_stands_in_the_place_of_a_part(look, tmp_path, link):
    place = tmp_path / "_ema"
    place.symlink_to(tmp_path / "nowhere") if link else place.write_text("")
    told = f"^{place} is no folder, and checkpoints are to be written there"
    with pytest.raises(CheckpointError, match=told):
        look()
