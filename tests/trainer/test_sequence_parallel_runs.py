"""Runs whose ranks hold rows together (``--sequence_parallel_size``) train as one rank does."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import flags, metric_rows, outcome, write_inputs
from safetensors.torch import load_file
from support.fake_vllm import trained_servers
from support.ranks import READ_BY_VLLM, REPO, WITH_SUPPORT, run_ranks
from support.tiny import save_causal_lm, save_reward_model, write_jsonl
from support.vllm_servers import KEY, KEY_VARIABLE, Servers
from transformers import AutoConfig

from lightppo.rollout.vllm.weights import architecture

WORLD = """
import random
from lightppo import Step

class World:
    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        luck = random.Random(text + str(self.turns))
        done = self.turns == 3 or luck.random() < 0.4
        return Step(f" {luck.randrange(10, 99)} ", reward=float(luck.random() < 0.5), done=done)
"""
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
QLORA = LORA | {"pretrain": "{wide}", "load_in_4bit": True}
HPZ = {"zero_stage": 3, "zpg": 2}  # of one rank alone: without
OFFLOADED = {"zero_stage": 3, "adam_offload": True, "param_offload": True}
EPISODES = GRPO | {
    "env": "{world}:World",
    "reward_fn": None,
    "label_key": "label",
    "reward_source": "environment",
    "max_turn_tokens": 4,
    "generate_max_len": 30,
}
AHEAD = GRPO | {
    "rollout_engine": "vllm_server",
    "vllm_server_url": "{server}",
    "vllm_server_sync": "disk",
    "vllm_server_sync_dir": "{sync}",
    "rollout_check": "off",
    "max_staleness": 1,
}
REUSE = {"dynamic_sampling": True, "max_num_gen_batches": 1, "on_exhausted": "reuse"}
DISTILLED = GRPO | {
    "teacher_pretrain": "{teacher}",
    "distill_by": "loss",
    "distill_topk": 3,
    "init_kl_coef": 0,
}
# name → command, options
USUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("ppo", GRPO | {"zero_stage": 0}),
    "PPO, offloaded, hpZ": ("ppo", PPO | OFFLOADED | HPZ),
    "LoRA, 4 bits": ("ppo", QLORA),
    "DPO": ("dpo", {}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"GRPO, ZeRO {stage}": ("ppo", GRPO | {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    **{f"PPO, ZeRO {stage}": ("ppo", PPO | {"zero_stage": stage}) for stage in (0, 2, 3)},
    "full KL": ("ppo", GRPO | {"kl_estimator": "full"}),
    "full KL in the reward": ("ppo", GRPO | {"kl_estimator": "full", "use_kl_in_reward": True}),
    "GSPO": ("ppo", GRPO | {"policy_loss": "gspo", "max_epochs": 2}),
    "greedy baseline": ("ppo", {"advantage_estimator": "remax", "critic_learning_rate": None}),
    "token baseline": ("ppo", GRPO | {"advantage_estimator": "optimal_token_baseline"}),
    "correction": ("ppo", GRPO | {"rollout_correction": "seq_mask_tis"}),
    "normalised values": ("ppo", PPO | {"value_norm": "exp", "kl_target": 0.1}),
    "tokens of high entropy": ("ppo", GRPO | {"high_entropy_token_ratio": 0.5}),
    "whole groups": ("ppo", GRPO | {"shuffle": "groups"}),
    "evaluation": ("ppo", GRPO | {"eval_data": "{prompt_data}", "eval_steps": 1}),
    "early stop": ("ppo", GRPO | {"max_epochs": 3, "early_stop_kl": 1e-4}),
    "covariances": ("ppo", GRPO | {"policy_loss": "clip_cov", "max_epochs": 2}),
    "tokens": ("ppo", GRPO | {"max_tokens_per_micro_batch": 30}),
    "padded prompts": ("ppo", GRPO | {"no_share_prompts": True}),
    "top tokens": ("ppo", DISTILLED),
    "teacher": ("ppo", DISTILLED | {"distill_topk": None}),
    "reward model": ("ppo", {"reward_pretrain": "{reward}", "reward_fn": None}),
    "checkpointing": ("ppo", PPO | {"gradient_checkpointing": True, "zero_stage": 3}),
    "bf16": ("ppo", GRPO | {"bf16": True}),
    "fp16": ("ppo", GRPO | {"fp16": True}),
    "average": ("ppo", GRPO | {"enable_ema": True, "zero_stage": 3}),
    "offloaded Adam": ("ppo", PPO | {"adam_offload": True}),
    "all offloaded": ("ppo", GRPO | OFFLOADED),
    "hpZ": ("ppo", PPO | HPZ),
    "4 bits": ("ppo", QLORA),
    "4 bits, ZeRO 2": ("ppo", QLORA | {"zero_stage": 2, "gradient_checkpointing": None}),
    "episodes": ("ppo", EPISODES),
    "a step ahead": ("ppo", AHEAD),
    "LoRA": ("ppo", LORA),
    "LoRA, ZeRO 2": ("ppo", LORA | {"zero_stage": 2, "gradient_checkpointing": None}),
    **{f"{kind}, ZeRO {stage}": (kind, {"zero_stage": stage})
       for kind in ("sft", "rm", "dpo") for stage in (0, 2, 3)},
}  # fmt: skip
# name → options, of two ranks alone: their groups are not those of one rank
OF_TWO: dict[str, dict[str, Any]] = {
    "reuse": GRPO | REUSE | {"generate_max_len": 2},
    "all": EPISODES | REUSE | OFFLOADED | HPZ | {"gradient_checkpointing": True},
}
# heads of 32 are the smallest that vLLM's attention takes on a CPU
FOR_VLLM = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
SUPERVISED = {
    "zero_stage": 2,
    "train_batch_size": 8,
    "micro_train_batch_size": 2,
    "learning_rate": RATE,
    "max_steps": 3,
    "max_len": 40,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("inputs")
    texts = [{"input": f"{n}+{n}=", "output": str(2 * n) * (n % 3 + 1)} for n in range(1, 25)]
    pairs = [
        {"prompt": f"{n}+{n}=", "chosen": str(2 * n) * (n % 3 + 1), "rejected": "0" * (n % 4 + 1)}
        for n in range(1, 25)
    ]
    (folder / "teacher").mkdir()
    (folder / "world.py").write_text(WORLD)
    ppo = write_inputs(folder)
    shape = architecture(AutoConfig.from_pretrained(ppo["pretrain"]))
    made = ppo | {
        "teacher": write_inputs(folder / "teacher", seed=5)["pretrain"],
        "reward": save_reward_model(folder / "reward"),
        "pretrain_data": write_jsonl(folder / "texts.jsonl", texts),
        "texts": write_jsonl(folder / "rows.jsonl", texts),
        "pairs": write_jsonl(folder / "pairs.jsonl", pairs),
        "wide": save_causal_lm(folder / "wide", hidden_size=64, intermediate_size=128),
        "wide_heads": save_causal_lm(folder / "wide_heads", **FOR_VLLM),
        "world": str(folder / "world.py"),
        "sync": str(folder),
    }
    with trained_servers(shape, 1) as (server,):
        server.sees_weights = False  # its answers would depend on their last bits
        yield made | {"server": server.url}


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


def run(
    cases: dict, inputs: dict[str, str], out: Path, world_size: int, size: int, **how: Any
) -> Path:
    """The folder with all cases, run on so many ranks, of which ``size`` hold each row together."""
    own = {"sequence_parallel_size": size} | ({"zpg": None} if world_size == 1 else {})
    commands = [
        command(kind, inputs, out / case, **options | own)
        for case, (kind, options) in cases.items()
    ]
    out.mkdir()
    (out / "commands.json").write_text(json.dumps(commands))
    how |= {"world_size": world_size, "timeout": 3000}
    result = run_ranks(SCRIPT, out / "commands.json", **how)
    told = result.output.count(f"--sequence_parallel_size {size}: {size} ranks train on each")
    assert told == (len(cases) if size > 1 else 0)
    return out


def check(cases: dict, found: Path, expected: Path) -> None:
    """Compare weights and metrics; all differences together, by case."""
    problems = {}
    for case, (_, options) in cases.items():
        is_coarse = options.get("bf16", False) or options.get("fp16", False)
        files = list((expected / case / "run").rglob("*model.safetensors"))  # and the adapter's
        assert len(files) == 1 + ("lora_rank" in options)
        for file in files:
            weights = load_file(found / file.relative_to(expected))
            for key, value in load_file(file).items():
                difference = float((weights[key].float() - value.float()).abs().max())
                if not difference < (2e-2 if is_coarse else 5e-6):  # 3.4e-6 as MKL rounds
                    problems[case, key] = difference
        rows, expected_rows = metric_rows(found / case), metric_rows(expected / case)
        assert [row.keys() for row in rows] == [row.keys() for row in expected_rows], case
        for row, expected_row in zip(rows, expected_rows):
            for metric, number in row.items():
                # DPO begins with margins of 0, whose sign rounding decides.
                is_even = metric == "train/accuracy" and case.startswith("dpo")
                if isinstance(number, float) and not is_even and not metric.endswith("_seconds"):
                    bounds = (
                        {"rel": 0.05, "abs": 0.005} if is_coarse else {"rel": 1e-4, "abs": 1e-5}
                    )
                    if number != pytest.approx(expected_row[metric], nan_ok=True, **bounds):
                        problems[case, metric] = (number, expected_row[metric])
        for file in (expected / case).rglob("step*.jsonl.gz"):
            of_pieces = samples(found / file.relative_to(expected))
            if not is_coarse and not are_alike(of_pieces, samples(file)):
                problems[case, file.name] = "other samples"
    assert not problems


def samples(file: Path) -> list[Any]:
    """Samples with their numbers per token, without what depends on the clock."""

    def without_clock(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not name.endswith("seconds")}

    lines = gzip.decompress(file.read_bytes()).splitlines()
    return [json.loads(line, object_hook=without_clock) for line in lines]


def are_alike(found: Any, expected: Any) -> bool:
    """Whether two values of JSON are the same but for rounding."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            are_alike(found[name], value) for name, value in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(are_alike, found, expected))
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-4, abs=1e-4, nan_ok=True)
    return found == expected


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
def test_pieces_train_as_ranks_with_rows_of_their_own_do(inputs, tmp_path):
    cases = {name: ("ppo", options) for name, options in OF_TWO.items()}
    expected = run(cases, inputs, tmp_path / "whole", 2, 1)
    for name in cases:
        reused = [row["rollout/reused_groups"] for row in metric_rows(expected / name)]
        assert any(reused)
    check(cases, run(cases, inputs, tmp_path / "pieces", 2, 2), expected)


@pytest.fixture(scope="module")
def vllm_server(inputs, tmp_path_factory) -> Iterator[str]:
    servers = Servers([inputs["wide_heads"]], tmp_path_factory.mktemp("server"), more=[[]])
    try:
        servers.wait()
        yield servers.urls[0]
    finally:
        servers.close()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_pieces_train_on_samples_of_vllm(inputs, tmp_path, request, engine):
    options = GRPO | {"pretrain": "{wide_heads}", "zero_stage": 3, "rollout_engine": engine}
    if engine == "vllm":
        options["max_num_seqs"] = 16
    else:
        options["vllm_server_url"] = request.getfixturevalue("vllm_server")
        options["vllm_server_api_key_env"] = KEY_VARIABLE
    how = {"vllm": True, "env": READ_BY_VLLM | {KEY_VARIABLE: KEY}}
    cases = {engine: ("ppo", options)}
    expected = run(cases, inputs, tmp_path / "one", 1, 1, **how)
    check(cases, run(cases, inputs, tmp_path / "pieces", 2, 2, **how), expected)


@pytest.mark.long
def test_a_step_is_repeated(inputs, tmp_path):
    """By ``lightppo replay``, on as many ranks."""
    options = PPO | {"save_steps": 1, "sequence_parallel_size": 2}
    script = tmp_path / "command.py"
    script.write_text("from lightppo.__main__ import main\n\nmain()\n")
    run_ranks(script, *command("ppo", inputs, tmp_path, **options))
    words = ["replay", tmp_path / "run", "--step=2", "--samples=1"]
    output = run_ranks(script, *words).output
    assert re.search(r"^step 2 is equal to what was recorded: \d+ numbers$", output, re.MULTILINE)
    assert output.count("step 2: 4 samples, as prompt.sample:score") == 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ppo", "sft", "rm", "dpo"])
def test_a_run_resumes_with_another_number_of_ranks_per_row(inputs, tmp_path, kind):
    """Stopped in the middle: with the same number to the last bit, with another one within rounding."""
    of_kind = GRPO | {"total_training_steps": 4} if kind == "ppo" else {"max_steps": 4}
    options = of_kind | {"save_steps": 1, "zero_stage": 2}
    sizes = {"whole": 2, "same": 2, "other": 1}
    commands = []
    for name, size in sizes.items():
        own = options | {"sequence_parallel_size": 2}
        if name != "whole":
            commands.append(command(kind, inputs, tmp_path / name, **own, benchmark_steps=2))
        commands.append(
            command(kind, inputs, tmp_path / name, **own | {"sequence_parallel_size": size})
        )
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    result = run_ranks(SCRIPT, tmp_path / "commands.json", timeout=900)
    assert "resume: --sequence_parallel_size was 2, is 1" in result.output
    expected = outcome(tmp_path / "whole")
    assert outcome(tmp_path / "same") == expected
    (tmp_path / "expected").mkdir()
    (tmp_path / "expected" / "other").symlink_to(tmp_path / "whole")
    check({"other": (kind, options)}, tmp_path, tmp_path / "expected")


# name → options of the resume, its number of ranks
AFTER_A_KILL = {
    "same": ({}, 2),
    "one rank per row": ({"sequence_parallel_size": 1}, 2),
    "one rank": ({"sequence_parallel_size": 1, "reshape_ckpt": True}, 1),
    "two groups": ({"reshape_ckpt": True}, 4),
    "four ranks per row": ({"sequence_parallel_size": 4, "reshape_ckpt": True}, 4),
}


@pytest.mark.long
@pytest.mark.parametrize("phase", ["training", "saving"])
def test_a_rank_that_is_killed_changes_nothing(inputs, tmp_path, phase):
    """Resumed with the same ranks to the last bit, with others within rounding."""
    options = {
        "critic_learning_rate": RATE,
        "actor_learning_rate": RATE,
        "sequence_parallel_size": 2,
    }
    own = {name: inputs[name] for name in ("pretrain", "prompt_data", "reward_fn")}

    def start(name: str, fault: dict[str, Any], world_size: int = 2, **more: Any) -> Any:
        words = [json.dumps(fault), *flags(own, tmp_path / name, **options | more)]
        how = {"world_size": world_size, "check": not fault, "env": WITH_SUPPORT}
        return run_ranks(REPO / "tests" / "faults" / "faulty.py", *words, **how)

    start("whole", {})
    fault = {"fault": "SIGKILL", "phase": phase, "rank": 1, "step": 3}
    killed = start("killed", fault | {"struck": str(tmp_path / "struck")})
    assert killed.returncode != 0
    assert (tmp_path / "struck").exists()
    (tmp_path / "expected").mkdir()
    for name, (more, world_size) in AFTER_A_KILL.items():
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        assert "resumed from" in start(name, {}, world_size, **more).output
        (tmp_path / "expected" / name).symlink_to(tmp_path / "whole")
    assert outcome(tmp_path / "same") == outcome(tmp_path / "whole")
    cases = dict.fromkeys(AFTER_A_KILL, ("ppo", options))
    check(cases, tmp_path, tmp_path / "expected")
