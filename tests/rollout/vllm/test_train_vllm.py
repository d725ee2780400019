"""examples/train_ppo.py with the real vLLM: a run and its resume, and how a run ends that is broken off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import psutil
import pytest
from support.ranks import READ_BY_VLLM, REPO, run_ranks
from support.runs import forget_checkpoints
from support.tiny import read_jsonl, save_causal_lm, sums, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SCRIPT = REPO / "examples" / "train_ppo.py"

# Scores digits. In the batch that END_AT names it ends the run by END_HOW, having noted what the process has of its
# own.
REWARD = """
import json, os, signal, psutil

calls = 0

def reward_func(queries, prompts, labels):
    global calls
    calls += 1
    if calls == int(os.environ.get("END_AT", 0)):
        with open("/proc/self/maps") as file:
            shared = sorted({line.split()[-1] for line in file if "/dev/shm/" in line and "deleted" not in line})
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        with open(os.environ["NOTES"], "w") as file:
            json.dump({"pid": os.getpid(), "shared": shared, "children": children}, file)
        if os.environ["END_HOW"] == "raise":
            raise KeyError("no such answer")
        signal.raise_signal(signal.SIGTERM)
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers]
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """``flags(out, **options)``: the command line of a small run."""
    root = tmp_path_factory.mktemp("train_vllm")
    (root / "reward.py").write_text(REWARD)
    shared = {
        # heads of 32, the smallest that vLLM's attention takes on a CPU
        "pretrain": save_causal_lm(
            root / "model", hidden_size=64, num_attention_heads=2, num_key_value_heads=1
        ),
        "prompt_data": write_jsonl(
            root / "prompts.jsonl", [*sums(15), {"input": "1+" * 12 + "1=", "label": "13"}]
        ),
        "truncation": "left",
        "reward_fn": root / "reward.py",
        "rollout_engine": "vllm",
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "prompt_max_len": 16,
        "generate_max_len": 12,
        "max_num_seqs": 16,
        "actor_learning_rate": 1e-3,
    }

    def make(out: Path, **options):
        options = {"save_path": out / "model", "ckpt_path": out / "ckpt", **shared, **options}
        return [f"--{name}={value}" for name, value in options.items()]

    return make


def steps(out: Path) -> dict[int, dict[str, float]]:
    """Metrics of each training step, without what depends on the clock."""
    rows = read_jsonl(out / "model" / "metrics.jsonl")
    return {
        row["step"]: {k: v for k, v in row.items() if not k.startswith("perf/") and k != "time"}
        for row in rows
        if "rollout/reward" in row
    }


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("fork", {}),
        # test_vllm.py has the pushes of adapters
        pytest.param("fork", {"lora_rank": 4}, id="adapters", marks=pytest.mark.long),
        pytest.param("deepspeed", {}, marks=pytest.mark.long),
    ],
)
def test_a_run_and_its_resume(flags, tmp_path, launcher, options):
    def launch(*more, **how):
        how |= {"timeout": 500, "env": READ_BY_VLLM}
        words = flags(tmp_path, zero_stage=3, save_steps=2, **options)
        return run_ranks(SCRIPT, *words, *more, **how).output

    output = launch(launcher=launcher, vllm=True)
    assert "rollout check: log probs differ by" in output
    # and all the steps below have been through with it
    assert "16 rows: 16 kept, 1 of them truncated" in output
    assert ("LoRA: vLLM gets the adapter alone after every step" in output) == bool(options)
    seen = steps(tmp_path)
    assert list(seen) == [1, 2, 3, 4]
    for row in seen.values():
        assert 0 < row["rollout/logp_diff_mean"] < 1e-5
        assert row["rollout/logp_diff_mean"] <= row["rollout/logp_diff_max"] < 1e-4
    assert len({row["rollout/response_length"] for row in seen.values()}) > 1
    rows = read_jsonl(tmp_path / "model" / "metrics.jsonl")
    (sent,) = {row["perf/sync_megabytes"] for row in rows if "rollout/reward" in row}
    assert 0 < sent < (0.03 if options else 0.3)  # a model of 58 thousand weights

    forget_checkpoints(tmp_path / "ckpt", after=2)
    assert "2 steps done" in launch("--offload_during_rollout", vllm=True)  # changes no number
    again = steps(tmp_path)
    assert list(again) == [1, 2, 3, 4]
    for step, row in again.items():
        for name, value in row.items():
            if not name.startswith(("rollout/logp_diff", "rollout/mismatch")):
                # of what prefixes happen to be cached
                assert math.isclose(value, seen[step][name], rel_tol=1e-4, abs_tol=1e-6), (
                    step,
                    name,
                )


@pytest.mark.parametrize(
    ("how", "launcher", "code"),
    [
        ("raise", "fork", 1),
        ("signal", "fork", 143),
        pytest.param("signal", "python", 143, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_broken_off_leaves_nothing(flags, tmp_path, how, launcher, code):
    notes = tmp_path / "notes.json"
    ended = run_ranks(
        SCRIPT,
        *flags(tmp_path, zero_stage=0, rollout_check="warn", logp_diff_tolerance=1e-12),
        launcher=launcher,
        vllm=True,
        world_size=1,
        check=False,
        timeout=500,
        env=READ_BY_VLLM
        | {"END_AT": "2", "END_HOW": how, "NOTES": str(notes), "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == code, ended.output[-3000:]
    assert (
        "no such answer" if how == "raise" else "stopped by SIGTERM after step 2 of 4; saved in"
    ) in ended.output
    # any difference is one
    assert "step 1: the rollout engine's log probs drift from the trainer's" in ended.output
    noted = json.loads(notes.read_text())
    assert not [pid for pid in [noted["pid"], *noted["children"]] if psutil.pid_exists(pid)]
    assert not [path for path in noted["shared"] if Path(path).exists()]
    assert not list(tmp_path.glob("lightppo-vllm-*"))
