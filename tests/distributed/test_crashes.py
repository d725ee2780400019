"""A crash of the machine at any moment of a save: the old state is found or the new one, and nothing is damaged."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.crash import DiskLog, lay_out, logged
from support.fakes import FakeStrategy
from support.loops import IdleLoop

from lightppo import files
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.checkpoint.run_exports import clear_exports, save_best, save_hf
from lightppo.config import CheckpointConfig, PPOConfig
from lightppo.errors import CheckpointError, TrainingError

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def saver(parts):
    """``saver(**options)``: saves real engines of actor and critic."""

    def make(**options: Any) -> RunCheckpointer:
        models = {"actor": parts["actor"][0], "critic": parts["critic"][0]}
        return RunCheckpointer(
            parts["strategy"], CheckpointConfig(**options), models, parts["tokenizer"]
        )

    return make


def start(folder: Path) -> tuple[str | None, str]:
    """The checkpoint that the next start takes, and what the start says."""
    strategy, loaded = FakeStrategy(), []
    finder = RunCheckpointer(
        strategy, CheckpointConfig(ckpt_path=str(folder)), {"actor": None, "critic": None}, None
    )

    def load(root: Path, tag: str, checked: bool) -> dict[str, Any]:
        loaded.append(tag)
        return {"config": PPOConfig().flat(), "trainer": {"global_step": 0}}

    finder.load = load
    finder.resume(PPOConfig().flat(), {})
    return (loaded or [None])[0], "\n".join(strategy.printed)


def found_after_crashes(log: DiskLog, tmp_path: Path, look: Any) -> dict[str, Any]:
    """What ``look(folder)`` finds after each crash, by what was done last."""
    (blobs := tmp_path / "blobs").mkdir()
    found = {}
    for what, state in log.states():
        lay_out(state, tmp_path / "after", blobs)
        found[what] = look(tmp_path / "after")
    return found


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_while_saving_leaves_the_old_checkpoint_or_the_new_one(saver, tmp_path, keep):
    mine, root = saver(max_ckpt_num=keep), tmp_path / "ckpt"
    mine.save(root, 1, {"trainer": 1})
    with logged(root) as log:
        mine.save(root, 2, {"trainer": 2})
    found = found_after_crashes(log, tmp_path, start)
    assert len(found) > 40
    wrong = {
        what: tag
        for what, (tag, said) in found.items()
        if tag not in ("global_step1", "global_step2") or "is damaged" in said
    }
    assert wrong == {}
    tags = [tag for tag, _ in found.values()]
    assert tags[0] == "global_step1"
    assert tags[-1] == "global_step2"
    synced = {Path(moment.what).name for moment in log.moments if moment.what.startswith("fsync")}
    assert {
        "mp_rank_00_model_states.pt",
        "client_state.pt",
        f".{files.MANIFEST}.tmp",
        ".latest.tmp",
    } <= synced

    lay_out(dict(log.states())[list(found)[-1]], tmp_path / "end", tmp_path / "blobs")
    assert mine.load(tmp_path / "end", "global_step2")["trainer"] == 2  # by the engines


def test_weights_that_are_not_finite_take_no_good_checkpoint(saver, tmp_path):
    mine, root = saver(max_ckpt_num=1, save_hf_ckpt=True), tmp_path / "ckpt"
    mine.save(root, 1, {"trainer": 1})
    weight = next(iter(mine.models["critic"].parameters())).data.view(-1)
    kept = weight[0].item()
    with logged(root) as log:
        for bad in (float("nan"), float("inf")):
            weight[0] = bad
            for save in (partial(save_hf, mine), lambda root, step: mine.save(root, step, {})):
                with pytest.raises(
                    TrainingError, match="after step 2 weights of the critic are not finite"
                ):
                    save(root, 2)
    weight[0] = kept
    assert [moment.what for moment in log.moments] == ["start", "end"]
    assert start(root)[0] == "global_step1"


def test_the_model_sees_what_a_missing_fsync_does(saver, tmp_path, monkeypatch):
    mine, root = saver(max_ckpt_num=1), tmp_path / "ckpt"
    mine.save(root, 1, {})
    monkeypatch.setattr(files, "sync_folder", lambda folder: None)
    with logged(root) as log:
        mine.save(root, 2, {})
    # the old one was gone before the names of the new one were on disk
    with pytest.raises(CheckpointError):
        found_after_crashes(log, tmp_path, start)


def test_a_crash_takes_no_row_of_a_step_that_is_saved(saver, parts, tmp_path):
    """Whatever the checkpoint is that the next start takes, each row until its step is there."""
    mine, root = saver(max_ckpt_num=1), tmp_path / "all"
    config = PPOConfig.from_flat(
        save_path=str(root / "run"), ckpt_path=str(root / "ckpt"), save_steps=1
    )
    loop = IdleLoop(config, parts["strategy"], mine)
    with logged(root) as log:
        loop.run(2)

    def look(after: Path) -> tuple[int, list[tuple[int, list[str]]]]:
        tag, rows = start(after / "ckpt")[0], []
        last = int(tag.removeprefix("global_step")) if tag else 0
        for line in (after / "run" / "metrics.jsonl").read_text().splitlines() if last else ():
            # not one that the crash tore
            if line.endswith("}") and (row := json.loads(line))["step"] <= last:
                rows.append((row["step"], sorted(row)))
        return last, rows

    whole = [
        (row["step"], sorted(row))
        for row in map(json.loads, (root / "run" / "metrics.jsonl").open())
    ]
    found = found_after_crashes(log, tmp_path, look)
    assert {last for last, _ in found.values()} == {0, 1, 2}
    assert {
        what: seen
        for what, seen in found.items()
        if seen[1] != [row for row in whole if row[0] <= seen[0]]
    } == {}


def test_a_crash_while_an_export_is_replaced_leaves_the_old_or_the_new(saver, tmp_path):
    mine, root = saver(), tmp_path / "ckpt"
    save_best(mine, root, 1, "eval/reward", 0.1)
    with logged(root) as log:
        save_best(mine, root, 2, "eval/reward", 0.2)

    def look(folder: Path) -> Any:
        clear_exports(folder)
        assert not list(folder.glob(".*"))
        return files.damage(folder / "best_hf"), json.loads(
            (folder / "best_hf" / "best.json").read_text()
        )["step"]

    found = found_after_crashes(log, tmp_path, look)
    assert {what: seen for what, seen in found.items() if seen not in (([], 1), ([], 2))} == {}
    assert len(set(map(str, found.values()))) == 2


def test_a_crash_while_a_model_is_written_among_other_files_leaves_it_whole_or_unsealed(
    saver, tmp_path
):
    mine, folder = saver(), tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}")
    save = lambda step: mine.strategy.save_model(  # noqa: E731
        mine.models["actor"], mine.tokenizer, folder, step=step
    )  # noqa: E731, RUF100
    save(1)
    with logged(folder) as log:
        save(2)

    def look(after: Path) -> tuple[int | None, list[str]]:
        step = files.manifest(after)["facts"].get("step")
        return step, files.damage(after) if step else []

    found = found_after_crashes(log, tmp_path, look)
    assert {step for step, _ in found.values()} == {1, None, 2}
    assert [what for what, (_, damaged) in found.items() if damaged] == []
    assert os.listdir(tmp_path / "after").count("metrics.jsonl") == 1
