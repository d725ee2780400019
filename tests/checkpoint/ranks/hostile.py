"""Checks that loading a checkpoint runs nothing of what its files hold, whichever file it is."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models.adapters.ranks import adapters
from support.hostile import poison
from support.rank_checks import TinyActor, causal_lm, make_strategy, run, train_step, trained_actor

from lightppo.checkpoint import damage
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError
from lightppo.files import seal

FORMS: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "2 bf16": {"zero_stage": 2, "bf16": True},
    "3 bf16": {"zero_stage": 3, "bf16": True},
    "2 lora": {"zero_stage": 2},
    "3 lora": {"zero_stage": 3},
    "0 frozen": {"zero_stage": 0},
    "3 frozen": {"zero_stage": 3},
}


def saved(form: str, work_dir: Path) -> tuple[DeepspeedStrategy, Any, Path]:
    """A model after a step, without optimizer if frozen, and where its checkpoint is."""
    role = make_strategy(**FORMS[form])
    if form.endswith("frozen"):
        actor = role.prepare(TinyActor(causal_lm(), role.get_ds_eval_config()))
    elif form.endswith("lora"):
        actor, *optimizer = adapters.lora_actor(
            role, adapters.saved_model(work_dir, role, tied=True)
        )
        adapters.train_step(role, actor, *optimizer, 0)
    else:
        actor, *optimizer = trained_actor(role)
        train_step(role, actor, *optimizer, 0)
    folder = work_dir / form
    role.save_ckpt(actor, folder, tag="t")
    return role, actor, folder


def poisoned(role: DeepspeedStrategy, folder: Path, mark: Path) -> Iterator[Path]:
    """The checkpoint with one file after the other poisoned, and a manifest that fits. Collective."""
    files = sorted((folder / "t").rglob("*.pt"))
    for file in files:
        whole = file.with_suffix(".whole")
        role.barrier()
        if role.is_rank_0():
            shutil.copy(file, whole)
            poison(file, mark)
            seal(folder / "t")
        role.barrier()
        yield file
        role.barrier()
        if role.is_rank_0():
            whole.rename(file)
            seal(folder / "t")
    role.barrier()


def check_refused_on_all_ranks(_: DeepspeedStrategy, work_dir: Path) -> None:
    """All say the same, with the file's name, before a weight has changed; a whole checkpoint loads."""
    mark, seen = work_dir / "ran", set()
    for form in ("2", "3 bf16", "3 frozen"):
        role, actor, folder = saved(form, work_dir)
        for file in poisoned(role, folder, mark):
            seen.add(file.name)
            with pytest.raises(CheckpointError) as error:
                role.load_ckpt(actor, folder, tag="t")
            told = role.all_gather_object(str(error.value))
            assert set(told) == {told[0]}
            assert told[0].startswith(f"{file} is not loaded: it names posix.system"), told[0]
            assert "\n" not in told[0]
        role.load_ckpt(actor, folder, tag="t")
    assert not mark.exists()
    last = role.world_size - 1
    assert seen >= {"client_state.pt", "mp_rank_00_model_states.pt", f"frozen_rank{last}.pt"}
    assert {
        f"{kind}zero_pp_rank_{last}_mp_rank_00_optim_states.pt" for kind in ("", "bf16_")
    } <= seen
    assert f"zero_pp_rank_{last}_mp_rank_00_model_states.pt" in seen


def check_every_reader_alone(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Also where the first look at the files finds nothing, as if a file were replaced after it."""
    mark = work_dir / "ran"
    for form in FORMS:
        role, actor, folder = saved(form, work_dir)
        alone = [{}, {"load_optimizer_states": False, "load_lr_scheduler_states": False}]
        for file in poisoned(role, folder, mark):
            for options in alone:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(damage, "require_plain", lambda *_: None)
                    # some are not read
                    with contextlib.suppress(CheckpointError, pickle.UnpicklingError):
                        role.load_ckpt(actor, folder, tag="t", **options)
                    assert not mark.exists(), (form, file.name, options)


def check_reshaped(_: DeepspeedStrategy, work_dir: Path) -> None:
    """What one rank reads of the others' files."""
    mark = work_dir / "ran"
    for form, others in {"3": "0", "0": "2", "2 bf16": "3 bf16", "0 frozen": "3 frozen"}.items():
        role, _, folder = saved(form, work_dir)
        role, actor, _ = saved(others, work_dir / "others")
        for file in poisoned(role, folder, mark):
            with pytest.raises(CheckpointError, match=r"is not loaded: it names posix\.system"):
                role.load_ckpt(actor, folder, tag="t", reshape=True)
            assert not mark.exists(), (form, others, file.name)


if __name__ == "__main__":
    run([value for name, value in list(globals().items()) if name.startswith("check_")])
