"""The loop under sft, rm and dpo, by SFT: against plain torch, on one rank and two; stopped and resumed; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import REPO, run_ranks
from support.runs import fitted
from support.tiny import read_jsonl, write_jsonl

from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import SFTConfig
from lightppo.errors import ConfigError, TrainingError

SCRIPT = REPO / "examples" / "train_sft.py"
SEED, ROWS, BATCH, EPOCHS, RATE = 7, 10, 4, 2, 1e-2  # steps of 4, 4 and 2 rows in each epoch


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Completions of 1 to 10 characters: the token totals of micro batches and ranks differ a lot."""
    return [{"input": f"{i}+", "output": "abcdefghij"[: i + 1]} for i in range(ROWS)]


@pytest.fixture(scope="module")
def dataset(rows, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("data") / "sft.jsonl", rows)


@pytest.fixture(scope="module")
def plain(rows, tiny_model) -> list[dict[str, float]]:
    """Loss and gradient norm of each step by torch alone, one unpadded row after the other."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    history = []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        for chosen in (order[0:4], order[4:8], order[8:10]):
            total, tokens = 0.0, 0
            for i in chosen:
                prompt = tokenizer(rows[i]["input"])["input_ids"]
                answer = [
                    *tokenizer(rows[i]["output"], add_special_tokens=False)["input_ids"],
                    tokenizer.eos_token_id,
                ]
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                total = total + torch.nn.functional.cross_entropy(
                    logits, torch.tensor(answer), reduction="sum"
                )
                tokens += len(answer)
            loss = total / tokens
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.append({"loss": loss.item(), "grad_norm": float(norm), "tokens": tokens})
    return history


def values(model: str, dataset: str, folder: Path, micro: int) -> dict[str, Any]:
    return {
        "pretrain": model,
        "dataset": dataset,
        "output_key": "output",
        "max_len": 16,
        "train_batch_size": BATCH,
        "micro_train_batch_size": micro,
        "num_epochs": EPOCHS,
        "learning_rate": RATE,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0,
        "seed": SEED,
        "save_path": folder / "model",
        "log_file": folder / "sft.jsonl",
    }


def options(model: str, dataset: str, folder: Path, micro: int, *more: str) -> list[str]:
    return [
        f"--{name}={value}" for name, value in values(model, dataset, folder, micro).items()
    ] + list(more)


def logged(folder: Path, prefix: str = "train/") -> list[dict[str, float]]:
    """Rows with these metrics, and their steps."""
    rows = read_jsonl(folder / "sft.jsonl")
    rows = [{n: x for n, x in row.items() if n == "step" or n.startswith(prefix)} for row in rows]
    return [row for row in rows if len(row) > 1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture
def train(world, tiny_model, dataset, tmp_path):
    """``train(folder, **options)``: a finished run in this process; its trainer."""
    from lightppo import SFTTrainer

    def fit(folder: str, **more: Any):
        small = values(tiny_model, dataset, tmp_path / folder, 2) | {"zero_stage": 0}
        return fitted(SFTConfig.from_flat(small | more), SFTTrainer)

    return fit


@pytest.mark.parametrize(
    ("launcher", "world_size", "micro", "zero_stage", "packing"),
    [
        ("fork", 1, 1, 1, "--packing_samples"),
        ("fork", 2, 2, 3, "--packing_samples"),
        ("fork", 2, 1, 2, "--no_packing_samples"),
        pytest.param("deepspeed", 2, 2, 3, "--packing_samples", marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_plain_torch(
    tiny_model, dataset, plain, tmp_path, launcher, world_size, micro, zero_stage, packing
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_ranks(
        SCRIPT,
        *options(tiny_model, dataset, tmp_path, micro, f"--zero_stage={zero_stage}", packing),
        launcher=launcher,
        world_size=world_size,
    )
    found = logged(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["train/epoch"] for row in found] == [0, 0, 0, 1, 1, 1]
    # Every row once per epoch, also the tail of two: 1 + … + 10 characters and 10 EOS are 65 tokens.
    assert [row["train/tokens"] for row in found] == [step["tokens"] for step in plain]
    assert sum(row["train/tokens"] for row in found[:3]) == 65
    for row, step in zip(found, plain):
        # Adam amplifies rounding of tiny gradients, step after step; the first step is exact to float32.
        tolerance = 1e-5 if row["step"] == 1 else 2e-3
        assert row["train/loss"] == pytest.approx(step["loss"], rel=tolerance)
        assert row["train/grad_norm"] == pytest.approx(step["grad_norm"], rel=10 * tolerance)
        assert row["train/lr"] == RATE
        assert row["train/skipped"] == 0

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"


def test_max_steps_goes_on_into_further_epochs_and_the_rate_falls(train, tmp_path):
    train(".", num_epochs=None, max_steps=5, lr_scheduler="linear", micro_train_batch_size=4)
    found = logged(tmp_path)
    assert [row["train/epoch"] for row in found] == [0, 0, 0, 1, 1]
    # linear to 0 over 5 steps: 5/5, 4/5, … of the peak
    assert [row["train/lr"] for row in found] == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    assert found[-1]["train/loss"] < found[0]["train/loss"]


def test_the_last_step_is_logged_whatever_its_number(train, tmp_path):
    train(".", logging_steps=4)
    assert [row["step"] for row in logged(tmp_path)] == [4, 6]


def test_a_packed_run_is_a_padded_one_but_for_rounding(train, tmp_path):
    packed, padded = train("packed", max_norm=0), train("padded", max_norm=0, packing_samples=False)
    assert (packed.model.layout.packs, padded.model.layout.packs) == (True, False)
    for ours, theirs in zip(logged(tmp_path / "packed"), logged(tmp_path / "padded")):
        assert ours == pytest.approx(theirs, rel=1e-5 if ours["step"] == 1 else 2e-3)


def test_a_dry_run_takes_one_step_and_keeps_nothing(train, tmp_path, capsys):
    train(".", dry_run=True)
    assert "dry run: one step of the 2 longest rows, loss " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# -- stopped, and gone on with ---------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_run(train, dataset, tmp_path, capsys):
    """Stops inside an epoch, at its end, in the next one; with evaluations, and the best model kept."""
    more = {
        "eval_dataset": dataset,
        "eval_split": "train",
        "eval_steps": 1,
        "best_metric": "eval/loss",
        "save_steps": 1,
    }
    straight = train("straight", **more)
    for stop in (2, 3, None):
        torch.rand(7)  # whatever the process did in between
        resumed = train("resumed", **more, benchmark_steps=stop)
    assert "resumed from" in capsys.readouterr().out
    for kind in ("train/", "eval/", "alarm/"):
        assert logged(tmp_path / "resumed", kind) == logged(tmp_path / "straight", kind)
    ours, theirs = weights(tmp_path / "resumed"), weights(tmp_path / "straight")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert resumed.state == straight.state
    assert resumed.states["alarms"].state_dict() == straight.states["alarms"].state_dict()

    evaluated = logged(tmp_path / "straight", "eval/")
    assert [row["step"] for row in evaluated] == [0, 1, 2, 3, 4, 5, 6]
    assert {row["eval/tokens"] for row in evaluated} == {65}
    best = min(evaluated[1:], key=lambda row: row["eval/loss"])
    note = json.loads((tmp_path / "straight/model/checkpoints/best_hf/best.json").read_text())
    assert note.pop("run") == straight.checkpointer.run
    assert note == {"step": best["step"], "metric": "eval/loss", "value": best["eval/loss"]}

    def look() -> dict[Path, tuple]:
        found = [path for path in (tmp_path / "resumed").rglob("*") if path.name != ".lock"]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = look()
    train("resumed", **more)  # once more
    assert "run complete: 6 steps; raise --num_epochs 2 to go on" in capsys.readouterr().out
    assert look() == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(train, tmp_path, capsys):
    train("straight", save_steps=1)
    train("damaged", save_steps=1, benchmark_steps=4)
    shard = next(
        (tmp_path / "damaged/model/checkpoints/_actor/global_step4").rglob("*model_states.pt")
    )
    shard.write_bytes(shard.read_bytes()[:-1])
    train("damaged", save_steps=1)
    assert "going on from global_step3" in capsys.readouterr().out
    assert logged(tmp_path / "damaged") == logged(tmp_path / "straight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1.0}, r"--learning_rate 0.01 → 1.0"),
        ({"truncation": "drop"}, r"--truncation error → drop"),
        ({}, r"--dataset .* has other content than it had"),
    ],
)
def test_another_run_is_refused(train, rows, tmp_path, change, message):
    data = Path(write_jsonl(tmp_path / "rows.jsonl", rows))
    train("run", dataset=str(data), save_steps=2, benchmark_steps=2)
    if not change:
        data.write_text(data.read_text().replace("abc", "cba"))
    with pytest.raises(ConfigError, match=f"cannot resume .*: {message}"):
        train("run", dataset=str(data), save_steps=2, **change)


def test_a_signal_saves_and_the_same_command_goes_on_as_if_nothing_had_happened(
    tiny_model, dataset, tmp_path
):
    """To one of two ranks, in the second step; dropout of adapters draws random numbers."""
    script = tmp_path / "stopped.py"
    script.write_text("""
import os, signal, sys
from lightppo.cli.supervised import sft
from lightppo.supervised.trainer import SupervisedTrainer

def training_step(self, micro_batches, own=SupervisedTrainer.training_step):
    if "STOP" in os.environ and os.environ["RANK"] == "1" and self.state.global_step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return own(self, micro_batches)

SupervisedTrainer.training_step = training_step
sft(sys.argv[1:], "train_sft.py")
""")
    more = ("--lora_rank=4", "--lora_dropout=0.1", "--zero_stage=2")
    straight, stopped = (
        options(tiny_model, dataset, tmp_path / name, 2, *more) for name in ("straight", "stopped")
    )
    run_ranks(script, *straight)
    result = run_ranks(script, *stopped, check=False, env={"STOP": "1"})
    assert result.returncode == 143, result.output
    assert "stopped by SIGTERM after step 2 of 6; saved in" in result.output
    assert not (tmp_path / "stopped/model/config.json").exists()
    run_ranks(script, *stopped)
    assert logged(tmp_path / "stopped") == logged(tmp_path / "straight")
    ours, theirs = weights(tmp_path / "stopped"), weights(tmp_path / "straight")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_steps_without_a_finite_gradient_end_the_run_and_the_batch_is_kept(
    train, tiny_model, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.lm_head.weight.data[5] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "nan")
    message = r"step 2: no finite gradient .* in 2 steps in a row \(--max_skipped_steps\).*lightppo replay \S+/model --batch"
    with pytest.raises(TrainingError, match=message):
        train(".", pretrain=str(tmp_path / "nan"), max_skipped_steps=2)
    kept = torch.load(tmp_path / "model/nonfinite/step2_rank0.pt", weights_only=True)
    assert [len(part["labels"]) for part in kept["micro_batches"]] == [2, 2]
    assert "+" in kept["texts"][0][0]
    assert [row["train/skipped"] for row in logged(tmp_path)] == [1, 1]
    assert [row["alarm/loss_not_finite"] for row in logged(tmp_path, "alarm/")] == [1, 1]


# -- models and data -------------------------------------------------------------------------------------------------


def test_adapters(tiny_model, dataset, tmp_path):
    """With --lora_rank the adapters learn, and the merged model and the adapter are saved."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = [
        "--lora_rank=4",
        "--lora_alpha=32",
        "--lora_dropout=0.05",
        "--target_modules",
        "q_proj",
        "down_proj",
    ]
    run_ranks(SCRIPT, *options(tiny_model, dataset, tmp_path, 2, "--zero_stage=3", *lora))
    losses = [
        json.loads(line)["train/loss"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()
    ]
    assert sum(losses[3:]) < 0.9 * sum(losses[:3])  # the second epoch against the first
    merged, base = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", tiny_model)
    )
    changed = {
        n for n, w in merged.state_dict().items() if not torch.equal(w, base.state_dict()[n])
    }
    layers = ("self_attn.q_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    ids = torch.arange(4, 16)[None]
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))
    torch.testing.assert_close(
        adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5, rtol=0
    )


def test_rows_template_betas_and_warm_up_reach_the_run(train, rows, tmp_path):
    """The first four rows with a template are a file of four rows with it; the rate rises over half of four steps."""
    templated = [{**row, "input": f"Q{row['input']}A"} for row in rows[:4]]
    file = write_jsonl(tmp_path / "templated.jsonl", templated)
    warm_up = {"train_batch_size": 2, "lr_scheduler": "linear", "lr_warmup_ratio": 0.5}
    runs = {
        "chosen": {"max_samples": 4, "input_template": "Q{}A"},
        "written": {"dataset": file},
        "betas": {"dataset": file, "adam_betas": (0.1, 0.2)},
    }
    for name, more in runs.items():
        train(name, **warm_up, **more)
    of = lambda name, metric: [row[f"train/{metric}"] for row in logged(tmp_path / name)]  # noqa: E731
    assert of("chosen", "loss") == of("written", "loss")
    assert of("betas", "loss")[:1] == of("written", "loss")[:1]
    assert of("betas", "loss")[3] != of("written", "loss")[3]
    assert of("written", "lr") == pytest.approx([RATE / 3, 2 * RATE / 3, RATE, RATE / 2])


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dataset", "d"], "--pretrain is required"),
            (["--pretrain", "m"], "--dataset is required"),
            (
                ["--num_epochs", "2", "--max_steps", "5"],
                "--num_epochs and --max_steps are both given",
            ),
            (
                ["--micro_train_batch_size", "3"],
                "--train_batch_size 128 must be a multiple of --micro_train_batch_size 3",
            ),
            (["--lora_alpha", "8"], "--lora_alpha needs --lora_rank above 0"),
            (["--target_modules", "q_proj"], "--target_modules needs --lora_rank above 0"),
            (["--load_in_4bit"], "--load_in_4bit needs --lora_rank above 0"),
            (["--best_metric", "eval/loss"], "--best_metric needs --eval_dataset"),
            (["--bf16", "--zero_stage", "0"], "--bf16 needs --zero_stage other than 0"),
            (["--zpg", "2", "--zero_stage", "3"], "--zpg 2 does not divide the 1 ranks"),
            (
                ["--sequence_parallel_size", "2"],
                "--sequence_parallel_size 2 does not divide the 1 ranks",
            ),
            (["--learning_rate", "0"], "--learning_rate must be a number >0"),
            (["--learning_rat", "1e-3"], "--learning_rate"),
        ],
    )
    def test_is_refused_before_anything_loads(self, capsys, arguments, message):
        known = (
            []
            if arguments[0] in ("--dataset", "--pretrain")
            else ["--pretrain", "m", "--dataset", "d"]
        )
        with pytest.raises(SystemExit) as exit_info:
            parse_args([*known, *arguments], kind=SFTConfig)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err

    def test_batch_sizes_are_checked_for_the_number_of_ranks(self, capsys, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(SystemExit):
            parse_args(["--pretrain", "m", "--dataset", "d"], kind=SFTConfig)
        assert "--micro_train_batch_size 8 × 3 ranks" in capsys.readouterr().err

    def test_a_missing_model_or_column_is_one_line(self, tiny_model, dataset, tmp_path):
        result = run_ranks(
            SCRIPT, "--pretrain=/no/such", f"--dataset={dataset}", world_size=1, check=False
        )
        assert result.returncode == 2
        assert "train_sft.py: error: --pretrain /no/such: no such folder" in result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize(("lengths", "packs"), [([9, 10, 10], False), ([4, 10, 10], True)])
def test_rows_of_about_the_same_length_gain_nothing_by_packing(lengths, packs):
    from lightppo.supervised.objectives import SFT

    rows = SimpleNamespace(lengths=np.array(lengths))
    assert SFT(SFTConfig(), None).gains_by_packing(rows) == packs
