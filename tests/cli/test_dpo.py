"""lightppo dpo: against plain torch, on one rank and two, packed and padded, with adapters; resumed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.runs import fitted
from support.tiny import read_jsonl, save_causal_lm, write_jsonl

from lightppo.algorithms.losses import dpo_loss, ipo_loss
from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import DPOConfig

SCRIPT = REPO / "examples" / "train_dpo.py"
# steps of 4 and 2 pairs in each epoch
SEED, ROWS, BATCH, EPOCHS, RATE, BETA = 7, 6, 4, 2, 1e-3, 0.5
LOSSES = {
    "dpo": (
        ["--label_smoothing=0.1"],
        lambda lead: dpo_loss(lead, beta=BETA, label_smoothing=0.1),
        False,
    ),
    "dpo_of_means": ([], lambda lead: dpo_loss(lead, beta=BETA), True),
    "ipo": (["--preference_loss=ipo"], lambda lead: ipo_loss(lead, beta=BETA), True),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Pairs of different lengths."""
    words = ["a", "bcd", "efghijk", "lm", "nopqr", "stuv"]
    return [
        {"input": f"{i}+{i}=", "chosen": words[i], "rejected": words[(i + 2) % ROWS]}
        for i in range(ROWS)
    ]


@pytest.fixture(scope="module")
def dataset(rows, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def plain(
    rows: list[dict[str, str]], path: str, loss: str, start: str | None = None
) -> list[dict[str, float]]:
    """Metrics of each step by torch alone, one unpadded answer after the other; ``start``: another reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # of another test's run at ZeRO-3
    _, loss_fn, averages = LOSSES[loss]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path),
    )
    reference = AutoModelForCausalLM.from_pretrained(start) if start else copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    history = []

    def log_prob(model: Any, row: dict[str, str], which: str) -> torch.Tensor:
        prompt = tokenizer(row["input"])["input_ids"]
        answer = [
            *tokenizer(row[which], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return -torch.nn.functional.cross_entropy(
            logits, torch.tensor(answer), reduction="mean" if averages else "sum"
        )

    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        for chosen in (order[:4], order[4:]):
            pairs = [
                [log_prob(model, rows[i], which) for which in ("chosen", "rejected")]
                for i in chosen
            ]
            with torch.no_grad():
                before = [
                    [log_prob(reference, rows[i], which) for which in ("chosen", "rejected")]
                    for i in chosen
                ]
            changes = torch.stack([torch.stack(pair) for pair in pairs]) - torch.tensor(before)
            total = loss_fn(changes[:, 0] - changes[:, 1]).mean()
            optimizer.zero_grad()
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rewards = BETA * changes.detach().mean(0)
            history.append({"loss": total.item(), "grad_norm": float(norm), "pairs": len(chosen)})
            history[-1] |= {
                "chosen_reward": rewards[0].item(),
                "rejected_reward": rewards[1].item(),
            }
            history[-1] |= {"margin": (rewards[0] - rewards[1]).item()}
            history[-1] |= {"chosen_log_prob": sum(pair[0].item() for pair in pairs) / len(chosen)}
    return history


def values(model: str, dataset: str, folder: Path, micro: int = 2) -> dict[str, Any]:
    return {
        "pretrain": model,
        "dataset": dataset,
        "max_len": 24,
        "train_batch_size": BATCH,
        "micro_train_batch_size": micro,
        "num_epochs": EPOCHS,
        "learning_rate": RATE,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0,
        "beta": BETA,
        "seed": SEED,
        "save_path": folder / "model",
        "log_file": folder / "metrics.jsonl",
    }


def logged(folder: Path, prefix: str = "train/") -> list[dict[str, float]]:
    rows = read_jsonl(folder / "metrics.jsonl")
    rows = [{n: x for n, x in row.items() if n == "step" or n.startswith(prefix)} for row in rows]
    return [row for row in rows if len(row) > 1]


def check_steps(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [row["train/pairs"] for row in found] == [4, 2, 4, 2]
    for row, step in zip(found, expected, strict=True):
        # Adam amplifies rounding of tiny gradients, step after step; the first step is exact to float32.
        tolerance = 1e-5 if row["step"] == 1 else 5e-3
        for name, value in step.items():
            assert row[f"train/{name}"] == pytest.approx(
                value, rel=tolerance, abs=10 * tolerance
            ), (name, row["step"])


@pytest.fixture
def train(world, tiny_model, dataset, tmp_path):
    """``train(folder, **options)``: a finished run in this process; its trainer."""
    from lightppo.supervised.trainer import SupervisedTrainer

    def fit(folder: str, **more: Any):
        small = values(tiny_model, dataset, tmp_path / folder) | {"zero_stage": 0}
        return fitted(DPOConfig.from_flat(small | more), SupervisedTrainer)

    return fit


@pytest.mark.parametrize(
    ("world_size", "micro", "zero_stage", "packing", "loss"),
    [
        (2, 1, 3, "--packing_samples", "ipo"),
        pytest.param(2, 2, 2, "--no_packing_samples", "dpo", marks=pytest.mark.long),
        pytest.param(1, 4, 1, "--packing_samples", "dpo", marks=pytest.mark.long),
        pytest.param(2, 2, 0, "--packing_samples", "dpo", marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_plain_torch(
    rows, tiny_model, dataset, tmp_path, world_size, micro, zero_stage, packing, loss
):
    options = values(tiny_model, dataset, tmp_path, micro) | {"zero_stage": zero_stage}
    run_ranks(
        SCRIPT,
        *(f"--{k}={v}" for k, v in options.items()),
        packing,
        *LOSSES[loss][0],
        world_size=world_size,
    )
    check_steps(logged(tmp_path), plain(rows, tiny_model, loss))


def test_a_packed_run_is_a_padded_one_but_for_rounding(train, rows, tiny_model, tmp_path):
    packed = train("packed", label_smoothing=0.1)
    padded = train("padded", label_smoothing=0.1, packing_samples=False)
    assert (packed.model.layout.packs, padded.model.layout.packs) == (True, False)
    expected = plain(rows, tiny_model, "dpo")
    for run in ("packed", "padded"):
        check_steps(logged(tmp_path / run), expected)


def test_log_probs_of_answers_may_be_means_over_their_tokens(train, rows, tiny_model, tmp_path):
    train(".", average_log_probs=True)
    check_steps(logged(tmp_path), plain(rows, tiny_model, "dpo_of_means"))


def test_a_resumed_run_with_adapters_is_the_uninterrupted_run(train, dataset, tiny_model, tmp_path):
    """It compares with the start, not with what the checkpoint holds; before the first step nothing has changed."""
    from transformers import AutoModelForCausalLM

    more = {
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "eval_dataset": dataset,
        "eval_split": "train",
        "eval_steps": 1,
    }
    train("straight", **more, save_steps=1)
    for stop in (2, None):
        torch.rand(7)  # whatever the process did in between
        train("resumed", **more, save_steps=1, benchmark_steps=stop)
    for kind in ("train/", "eval/"):
        assert logged(tmp_path / "resumed", kind) == logged(tmp_path / "straight", kind)
    start, *_, end = logged(tmp_path / "straight", "eval/")
    assert start["eval/loss"] == pytest.approx(math.log(2))
    assert start["eval/margin"] == start["eval/chosen_reward"] == 0
    assert end["eval/margin"] > 0
    assert end["eval/accuracy"] > 0.5
    assert end["eval/pairs"] == ROWS
    merged, base = (
        AutoModelForCausalLM.from_pretrained(p) for p in (tmp_path / "resumed/model", tiny_model)
    )
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight
    )


def test_a_reference_of_its_own(train, rows, tmp_path, capsys):
    """Against torch alone, by one forward pass and by two runs; it is let go before the first step."""
    other = save_causal_lm(tmp_path / "other", seed=3)
    more = {"ref_pretrain": other, "label_smoothing": 0.1}
    trainer = train("own", **more)
    check_steps(logged(tmp_path / "own"), plain(rows, trainer.config.model.pretrain, "dpo", other))
    assert trainer.objective.reference is None
    train("dry", **more, dry_run=True)
    assert f"longest rows, loss {math.log(2):.4f}" not in capsys.readouterr().out
    train("resumed", **more, save_steps=1, benchmark_steps=2)
    train("resumed", **more, save_steps=1)
    assert logged(tmp_path / "resumed") == logged(tmp_path / "own")


@pytest.mark.long
def test_a_reference_of_its_own_in_shards(rows, tiny_model, dataset, tmp_path):
    other = save_causal_lm(tmp_path / "other", seed=3)
    options = values(tiny_model, dataset, tmp_path, 1) | {"zero_stage": 3, "ref_pretrain": other}
    run_ranks(SCRIPT, *(f"--{k}={v}" for k, v in options.items()), "--label_smoothing=0.1")
    check_steps(logged(tmp_path), plain(rows, tiny_model, "dpo", other))


def test_columns_of_other_names(train, rows, tmp_path):
    renamed = [
        {"input": r["input"], "better": r["chosen"], "pair": {"worse": r["rejected"]}} for r in rows
    ]
    dataset = write_jsonl(tmp_path / "renamed.jsonl", renamed)
    train("renamed", dataset=dataset, chosen_key="better", rejected_key="pair.worse")
    train("named")
    assert logged(tmp_path / "renamed") == logged(tmp_path / "named")


def test_a_dry_run_needs_no_reference(train, tmp_path, capsys):
    train(".", dry_run=True)
    assert (
        f"dry run: one step of the 2 longest rows, loss {math.log(2):.4f}"
        in capsys.readouterr().out
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--preference_loss", "ipo", "--label_smoothing", "0.1"],
            "--label_smoothing needs --preference_loss dpo",
        ),
        (["--label_smoothing", "0.5"], "--label_smoothing must be"),
        (
            ["--preference_loss", "dop"],
            "--preference_loss: unknown name 'dop' (did you mean 'dpo'?)",
        ),
        (["--beta", "0"], "--beta must be a number >0"),
    ],
)
def test_is_refused_before_anything_loads(capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse_args(["--pretrain", "m", "--dataset", "d", *arguments], kind=DPOConfig)
    assert message in capsys.readouterr().err
