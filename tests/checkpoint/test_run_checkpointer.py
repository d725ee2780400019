"""RunCheckpointer: which checkpoint the next start finds; the state that goes in and comes out."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.fakes import FakeStrategy, on_ranks

from lightppo import files
from lightppo.checkpoint.damage import last_undamaged
from lightppo.checkpoint.layout import list_tags, resume_root
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.config import CheckpointConfig, PPOConfig
from lightppo.distributed.distributed import DistributedStrategy
from lightppo.errors import CheckpointError

ages = itertools.count(1)


def make_part(root: Path, part: str, step: int, whole: bool = True) -> None:
    """One part of a checkpoint as the strategy leaves it; each call makes one younger than the last."""
    folder = root / f"_{part}" / f"global_step{step}"
    folder.mkdir(parents=True)
    if whole:
        (folder / "lightppo_checkpoint.json").write_text("{}")
        age = 1_000_000_000 * next(ages)
        os.utime(folder / "lightppo_checkpoint.json", ns=(age, age))


def make_checkpoints(root: Path, *steps: int, parts: tuple[str, ...] = ("critic", "actor")) -> None:
    for step in steps:
        for part in parts:
            make_part(root, part, step)
        (root / "latest").write_text(f"global_step{step}")


class SavingStrategy(FakeStrategy):
    """Writes checkpoints of the form above and rotates them as ``DeepspeedStrategy.save_ckpt`` says."""

    dies_at: str | None = None  # the part that a crash comes before

    def save_ckpt(self, model: str, save_dir: Path, tag: str, *, max_num: int, max_mem: float, client_state: Any,
                  protected_tags: tuple[str, ...] = (), facts: Any = None) -> None:  # fmt: skip
        if save_dir.name == f"_{self.dies_at}":
            raise KeyboardInterrupt(f"killed before {save_dir}")
        make_part(save_dir.parent, save_dir.name[1:], int(tag.removeprefix("global_step")))
        content = {"model": model, "max_mem": max_mem, "has_state": client_state is not None}
        (save_dir / tag / "content.json").write_text(json.dumps(content))
        torch.save(client_state, save_dir / tag / "state.pt")
        files.seal(save_dir / tag, **(facts or {}))
        tags = list_tags(save_dir)
        for old in [t for t in tags if t != tag and t not in protected_tags][
            : max(0, len(tags) - max_num)
        ]:
            for file in (save_dir / old).iterdir():
                file.unlink()
            (save_dir / old).rmdir()

    def load_ckpt(
        self, model: str, load_dir: Path, tag: str, checked: bool, reshape: bool
    ) -> tuple[str, Any]:
        path = load_dir / tag
        assert json.loads((path / "content.json").read_text())["model"] == model
        return str(path), torch.load(path / "state.pt", weights_only=False)

    def save_model(self, model: str, tokenizer: Any, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "model").write_text(f"{model} {tokenizer}")
        age = 1_000_000_000 * next(ages)
        os.utime(output_dir, ns=(age, age))


def checkpointer(
    strategy: FakeStrategy | None = None, ema: bool = False, critic: bool = True, **options: Any
):
    models = (
        {"actor": "ACTOR"}
        | ({"critic": "CRITIC"} if critic else {})
        | ({"ema": "EMA"} if ema else {})
    )
    return RunCheckpointer(
        strategy or SavingStrategy(), CheckpointConfig(**options), models, "TOKENIZER"
    )


def found(mine: RunCheckpointer, root: Path) -> str | None:
    """The checkpoint that a run would go on from."""
    return next(iter(mine.candidates(root)), None)


# -- finding ---------------------------------------------------------------------------------------------------------


def test_where_there_is_nothing_nothing_is_found(tmp_path):
    assert found(checkpointer(), tmp_path / "never made") is None
    assert found(checkpointer(), tmp_path) is None
    (tmp_path / "_actor").mkdir()
    assert found(checkpointer(), tmp_path) is None


def test_the_last_checkpoint_is_found_by_its_number_not_its_spelling(tmp_path):
    make_checkpoints(tmp_path, 9, 10, 11)
    assert found(checkpointer(), tmp_path) == "global_step11"
    (tmp_path / "latest").unlink()
    assert found(checkpointer(), tmp_path) == "global_step11"


@pytest.mark.parametrize("broken", ["missing", "incomplete"])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_checkpoint_that_lacks_a_part_is_passed_over(tmp_path, part, broken):
    make_checkpoints(tmp_path, 5)
    make_part(tmp_path, "critic" if part == "actor" else "actor", 10)
    if broken == "incomplete":
        make_part(tmp_path, part, 10, whole=False)
    (tmp_path / "latest").write_text("global_step10")
    assert found(checkpointer(), tmp_path) == "global_step5"


def test_a_save_that_was_interrupted_is_no_checkpoint(tmp_path):
    make_checkpoints(tmp_path, 5)
    for part in ("actor", "critic"):
        make_part(tmp_path, part, 10)
        (tmp_path / f"_{part}" / "global_step10").rename(
            tmp_path / f"_{part}" / "global_step10.incomplete"
        )
    assert found(checkpointer(), tmp_path) == "global_step5"


def test_only_incomplete_checkpoints_are_none(tmp_path):
    make_part(tmp_path, "critic", 5)
    make_part(tmp_path, "actor", 5, whole=False)  # the first save was interrupted
    assert found(checkpointer(), tmp_path) is None


def test_a_run_started_anew_in_the_folder_of_an_older_one_finds_its_own(tmp_path):
    """--resume never, then a crash at step 4: the older run's step 100 must not be taken for the last."""
    make_checkpoints(tmp_path, 90, 100)
    make_checkpoints(tmp_path, 2, 4)
    assert found(checkpointer(), tmp_path) == "global_step4"
    (tmp_path / "latest").unlink()
    assert found(checkpointer(), tmp_path) == "global_step4"  # by age


def test_the_marker_decides_where_ages_are_lost(tmp_path):
    """A copied folder: its files are as old as the copying made them."""
    make_checkpoints(tmp_path, 6, 4, 2)
    (tmp_path / "latest").write_text("global_step6")
    assert found(checkpointer(), tmp_path) == "global_step6"


def test_directories_with_other_names_are_left_alone(tmp_path):
    make_checkpoints(tmp_path, 5)
    (tmp_path / "latest").unlink()
    for part in ("actor", "critic"):
        make_part(tmp_path, part, 1)
        (tmp_path / f"_{part}" / "global_step1").rename(tmp_path / f"_{part}" / "best")
    assert found(checkpointer(), tmp_path) == "global_step5"


@pytest.mark.parametrize(
    ("saved", "now", "parts"),
    [
        (("actor",), {"critic": True}, "_critic"),
        (("critic", "actor"), {"ema": True}, "_ema"),
        (("actor",), {"ema": True}, "_critic, _ema"),
    ],
)
def test_checkpoints_of_a_run_with_other_models_are_refused(tmp_path, saved, now, parts):
    make_checkpoints(tmp_path, 5, 10, parts=saved)
    with pytest.raises(CheckpointError, match=rf"{parts}:.*--resume never.*--save_path"):
        found(checkpointer(**now), tmp_path)


def test_parts_without_a_step_in_common_are_refused(tmp_path):
    make_part(tmp_path, "critic", 10)
    make_part(tmp_path, "actor", 5)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        found(checkpointer(), tmp_path)


def test_parts_that_this_run_does_not_have_do_not_matter_to_finding(tmp_path):
    """Whether the options may differ is decided by the saved config."""
    make_checkpoints(tmp_path, 5, parts=("critic", "ema", "actor"))
    assert found(checkpointer(critic=False), tmp_path) == "global_step5"


# -- damaged ones ----------------------------------------------------------------------------------------------------


def seal_all(root: Path) -> None:
    for folder in root.glob("_*/global_step*"):
        (folder / "states.pt").write_text(folder.name)
        meta = folder / "lightppo_checkpoint.json"
        age = meta.stat().st_mtime_ns
        meta.write_text('{"sealed": true}')
        os.utime(meta, ns=(age, age))
        files.seal(folder)


def resumed(
    root: Path, mine: RunCheckpointer | None = None, before: int | None = None, **options: Any
) -> tuple[str | None, str]:
    """The tag that a start loads, and what it says; ``before``: a replay of this step."""
    mine, loaded = mine or checkpointer(ckpt_path=str(root), **options), []

    def load(root: Path, tag: str, checked: bool) -> dict[str, Any]:
        assert checked
        loaded.append(tag)
        return {"config": PPOConfig().flat(), "trainer": {"global_step": 0}}

    mine.load = load
    mine.resume(PPOConfig().flat(), {}, before=before)
    return (loaded or [None])[0], "\n".join(mine.strategy.printed)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_taken(tmp_path, part, world):
    make_checkpoints(tmp_path, 4, 5, 6)
    seal_all(tmp_path)
    (tmp_path / f"_{part}" / "global_step6" / "states.pt").write_text("global_stepX")
    (tmp_path / "_critic" / "global_step5" / "states.pt").unlink()

    def start(strategy: FakeStrategy) -> tuple[str | None, str]:
        mine = checkpointer(
            SavingStrategy(strategy.rank, world, strategy.exchange), ckpt_path=str(tmp_path)
        )
        return resumed(tmp_path, mine)

    starts = on_ranks(world, start)
    assert [tag for tag, _ in starts] == ["global_step4"] * world
    told = starts[0][1].splitlines()[0]
    assert told == (
        f"{tmp_path}: global_step6 is damaged, kept as global_step6.damaged: _{part}: states.pt has other content than "
        "was written; global_step5 is damaged, kept as global_step5.damaged: _critic: states.pt is missing; "
        "going on from global_step4"
    )
    for folder in (tmp_path / "_actor", tmp_path / "_critic"):
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["global_step4", "global_step5.damaged", "global_step6.damaged", "latest"]
        assert (folder / "latest").read_text() == "global_step4"
        assert list_tags(folder) == ["global_step4"]
    assert resumed(tmp_path)[0] == "global_step4"  # the next start does not speak of it again
    assert "is damaged" not in resumed(tmp_path)[1]


def test_a_second_damaged_checkpoint_of_a_step_is_kept_too(tmp_path):
    for _ in range(2):
        make_checkpoints(tmp_path, 4)
        make_checkpoints(tmp_path, 5)
        seal_all(tmp_path)
        (tmp_path / "_actor" / "global_step5" / "states.pt").unlink()
        assert resumed(tmp_path)[0] == "global_step4"
        for part in ("_actor", "_critic"):
            shutil.rmtree(tmp_path / part / "global_step4")
    found = sorted(path.name for path in (tmp_path / "_critic").glob("*.damaged"))
    assert found == ["global_step5.1.damaged", "global_step5.damaged"]


def test_without_a_whole_one_nothing_is_renamed_and_nothing_starts_anew(tmp_path):
    make_checkpoints(tmp_path, 5)
    seal_all(tmp_path)
    (tmp_path / "_actor" / "global_step5" / "states.pt").unlink()
    for _ in range(2):
        with pytest.raises(
            CheckpointError,
            match=r"_actor: states.pt is missing; no whole one is left.*--resume never",
        ):
            resumed(tmp_path)


def test_a_named_folder_is_only_read(tmp_path):
    make_checkpoints(tmp_path, 4, 5)
    seal_all(tmp_path)
    (tmp_path / "_actor" / "global_step5" / "states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}/global_step5 is damaged: _actor: states.pt is missing"
    ):
        resumed(tmp_path, checkpointer(resume=str(tmp_path)))
    # a replay passes it over
    tag, said = resumed(tmp_path, checkpointer(resume=str(tmp_path)), before=9)
    assert tag == "global_step4"
    assert said.startswith(
        f"{tmp_path}: global_step5 is damaged: _actor: states.pt is missing; going on from global_"
    )
    assert (tmp_path / "_actor" / "global_step5").is_dir()


def test_one_of_an_older_version_is_taken_without_a_manifest_but_not_one_that_lost_it(
    tmp_path, caplog
):
    make_checkpoints(tmp_path, 4, 5)
    with caplog.at_level("INFO"):
        assert resumed(tmp_path)[0] == "global_step5"
    assert "global_step5 is of an older lightppo: it has no manifest" in caplog.text
    seal_all(tmp_path)
    (tmp_path / "_critic" / "global_step5" / files.MANIFEST).unlink()
    assert resumed(tmp_path)[0] == "global_step4"


def test_parts_of_two_runs_never_look_like_one_checkpoint(tmp_path):
    """A run started anew writes step 2 of its critic over that of an older run, and is killed before its actor's."""
    make_checkpoints(tmp_path, 1, 2)
    mine = checkpointer()
    mine.strategy.dies_at = "actor"
    with pytest.raises(KeyboardInterrupt):
        mine.save(tmp_path, 2, {})
    assert found(checkpointer(), tmp_path) == "global_step1"


# -- what a disk or a user has changed ------------------------------------------------------------------------------


def test_a_mark_with_a_flipped_bit_is_named_and_the_last_whole_checkpoint_taken(tmp_path, caplog):
    saved_run(tmp_path, 1, 2)
    whole = (tmp_path / "latest").read_bytes()
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "latest").write_bytes(flipped)
        caplog.clear()
        mine = checkpointer(ema=True)
        found = last_undamaged(mine, tmp_path, mine.candidates(tmp_path), False, None)
        assert found == ("global_step1" if flipped == b"global_step1" else "global_step2")
        if flipped.decode(errors="replace").strip() != "global_step2":
            assert f"{tmp_path}/latest names" in caplog.text
    (tmp_path / "latest").write_bytes(b"\xe7lobal_step2")
    assert started(tmp_path)["trainer"] == {"global_step": 2}
    assert (
        f"{tmp_path}/latest names '\\\\xe7lobal_step2'; the last whole checkpoint is global_step2"
        in caplog.text
    )


def test_a_mark_that_names_an_earlier_checkpoint_of_the_run_is_told(tmp_path, caplog):
    saved_run(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("global_step2")
    assert started(tmp_path)["trainer"] == {"global_step": 2}
    assert (
        f"{tmp_path}/latest names global_step2, but the later global_step3 of the same run is whole"
        in caplog.text
    )
    saved_run(tmp_path, 1)  # another run, started anew beside what the old one left
    caplog.clear()
    assert started(tmp_path)["trainer"] == {"global_step": 1}
    assert caplog.text == ""


# -- parts of different checkpoints ----------------------------------------------------------------------------------


def saved_run(root: Path, *steps: int, ema: bool = True) -> RunCheckpointer:
    """The checkpoints of a run with critic, and with a moving average or without."""
    mine = checkpointer(ema=ema, ckpt_path=str(root))
    for step in steps:
        mine.save(root, step, {"config": PPOConfig().flat(), "trainer": {"global_step": step}})
    return mine


def started(root: Path, ema: bool = True, **options: Any) -> dict[str, Any] | None:
    return checkpointer(ema=ema, ckpt_path=str(root), **options).resume(PPOConfig().flat(), {})


def put(source: Path, target: Path) -> None:
    """As a partial restore does: these files in place of those."""
    shutil.rmtree(target)
    shutil.copytree(source, target)


@pytest.mark.parametrize("part", ["actor", "critic", "ema"])
def test_a_part_of_another_step_is_refused(tmp_path, part):
    run = saved_run(tmp_path, 1, 2, 3).run
    assert started(tmp_path)["trainer"] == {"global_step": 3}
    put(tmp_path / f"_{part}" / "global_step2", tmp_path / f"_{part}" / "global_step3")
    with pytest.raises(CheckpointError) as error:
        started(tmp_path)
    others = [name for name in ("actor", "critic", "ema") if name != part]
    rest = "; ".join(f"_{name} is the {name} of step 3 of run {run}" for name in others)
    assert str(error.value) == (
        f"{tmp_path}/global_step3 has parts of different checkpoints: _{part} is the {part} of step 2 of run {run}; "
        f"{rest}. Restore all parts of global_step3 from one backup, or remove global_step3 from every part to go on "
        "from global_step2; to start anew, set --resume never"
    )
    for name in ("actor", "critic", "ema"):  # as the message says
        shutil.rmtree(tmp_path / f"_{name}" / "global_step3")
    assert started(tmp_path)["trainer"] == {"global_step": 2}


@pytest.mark.parametrize("part", ["actor", "critic", "ema"])
def test_a_part_of_another_run_is_refused(tmp_path, part):
    mine, other = saved_run(tmp_path / "mine", 2), saved_run(tmp_path / "other", 2)
    put(
        tmp_path / "other" / f"_{part}" / "global_step2",
        tmp_path / "mine" / f"_{part}" / "global_step2",
    )
    rest = [name for name in ("actor", "critic", "ema") if name != part]
    told = f"_{part} is the {part} of step 2 of run {other.run}; _{rest[0]} is the {rest[0]} of step 2 of run {mine.run}; "
    for options in ({}, {"resume": str(tmp_path / "mine")}):
        with pytest.raises(CheckpointError, match=told):
            started(tmp_path / "mine", **options)
    assert (tmp_path / "mine" / "_actor" / "global_step2").is_dir()  # nothing is renamed


def test_of_two_parts_of_two_runs_both_are_named(tmp_path):
    mine, other = (saved_run(tmp_path / name, 2, ema=False) for name in ("mine", "other"))
    put(
        tmp_path / "other" / "_actor" / "global_step2",
        tmp_path / "mine" / "_actor" / "global_step2",
    )
    told = f"_critic is the critic of step 2 of run {mine.run}; _actor is the actor of step 2 of run {other.run}. Restore"
    with pytest.raises(CheckpointError, match=told):
        started(tmp_path / "mine", ema=False)


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_part_of_an_earlier_save_of_the_same_step_is_refused(tmp_path, part):
    """Same run, same step: only the sums tell."""
    mine = saved_run(tmp_path, 2)
    shutil.copytree(tmp_path, tmp_path / "before")
    mine.models = {name: f"{model} later" for name, model in mine.models.items()}
    mine.save(tmp_path, 2, {})
    put(tmp_path / "before" / f"_{part}" / "global_step2", tmp_path / f"_{part}" / "global_step2")
    with pytest.raises(
        CheckpointError,
        match=f"_{part} is of another save, the {part} of step 2 of run {mine.run}; _",
    ):
        started(tmp_path)


def test_one_part_in_the_place_of_another_is_refused(tmp_path):
    run = saved_run(tmp_path, 2).run
    put(tmp_path / "_critic" / "global_step2", tmp_path / "_ema" / "global_step2")
    with pytest.raises(
        CheckpointError, match=f"checkpoints: _ema is the critic of step 2 of run {run}; _actor is"
    ):
        started(tmp_path)


def test_parts_of_an_older_version_fit_together_but_not_to_newer_ones(tmp_path):
    saved_run(tmp_path, 1, 2)
    for folder in tmp_path.glob("_*/global_step2"):
        files.seal(folder)  # without facts
    assert started(tmp_path)["trainer"] == {"global_step": 2}
    put(tmp_path / "_critic" / "global_step1", tmp_path / "_critic" / "global_step2")
    with pytest.raises(
        CheckpointError, match=r"_critic is the critic of step 1 of run \w+; _actor is of an older"
    ):
        started(tmp_path)


def test_all_ranks_refuse_a_mixture_alike(tmp_path):
    saved_run(tmp_path, 1, 2)
    put(tmp_path / "_critic" / "global_step1", tmp_path / "_critic" / "global_step2")

    def start(strategy: FakeStrategy) -> str:
        mine = checkpointer(
            SavingStrategy(strategy.rank, 2, strategy.exchange), ckpt_path=str(tmp_path)
        )
        with pytest.raises(CheckpointError) as error:
            mine.resume(PPOConfig().flat(), {})
        return str(error.value)

    first, second = on_ranks(2, start)
    assert first == second


def test_a_resumed_run_keeps_its_name_and_one_that_goes_on_from_a_path_has_its_own(tmp_path):
    first = saved_run(tmp_path, 1)
    resumed_run, branch = (
        checkpointer(ema=True, ckpt_path=str(tmp_path)),
        checkpointer(ema=True, resume=str(tmp_path)),
    )
    for mine in (resumed_run, branch):
        mine.resume(PPOConfig().flat(), {})
    assert resumed_run.run == first.run
    assert branch.run != first.run


# -- saving and loading ----------------------------------------------------------------------------------------------


def test_every_part_is_saved_under_one_tag_and_marked(tmp_path):
    checkpointer(ema=True, max_ckpt_mem=90.0).save(tmp_path, 7, {"trainer": 1})
    assert (tmp_path / "latest").read_text() == "global_step7"
    contents = {
        part: json.loads((tmp_path / f"_{part}" / "global_step7" / "content.json").read_text())
        for part in ("actor", "critic", "ema")
    }
    assert {part: content["model"] for part, content in contents.items()} == {
        "actor": "ACTOR",
        "critic": "CRITIC",
        "ema": "EMA",
    }
    assert {part: content["has_state"] for part, content in contents.items()} == {
        "actor": True,
        "critic": False,
        "ema": False,
    }
    # --max_ckpt_mem is for all parts together
    assert {content["max_mem"] for content in contents.values()} == {30.0}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_checkpoints_go_and_the_last_is_found(tmp_path, keep):
    mine = checkpointer(max_ckpt_num=keep)
    for step in range(1, 6):
        mine.save(tmp_path, step, {})
        assert found(mine, tmp_path) == f"global_step{step}"
    assert list_tags(tmp_path / "_actor") == [f"global_step{step}" for step in range(6 - keep, 6)]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("part", ["critic", "ema", "actor"])
def test_a_run_killed_while_saving_goes_back_to_the_checkpoint_before(tmp_path, part, keep):
    mine = checkpointer(ema=True, max_ckpt_num=keep)
    mine.save(tmp_path, 1, {})
    mine.save(tmp_path, 2, {})
    mine.strategy.dies_at = part
    with pytest.raises(KeyboardInterrupt):
        mine.save(tmp_path, 3, {})
    again = checkpointer(ema=True, max_ckpt_num=keep)
    assert found(again, tmp_path) == "global_step2"
    again.save(tmp_path, 4, {})
    assert found(again, tmp_path) == "global_step4"


def test_state_and_random_numbers_come_back(tmp_path):
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    checkpointer().save(tmp_path, 2, {"trainer": {"global_step": 2}, "kl_ctl": {"value": 0.5}})
    draw = lambda: (random.random(), numpy.random.rand(), torch.rand(()).item())  # noqa: E731
    expected = draw()
    draw()
    state = checkpointer().load(tmp_path, "global_step2")
    assert state == {"trainer": {"global_step": 2}, "kl_ctl": {"value": 0.5}, "world_size": 1}
    assert draw() == expected


def test_with_other_ranks_the_generators_are_seeded_by_seed_step_and_rank(tmp_path):
    for step in (2, 3):
        checkpointer().save(tmp_path, step, {"trainer": {"global_step": step}})

    def drawn(rank: int, step: int, seed: int = 42) -> tuple[float, ...]:
        mine = SavingStrategy(rank, world_size=2)
        mine.seed, mine.set_seed = seed, DistributedStrategy().set_seed
        assert (
            checkpointer(mine, reshape_ckpt=True).load(tmp_path, f"global_step{step}")["world_size"]
            == 1
        )
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    found = [drawn(0, 2), drawn(1, 2), drawn(0, 3), drawn(0, 2, seed=43)]
    assert len(set(found)) == 4
    assert drawn(1, 2) == found[1]


def test_random_numbers_of_every_rank_are_in_the_checkpoint(tmp_path):
    def save(strategy: FakeStrategy) -> None:
        mine = SavingStrategy(strategy.rank, 2, strategy.exchange)
        gather = mine.gather_object
        # Threads share one generator; what a rank hands in is its own.
        mine.gather_object = lambda obj: gather({"of rank": mine.rank})
        if mine.rank == 1:
            mine.save_ckpt = lambda *args, **kwargs: None
        checkpointer(mine).save(tmp_path, 1, {})

    on_ranks(2, save)
    state = torch.load(tmp_path / "_actor" / "global_step1" / "state.pt", weights_only=False)
    assert state["rng"] == [{"of rank": 0}, {"of rank": 1}]


# -- where to look ---------------------------------------------------------------------------------------------------


def test_resume_auto_and_never(tmp_path):
    assert resume_root("auto", str(tmp_path)) == tmp_path
    assert resume_root("never", str(tmp_path)) is None


def test_resume_from_a_folder(tmp_path):
    make_checkpoints(tmp_path / "other", 5)
    assert resume_root(str(tmp_path / "other"), "./ckpt") == tmp_path / "other"


def test_a_named_folder_without_a_whole_checkpoint_is_refused(tmp_path):
    """A run that was told where to resume from must not start anew instead."""
    make_checkpoints(tmp_path / "run", 5)
    (tmp_path / "empty" / "_actor").mkdir(parents=True)
    make_part(tmp_path / "incomplete", "actor", 1, whole=False)
    for wrong in ("missing", "empty", "incomplete", "run/_actor", "run/_actor/global_step5"):
        with pytest.raises(CheckpointError, match=f"--resume {tmp_path / wrong}:"):
            resume_root(str(tmp_path / wrong), "./ckpt")
