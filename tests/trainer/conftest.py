"""What tests of a whole trainer share: a world of one rank in the test's process, and runs small enough for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightppo.config import PPOConfig

REWARD = '''
def reward_func(queries, prompts, labels):
    """The more ones and twos, the better."""
    return [float(query.count("1") + query.count("2")) for query in queries]
'''


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of this process alone, as under plain ``python``; afterwards all is as it was before."""
    environment = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at import
    import torch.distributed as dist
    from deepspeed import comm
    from deepspeed.utils import groups

    from lightppo.strategy.checkpoint import restore_rng_state, rng_state
    from lightppo.strategy.deepspeed import DeepspeedStrategy

    generators = rng_state()
    remembered = {name: value for name, value in vars(groups).items() if name.startswith("_")}
    DeepspeedStrategy().setup_distributed()
    yield
    dist.destroy_process_group()
    vars(groups).update(remembered)  # DeepSpeed keeps groups for ever; the next world has others
    comm.comm.cdb = None
    os.environ.clear()
    os.environ.update(environment)
    restore_rng_state(generators)


@pytest.fixture(scope="session")
def assets(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options that name the inputs of a run: model, twelve prompts, reward function."""
    from support.tiny import sums, write_jsonl

    root = tmp_path_factory.mktemp("assets")
    (root / "reward.py").write_text(REWARD)
    return {
        "pretrain": tiny_model,
        "prompt_data": write_jsonl(root / "prompts.jsonl", sums(12)),
        "reward_fn": str(root / "reward.py"),
    }


@pytest.fixture
def make_config(assets: dict[str, str], tmp_path: Path) -> Callable[..., PPOConfig]:
    """``make_config(**options)``: a small run; 12 prompts in rollouts of 4, one optimizer step each."""

    def make(**options) -> PPOConfig:
        small = {
            "prompt_max_len": 12,
            "generate_max_len": 5,
            "rollout_batch_size": 4,
            "train_batch_size": 4 * options.get("n_samples_per_prompt", 1),
            "micro_train_batch_size": 2,
            "actor_learning_rate": 1e-2,
            "critic_learning_rate": 1e-2,
            "zero_stage": 0,
            "num_examine": 0,
            "save_path": str(tmp_path / "run"),
            "ckpt_path": str(tmp_path / "ckpt"),
        }
        return PPOConfig.from_flat(assets | small | options)

    return make
