"""Checks of training, skipping, averaging and gathering, on one or more ranks."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import averages
import deepspeed
import pytest
import skipping
import torch
from deepspeed.accelerator import get_accelerator
from support.rank_checks import (
    EPS,
    LR,
    MAX_NORM,
    TinyActor,
    TinyCritic,
    batch,
    causal_lm,
    halving,
    make_strategy,
    nll_sum,
    run,
    sequence_classifier,
    sharded_train_config,
    train_step,
    trained_actor,
    usual,
    whole_weights,
)
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from lightppo.distributed import distributed
from lightppo.distributed.deepspeed import DeepspeedStrategy, StepOutcome
from lightppo.errors import LaunchError
from lightppo.models.actor import Actor
from lightppo.models.kernels.offload import offloading

POISONED = 2  # this step's gradient is not finite on the last rank

# fp32 against plain torch in one process on the whole batch: what differs is the order of sums.
LOSS_ATOL, NORM_RTOL, WEIGHT_ATOL = 2e-6, 1e-4, 2e-5


def plain_torch(steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of ordinary training in this one process."""
    model = causal_lm()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    scheduler = halving(optimizer)
    losses, norms = [], []
    for step in range(steps):
        ids = batch(step)
        loss = nll_sum(model(input_ids=ids).logits, ids) / ids[:, 1:].numel()
        losses.append(loss.item())
        if step == POISONED:
            norms.append(math.inf)
            continue
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


EVERY_VARIANT: dict[str, dict] = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "3, small parameters unsharded": {"zero_stage": 3, "persist": True},
    "1, optimizer offloaded": {"zero_stage": 1, "adam_offload": True},
    "2, optimizer offloaded": {"zero_stage": 2, "adam_offload": True},
    "3, optimizer offloaded": {"zero_stage": 3, "adam_offload": True},
    "3, all offloaded": {"zero_stage": 3, "adam_offload": True, "param_offload": True},
    "3, hpZ": {"zero_stage": 3, "zpg": 2},
    "2, overlapping": {"zero_stage": 2, "overlap_comm": True},
}
# skipping.py has the offloaded optimizer of ZeRO-2
VARIANTS = usual(
    EVERY_VARIANT,
    "0",
    "1, optimizer offloaded",
    "2",
    "3, small parameters unsharded",
    "3, all offloaded",
    "3, hpZ",
    "2, overlapping",
)
BF16 = usual(
    {
        "1": {"zero_stage": 1},
        "1, gradients in bf16": {"zero_stage": 1, "grad_accum_dtype": "bf16"},
        "2": {"zero_stage": 2},
        "3": {"zero_stage": 3},
        "2, optimizer offloaded": {"zero_stage": 2, "adam_offload": True},
    },
    "1, gradients in bf16",
    "2, optimizer offloaded",
    "3",
)
FP16 = usual(
    {
        "1": {"zero_stage": 1},
        "2": {"zero_stage": 2},
        "3": {"zero_stage": 3},
        "2, optimizer offloaded": {"zero_stage": 2, "adam_offload": True},
    },
    "2, optimizer offloaded",
    "3",
)


def check_zero_equals_plain_torch(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """D2 and T7: all stages train as plain torch does, and all ranks pass over a step that is poisoned on one."""
    steps = 4
    losses, norms, weights = plain_torch(steps)
    for variant, options in VARIANTS.items():
        if strategy.world_size == 1 and len(options) == 2:
            continue  # of the variations on a stage one rank tries only "all offloaded"
        options = dict(options)
        persist = options.pop("persist", False)
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role, persist=persist)
        for step in range(steps):
            loss, outcome = train_step(
                role, actor, optimizer, scheduler, step, poison=step == POISONED
            )
            assert outcome.skipped == (step == POISONED), (variant, step, outcome)
            assert loss == pytest.approx(losses[step], abs=LOSS_ATOL), (variant, step)
            assert outcome.grad_norm == pytest.approx(norms[step], rel=NORM_RTOL), (variant, step)
        # 3 of 4 steps counted: 1e-2 · 0.5^3
        assert scheduler.get_last_lr() == [pytest.approx(LR * 0.5**3)] * 2, variant
        for name, got in whole_weights(role, actor).items():
            torch.testing.assert_close(
                got,
                weights[name],
                atol=WEIGHT_ATOL,
                rtol=0,
                msg=lambda m: f"{variant}: {m}",  # noqa: B023
            )  # noqa: B023, RUF100


def check_no_pass_waits_for_the_device(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """DeepSpeed's own code asks a GPU to be done with everything in no pass; its timer would, from the third step on."""
    for stage in (0, 1, 2, 3):
        role = make_strategy(zero_stage=stage)
        actor, optimizer, scheduler = trained_actor(role)
        for step in (0, 1, 3):
            train_step(role, actor, optimizer, scheduler, step)
        with mock.patch.object(
            type(get_accelerator()), "synchronize", side_effect=AssertionError("waits")
        ):
            train_step(role, actor, optimizer, scheduler, 4)
            with torch.no_grad():
                actor(batch(5))


def check_one_rank_averages_nothing(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Alone at stage 0 the gradient stays where it is; a parameter without one decays all the same, as on two ranks."""
    role = make_strategy(zero_stage=0)
    actor, optimizer, scheduler = trained_actor(role)
    unused = actor.model.module.model.layers[1].mlp.down_proj.weight
    actor.model.module.model.layers[1].mlp.forward = torch.zeros_like
    before = unused.detach().clone()
    role.backward(nll_sum(actor(batch(0)), batch(0)), actor)
    gradients = {
        name: (p.grad, p.grad.clone()) for name, p in actor.named_parameters() if p.grad is not None
    }
    seen: dict[str, bool] = {}

    def look(*_: object) -> None:
        for name, p in actor.named_parameters():
            if name in gradients:
                seen[name] = p.grad is gradients[name][0]

    optimizer.register_step_pre_hook(look)
    with mock.patch(
        "deepspeed.comm.all_reduce", side_effect=AssertionError("nobody to average with")
    ):
        outcome = role.optimizer_step(optimizer, actor, scheduler)
    assert not outcome.skipped
    assert all(seen.values())
    assert len(seen) == len(gradients)
    decay = optimizer.param_groups[0]["weight_decay"]
    torch.testing.assert_close(unused, before * (1 - LR * decay))
    # in bf16 at stage 1, too, where DeepSpeed would round the fp32 sum to bf16 meanwhile
    role = make_strategy(zero_stage=1, bf16=True)
    actor, optimizer, scheduler = trained_actor(role)
    role.backward(nll_sum(actor(batch(0)), batch(0)), actor)
    with mock.patch(
        "deepspeed.comm.all_reduce", side_effect=AssertionError("nobody to average with")
    ):
        assert not role.optimizer_step(optimizer, actor, scheduler).skipped


EVERY_FUSED: dict[str, dict] = {
    "1, bf16": {"zero_stage": 1, "bf16": True},
    "2, bf16": {"zero_stage": 2, "bf16": True},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "1, fp16": {"zero_stage": 1, "fp16": True},
    "2, fp16": {"zero_stage": 2, "fp16": True},
    "2, bf16, overlapping": {"zero_stage": 2, "bf16": True, "overlap_comm": True},
    "2, gradients in bf16": {"zero_stage": 2, "bf16": True, "grad_accum_dtype": "bf16"},
}
FUSED = usual(EVERY_FUSED, "1, bf16", "2, bf16", "1, fp16", "2")


def check_fused_calls_change_no_weight(_: DeepspeedStrategy, work_dir: Path) -> None:
    """With and without them, weights are the same to the last bit, norms to rounding; poisoned steps are skipped."""
    for variant, options in FUSED.items():
        runs = []
        for is_fused in (False, True):
            role = make_strategy(**options)
            role.max_norm = 0.0  # a norm that rounds otherwise would clip otherwise
            with contextlib.ExitStack() as stack:
                if not is_fused:
                    nothing = mock.patch("lightppo.distributed.deepspeed.fuse_gradient_calls")
                    stack.enter_context(nothing)
                actor, optimizer, scheduler = trained_actor(role)
            # a layer without a gradient, between others
            actor.model.module.model.layers[0].mlp.forward = torch.zeros_like
            outcomes = [
                # of the last rank the gradient overflows, and not the loss
                train_step(role, actor, optimizer, scheduler, step, poison=1e38 * (step == 1))[1]
                for step in range(3)
            ]
            assert [outcome.skipped for outcome in outcomes] == [False, True, False], variant
            norms = [outcome.grad_norm for outcome in outcomes if not outcome.skipped]
            runs.append((norms, whole_weights(role, actor)))
        (norms, weights), (fused_norms, fused_weights) = runs
        assert fused_norms == pytest.approx(norms, rel=1e-6), variant
        for name, weight in weights.items():
            assert torch.equal(fused_weights[name], weight), (variant, name)


def check_sums_are_averaged_in_fp32(_: DeepspeedStrategy, work_dir: Path) -> None:
    """What micro batches have added up is not rounded to bf16 on its way to the other rank."""
    role = make_strategy(zero_stage=1, bf16=True)
    actor, optimizer, scheduler = trained_actor(role)
    trained = sum(p.numel() for p in actor.parameters())
    sent: Counter[torch.dtype] = Counter()
    all_reduce = deepspeed.comm.all_reduce

    def watched(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        sent[tensor.dtype] += tensor.numel()
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch("deepspeed.comm.all_reduce", watched):
        train_step(role, actor, optimizer, scheduler, 0)
    assert sent[torch.bfloat16] == 0
    assert sent[torch.float32] >= trained


def check_bf16_stays_near_fp32(_: DeepspeedStrategy, work_dir: Path) -> None:
    """bf16 with fp32 masters: within bf16's rounding of the fp32 losses, and poisoned steps are skipped too."""
    steps = 4
    losses, norms, _ = plain_torch(steps)
    for options in BF16.values():
        strategy = make_strategy(bf16=True, **options)
        actor, optimizer, scheduler = trained_actor(strategy)
        for step in range(steps):
            loss, outcome = train_step(
                strategy, actor, optimizer, scheduler, step, poison=step == POISONED
            )
            assert outcome.skipped == (step == POISONED), (options, step, outcome)
            assert loss == pytest.approx(losses[step], abs=5e-3), (options, step)
            assert outcome.grad_norm == pytest.approx(norms[step], rel=2e-2), (options, step)
        dtypes = {p.dtype for p in strategy.unwrap_model(actor).parameters()}
        assert dtypes == {torch.bfloat16}, options


def check_fp16_finds_its_loss_scale(_: DeepspeedStrategy, work_dir: Path) -> None:
    """fp16: overflows on one rank halve the scale on all and change nothing else; losses and norms are near fp32's."""
    steps = 4
    losses, norms, _ = plain_torch(steps)
    for options in FP16.values():
        strategy = make_strategy(fp16=True, **options)
        actor, optimizer, scheduler = trained_actor(strategy)
        assert {p.dtype for p in strategy.unwrap_model(actor).parameters()} == {torch.float16}
        scale = 2.0**16
        for step in range(steps):
            # a gradient above 65504 on one rank: all drop the step and try again with half of the
            # scale
            if step == 1:
                before = whole_weights(strategy, actor)
                _, outcome = train_step(strategy, actor, optimizer, scheduler, step, poison=1e7)
                scale /= 2
                assert outcome == StepOutcome(
                    math.inf, skipped=True, overflow=True, loss_scale=scale
                ), options
                assert strategy.all_gather_object(outcome) == [outcome] * strategy.world_size
                after = whole_weights(strategy, actor)
                assert all(torch.equal(weight, after[name]) for name, weight in before.items()), (
                    options
                )
            loss, outcome = train_step(
                strategy, actor, optimizer, scheduler, step, poison=step == POISONED
            )
            # a loss that is not finite is not the scale's fault
            assert (outcome.skipped, outcome.overflow) == (step == POISONED, False), (
                options,
                step,
                outcome,
            )
            assert outcome.loss_scale == scale, (options, step)
            assert loss == pytest.approx(losses[step], abs=1e-3), (options, step)
            assert outcome.grad_norm == pytest.approx(norms[step], rel=4e-3), (options, step)
        assert scheduler.get_last_lr() == [pytest.approx(LR * 0.5**3)] * 2, options
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}, options  # Adam's
        assert actor.model.skipped_steps == 1


def check_fp16_loss_scale_moves(_: DeepspeedStrategy, work_dir: Path) -> None:
    """It doubles after 1000 steps without an overflow, not at the cost of that step; at 1 an overflow is an error."""
    for stage in (2, 3):
        strategy, weights, outcomes = make_strategy(stage, fp16=True), [], []
        for steps_before in (10, 999):
            actor, optimizer, scheduler = trained_actor(strategy)
            actor.model.optimizer.loss_scaler.cur_iter = steps_before
            outcomes.append(train_step(strategy, actor, optimizer, scheduler, 0)[1])
            weights.append(whole_weights(strategy, actor))
        assert [outcome.loss_scale for outcome in outcomes] == [2.0**16, 2.0**17], stage
        assert outcomes[0].grad_norm == outcomes[1].grad_norm, stage
        assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items()), (
            stage
        )
        actor.model.optimizer.cur_scale = 2.0
        found = [
            train_step(strategy, actor, optimizer, scheduler, 1, poison=1e30)[1] for _ in range(3)
        ]
        assert [(outcome.overflow, outcome.loss_scale) for outcome in found] == [
            (True, 1),
            (False, 1),
            (False, 1),
        ]
        assert all(outcome.skipped for outcome in found)


def check_fp16_is_refused(_: DeepspeedStrategy, work_dir: Path) -> None:
    """Where the device cannot, the start says so, before models load."""
    type(get_accelerator()).is_fp16_supported = lambda _: False
    with pytest.raises(LaunchError, match=r"^--fp16: .* this CPU: set --bf16, or neither"):
        DeepspeedStrategy(fp16=True).setup_distributed()
    make_strategy(fp16=True).setup_distributed()


def check_activation_offload_in_shards(_: DeepspeedStrategy, work_dir: Path) -> None:
    """ZeRO-3 takes weights away between forward and backward pass; what is kept refers to them, not to copies."""
    role, kept, copied, norms = make_strategy(zero_stage=3), [], [], []
    original = torch.autograd.graph.saved_tensors_hooks

    class Watched(original):
        def __init__(self, pack: Callable, unpack: Callable) -> None:
            super().__init__(lambda tensor: self.see(tensor, pack(tensor)), unpack)

        def see(self, tensor: torch.Tensor, kept: tuple) -> tuple:
            if not isinstance(kept[0], torch.nn.Parameter):
                copied.append(tuple(tensor.shape))
            return kept

    torch.autograd.graph.saved_tensors_hooks = Watched
    for offloads in (False, True):
        actor = Actor(causal_lm(tied=False), ds_config=sharded_train_config(role))
        optimizer = role.create_optimizer(actor, lr=LR)
        actor, optimizer, _ = role.prepare((actor, optimizer, None))
        actor.around_pass = offloading if offloads else None
        for step in range(2):
            mine = batch(step).chunk(role.world_size)[role.get_rank()]
            role.backward(-actor(mine, 5).sum() / 40 * role.world_size, actor)
            norms.append(role.optimizer_step(optimizer, actor).grad_norm)
        kept.append(whole_weights(role, actor))
        shapes = {
            tuple(p.ds_shape) for p in role.unwrap_model(actor).parameters() if len(p.ds_shape) > 1
        }
    torch.autograd.graph.saved_tensors_hooks = original
    assert norms[:2] == norms[2:]
    assert all(torch.equal(weight, kept[1][name]) for name, weight in kept[0].items())
    assert len(copied) > 40
    assert not shapes & {*copied, *(shape[::-1] for shape in copied)}


def check_collectives(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    rank, world = strategy.get_rank(), strategy.world_size
    assert world == 2
    # 1 and 2: mean 1.5, sum 3
    assert strategy.all_reduce(1.0 + rank) == 1.5
    assert strategy.all_reduce(1 + rank, op="sum") == 3
    assert isinstance(strategy.all_reduce(1 + rank, op="sum"), int)
    data = {"loss": 1.0 + rank, "tokens": 10 * (rank + 1), "vector": torch.tensor([rank, 4])}
    if rank == 1:  # another order of keys must not mix them up
        data = dict(reversed(data.items()))
    reduced = strategy.all_reduce(data, op="max")
    assert (reduced["loss"], reduced["tokens"], reduced["vector"].tolist()) == (2.0, 20, [1, 4])
    assert strategy.all_reduce(torch.tensor([rank, 4])).tolist() == [0.5, 4.0]
    assert strategy.all_reduce(torch.tensor([True, rank == 0]), op="sum").tolist() == [2, 1]
    mine = torch.tensor([1.0])
    strategy.all_reduce(mine, op="sum")
    assert mine.item() == 1.0  # the argument is left alone
    with pytest.raises(ValueError, match="mean, sum, max, min"):
        strategy.all_reduce(1.0, op="average")
    with pytest.raises(TypeError, match="str"):
        strategy.all_reduce({"name": "x"})
    # rank 0 has one row, rank 1 two
    rows = torch.full((1 + rank, 2), float(rank))
    assert strategy.all_gather(rows).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert strategy.all_gather({"n": rank + 5})["n"].tolist() == [5, 6]
    check_uneven_gathers(strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "GATHERED_BYTES", 16)  # a row or two at a time
        check_uneven_gathers(strategy)
    assert strategy.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert strategy.gather_object({"rank": rank}) == (
        [{"rank": 0}, {"rank": 1}] if rank == 0 else None
    )
    # rank 0 sends both something, rank 1 itself nothing
    assert (
        strategy.exchange_objects({to: [rank, "x" * to] for to in range(2 - rank)})
        == [[[0, ""], [1, ""]], [[0, "x"]]][rank]
    )
    assert strategy.exchange_objects({}) == []
    assert strategy.broadcast_object(f"from {rank}", src=1) == "from 1"
    assert strategy.same_count(3 + 4 * rank) == 7
    # 5 samples on 2 ranks, 4 of which were consumed: one left each, the last wraps around
    loader = strategy.setup_dataloader(
        list(range(5)), batch_size=2, shuffle=False, consumed_samples=4
    )
    assert strategy.all_gather_object([b.tolist() for b in loader]) == [[[4]], [[0]]]


def check_uneven_gathers(strategy: DeepspeedStrategy) -> None:
    """First dimensions that differ, down to nothing; every dtype stays itself to the last bit."""
    rank = strategy.get_rank()
    third = 1 / 3  # not a float32
    for values, dtype in (
        ([[third], [third + 1, third + 2]], torch.float64),
        ([[], [third]], torch.float64),
        ([[third, third], []], torch.float64),
        ([[], []], torch.float64),
        ([[True, False, True], [False]], torch.bool),
        ([[], [True, False]], torch.bool),
        ([[2**40], [2**40 + 1, 3]], torch.int64),
        ([[1.5], [float("nan"), float("inf")]], torch.float32),
        ([[0.5, 0.25], [1.0]], torch.bfloat16),
    ):
        got = strategy.all_gather(torch.tensor(values[rank], dtype=dtype))
        expected = torch.tensor(values[0] + values[1], dtype=dtype)
        assert got.dtype == dtype
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0)), (values, got)
    # (0, 3) on rank 0, (2, 3) on rank 1; and a view that is not contiguous
    mine = torch.full((2 * rank, 3), third, dtype=torch.float64)
    assert (
        strategy.all_gather({"x": mine, "y": torch.ones(2, rank).T})["x"].tolist()
        == [[third] * 3] * 2
    )
    assert strategy.all_gather(torch.ones(2, 1 + rank).T).shape == (3, 2)
    # a number or a 0-d tensor of each rank; the result follows no gradient
    assert strategy.all_gather(torch.tensor(third + rank, dtype=torch.float64)).tolist() == [
        third,
        third + 1,
    ]
    assert strategy.all_gather(third + rank).tolist() == [third, third + 1]
    assert strategy.all_gather(rank == 1).tolist() == [False, True]
    assert not strategy.all_gather(torch.ones(1, requires_grad=True)).requires_grad


def greedy(model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False,
        )  # fmt: skip
    return out[0, prompt.shape[1] :].tolist()


def check_gathered_parameters(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Ranks generate different numbers of tokens; afterwards, and after an error, training goes on unchanged."""
    rank = strategy.get_rank()
    new_tokens = (2, 9)[rank]
    expected = greedy(causal_lm().eval(), batch(0)[:1, :4], new_tokens)
    for options in ({"zero_stage": 3}, {"zero_stage": 3, "param_offload": True}, {"zero_stage": 2}):
        role = make_strategy(**options)
        actor, optimizer, scheduler = trained_actor(role)
        untouched, untouched_optimizer, untouched_scheduler = trained_actor(role)
        for step in range(3):
            if step == 0:
                with (
                    role.gathered_parameters(actor) as model,
                    role.gathered_parameters(actor) as again,
                ):
                    assert model is again
                    model.eval()
                    assert greedy(model, batch(0)[:1, :4], new_tokens) == expected
                    assert all(p.numel() > 0 for p in model.parameters())
                    model.train()
            if step == 1:
                with (
                    pytest.raises(ValueError, match="no_such_option"),
                    role.gathered_parameters(actor) as model,
                ):
                    model.generate(
                        batch(0), no_such_option=greedy(model, batch(0)[:1, :4], 1 + rank)
                    )
            if options["zero_stage"] == 3:
                assert all(p.numel() == 0 for p in role.unwrap_model(actor).parameters())
            loss, outcome = train_step(role, actor, optimizer, scheduler, step)
            same_loss, same = train_step(
                role, untouched, untouched_optimizer, untouched_scheduler, step
            )
            assert (loss, outcome) == (same_loss, same), (options, step)
        frozen = role.prepare(TinyActor(causal_lm(), role.get_ds_eval_config()))
        with role.gathered_parameters(frozen) as model:
            assert greedy(model, batch(0)[:1, :4], new_tokens) == expected
        with torch.no_grad():
            logits = frozen(batch(0))
        torch.testing.assert_close(
            logits, causal_lm()(input_ids=batch(0)).logits, atol=1e-5, rtol=0
        )


def check_prepare(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """What comes back for an Actor, a Critic, a frozen model, None; per-role stages; offload; wrong configurations."""
    role = make_strategy(zero_stage=3)
    actor, critic = (
        TinyActor(causal_lm()),
        TinyCritic(sequence_classifier(), role.get_ds_train_config(zero_stage=1)),
    )
    reference = TinyActor(causal_lm())
    reference._offload = True
    actor_optimizer = role.create_optimizer(actor, lr=LR)
    critic_optimizer = role.create_optimizer(critic, lr=LR)
    (got_actor, got_optimizer, scheduler), (engine, *_), got_reference, none = role.prepare(
        (actor, actor_optimizer, None),
        (critic, critic_optimizer, None),
        reference,
        None,
        is_rlhf=True,
    )
    assert got_actor is actor
    assert got_optimizer is actor_optimizer
    assert scheduler is None
    assert none is None
    assert got_reference is reference
    assert engine.module is critic
    assert role.unwrap_model(engine) is critic
    assert actor.model.zero_optimization_stage() == 3
    assert engine.zero_optimization_stage() == 1
    assert reference.model.zero_offload_param() is not None
    with torch.no_grad():
        expected = causal_lm()(input_ids=batch(0)).logits
        torch.testing.assert_close(reference(batch(0)), expected, atol=1e-5, rtol=0)
    values = engine(batch(0)[:2])
    role.backward(values.mean(), engine, critic_optimizer)
    own = torch.optim.lr_scheduler.LambdaLR(critic_optimizer, lambda step: 1 / (1 + step))
    outcome = role.optimizer_step(critic_optimizer, engine, own, name="critic")
    assert outcome.grad_norm > 0
    assert own.get_last_lr() == [LR / 2] * 2  # a scheduler that prepare did not see moves too
    role.backward(engine(batch(0)[:2]).mean() * float("nan"), engine, critic_optimizer)
    assert role.optimizer_step(critic_optimizer, engine, own, name="critic").skipped
    assert own.get_last_lr() == [LR / 2] * 2  # but not with a step that is skipped
    frozen = TinyActor(causal_lm(), role.get_ds_eval_config())
    frozen_optimizer = role.create_optimizer(frozen, lr=LR)
    with pytest.raises(ValueError, match="get_ds_train_config"):
        role.prepare((frozen, frozen_optimizer, None))
    with pytest.raises(ValueError, match=r"strategy.prepare\(\)"):
        role.backward(torch.zeros(()), causal_lm())
    with pytest.raises(ValueError, match="tuple of 2"):
        role.prepare((causal_lm(), None))
    with pytest.raises(ValueError, match="no trainable parameter"):
        role.create_optimizer(causal_lm().requires_grad_(False), lr=LR)
    assert role.report_memory("after prepare")["resident"] > 0


def check_scheduler_steps_once_per_step(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """The seed passes its scheduler both to prepare and to optimizer_step; a skipped step moves neither."""
    for stage in (0, 2, 3):
        role = make_strategy(zero_stage=stage)
        actor, optimizer, scheduler = trained_actor(role)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # noqa: B023
        log = logging.getLogger("lightppo.distributed.deepspeed")
        log.addHandler(handler)
        train_step(role, actor, optimizer, scheduler, step=0)
        assert scheduler.get_last_lr()[0] == pytest.approx(LR / 2)
        train_step(role, actor, optimizer, scheduler, step=1, poison=True)
        assert scheduler.get_last_lr()[0] == pytest.approx(LR / 2)
        log.removeHandler(handler)
        assert [("of actor is skipped" in message) for message in records] == [
            True
        ] * role.is_rank_0(), records
        assert {group["lr"] for group in actor.model.optimizer.param_groups} == {
            scheduler.get_last_lr()[0]
        }


class Zero3Switch:
    """What transformers asks of an HfDeepSpeedConfig, which itself needs accelerate."""

    def __init__(self, config: dict) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


def check_sharded_from_the_start(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """A model that was born in shards, as transformers loads it under ZeRO-3: optimizer, weights, training, export."""
    role = make_strategy(zero_stage=3)
    config = sharded_train_config(role)
    role.save_model(causal_lm(seed=3), None, work_dir / "others")
    role.save_model(causal_lm(), None, work_dir / "weights")
    switch = Zero3Switch(config)
    set_hf_deepspeed_config(switch)
    actor = TinyActor(LlamaForCausalLM.from_pretrained(work_dir / "others"), config)
    unset_hf_deepspeed_config()
    embedding = actor.model.model.embed_tokens.weight
    assert embedding.numel() == 0
    assert embedding.ds_tensor.numel() == -(-61 * 32 // role.world_size)
    role.load_model(actor, work_dir / "weights")
    optimizer = role.create_optimizer(actor, lr=LR, weight_decay=0.1, eps=EPS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    # 7 matrices and 2 norms a layer
    assert [len(group["params"]) for group in optimizer.param_groups] == [15, 5]
    actor, optimizer, scheduler = role.prepare((actor, optimizer, halving(optimizer)))
    losses, norms, _ = plain_torch(2)
    for step in range(2):
        loss, outcome = train_step(role, actor, optimizer, scheduler, step)
        assert loss == pytest.approx(losses[step], abs=LOSS_ATOL)
        assert outcome.grad_norm == pytest.approx(norms[step], rel=NORM_RTOL)


if __name__ == "__main__":
    here = [value for name, value in list(globals().items()) if name.startswith("check_")]
    run([*averages.CHECKS, *skipping.CHECKS, *here])
