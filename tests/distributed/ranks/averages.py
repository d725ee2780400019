"""Checks of moving averages and of copies, of every kind of actor into every kind of frozen model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_checks import (
    TinyActor,
    batch,
    causal_lm,
    make_strategy,
    train_step,
    trained_actor,
    usual,
    whole_weights,
)

from lightppo.distributed.deepspeed import DeepspeedStrategy

EVERY_AVERAGE = {
    # actor, average; without "bf16" both are fp32, and the average always is
    "3 into 3": ({"zero_stage": 3}, {"zero_stage": 3}),
    "2 into 3": ({"zero_stage": 2}, {"zero_stage": 3}),
    "3 into 0": ({"zero_stage": 3}, {"zero_stage": 0}),
    "0 into 0": ({"zero_stage": 0}, {"zero_stage": 0}),
    "1 into 0, offloaded": ({"zero_stage": 1}, {"zero_stage": 0, "offload": True}),
    "3, small unsharded, into 3, offloaded": (
        {"zero_stage": 3, "persist": True},
        {"zero_stage": 3, "offload": True},
    ),
    "bf16, 3 into 3": ({"zero_stage": 3, "bf16": True}, {"zero_stage": 3}),
    "bf16, 1 into 0": ({"zero_stage": 1, "bf16": True}, {"zero_stage": 0}),
    "bf16, 3, all offloaded, into 0": (
        {"zero_stage": 3, "bf16": True, "adam_offload": True, "param_offload": True},
        {"zero_stage": 0},
    ),
}
AVERAGES = usual(
    EVERY_AVERAGE,
    "2 into 3",
    "1 into 0, offloaded",
    "3, small unsharded, into 3, offloaded",
    "bf16, 3 into 3",
    "bf16, 3, all offloaded, into 0",
)
ALONE = list(EVERY_AVERAGE)[:4]


def check_moving_average(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Every pairing of sharded and whole; shards need no communication; fp32 average of a bf16 model; hpZ; copies."""
    beta = 0.9
    if strategy.world_size > 1:
        # from now on this process's ZeRO-3 engines keep hpZ copies
        trained_actor(make_strategy(zero_stage=3, zpg=2))
    for case in AVERAGES if strategy.world_size > 1 else ALONE:
        options, ema_options = EVERY_AVERAGE[case]
        options = dict(options)
        persist = options.pop("persist", False)
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role, persist=persist)
        ema = role.prepare(
            TinyActor(
                causal_lm(seed=1), role.get_ds_eval_config(dtype=torch.float32, **ema_options)
            )
        )
        before, new = whole_weights(role, ema), whole_weights(role, actor)
        if options["zero_stage"] == 3 and ema.model.zero_optimization_stage() == 0:
            role.moving_average(actor, ema, beta)
        else:
            # one after the other: a collective inside would wait for ever
            for rank in range(role.world_size):
                if role.get_rank() == rank:
                    role.moving_average(actor, ema, beta, device="cpu")
                role.barrier()
        for name, got in whole_weights(role, ema).items():
            expected = beta * before[name] + (1 - beta) * new[name]
            torch.testing.assert_close(
                got,
                expected,
                atol=1e-6,
                rtol=0,
                msg=lambda m: f"{case} {m}",  # noqa: B023
            )  # noqa: B023, RUF100
        assert {p.dtype for p in role.unwrap_model(ema).parameters()} == {torch.float32}, case
        same_logits(role, ema)
        # and the actor trains on
        _, outcome = train_step(role, actor, optimizer, scheduler, step=0)
        assert not outcome.skipped
        check_copy(role, actor, ema, work_dir)
    with pytest.raises(ValueError, match="beta"):
        strategy.moving_average(causal_lm(), causal_lm(), beta=1.5)
    with pytest.raises(ValueError, match=r"differ in \d+ parameters, first 'lm_head.weight'"):
        strategy.moving_average(causal_lm(tied=True), causal_lm(tied=False), beta=0.5)


def same_logits(role: DeepspeedStrategy, model) -> None:
    """The forward of an fp32 model is that of the weights it has now."""
    plain = causal_lm()
    plain.load_state_dict(
        whole_weights(role, model) | {"lm_head.weight": plain.lm_head.weight}, strict=False
    )
    plain.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(
            model(batch(0)), plain(input_ids=batch(0)).logits, atol=1e-5, rtol=0
        )


def check_copy(role: DeepspeedStrategy, actor, ema, work_dir: Path) -> None:
    """beta 0 makes the average the actor, bit for bit, whatever it was; its checkpoint brings that back."""
    for param in role.unwrap_model(ema).parameters():
        (param.ds_tensor if hasattr(param, "ds_tensor") else param.data).fill_(float("nan"))
    role.moving_average(actor, ema, beta=0.0)
    weights, got = whole_weights(role, actor), whole_weights(role, ema)
    assert [name for name in weights if not torch.equal(got[name], weights[name])] == []
    same_logits(role, ema)
    role.save_ckpt(ema, work_dir / "average", tag="copy")
    role.moving_average(causal_lm(seed=8), ema, beta=0.5)  # a plain module will do
    assert any(
        not torch.equal(weight, weights[name]) for name, weight in whole_weights(role, ema).items()
    )
    role.load_ckpt(ema, work_dir / "average")
    got = whole_weights(role, ema)
    assert [name for name in weights if not torch.equal(got[name], weights[name])] == []
    same_logits(role, ema)


CHECKS = [check_moving_average]
