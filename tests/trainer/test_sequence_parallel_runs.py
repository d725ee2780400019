"""Runs whose ranks hold rows together (``--sequence_parallel_size``) train as one rank does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import flags, metric_rows, outcome, write_inputs
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.tiny import save_reward_model, write_jsonl

SCRIPT = Path(__file__).parent / "ranks" / "pieces.py"
# Adam makes a step of about this size of any gradient, however small: rounding moves weights by a hundredth of it.
RATE = 1e-5
GRPO = {
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "init_kl_coef": 0.1,
    "critic_learning_rate": None,
    "micro_train_batch_size": 2,
}
PPO = {
    "critic_learning_rate": RATE,
    "ptx_coef": 0.3,
    "pretrain_data": "{pretrain_data}",
    "entropy_coef": 0.01,
}
LORA = GRPO | {"lora_rank": 4, "gradient_checkpointing": True, "zero_stage": 3}
DISTILLED = GRPO | {
    "teacher_pretrain": "{teacher}",
    "distill_by": "loss",
    "distill_topk": 3,
    "init_kl_coef": 0,
}
# name → command, options
USUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("ppo", GRPO | {"zero_stage": 0}),
    "PPO": ("ppo", PPO),
    "LoRA": ("ppo", LORA),
    "DPO": ("dpo", {}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"GRPO, ZeRO {stage}": ("ppo", GRPO | {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    **{f"PPO, ZeRO {stage}": ("ppo", PPO | {"zero_stage": stage}) for stage in (0, 2, 3)},
    "full KL": ("ppo", GRPO | {"kl_estimator": "full"}),
    "full KL in the reward": ("ppo", GRPO | {"kl_estimator": "full", "use_kl_in_reward": True}),
    "GSPO": ("ppo", GRPO | {"policy_loss": "gspo", "max_epochs": 2}),
    "early stop": ("ppo", GRPO | {"max_epochs": 3, "early_stop_kl": 1e-4}),
    "covariances": ("ppo", GRPO | {"policy_loss": "clip_cov", "max_epochs": 2}),
    "tokens": ("ppo", GRPO | {"max_tokens_per_micro_batch": 30}),
    "padded prompts": ("ppo", GRPO | {"no_share_prompts": True}),
    "top tokens": ("ppo", DISTILLED),
    "teacher": ("ppo", DISTILLED | {"distill_topk": None}),
    "reward model": ("ppo", {"reward_pretrain": "{reward}", "reward_fn": None}),
    "checkpointing": ("ppo", PPO | {"gradient_checkpointing": True, "zero_stage": 3}),
    "bf16": ("ppo", GRPO | {"bf16": True}),
    "average": ("ppo", GRPO | {"enable_ema": True, "zero_stage": 3}),
    "LoRA": ("ppo", LORA),
    "LoRA, ZeRO 2": ("ppo", LORA | {"zero_stage": 2, "gradient_checkpointing": None}),
    **{f"{kind}, ZeRO {stage}": (kind, {"zero_stage": stage})
       for kind in ("sft", "rm", "dpo") for stage in (0, 2, 3)},
}  # fmt: skip
SUPERVISED = {
    "zero_stage": 2,
    "train_batch_size": 8,
    "micro_train_batch_size": 2,
    "learning_rate": RATE,
    "max_steps": 3,
    "max_len": 40,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    texts = [{"input": f"{n}+{n}=", "output": str(2 * n) * (n % 3 + 1)} for n in range(1, 25)]
    pairs = [
        {"prompt": f"{n}+{n}=", "chosen": str(2 * n) * (n % 3 + 1), "rejected": "0" * (n % 4 + 1)}
        for n in range(1, 25)
    ]
    (folder / "teacher").mkdir()
    ppo = write_inputs(folder)
    return ppo | {
        "teacher": write_inputs(folder / "teacher", seed=5)["pretrain"],
        "reward": save_reward_model(folder / "reward"),
        "pretrain_data": write_jsonl(folder / "texts.jsonl", texts),
        "texts": write_jsonl(folder / "rows.jsonl", texts),
        "pairs": write_jsonl(folder / "pairs.jsonl", pairs),
    }


def command(kind: str, inputs: dict[str, str], out: Path, **options: Any) -> list[str]:
    values = {
        name: value.format(**inputs) if isinstance(value, str) else value
        for name, value in options.items()
    }
    if kind == "ppo":
        own = {name: inputs[name] for name in ("pretrain", "prompt_data", "reward_fn")}
        few = {"total_training_steps": 2, "save_steps": -1, "actor_learning_rate": RATE}
        values = few | values
        return [kind, *flags(own, out, **values)]
    own = {"pretrain": inputs["pretrain"], "dataset": inputs["texts" if kind == "sft" else "pairs"]}
    values = own | SUPERVISED | {"save_path": out / "run", "ckpt_path": out / "ckpt"} | values
    return [kind, *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def run(cases: dict, inputs: dict[str, str], out: Path, world_size: int, size: int) -> Path:
    """The folder with all cases, run on so many ranks, of which ``size`` hold each row together."""
    commands = [
        command(kind, inputs, out / case, sequence_parallel_size=size, **options)
        for case, (kind, options) in cases.items()
    ]
    out.mkdir()
    (out / "commands.json").write_text(json.dumps(commands))
    result = run_ranks(SCRIPT, out / "commands.json", world_size=world_size, timeout=3000)
    told = result.output.count(f"--sequence_parallel_size {size}: {size} ranks train on each")
    assert told == (len(cases) if size > 1 else 0)
    return out


def check(cases: dict, found: Path, expected: Path) -> None:
    """Compare weights and metrics; all differences together, by case."""
    problems = {}
    for case, (_, options) in cases.items():
        is_coarse = options.get("bf16", False)
        weights = load_file(found / case / "run" / "model.safetensors")
        for key, value in load_file(expected / case / "run" / "model.safetensors").items():
            difference = float((weights[key].float() - value.float()).abs().max())
            if not difference < (2e-2 if is_coarse else 1e-6):
                problems[case, key] = difference
        rows, expected_rows = metric_rows(found / case), metric_rows(expected / case)
        assert [row.keys() for row in rows] == [row.keys() for row in expected_rows], case
        for row, expected_row in zip(rows, expected_rows):
            for metric, number in row.items():
                # DPO begins with margins of 0, whose sign rounding decides.
                is_even = metric == "train/accuracy" and case.startswith("dpo")
                if isinstance(number, float) and not is_coarse and not is_even:
                    near = pytest.approx(expected_row[metric], rel=1e-4, abs=1e-5, nan_ok=True)
                    if number != near:
                        problems[case, metric] = (number, expected_row[metric])
        for file in (expected / case).rglob("step*.jsonl.gz"):
            if not is_coarse and samples(found / file.relative_to(expected)) != samples(file):
                problems[case, file.name] = "other samples"
    assert not problems


def samples(file: Path) -> list[Any]:
    """Samples with their numbers per token, to four places."""
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    text = json.dumps(rows)
    return json.loads(text, parse_float=lambda number: round(float(number), 4) + 0.0)


@pytest.mark.slow
def test_pieces_train_as_one_rank_does(inputs, tmp_path):
    expected = run(USUAL, inputs, tmp_path / "one", 1, 1)
    check(USUAL, run(USUAL, inputs, tmp_path / "pieces", 2, 2), expected)


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory) -> Path:
    return run(MORE, inputs, tmp_path_factory.mktemp("runs") / "one", 1, 1)


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2), (4, 4)])
def test_pieces_train_as_one_rank_does_whatever_the_options(
    inputs, one_rank, world_size, size, tmp_path
):
    check(MORE, run(MORE, inputs, tmp_path / "pieces", world_size, size), one_rank)


@pytest.mark.long
def test_a_run_resumes_with_another_number_of_ranks_per_row(inputs, tmp_path):
    """Stopped in the middle: with the same number to the last bit, with another one within rounding."""
    options = GRPO | {"total_training_steps": 4, "save_steps": 1, "zero_stage": 2}
    sizes = {"whole": 2, "same": 2, "other": 1}
    commands = []
    for name, size in sizes.items():
        own = options | {"sequence_parallel_size": 2}
        if name != "whole":
            commands.append(command("ppo", inputs, tmp_path / name, **own, benchmark_steps=2))
        commands.append(
            command("ppo", inputs, tmp_path / name, **own | {"sequence_parallel_size": size})
        )
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    result = run_ranks(SCRIPT, tmp_path / "commands.json", timeout=900)
    assert "resume: --sequence_parallel_size was 2, is 1" in result.output
    expected = outcome(tmp_path / "whole")
    assert outcome(tmp_path / "same") == expected
    (tmp_path / "expected").mkdir()
    (tmp_path / "expected" / "other").symlink_to(tmp_path / "whole")
    check({"other": ("ppo", options)}, tmp_path, tmp_path / "expected")
