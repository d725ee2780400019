"""What tests of a whole trainer share: a world of one rank in the test's process, and runs small enough for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.world import one_rank

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic

REWARD = '''
def reward_func(queries, prompts, labels):
    """The more ones and twos, the better."""
    return [float(query.count("1") + query.count("2")) for query in queries]
'''


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of this process alone, as under plain ``python``; afterwards all is as it was before."""
    with one_rank():
        yield


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
            "zero_stage": 0,
            "num_examine": 0,
            "save_path": str(tmp_path / "run"),
            "ckpt_path": str(tmp_path / "ckpt"),
        }
        config = PPOConfig.from_flat(assets | small | options)
        return config.with_options(critic_learning_rate=1e-2) if needs_critic(config) else config

    return make


@pytest.fixture(scope="module")
def parts(world, tiny_model) -> dict[str, Any]:
    """Prepared models with optimizers and schedules, shared by trainers that differ in their options."""
    from lightppo.trainer import build

    config = PPOConfig.from_flat(
        pretrain=tiny_model,
        zero_stage=0,
        prompt_max_len=12,
        generate_max_len=5,
        rollout_batch_size=4,
        train_batch_size=4,
    ).resolved()
    strategy = build.build_strategy(config)
    models = build.build_models(config, strategy)
    actor, critic = strategy.prepare(
        build.with_optimizer(models.actor, 1e-3, 100, config, strategy),
        build.with_optimizer(models.critic, 1e-3, 100, config, strategy),
    )
    return {"strategy": strategy, "actor": actor, "critic": critic, "reference": strategy.prepare(models.reference),
            "tokenizer": build.build_tokenizer(config, models.actor)}  # fmt: skip


@pytest.fixture
def trainer_with(parts, tmp_path) -> Callable[..., Any]:
    """``trainer_with(**options)``: a trainer whose engine and rewards are tables."""
    from support.fakes import FakeEngine, FakeReward
    from support.sampled import SCORES

    from lightppo import PPOTrainer

    def make(reward_source=None, rollout_engine=None, teacher=None, **options: Any) -> PPOTrainer:
        small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "prompt_max_len": 12, "generate_max_len": 5,
                 "num_examine": 0, "save_path": str(tmp_path / "run"), "ckpt_path": str(tmp_path / "ckpt")}  # fmt: skip
        if "ppo_n_minibatches" not in options:
            small["train_batch_size"] = 4
        config = PPOConfig.from_flat(small | options)
        (actor, actor_optim, actor_schedule), (critic, critic_optim, critic_schedule) = parts["actor"], parts["critic"]
        if not needs_critic(config):
            critic = critic_optim = critic_schedule = None
        reference = parts["reference"] if config.algorithm.init_kl_coef > 0 else None
        models = (actor, critic, None, reference, None)
        trained = (actor_optim, critic_optim, actor_schedule, critic_schedule)
        return PPOTrainer(parts["strategy"], *models, *trained, config=config, tokenizer=parts["tokenizer"],
                          rollout_engine=rollout_engine or FakeEngine(), teacher=teacher,
                          reward_source=reward_source or FakeReward(SCORES))  # fmt: skip

    return make


@pytest.fixture
def made(parts, tmp_path) -> Callable[..., Any]:
    """``made(cls, **options)``: a trainer of a class, as a script in the seed's style makes it."""
    import argparse

    from support.fakes import FakeEngine, FakeReward
    from support.sampled import SCORES

    def make(cls: type, **options: Any) -> Any:
        args = argparse.Namespace(
            rollout_batch_size=2, n_samples_per_prompt=2, train_batch_size=4, num_episodes=2, generate_max_len=5,
            save_steps=2, eval_steps=-1, logging_steps=1, num_examine=0, save_path=str(tmp_path / "run"),
            ckpt_path=str(tmp_path / "ckpt"), seed=42,
        )  # fmt: skip
        vars(args).update(options.pop("args", {}))
        (actor, actor_optim, actor_schedule), (critic, critic_optim, critic_schedule) = parts["actor"], parts["critic"]
        strategy = parts["strategy"]
        strategy.args = args
        defaults = {"micro_train_batch_size": 2, "prompt_max_len": 12, "max_new_tokens": 5}
        return cls(
            *(strategy, actor, critic, None, parts["reference"], None),
            *(actor_optim, critic_optim, actor_schedule, critic_schedule),
            tokenizer=parts["tokenizer"],
            rollout_engine=options.pop("rollout_engine", None) or FakeEngine(),
            reward_source=options.pop("reward_source", FakeReward(SCORES)),
            **defaults | options,
        )

    return make
