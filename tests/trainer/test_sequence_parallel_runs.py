"""Runs whose ranks hold rows together (``--sequence_parallel_size``) train as one rank does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import flags, metric_rows, write_inputs
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
PPO = {"critic_learning_rate": RATE, "ptx_coef": 0.3, "pretrain_data": "{pretrain_data}", "entropy_coef": 0.01}
LORA = GRPO | {"lora_rank": 4, "gradient_checkpointing": True, "zero_stage": 3}
DISTILLED = GRPO | {"teacher_pretrain": "{teacher}", "distill_topk": 3, "init_kl_coef": 0}
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
    "teacher": ("ppo", DISTILLED | {"distill_topk": None, "distill_by": "loss"}),
    "reward model": ("ppo", {"reward_pretrain": "{reward}", "reward_fn": None}),
    "checkpointing": ("ppo", PPO | {"gradient_checkpointing": True, "zero_stage": 3}),
    "offload": ("ppo", GRPO | {"gradient_checkpointing": True, "activation_offload": True}),
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


def compare(cases: dict, inputs: dict[str, str], out: Path, sizes: dict[str, tuple[int, int]]):
    """Run all cases for each pair of ranks and sequence size, and compare weights and metrics with one rank's."""
    sizes = {"one": (1, 1)} | sizes
    for name, (world_size, size) in sizes.items():
        commands = [
            command(kind, inputs, out / name / case, sequence_parallel_size=size, **options)
            for case, (kind, options) in cases.items()
        ]
        (out / f"{name}.json").write_text(json.dumps(commands))
        result = run_ranks(SCRIPT, out / f"{name}.json", world_size=world_size, timeout=900)
        told = result.output.count(f"--sequence_parallel_size {size}: {size} ranks train on each")
        assert told == (len(cases) if size > 1 else 0)
    for case, (_, options) in cases.items():
        limit = 2e-2 if options.get("bf16") else 1e-6
        expected = load_file(out / "one" / case / "run" / "model.safetensors")
        expected_rows = metric_rows(out / "one" / case)
        for name in list(sizes)[1:]:
            weights = load_file(out / name / case / "run" / "model.safetensors")
            assert weights.keys() == expected.keys()
            for key, value in weights.items():
                difference = float((value.float() - expected[key].float()).abs().max())
                assert difference < limit, (case, name, key, difference)
            rows = metric_rows(out / name / case)
            assert len(rows) == len(expected_rows)
            for row, expected_row in zip(rows, expected_rows):
                assert row.keys() == expected_row.keys(), (case, name)
                for metric, number in row.items():
                    if isinstance(number, float) and not options.get("bf16"):
                        assert number == pytest.approx(
                            expected_row[metric], rel=1e-4, abs=1e-5, nan_ok=True
                        ), (case, name, metric)


@pytest.mark.slow
def test_pieces_train_as_one_rank_does(inputs, tmp_path):
    compare(USUAL, inputs, tmp_path, {"pieces": (2, 2)})


@pytest.mark.long
def test_pieces_train_as_one_rank_does_whatever_the_options(inputs, tmp_path):
    compare(MORE, inputs, tmp_path, {"two": (2, 2), "groups": (4, 2), "four": (4, 4)})
