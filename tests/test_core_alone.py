"""The core without ``lightppo/plugins``: it trains, saves, is killed, goes on, and its weights are the product's.

The product runs with the plain kernels, the plain decoder and the padded batches of the core, and its log probs before an
update come from a pass, because what its plugins do instead rounds differently.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import RanksResult, run_ranks
from support.tiny import sums, write_jsonl

ROOT = Path(__file__).parents[1]

REWARD = '''
import os, signal
from pathlib import Path


def reward_func(queries, prompts, labels):
    """The more ones and twos, the better; where it is asked to, it kills the process at the third step."""
    calls = Path(__file__).with_name(os.environ["CALLS"] + ".calls")
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size == 3 and os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(query.count("1") + query.count("2")) for query in queries]
'''
PLAIN = """
from lightppo.__main__ import main
from lightppo.plugin import DECODERS, HEAD_SCORES, KERNELS, MODULES, OLD_LOG_PROBS
from lightppo.table import Entry
MODULES.clear()
HEAD_SCORES.clear()
OLD_LOG_PROBS.clear()
DECODERS.pop("slots", None)
KERNELS["decoding"] = Entry("contextlib:nullcontext")
main()
"""
SMALL = {
    "prompt_max_len": 12,
    "generate_max_len": 5,
    "rollout_batch_size": 4,
    "micro_train_batch_size": 2,
    "actor_learning_rate": 1e-2,
    "total_training_steps": 3,
    "save_steps": 1,
}
RUNS = {
    # as examples/quickstart/ppo.yaml, with two steps per rollout
    "ppo": {
        "advantage_estimator": "gae",
        "max_epochs": 2,
        "train_batch_size": 2,
        "zero_stage": 1,
        "critic_learning_rate": 1e-2,
    },
    "grpo": {
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "zero_stage": 3,
    },
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has no plugins."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(
        ROOT / "lightppo",
        folder / "lightppo",
        ignore=shutil.ignore_patterns("plugins", "__pycache__"),
    )
    return folder


def lightppo(
    package: Path, folder: Path, run: str, model: str, *flags: str, **environment: str
) -> RanksResult:
    """``lightppo ppo`` of a package with plain kernels and decoder, in a process that has none of it imported."""
    options = (
        SMALL
        | RUNS[run]
        | {"pretrain": model, "prompt_data": "prompts.jsonl", "reward_fn": "reward.py"}
    )
    options |= {
        "save_path": f"{folder.name}/{run}",
        "ckpt_path": f"{folder.name}/{run}_checkpoints",
    }
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]
    script = folder.parent / "plain.py"
    script.write_text(PLAIN)
    environment["PYTHONPATH"] = str(package)
    words = ["ppo", *words, *flags]
    return run_ranks(
        script, *words, bare=True, world_size=1, timeout=300, check=False, env=environment
    )


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_core_alone_trains_is_killed_goes_on_and_has_the_products_weights(
    core, tiny_model, tmp_path, run, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    write_jsonl(tmp_path / "prompts.jsonl", sums(12))
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    killed = lightppo(core, alone, run, tiny_model, CALLS="alone", KILLED="1")
    assert killed.returncode == -signal.SIGKILL, killed.output
    resumed = lightppo(core, alone, run, tiny_model, CALLS="alone")
    assert resumed.returncode == 0, resumed.output
    assert "resumed from" in resumed.output
    assert "2 steps done" in resumed.output
    # the product would pack its rows, which the core alone cannot
    product = lightppo(ROOT, whole, run, tiny_model, "--no_packing_samples", CALLS="whole")
    assert product.returncode == 0, product.output
    assert weights(alone / run) == weights(whole / run)
    assert not (alone / run / "metrics.jsonl").exists()  # that is a plugin's
    assert (whole / run / "metrics.jsonl").exists()


def test_the_core_alone_shows_its_commands_and_flags(core):
    environment = os.environ | {"PYTHONPATH": str(core)}
    shown = subprocess.run(
        [sys.executable, "-m", "lightppo", "--help"],
        env=environment,
        cwd=core,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "  ppo " in shown.stdout
    assert "  sft " not in shown.stdout
    flags = subprocess.run(
        [sys.executable, "-m", "lightppo", "ppo", "--help", "all"],
        env=environment,
        cwd=core,
        capture_output=True,
        text=True,
    )
    assert flags.returncode == 0, flags.stderr
    assert "--rollout_batch_size" in flags.stdout
