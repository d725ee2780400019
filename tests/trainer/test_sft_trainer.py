"""examples/train_sft.py and SFTTrainer: against plain torch, on one rank and two; bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.tiny import write_jsonl

from lightppo.commands.sft import parse_args

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
                answer = [*tokenizer(rows[i]["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
                tokens += len(answer)
            loss = total / tokens
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.append({"loss": loss.item(), "grad_norm": float(norm), "tokens": tokens})
    return history


def options(model: str, dataset: str, folder: Path, micro: int, *more: str) -> list[str]:
    values = {
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
    return [f"--{name}={value}" for name, value in values.items()] + list(more)


@pytest.mark.parametrize(
    ("launcher", "world_size", "micro", "zero_stage"),
    [
        ("fork", 1, 1, 1),
        ("fork", 2, 2, 3),
        ("fork", 2, 1, 2),
        pytest.param("deepspeed", 2, 2, 3, marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_plain_torch(tiny_model, dataset, plain, tmp_path, launcher, world_size, micro, zero_stage):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_ranks(
        SCRIPT,
        *options(tiny_model, dataset, tmp_path, micro, f"--zero_stage={zero_stage}"),
        launcher=launcher,
        world_size=world_size,
    )
    logged = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert [row["train/epoch"] for row in logged] == [0, 0, 0, 1, 1, 1]
    # Every row once per epoch, also the tail of two: 1 + … + 10 characters and 10 EOS are 65 tokens.
    assert [row["train/tokens"] for row in logged] == [step["tokens"] for step in plain]
    assert sum(row["train/tokens"] for row in logged[:3]) == 65
    for row, step in zip(logged, plain):
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


def test_max_steps_goes_on_into_further_epochs_and_the_rate_falls(tiny_model, dataset, tmp_path):
    arguments = [a for a in options(tiny_model, dataset, tmp_path, 4) if not a.startswith(("--num_epochs", "--lr_sch"))]
    run_ranks(SCRIPT, *arguments, "--max_steps=5", "--lr_scheduler=linear", world_size=1)
    logged = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [row["train/epoch"] for row in logged] == [0, 0, 0, 1, 1]
    # linear to 0 over 5 steps: 5/5, 4/5, … of the peak
    assert [row["train/lr"] for row in logged] == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    assert logged[-1]["train/loss"] < logged[0]["train/loss"]


def test_a_dry_run_takes_one_step_and_keeps_nothing(tiny_model, dataset, tmp_path):
    arguments = [*options(tiny_model, dataset, tmp_path, 4), "--dry_run", "--zero_stage=0"]
    result = run_ranks(SCRIPT, *arguments, world_size=1)
    assert "dry run: one step of 2 rows, loss " in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tiny_model, dataset, tmp_path):
    """Run without an end; rank 1 gets SIGTERM after the first step."""
    script, log = tmp_path / "stopped.py", tmp_path / "sft.jsonl"
    script.write_text(f"""
import os, pathlib, signal, sys, threading, time
from lightppo.commands.sft import main

def stop():
    while not (log := pathlib.Path({str(log)!r})).exists() or not log.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

if os.environ["RANK"] == "1":
    threading.Thread(target=stop, daemon=True).start()
main(sys.argv[1:], "train_sft.py")
""")
    endless = [a for a in options(tiny_model, dataset, tmp_path, 2) if not a.startswith("--num_epochs")]
    result = run_ranks(script, *endless, "--max_steps=1000000", check=False)
    last = len(log.read_text().splitlines())
    assert result.returncode == 143, result.output
    assert f"stopped by SIGTERM after step {last}; nothing is saved" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "model" / "config.json").exists()


def test_adapters(tiny_model, dataset, tmp_path):
    """With --lora_rank the adapters learn, and the merged model and the adapter are saved."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = ["--lora_rank=4", "--lora_alpha=32", "--lora_dropout=0.05", "--target_modules", "q_proj", "down_proj"]
    run_ranks(SCRIPT, *options(tiny_model, dataset, tmp_path, 2, "--zero_stage=3", *lora))
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert sum(losses[3:]) < 0.9 * sum(losses[:3])  # the second epoch against the first
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", tiny_model))
    changed = {n for n, w in merged.state_dict().items() if not torch.equal(w, base.state_dict()[n])}
    layers = ("self_attn.q_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    ids = torch.arange(4, 16)[None]
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))
    torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5, rtol=0)


def test_rows_template_betas_and_warm_up_reach_the_run(rows, tiny_model, dataset, tmp_path):
    """The first four rows with a template are a file of four rows with it; the rate rises over half of four steps."""
    templated = [{**row, "input": f"Q{row['input']}A"} for row in rows[:4]]
    file = write_jsonl(tmp_path / "templated.jsonl", templated)
    warm_up = ["--train_batch_size=2", "--lr_scheduler=linear", "--lr_warmup_ratio=0.5"]
    runs = {
        "chosen": (dataset, ["--max_samples=4", "--input_template=Q{}A"]),
        "written": (file, []),
        "betas": (file, ["--adam_betas", "0.1", "0.2"]),
    }
    logged = {}
    for name, (data, more) in runs.items():
        run_ranks(SCRIPT, *options(tiny_model, data, tmp_path / name, 2, *warm_up, *more), world_size=1)
        logged[name] = [json.loads(line) for line in (tmp_path / name / "sft.jsonl").read_text().splitlines()]
    of = lambda name, metric: [row[f"train/{metric}"] for row in logged[name]]  # noqa: E731
    assert of("chosen", "loss") == of("written", "loss")
    assert of("betas", "loss")[:2] == of("written", "loss")[:2]
    assert of("betas", "loss")[3] != of("written", "loss")[3]
    assert of("written", "lr") == pytest.approx([0, RATE / 2, RATE, RATE / 2])


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dataset", "d"], "--pretrain is required"),
            (["--pretrain", "m"], "--dataset is required"),
            (["--num_epochs", "2", "--max_steps", "5"], "--num_epochs and --max_steps are both given"),
            (
                ["--micro_train_batch_size", "3"],
                "--train_batch_size 128 must be a multiple of --micro_train_batch_size 3",
            ),
            (["--lora_alpha", "8"], "--lora_alpha has no effect without adapters: set --lora_rank"),
            (["--target_modules", "q_proj"], "--target_modules has no effect without adapters"),
            (["--load_in_4bit"], "--load_in_4bit holds weights that do not train in 4 bits: set --lora_rank"),
            (["--learning_rate", "0"], "--learning_rate must be a number >0"),
            (["--learning_rat", "1e-3"], "--learning_rate"),
        ],
    )
    def test_is_refused_before_anything_loads(self, capsys, arguments, message):
        known = [] if arguments[0] in ("--dataset", "--pretrain") else ["--pretrain", "m", "--dataset", "d"]
        with pytest.raises(SystemExit) as exit_info:
            parse_args([*known, *arguments])
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err

    def test_batch_sizes_are_checked_for_the_number_of_ranks(self, capsys, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(SystemExit):
            parse_args(["--pretrain", "m", "--dataset", "d"])
        assert "--micro_train_batch_size 8 × 3 ranks" in capsys.readouterr().err

    def test_a_missing_model_or_column_is_one_line(self, tiny_model, dataset, tmp_path):
        result = run_ranks(SCRIPT, "--pretrain=/no/such", f"--dataset={dataset}", world_size=1, check=False)
        assert result.returncode == 2
        assert "train_sft.py: error: --pretrain /no/such: no such folder" in result.output
        assert "Traceback" not in result.output


class TestArguments:
    def test_no_steps_is_an_error(self):
        from lightppo.trainer.supervised import SFTTrainer

        with pytest.raises(ValueError, match=r"max_steps \(0\)"):
            SFTTrainer(None, None, None, None, None, max_steps=0)
