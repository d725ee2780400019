"""Scripts in the shape of OpenRLHF's launcher era that build model, data and optimizer, then hand them to a trainer.

As a script it trains a demonstration model, a reward model or a DPO model. As a test it does so in its own process,
against runs of ``lightppo sft``, ``rm`` and ``dpo``, and on two ranks with ZeRO-3.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightppo.errors import ConfigError, DataError

ROWS, BATCH, RATE = 12, 4, 1e-2  # three steps in an epoch


def make_model(args: argparse.Namespace, strategy: Any) -> Any:
    from lightppo import Actor, get_llm_for_sequence_regression

    options = {
        "use_flash_attention_2": args.flash_attn,
        "bf16": args.bf16,
        "load_in_4bit": False,
        "lora_rank": args.lora_rank,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "lora_dropout": 0,
        "ds_config": strategy.get_ds_train_config(is_actor=args.kind != "rm"),
        "packing_samples": args.packing_samples,
    }
    if args.kind != "rm":
        return Actor(args.pretrain, **options)
    head = {"init_value_head": True, "value_head_prefix": args.value_head_prefix}
    return get_llm_for_sequence_regression(args.pretrain, "reward", **options, **head)


def make_loaders(args: argparse.Namespace, tokenizer: Any, strategy: Any) -> list[Any]:
    from lightppo import RewardDataset, SFTDataset, blending_datasets

    splits = {"train_split": args.train_split, "eval_split": args.eval_split}
    found = blending_datasets(
        args.dataset, args.dataset_probs, strategy, args.seed, max_count=args.max_samples, **splits
    )
    loaders = []
    for rows, shuffle in zip(found, (True, False)):
        rows = rows.select(range(min(args.max_samples, len(rows))))
        if args.kind == "sft":
            more = {
                "pretrain_mode": args.pretrain_mode,
                "input_template": args.input_template,
                "multiturn": False,
            }
            data = SFTDataset(rows, tokenizer, args.max_len, strategy, multiple_of=1, **more)
        else:
            is_dpo = args.kind == "dpo"
            data = RewardDataset(
                rows, tokenizer, args.max_len, strategy, input_template=None, is_dpo=is_dpo
            )
        collate_fn = data.packing_collate_fn if args.packing_samples else data.collate_fn
        loaders.append(
            strategy.setup_dataloader(data, args.micro_train_batch_size, True, shuffle, collate_fn)
        )
    return loaders


def make_trainer(args: argparse.Namespace, classes: dict[str, type]) -> tuple[Any, tuple[Any, ...]]:
    from transformers import get_scheduler

    from lightppo import (
        Actor,
        DPOTrainer,
        RewardModelTrainer,
        SFTTrainer,
        get_strategy,
        get_tokenizer,
    )

    strategy = get_strategy(args)
    strategy.setup_distributed()
    model = make_model(args, strategy)
    tokenizer = get_tokenizer(
        args.pretrain, getattr(model, "model", model), "right", strategy, use_fast=True
    )
    optim = strategy.create_optimizer(
        model, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    train_dataloader, eval_dataloader = make_loaders(args, tokenizer, strategy)
    per_epoch = len(train_dataloader.dataset) // args.train_batch_size
    scheduler = get_scheduler("constant", optim)
    model, optim, scheduler = strategy.prepare((model, optim, scheduler))

    consumed_samples = 0
    if args.load_checkpoint and os.path.exists(args.ckpt_path):
        _, states = strategy.load_ckpt(model if args.kind == "rm" else model.model, args.ckpt_path)
        consumed_samples = states["consumed_samples"]
    parts = {
        "model": model,
        "strategy": strategy,
        "optim": optim,
        "tokenizer": tokenizer,
        "train_dataloader": train_dataloader,
        "eval_dataloader": eval_dataloader,
        "scheduler": scheduler,
        "max_norm": args.max_norm,
        "max_epochs": args.max_epochs,
    }
    exports = {"save_hf_ckpt": args.save_hf_ckpt, "disable_ds_ckpt": False}
    if args.kind == "sft":
        more = {"pretrain_mode": args.pretrain_mode, "batch_size": args.train_batch_size}
        trainer = classes.get("sft", SFTTrainer)(**parts, **more, **exports)
    elif args.kind == "rm":
        trainer = classes.get("rm", RewardModelTrainer)(**parts, loss=args.loss)
    else:
        reference = Actor(args.pretrain, ds_config=strategy.get_ds_eval_config(offload=False))
        reference = strategy.prepare(reference)
        trainer = classes.get("dpo", DPOTrainer)(
            **parts, ref_model=reference, beta=args.beta, **exports
        )
    return trainer, (args, consumed_samples, per_epoch)


def train(args: argparse.Namespace, **classes: type) -> Any:
    trainer, schedule = make_trainer(args, classes)
    trainer.fit(*schedule)
    strategy, model = trainer.strategy, trainer.model
    if args.kind == "rm":
        strategy._unwrap_model(model).config.value_head_prefix = args.value_head_prefix
    strategy.save_model(model, trainer.tokenizer, args.save_path)
    return trainer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("kind", "pretrain", "save_path", "ckpt_path", "dataset"):
        parser.add_argument(f"--{name}", required=True)
    defaults: dict[str, Any] = {
        "save_steps": -1, "eval_steps": -1, "logging_steps": 1, "max_ckpt_num": 3, "max_ckpt_mem": 1e8,
        "train_batch_size": BATCH, "micro_train_batch_size": 2, "max_epochs": 2, "seed": 42, "max_norm": 1.0,
        "learning_rate": RATE, "zero_stage": 0, "max_len": 24, "max_samples": 1e8, "lora_rank": 0, "beta": 0.1,
        "label_smoothing": 0.0, "nll_loss_coef": 0.0, "aux_loss_coef": 0.0, "local_rank": -1, "ring_attn_size": 1,
    }  # fmt: skip
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    texts = {
        "dataset_probs": "1.0", "train_split": "train", "eval_split": "test", "input_key": "input", "output_key": None,
        "prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "value_head_prefix": "score",
        "loss": "sigmoid", "input_template": None, "tokenizer_chat_template": None, "use_wandb": None,
        "use_tensorboard": None, "wandb_run_name": "run", "wandb_org": None, "wandb_group": None,
        "wandb_project": "openrlhf",
    }  # fmt: skip
    for name, default in texts.items():
        parser.add_argument(f"--{name}", default=default)
    for name in (
        *(
            "bf16",
            "flash_attn",
            "packing_samples",
            "load_checkpoint",
            "save_hf_ckpt",
            "pretrain_mode",
            "ipo",
        ),
        *("margin_loss", "compute_fp32_loss", "apply_chat_template"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the splits train and test, by kind; each row has both forms."""
    from support.tiny import write_jsonl

    answers = ["a", "bcd", "efghijk", "lm", "nopqr", "stuv"]
    rows = [{"input": f"{i}+{i}=", "output": answers[i % 6]} for i in range(ROWS)]
    pairs = [
        {
            "prompt": f"{i}+{i}=",
            "chosen": answers[i % 6],
            "rejected": answers[(i + 2) % 6],
            "margin": i % 3,
        }
        for i in range(ROWS)
    ]
    root = tmp_path_factory.mktemp("data")
    for kind, found in {"sft": rows, "rm": pairs, "dpo": pairs}.items():
        (root / kind).mkdir()
        write_jsonl(root / kind / "train.jsonl", found)
        write_jsonl(root / kind / "test.jsonl", found[:5])
    return {kind: str(root / kind) for kind in ("sft", "rm", "dpo")}


@pytest.fixture
def arguments(data, tiny_model, tmp_path):
    """``arguments(kind, folder, flag=value, …)``: of the script."""

    def make(kind: str, folder: str, **flags: Any) -> argparse.Namespace:
        out = tmp_path / folder
        own = {"output_key": "output"} if kind == "sft" else {"prompt_key": "prompt"}
        places = {
            "save_path": out / "model",
            "ckpt_path": out / "ckpt",
            "dataset": data[kind],
            "pretrain": tiny_model,
        }
        words = [
            f"--{name}={value}"
            for name, value in (places | own | flags).items()
            if value is not True
        ]
        return parse(
            [
                f"--kind={kind}",
                *words,
                *(f"--{name}" for name, value in flags.items() if value is True),
            ]
        )

    return make


def logged(args: argparse.Namespace, prefix: str = "train/") -> list[dict[str, float]]:
    from support.tiny import read_jsonl

    rows = read_jsonl(Path(args.save_path, "metrics.jsonl"))
    rows = [
        {name: x for name, x in row.items() if name == "step" or name.startswith(prefix)}
        for row in rows
    ]
    return [row for row in rows if len(row) > 1]


def command(args: argparse.Namespace, folder: Path, **more: Any) -> list[dict[str, float]]:
    """Training steps of ``lightppo sft``, ``rm`` or ``dpo`` on the same rows."""
    from lightppo.config.supervised_options import COMMANDS
    from lightppo.supervised.trainer import SupervisedTrainer

    names = (
        "pretrain",
        "dataset",
        "max_len",
        "train_batch_size",
        "micro_train_batch_size",
        "learning_rate",
        "seed",
    )
    options = {name: getattr(args, name) for name in names} | {
        "num_epochs": args.max_epochs,
        "zero_stage": 0,
    }
    options |= {
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0,
        "save_path": str(folder),
        "packing_samples": False,
    }
    SupervisedTrainer.from_config(COMMANDS[args.kind].from_flat(options | more)).fit()
    return logged(argparse.Namespace(save_path=folder))


@pytest.mark.parametrize(
    ("kind", "flags", "more"),
    [
        ("sft", {}, {}),
        ("rm", {"margin_loss": True}, {"margin_key": "margin", "input_key": "prompt"}),
        (
            "dpo",
            {"label_smoothing": 0.1, "beta": 0.5},
            {"label_smoothing": 0.1, "beta": 0.5, "input_key": "prompt"},
        ),
        pytest.param(
            *(
                "dpo",
                {"ipo": True},
                {"preference_loss": "ipo", "average_log_probs": False, "input_key": "prompt"},
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["sft", "rm", "dpo", "ipo"],
)
def test_a_script_takes_the_steps_of_the_command(world, arguments, tmp_path, kind, flags, more):
    args = arguments(kind, "script", **flags)
    train(args)
    found = logged(args)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    expected = command(args, tmp_path / "command", **more)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)
    # at the end of each epoch, not at the start
    assert [row["step"] for row in logged(args, "eval/")] == [3, 6]
    assert (Path(args.save_path) / "config.json").is_file()
    assert not Path(args.ckpt_path).exists()  # --save_steps -1 saves none
    assert (args.save_steps, args.eval_steps) == (math.inf, 3)  # as OpenRLHF's fit leaves them


@pytest.mark.parametrize("kind", [pytest.param("sft", marks=pytest.mark.long), "dpo"])
def test_a_script_that_packs_and_asks_for_flash_attention_runs_without_it(world, arguments, kind):
    padded, packed = (
        arguments(kind, "padded"),
        arguments(kind, "packed", packing_samples=True, flash_attn=True),
    )
    train(padded)
    assert train(packed).model.layout.packs
    first = [logged(args)[0]["train/loss"] for args in (padded, packed)]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def weights(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(args.save_path) / "model.safetensors")


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("rm", "dpo"))]
)
def test_a_script_that_goes_on_from_its_checkpoint_ends_where_it_would_have(world, arguments, kind):
    whole = arguments(kind, "whole")
    train(whole)
    train(arguments(kind, "cut", save_steps=2, max_epochs=1))
    rest = arguments(kind, "cut", save_steps=2, load_checkpoint=True)
    assert train(rest).state.global_step == 6
    assert sorted(path.name for path in Path(rest.ckpt_path).glob("global_step*")) == [
        f"global_step{i}" for i in (3, 4, 6)
    ]
    assert [row["step"] for row in logged(rest)] == [1, 2, 3, 4, 5, 6]
    expected, found = weights(whole), weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_overrides_of_a_script_act(world, arguments):
    from lightppo import SFTTrainer

    seen: dict[str, list[Any]] = {"logs": [], "eval": []}

    class Mine(SFTTrainer):
        def save_logs_and_checkpoints(self, args, global_step, step_bar, logs_dict, client_states):
            seen["logs"].append(
                (global_step, logs_dict["gpt_loss"] == logs_dict["loss_mean"], client_states)
            )
            logs = {**logs_dict, "mine": 7.0, "rollout_mine": 8.0}
            super().save_logs_and_checkpoints(
                args, global_step, step_bar, logs, {**client_states, "own": global_step}
            )

        def evaluate(self, eval_dataloader, steps=0):
            seen["eval"].append((len(eval_dataloader.dataset), steps))
            return {**super().evaluate(eval_dataloader, steps), "mine": 9.0}

    args = arguments("sft", "run", save_steps=2, max_epochs=1, save_hf_ckpt=True)
    trainer = train(args, sft=Mine)
    assert seen["logs"] == [(step, True, {"consumed_samples": step * BATCH}) for step in (1, 2, 3)]
    assert seen["eval"] == [(5, 3)]
    assert all(row["train/mine"] == 7.0 and "train/gpt_loss" not in row for row in logged(args))
    assert [row["rollout/mine"] for row in logged(args, "rollout/")] == [8.0] * 3
    assert [row["eval/mine"] for row in logged(args, "eval/")] == [9.0]
    _, states = trainer.strategy.load_ckpt(trainer.model, args.ckpt_path, "global_step2")
    assert (states["own"], states["consumed_samples"]) == (2, 2 * BATCH)
    assert (Path(args.ckpt_path) / "global_step2_hf" / "config.json").is_file()


def test_a_part_of_the_loss_of_chosen_answers(world, arguments):
    plain, more = (
        arguments("dpo", "plain", max_epochs=1),
        arguments("dpo", "more", max_epochs=1, nll_loss_coef=0.5),
    )
    train(plain)
    train(more)
    first, other = logged(plain)[0], logged(more)[0]
    assert other["train/nll_loss"] > 0
    assert "train/nll_loss" not in first
    assert other["train/loss"] == pytest.approx(
        first["train/loss"] + 0.5 * other["train/nll_loss"], rel=1e-5
    )


def test_adapters_train_and_the_rest_stays(world, arguments):
    trainer = train(arguments("dpo", "run", lora_rank=2, max_epochs=1))
    assert {
        "lora" in name
        for name, weight in trainer.model.model.module.named_parameters()
        if weight.requires_grad
    } == {True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"aux_loss_coef": 0.1}, "--aux_loss_coef"),
        ({"ring_attn_size": 2}, "--ring_attn_size 2"),
    ],
)
def test_what_is_not_here_is_refused(world, arguments, flags, message):
    with pytest.raises(ConfigError, match=message):
        train(arguments("rm", "run", **flags))


def test_logexp_has_no_margins(world, arguments, capsys):
    first = []
    for folder, flags in (
        ("a", {}),
        ("b", {"margin_loss": True}),
        ("c", {"margin_loss": True, "loss": "logexp"}),
    ):
        args = arguments("rm", folder, max_epochs=1, **flags)
        train(args)
        first.append(logged(args)[0]["train/loss"])
    assert first[0] == first[2] != first[1]
    assert capsys.readouterr().out.count("--margin_loss needs --loss sigmoid, not logexp") == 1


def test_rows_of_another_form_are_refused(world, arguments):
    from lightppo import SFTTrainer

    with pytest.raises(
        ConfigError,
        match=r"train_dataloader has rows of RewardDataset: make them by lightppo\.SFTDataset",
    ):
        train(arguments("rm", "run"), rm=lambda loss, **parts: SFTTrainer(**parts))


def test_a_trainer_of_the_command_is_made_as_before(world, arguments, tmp_path):
    from lightppo import SFTTrainer
    from lightppo.config.supervised_options import SFTConfig

    class Mine(SFTTrainer):
        def training_step(self, micro_batches):
            return {**super().training_step(micro_batches), "train/mine": 1.0}

    args = arguments("sft", "x")
    options = {
        "pretrain": args.pretrain,
        "dataset": args.dataset,
        "save_path": str(tmp_path / "run"),
        "zero_stage": 0,
    }
    trainer = Mine.from_config(
        SFTConfig.from_flat(options | {"train_batch_size": 4, "micro_train_batch_size": 2})
    )
    assert trainer.fit()["train/mine"] == 1.0
    assert (tmp_path / "run" / "config.json").is_file()  # it saves the model itself


@pytest.mark.long
def test_two_ranks_with_zero_3(arguments):
    from support.ranks import run_ranks

    args = arguments("rm", "run")
    flags = [f"--{name}={value}" for name, value in vars(args).items() if isinstance(value, str)]
    run_ranks(Path(__file__), *flags, "--zero_stage=3", "--packing_samples", world_size=2)
    assert [row["train/pairs"] for row in logged(args)] == [4] * 6
    config = json.loads((Path(args.save_path) / "config.json").read_text())
    assert config["value_head_prefix"] == "score"
    assert config["std"] > 0


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with a chat template."""
    from support.tiny import save_tokenizer

    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    turns = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}a:{% endif %}"
    return tokenizer


def of_script(**args: Any) -> Any:
    return argparse.Namespace(args=argparse.Namespace(**args))


def dataset_of(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def trained_text(tokenizer: Any, row: dict[str, torch.Tensor]) -> str:
    return tokenizer.decode(row["labels"][row["labels"] >= 0])


def test_a_script_cuts_long_rows_and_leaves_out_prompts_without_room(chats):
    from lightppo import SFTDataset

    rows = dataset_of(
        [
            {"input": "12=", "output": "3456789"},
            {"input": "123456789=", "output": "1"},
            {"input": "1=", "output": ""},
        ]
    )
    script = of_script(input_key="input", output_key="output")
    found = SFTDataset(rows, chats, 8, script, input_template="q{}")
    assert found.report.dropped == {"overlong": 1, "empty": 1}
    ids = found[0]["input_ids"]
    assert (len(ids), int(ids[-1])) == (8, chats.eos_token_id)
    assert chats.decode(ids[:-1]) == "q12=345"
    with pytest.raises(DataError, match="the limit is 8"):  # without a script it is as before
        SFTDataset(rows, chats, 8, output_key="output")
    # the fifth place, as in data.datasets
    assert SFTDataset(rows.select([0]), chats, 20, None, True).pretrain_mode


def test_the_loss_of_every_answer_of_a_chat(chats):
    from lightppo import SFTDataset

    chat = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    rows = dataset_of([{"input": [{"role": role, "content": text} for role, text in chat]}])
    script = of_script(input_key="input", apply_chat_template=True)
    last = SFTDataset(rows, chats, 64, script, input_template="ignored {}")
    every = SFTDataset(rows, chats, 64, script, multiturn=True)
    assert trained_text(chats, last[0]) == "4" + chats.eos_token
    assert trained_text(chats, every[0]) == "24" + chats.eos_token
    assert torch.equal(last[0]["input_ids"], every[0]["input_ids"])
    with pytest.raises(DataError, match="multiturn needs chats"):
        SFTDataset(rows, chats, 64, script, pretrain_mode=True, multiturn=True)


def test_pairs_of_texts_that_share_no_prompt(chats, tiny_model):
    from lightppo import Actor, RewardDataset

    texts = [{"chosen": "12", "rejected": "345"}, {"chosen": "6", "rejected": "6"}]
    found = RewardDataset(
        dataset_of(texts), chats, 8, of_script(chosen_key="chosen", rejected_key="rejected")
    )
    assert found.report.dropped == {"equal": 1}
    batch = found.packing_collate_fn([found[0]])
    assert batch["attention_mask"][:, 0].sum() in (0, 2)  # of padding, or of a begin-of-text
    log_probs = Actor(tiny_model)(
        batch["sequences"], batch["action_mask"].shape[1], batch["attention_mask"]
    )
    assert log_probs.isfinite().all()


def test_the_prompts_template_and_margins_of_pairs(chats, caplog):
    from lightppo import RewardDataset

    rows = [{"q": "1+1=", "chosen": "2", "rejected": "3", "margin": 2}]
    script = of_script(prompt_key="q", margin_loss=True)
    (found,) = RewardDataset(dataset_of(rows), chats, 20, script, "q{}a")
    assert chats.decode(found["prompt"]).endswith("q1+1=a")
    assert found["margin"] == 2.0
    (of_dpo,) = RewardDataset(dataset_of(rows), chats, 20, script, "q{}a", is_dpo=True)
    assert "margin" not in of_dpo
    del rows[0]["margin"]
    (without,) = RewardDataset(dataset_of(rows), chats, 20, script)
    assert "margin" not in without
    assert "--margin_loss: the rows have no column 'margin'" in caplog.text
    with pytest.raises(DataError, match="multiple_of 2"):
        RewardDataset(dataset_of(rows), chats, 20, script, multiple_of=2)


if __name__ == "__main__":
    train(parse(sys.argv[1:]))
