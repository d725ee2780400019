"""Checks of LoRA under ZeRO: training as plain peft does it, the reference in between, checkpoints, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support import rank_checks
from support.rank_checks import (
    EPS,
    LR,
    MAX_NORM,
    VOCAB,
    causal_lm,
    halving,
    make_strategy,
    run,
    sequence_classifier,
    usual,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import AdaptersOff, LoraOptions, add_adapters
from lightppo.models.critic import Critic
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.rollout.vllm import weights as rollout_weights

rank_checks.LAYERS = 1  # what is checked is per module
ACTIONS, KL_COEF, STEPS = 4, 0.5, 2
OPTIONS = LoraOptions(rank=4, alpha=8.0)

# What quantised.py changes: how models are loaded, and where the dense model of the same numbers is saved.
LOAD: dict[str, Any] = {}
DENSE = ""  # after the name of the folder
# largest difference of log probs at bf16, the adapter loaded beside the dense model
APART_BF16 = 1e-2

EVERY_VARIANT: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "1, checkpointing": {"zero_stage": 1, "checkpointing": False},
    "2": {"zero_stage": 2},
    "2, packed": {"zero_stage": 2, "packed": True},
    "2, reentrant checkpointing": {"zero_stage": 2, "checkpointing": True},
    "3": {"zero_stage": 3},
    "3, small parameters unsharded": {"zero_stage": 3, "persist": True},
    "3, packed, checkpointing": {"zero_stage": 3, "packed": True, "checkpointing": False},
    "3, reentrant checkpointing": {"zero_stage": 3, "checkpointing": True},
    "3, all offloaded": {"zero_stage": 3, "adam_offload": True, "param_offload": True},
}
# each option in one of them
VARIANTS = usual(
    EVERY_VARIANT,
    "0",
    "2, packed",
    "3, small parameters unsharded",
    "3, reentrant checkpointing",
    "3, all offloaded",
)


def saved_model(work_dir: Path, strategy: DeepspeedStrategy, tied: bool = False) -> str:
    unset_hf_deepspeed_config()
    folder = work_dir / f"base_tied_{tied}"
    strategy.on_rank_0(lambda: causal_lm(tied=tied).save_pretrained(folder), "save the model")
    return str(folder)


def saved_critic(work_dir: Path, strategy: DeepspeedStrategy) -> str:
    unset_hf_deepspeed_config()
    folder = work_dir / "base_critic"
    strategy.on_rank_0(lambda: sequence_classifier().save_pretrained(folder), "save the critic")
    return str(folder)


def ragged(step: int, rows: int = 6, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) ids and mask, padded on both sides."""
    generator = torch.Generator().manual_seed(700 + step)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(rows):
        mask[b, : b % 4] = 0
        mask[b, length - b % 3 :] = 0
    return ids * mask, mask


def b_of(name: str, shape: torch.Size) -> torch.Tensor:
    """A start for B that is not 0: else A would have no gradient, and adapters on and off would be the same."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return 0.2 * torch.randn(shape, generator=generator)


def with_nonzero_b(model: Actor | Critic) -> None:
    with torch.no_grad():
        for name, parameter in model.hf_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(b_of(name, parameter.shape))


def lora_actor(
    role: DeepspeedStrategy,
    path: str,
    *,
    persist: bool = False,
    packed: bool = False,
    dropout: float = 0,
):
    """A prepared actor with adapters, its optimizer and its scheduler."""
    config = role.get_ds_train_config()
    if role.zero_stage == 3 and not persist:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    actor = Actor(path, ds_config=config, bf16=role.bf16, packing_samples=packed, **LOAD)
    add_adapters(actor, LoraOptions(OPTIONS.rank, OPTIONS.alpha, dropout), seed=3)
    with_nonzero_b(actor)
    optimizer = role.create_optimizer(actor, lr=LR, eps=EPS)
    return role.prepare((actor, optimizer, halving(optimizer)))


def train_step(
    role: DeepspeedStrategy, actor: Actor, optimizer, scheduler, step: int
) -> tuple[float, Any]:
    """NLL of the actions and their KL to the reference, whose forward comes between the actor's and its backward."""
    ids, mask = ragged(step)
    total_tokens = real(mask).sum()
    reference, total = AdaptersOff(actor), 0.0
    actor.train()
    mine = [part.chunk(role.world_size)[role.get_rank()] for part in (ids, mask)]
    for micro, micro_mask in zip(*(part.split(2) for part in mine)):
        scores = actor.score_actions(micro, ACTIONS, micro_mask, logits=True)
        base = reference.score_actions(micro, ACTIONS, micro_mask, logits=True)
        assert not base.logits.requires_grad
        loss = (-scores.log_probs.sum() + KL_COEF * kl(scores.logits, base.logits)) / total_tokens
        total += loss.item()
        role.backward(loss * role.world_size, actor, optimizer)
    outcome = role.optimizer_step(optimizer, actor, scheduler, name="actor")
    return role.all_reduce(total, op="sum"), outcome


def real(mask: torch.Tensor) -> torch.Tensor:
    """(B, A): the action and the token before it are no padding."""
    return (mask[:, -ACTIONS:] * mask[:, -ACTIONS - 1 : -1]).bool()


def kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Sum over positions of KL(actor, reference)."""
    log_p, log_q = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def plain_peft(
    path: str,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, gradient norms, the adapter's start and end: peft, torch and nothing else, on the whole batch."""
    start = Actor(path)
    add_adapters(start, OPTIONS, seed=3)
    with_nonzero_b(start)
    first = {n: p.detach().clone() for n, p in start.hf_model.named_parameters() if p.requires_grad}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    trained = {
        n.removeprefix("base_model.model."): p
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert trained.keys() == first.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(first[name])
    optimizer = torch.optim.AdamW(
        trained.values(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    scheduler = halving(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        ids, mask = ragged(step)
        kept = real(mask)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        }
        logits = model(**inputs).logits[:, -ACTIONS - 1 : -1][kept]
        with torch.no_grad(), model.disable_adapter():
            base = model(**inputs).logits[:, -ACTIONS - 1 : -1][kept]
        nll = torch.nn.functional.cross_entropy(
            logits.float(), ids[:, -ACTIONS:][kept], reduction="sum"
        )
        loss = (nll + KL_COEF * kl(logits, base)) / kept.sum()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, first, {name: p.detach().clone() for name, p in trained.items()}


def whole(role: DeepspeedStrategy, model: Any) -> dict[str, torch.Tensor]:
    with role.gathered_parameters(model) as module:
        return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def check_adapters_train_as_in_plain_peft(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    path = saved_model(work_dir, strategy)
    losses, norms, first, last = plain_peft(path + DENSE)
    base = AutoModelForCausalLM.from_pretrained(path + DENSE).state_dict()
    for variant, options in VARIANTS.items():
        if strategy.world_size == 1 and len(options) == 2:
            continue  # of the variations on a stage one rank tries only those of several options
        options = dict(options)
        checkpointing = options.pop("checkpointing", None)
        of_actor = {name: options.pop(name, False) for name in ("persist", "packed")}
        role = make_strategy(**options)
        actor, optimizer, scheduler = lora_actor(role, path, **of_actor)
        if checkpointing is not None:
            actor.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        for step in range(STEPS):
            loss, outcome = train_step(role, actor, optimizer, scheduler, step)
            assert loss == pytest.approx(losses[step], abs=5e-6), (variant, step)
            assert outcome.grad_norm == pytest.approx(norms[step], rel=1e-4), (variant, step)
        weights = whole(role, actor)
        for name, expected in last.items():
            torch.testing.assert_close(
                weights.pop(name),
                expected,
                atol=3e-5,
                rtol=0,
                msg=lambda m: f"{variant}: {m}",  # noqa: B023
            )  # noqa: B023, RUF100
            assert not torch.equal(expected, first[name])
        for name, weight in weights.items():  # what is left is frozen
            if weight.dtype == torch.uint8:
                continue  # in 4 bits; see quantised.py
            assert torch.equal(weight, base[name.replace(".base_layer", "")]), (variant, name)
        trained = sum(p.numel() for p in last.values())
        # + padding of shards
        assert sum(state_elements(optimizer, actor)) <= 2 * trained + 16 * len(last), variant


def state_elements(optimizer: torch.optim.Optimizer, actor: Actor) -> list[int]:
    """Elements of the optimizer's moments on this rank."""
    inner = getattr(actor.model.optimizer, "optimizer", optimizer)
    return [
        t.numel()
        for state in inner.state.values()
        for t in state.values()
        if torch.is_tensor(t) and t.dim() > 0
    ]


EVERY_CKPT: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2_bf16": {"zero_stage": 2, "bf16": True},
    "zero3_bf16": {"zero_stage": 3, "bf16": True},
}
# test_lora_runs.py has ZeRO-0, quantised.py bf16 at ZeRO-3
CKPT = usual(EVERY_CKPT, "zero2", "zero3", "zero2_bf16")


def digest(role: DeepspeedStrategy, actor: Actor) -> dict[str, list[float]]:
    return {name: weight.float().flatten().tolist() for name, weight in whole(role, actor).items()}


def check_write(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Trains 2 steps, saves, trains 2 more, with dropout; the checkpoint holds no frozen weight."""
    path = saved_model(work_dir, strategy, tied=True)
    for name, options in CKPT.items():
        role = make_strategy(**options)
        actor, optimizer, scheduler = lora_actor(role, path, dropout=0.2)
        torch.manual_seed(60 + role.get_rank())
        for step in (0, 1):
            train_step(role, actor, optimizer, scheduler, step)
        role.save_ckpt(actor, work_dir / name, tag="a")
        torch.manual_seed(70 + role.get_rank())
        steps = [train_step(role, actor, optimizer, scheduler, step) for step in (2, 3)]
        record = {"losses": [loss for loss, _ in steps], "weights": digest(role, actor)}
        if role.is_rank_0():
            (work_dir / f"{name}.json").write_text(json.dumps(record))
            for file in (work_dir / name / "a").glob("*.pt"):
                state = torch.load(file, weights_only=False)
                held = state.get("module") or {}
                assert all("lora_" in key for key in held), (name, file, list(held)[:3])
                assert not state.get("frozen_param_fragments"), (name, file)
            if name == "zero2":
                size = sum(file.stat().st_size for file in (work_dir / name / "a").iterdir())
                trained = sum(p.numel() for p in actor.parameters() if p.requires_grad)
                # fp32 weights, masters and two moments, and what torch.save adds to each tensor
                assert size < 16 * trained + 120_000, (size, trained)


def check_resume(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Another process goes on, bit for bit."""
    path = saved_model(work_dir, strategy, tied=True)
    for name, options in CKPT.items():
        role = make_strategy(**options)
        actor, optimizer, scheduler = lora_actor(role, path, dropout=0.2)
        train_step(role, actor, optimizer, scheduler, 9)  # whatever it was before
        role.load_ckpt(actor, work_dir / name)
        torch.manual_seed(70 + role.get_rank())
        expected = json.loads((work_dir / f"{name}.json").read_text())
        losses = [train_step(role, actor, optimizer, scheduler, step)[0] for step in (2, 3)]
        assert losses == expected["losses"], name
        assert digest(role, actor) == expected["weights"], name
    another = saved_model(work_dir, strategy)  # of the same shape, with another head
    for name in ("zero2", "zero3"):
        role = make_strategy(**CKPT[name])
        actor, *_ = lora_actor(role, another, dropout=0.2)
        with pytest.raises(CheckpointError, match=r"other frozen weights.*--pretrain"):
            role.load_ckpt(actor, work_dir / name)
    role = make_strategy(zero_stage=2)
    plain = Actor(path, ds_config=role.get_ds_train_config())
    optimizer = role.create_optimizer(plain, lr=LR)
    plain, *_ = role.prepare((plain, optimizer, None))
    with pytest.raises(
        CheckpointError, match=r"LoRA adapters of rank 4, alpha 8, on down_.*--lora_rank"
    ):
        role.load_ckpt(plain, work_dir / "zero2")


def check_export(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """The folder is the merged model, its subfolder the adapter; both compute what the trained actor computes."""
    ids, mask = ragged(0)
    cases = {
        "zero0": [True],
        "zero2": [False],
        "zero3": [False, True],
        "zero2_bf16": [True],
        "zero3_bf16": [False],
    }
    for name, tied in ((key, tied) for key in CKPT for tied in cases[key]):
        path = saved_model(work_dir, strategy, tied=tied)
        role = make_strategy(**CKPT[name])
        actor, optimizer, scheduler = lora_actor(role, path)
        train_step(role, actor, optimizer, scheduler, 0)
        actor.eval()
        with torch.no_grad():
            expected = actor.score_actions(ids, ACTIONS, mask).log_probs
        folder = work_dir / f"export_{name}_{tied}"
        role.save_model(actor, None, folder)
        dtype = "bfloat16" if role.bf16 else "float32"
        tolerance = 0.15 if role.bf16 else 2e-5
        unset_hf_deepspeed_config()
        merged = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert not any("lora" in key or "base_layer" in key for key in merged.state_dict())
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(path + DENSE, dtype=dtype), folder / "adapter"
        )
        adapted = adapted.to(dtype=getattr(torch, dtype)).get_base_model()
        for model, limit in ((merged, tolerance), (adapted, APART_BF16 if role.bf16 else 1e-6)):
            got = Actor(model).score_actions(ids, ACTIONS, mask).log_probs.detach()
            torch.testing.assert_close(
                got,
                expected,
                atol=limit,
                rtol=0,
                msg=lambda m: f"{name} {tied}: {m}",  # noqa: B023
            )  # noqa: B023, RUF100
        before = whole(role, actor)
        rollout_weights.GATHERED_NUMEL = 1
        for _ in range(2):  # what rollout engines get, in buckets of about one layer each
            synced = {key: tensor.clone() for key, tensor in rollout_weights.full_weights(actor)}
        assert synced.keys() == merged.state_dict().keys()
        for key, weight in merged.state_dict().items():
            assert torch.equal(weight, synced[key]), (name, key)
        assert all(torch.equal(weight, before[key]) for key, weight in whole(role, actor).items())
        role.barrier()


def check_critic(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """A critic trains its adapters and its whole value head, and is exported merged."""
    path = saved_critic(work_dir, strategy)
    ids, mask = ragged(0)
    for options in CKPT.values():
        role = make_strategy(**options)
        critic = Critic(
            path, ds_config=role.get_ds_train_config(), bf16=role.bf16, draws_head=True, **LOAD
        )
        add_adapters(critic, OPTIONS, seed=4)
        before = {n: p.requires_grad for n, p in critic.named_parameters()}
        assert all(
            trained == ("lora_" in name or "score" in name) for name, trained in before.items()
        )
        optimizer = role.create_optimizer(critic, lr=LR)
        critic, optimizer, _ = role.prepare((critic, optimizer, None))
        old = whole(role, critic)
        for _ in range(2):  # A has a gradient once B is not 0
            role.backward(critic(ids, ACTIONS, mask).square().sum(), critic, optimizer)
            role.optimizer_step(optimizer, critic)
        for name, weight in whole(role, critic).items():
            assert torch.equal(weight, old[name]) != ("lora_" in name or "score" in name), (
                options,
                name,
            )
        expected = critic(ids, ACTIONS, mask).detach()
        folder = work_dir / f"critic_{options['zero_stage']}_{role.bf16}"
        role.save_model(critic, None, folder)
        dtype = "bfloat16" if role.bf16 else "float32"
        unset_hf_deepspeed_config()
        merged = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
        base = AutoModelForSequenceClassification.from_pretrained(path + DENSE, dtype=dtype)
        adapted = (
            PeftModel.from_pretrained(base, folder / "adapter")
            .merge_and_unload()
            .to(dtype=getattr(torch, dtype))
        )
        for model in (merged, adapted):
            got = Critic(model)(ids, ACTIONS, mask).detach()
            torch.testing.assert_close(got, expected, atol=0.1 if role.bf16 else 2e-5, rtol=0)
        role.barrier()


def check_rollouts(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Hugging Face rollouts of a sharded actor: its adapters are on, also after a reference forward and a step."""
    path = saved_model(work_dir, strategy)
    tokenizer = AutoTokenizer.from_pretrained(work_dir / "tokenizer")  # made by the test
    prompts = [
        Prompt(text, tokenizer.encode(text), index=i)
        for i, text in enumerate(("1+2=", "abc", "7", "x=33"))
    ]
    sampling = SamplingParams(max_new_tokens=12, n=8, seed=5)
    mine = prompts[: 3 if strategy.is_rank_0() else 1]
    for stage in (0, 3):
        role = make_strategy(zero_stage=stage)
        actor, optimizer, scheduler = lora_actor(role, path)
        engine = HFRolloutEngine(
            actor,
            tokenizer,
            gather_parameters=lambda: role.gathered_parameters(actor),  # noqa: B023
        )  # noqa: B023, RUF100
        seen = []
        for step in (0, 1):
            seen.append([r.response_ids for r in engine.generate(mine, sampling)])
            plain = causal_lm(tied=False)
            plain.load_state_dict(dict(rollout_weights.full_weights(actor)))
            alone = HFRolloutEngine(Actor(plain), tokenizer)
            assert seen[-1] == [r.response_ids for r in alone.generate(mine, sampling)], (
                stage,
                step,
            )
            train_step(role, actor, optimizer, scheduler, step)
        assert seen[0] != seen[1], stage


if __name__ == "__main__":
    run(
        [
            check_adapters_train_as_in_plain_peft,
            check_write,
            check_resume,
            check_export,
            check_critic,
            check_rollouts,
        ]
    )
