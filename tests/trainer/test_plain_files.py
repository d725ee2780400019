"""Checkpoints of a run with the files of a core without plugins, and with files of a user's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import fitted, forget_checkpoints

from lightppo.errors import CheckpointError
from lightppo.files import MANIFEST, Files
from lightppo.plugin import CHECKPOINT_CHOICES, CHECKPOINT_LOADERS, FILES
from lightppo.table import Entry

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.delitem(FILES, "kept")
    monkeypatch.delitem(CHECKPOINT_CHOICES, "undamaged")
    monkeypatch.delitem(CHECKPOINT_LOADERS, "reshape")


def weights(trainer) -> dict[str, torch.Tensor]:
    models = {"actor": trainer.actor, "critic": trainer.critic}
    return {
        f"{role}.{name}": tensor.clone()
        for role, model in models.items()
        for name, tensor in trainer.strategy.unwrap_model(model).state_dict().items()
    }


def assert_equal(one, other) -> None:
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def killed_while_saving(folder: Path, step: int) -> None:
    """What a run leaves that was killed before the actor of a step had its name."""
    actor = folder / "_actor" / f"global_step{step}"
    actor.rename(actor.with_name(f"{actor.name}.incomplete"))
    for marker in (folder / "latest", folder / "_actor" / "latest"):
        marker.write_text(f"global_step{step - 1}")


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(plain, make_config, tmp_path):
    options = {"save_path": str(tmp_path / "run"), "save_steps": 1, "num_episodes": 2}
    straight = fitted(make_config(**options))
    folder = tmp_path / "ckpt"
    last = int((folder / "latest").read_text().removeprefix("global_step"))
    names = json.loads((folder / "_actor" / f"global_step{last}" / MANIFEST).read_text())["files"]
    assert "client_state.pt" in names
    killed_while_saving(folder, last)
    assert_equal(fitted(make_config(**options)), straight)
    assert not list(folder.rglob("*.incomplete"))


def test_plain_checkpoints_and_those_with_sums_take_each_others_place(
    make_config, tmp_path, monkeypatch
):
    options = {"save_path": str(tmp_path / "run"), "save_steps": 1, "num_episodes": 2}
    folder = tmp_path / "ckpt"
    with monkeypatch.context() as without:
        without.delitem(FILES, "kept")
        straight = fitted(make_config(**options))
    last = int((folder / "latest").read_text().removeprefix("global_step"))
    forget_checkpoints(folder, after=last - 1)
    assert_equal(fitted(make_config(**options)), straight)  # this one writes sums
    forget_checkpoints(folder, after=last - 1)
    with monkeypatch.context() as without:
        without.delitem(FILES, "kept")
        assert_equal(fitted(make_config(**options)), straight)


def test_another_stage_asks_for_the_plugin(plain, make_config, tmp_path):
    options = {"save_path": str(tmp_path / "run"), "save_steps": 1}
    fitted(make_config(**options, zero_stage=0))
    with pytest.raises(
        CheckpointError, match=r"other ranks or another ZeRO stage: .* lightppo\.plugins\.reshape"
    ):
        fitted(make_config(**options, zero_stage=2, reshape_ckpt=True, num_episodes=2))


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
