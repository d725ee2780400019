"""Checkpoints that other ranks and ZeRO stages go on from; FORMS, in the environment, says which are saved and loaded.

``check_save`` writes to FORM@RANKS; ``check_load`` goes on from all that others wrote, with ACROSS from other stages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from models.adapters.ranks import adapters
from support import rank_checks
from support.rank_checks import (
    TinyActor,
    causal_lm,
    make_strategy,
    run,
    train_step,
    trained_actor,
    whole_weights,
)

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError

FORMS: dict[str, dict[str, Any]] = {str(stage): {"zero_stage": stage} for stage in range(4)}
FORMS |= {
    f"{stage} {kind}": {"zero_stage": stage, kind: True}
    for stage in (1, 2, 3)
    for kind in ("bf16", "fp16")
}
FORMS |= {f"{stage} lora": {"zero_stage": stage} for stage in range(4)}
FORMS |= {f"{stage} offload": {"zero_stage": stage, "adam_offload": True} for stage in (1, 2, 3)}
# a layer trains, the rest does not
FORMS |= {f"{stage} frozen": {"zero_stage": stage} for stage in range(4)}
# DeepSpeed leaves small parameters whole, as it does by default
FORMS["3 unsharded"] = {"zero_stage": 3}
CHOSEN, ACROSS = os.environ["FORMS"].split(","), "ACROSS" in os.environ

# Of the losses after a resume, against going on with the same ranks: only the sums over ranks round differently.
TOLERANCE = {"": 1e-6, "bf16": 3e-3, "fp16": 1e-3}


def kind_of(form: str) -> str:
    kind = form[2:]
    return kind if kind in ("bf16", "fp16", "lora", "frozen") else ""


def make(role: DeepspeedStrategy, form: str, work_dir: Path, seed: int = 0) -> tuple[Any, Any, Any]:
    """A prepared model, its optimizer, its scheduler."""
    if kind_of(form) == "lora":
        return adapters.lora_actor(role, adapters.saved_model(work_dir, role, tied=True))
    if kind_of(form) != "frozen":
        return trained_actor(role, seed, persist=form == "3 unsharded")
    actor = TinyActor(causal_lm(seed), rank_checks.sharded_train_config(role))
    actor.requires_grad_(False).model.model.layers[0].requires_grad_(True)
    optimizer = role.create_optimizer(
        actor, lr=rank_checks.LR, weight_decay=0.1, eps=rank_checks.EPS
    )
    return role.prepare((actor, optimizer, rank_checks.halving(optimizer)))


def losses(
    role: DeepspeedStrategy, form: str, parts: tuple[Any, Any, Any], steps: tuple[int, ...]
) -> list[float]:
    train = adapters.train_step if kind_of(form) == "lora" else train_step
    return [train(role, *parts, step)[0] for step in steps]


def state_of(
    role: DeepspeedStrategy, actor: TinyActor, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Whole fp32 weights and moments by DeepSpeed's own functions, the weights of the forward pass, and the rest."""
    engine = actor.model
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links once, before there are moments
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    tensors = {f"weight of {name}": weight for name, weight in whole_weights(role, actor).items()}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        plain = role.zero_stage == 0
        tensors[f"master of {name}"] = (
            p.detach().clone() if plain else safe_get_full_fp32_param(p).clone()
        )
        for key in ("exp_avg", "exp_avg_sq"):
            moment = (
                engine.optimizer.state[p][key] if plain else safe_get_full_optimizer_state(p, key)
            )
            tensors[f"{key} of {name}"] = moment.clone()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = {float(state["step"]) for state in inner.state.values()}
    groups = [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps")}
        for group in optimizer.param_groups
    ]
    rest = {
        "loss scale": engine.optimizer.cur_scale if role.fp16 else None,
        "steps": steps,
        "groups": groups,
        "lr": scheduler.get_last_lr(),
        "engine's steps": engine.global_steps,
    }
    return {"tensors": tensors, "rest": rest}


def check_save(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Trains 2 steps, saves, trains 2 more."""
    for form in CHOSEN:
        role = make_strategy(**FORMS[form])
        parts = make(role, form, work_dir)
        if role.fp16:
            parts[0].model.optimizer.cur_scale = 512.0
        losses(role, form, parts, (0, 1))
        folder = work_dir / f"{form}@{role.world_size}"
        role.save_ckpt(parts[0], folder, tag="t", client_state={"form": form})
        state = state_of(role, *parts) | {"losses": losses(role, form, parts, (2, 3))}
        if role.is_rank_0():
            torch.save(state, folder / "expected.pt")
    for stage in (0, 3):
        role = make_strategy(zero_stage=stage)
        ema = role.prepare(TinyActor(causal_lm(seed=5), role.get_ds_eval_config()))
        role.save_ckpt(ema, work_dir / "ema" / f"{stage}@{role.world_size}", tag="t")
    role.barrier()


def check_load(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Starts from other weights, loads what others saved in any form: all is as it was, and goes on alike."""
    done = 0
    for folder in sorted(work_dir.glob("*@*")):
        saved, ranks = folder.name.split("@")
        for form in CHOSEN:
            role = make_strategy(**FORMS[form])
            same_stage = saved[0] == form[0]
            if (
                kind_of(saved) != kind_of(form)
                or folder.name == f"{form}@{role.world_size}"
                or (ACROSS and same_stage)
            ):
                continue
            parts, where = (
                make(role, form, work_dir, seed=9),
                f"{folder.name} at {form}, {role.world_size} ranks",
            )
            if int(ranks) != role.world_size or not same_stage:
                with pytest.raises(
                    CheckpointError,
                    match="set --reshape_ckpt, resume with the same number of processes",
                ):
                    role.load_ckpt(parts[0], folder, tag="t")
            path, client_state = role.load_ckpt(parts[0], folder, tag="t", reshape=True)
            assert (path, client_state) == (str(folder / "t"), {"form": saved})
            expected, state = torch.load(folder / "expected.pt"), state_of(role, *parts)
            tensors = expected["tensors"]
            assert state["tensors"].keys() == tensors.keys()
            assert [
                name for name in tensors if not torch.equal(state["tensors"][name], tensors[name])
            ] == [], where
            assert state["rest"] == expected["rest"], where
            tolerance = TOLERANCE.get(kind_of(form), 1e-6)
            assert losses(role, form, parts, (2, 3)) == pytest.approx(
                expected["losses"], rel=tolerance
            ), where
            done += 1
    assert done > 0


def check_load_frozen(_: DeepspeedStrategy, work_dir: Path) -> None:
    """A model without optimizer, such as a moving average."""
    expected = dict(causal_lm(seed=5).named_parameters())
    for folder in sorted((work_dir / "ema").glob("*@*")):
        for stage in [0, 3] if not ACROSS else [3 - int(folder.name[0])]:
            role = make_strategy(zero_stage=stage)
            ema = role.prepare(TinyActor(causal_lm(seed=6), role.get_ds_eval_config()))
            role.load_ckpt(ema, folder, tag="t", reshape=True)
            for name, weight in whole_weights(role, ema).items():
                assert torch.equal(weight, expected[name]), (folder.name, stage, name)


def check_refused(_: DeepspeedStrategy, work_dir: Path) -> None:
    """What is another model stays an error, with the flag too."""
    folder = next(work_dir.glob("2@*"))
    role = make_strategy(zero_stage=3)
    actor = TinyActor(causal_lm(tied=False), rank_checks.sharded_train_config(role))
    optimizer = role.create_optimizer(actor, lr=rank_checks.LR)
    actor, *_ = role.prepare((actor, optimizer, None))
    with pytest.raises(
        CheckpointError, match=r"holds other trained weights: 1 differ, first 'lm_head.weight'"
    ):
        role.load_ckpt(actor, folder, tag="t", reshape=True)
    with pytest.raises(CheckpointError, match="its weights load with the optimizer only"):
        role.load_ckpt(actor, folder, tag="t", reshape=True, load_optimizer_states=False)
    role = make_strategy(zero_stage=2, bf16=True)
    with pytest.raises(
        CheckpointError, match="bf16=False, this run has bf16=True: resume with the same"
    ):
        role.load_ckpt(trained_actor(role)[0], folder, tag="t", reshape=True)


if __name__ == "__main__":
    run([value for name, value in list(globals().items()) if name.startswith("check_")])
