"""Two short runs with all that can be recorded, on one and on two ranks; tests work on copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.once import once
from support.ranks import run_ranks
from support.tiny import save_causal_lm, sums, write_jsonl

REWARD = '''
def reward_func(queries, prompts, labels):
    """The more ones and twos, the better."""
    return [float(query.count("1") + query.count("2")) for query in queries]
'''
COMMAND = "from lightppo.__main__ import main\n\nmain()\n"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``one`` and ``two``, runs of four steps on so many ranks, with a checkpoint of the second step."""

    def make() -> str:
        root = tmp_path_factory.mktemp("recorded")
        (root / "reward.py").write_text(REWARD)
        (root / "command.py").write_text(COMMAND)
        words = {"pretrain": save_causal_lm(root / "model"), "reward_fn": root / "reward.py", "seed": 7}
        words |= {"prompt_data": write_jsonl(root / "prompts.jsonl", sums(16)), "prompt_max_len": 12}
        words |= {"generate_max_len": 5, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 4}
        words |= {"micro_train_batch_size": 2, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}
        words |= {"save_steps": 2, "eval_data": root / "prompts.jsonl", "eval_steps": 2, "eval_max_samples": 2}
        for name, ranks, stage in (("one", 1, 0), ("two", 2, 3)):
            own = {"save_path": root / name, "zero_stage": stage, "rollout_data_dir": root / name / "rollouts"}
            own |= {"skip_rollout": root / name / "saved"} if ranks == 1 else {}
            flags = [f"--{flag}={value}" for flag, value in (words | own).items()]
            run_ranks(root / "command.py", "ppo", *flags, world_size=ranks)
        return str(root)

    return Path(once(tmp_path_factory, "recorded", make))


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``copied("one")``: that run, moved elsewhere."""
    return lambda name: Path(shutil.copytree(recorded / name, tmp_path / "moved" / name))
