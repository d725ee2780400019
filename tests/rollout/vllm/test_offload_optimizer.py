"""``--offload_during_rollout``: optimizer states leave their memory while vLLM samples, and come back as they were."""

from __future__ import annotations

import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import fitted, whole_weights
from support.tiny import sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.rollout import hf
from lightppo.rollout.vllm.offload_optimizer import (
    Room,
    SleepAfterEvaluation,
)
from lightppo.trainer.run_callbacks import of_rollouts
from lightppo.zero3 import AWAY, get_engine

pytestmark = pytest.mark.usefixtures("world")


class WithRoom:
    """The hf engine, around whose calls the trainer's states leave and come back, as around vLLM's."""

    def __init__(self, engine: hf.HFRolloutEngine, room: Room) -> None:
        self.engine, self.room = engine, room
        self.left: list[int] = []  # bytes, by call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self.left.append(self.room.leave())
        assert self.room.leave() == 0
        return self.engine.generate(*arguments, **options)

    def sleep(self) -> None:
        self.room.come_back()


def build(config: Any, strategy: Any, actor: Any, tokenizer: Any, with_room: bool = False) -> Any:
    engine = hf.build(config, strategy, actor, tokenizer)
    return WithRoom(engine, Room(strategy)) if with_room else engine


MANY = {"save_steps": 2, "eval_steps": 1, "benchmark_steps": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 2},
        *(pytest.param({"zero_stage": n}, marks=pytest.mark.long) for n in (0, 1, 3)),
        *(pytest.param({"zero_stage": n, "bf16": True}, marks=pytest.mark.long) for n in (1, 2, 3)),
    ],
    ids=str,
)
def test_a_run_ends_as_without_it(make_config, tmp_path, options):
    data = write_jsonl(tmp_path / "eval.jsonl", sums(3))
    ends = []
    for with_room in (False, True):
        paths = {"save_path": str(tmp_path / f"run{with_room}"), "ckpt_path": None}
        engine = partial(build, with_room=with_room)
        config = make_config(rollout_engine=engine, eval_data=data, **paths, **MANY, **options)
        trainer = fitted(config)
        assert not AWAY
        for part in (tmp_path / f"run{with_room}" / "checkpoints_ppo").glob("_*/global_step3"):
            shutil.rmtree(part)
        resumed = PPOTrainer.from_config(config)
        # saved behind an evaluation, after which nobody called sleep
        assert resumed.state.global_step == 2
        resumed.fit()
        ends.append(
            whole_weights(trainer) | {f"resumed {k}": w for k, w in whole_weights(resumed).items()}
        )
    for name, expected in ends[0].items():
        assert torch.equal(ends[1][name], expected), name

    left = trainer.rollout_engine.left
    models = [trainer.strategy.unwrap_model(model) for model in (trainer.actor, trainer.critic)]
    count = sum(getattr(p, "ds_numel", p.numel()) for model in models for p in model.parameters())
    if options["zero_stage"] == 0:
        assert left[0] == 0  # the model is its own master
    else:
        assert left[0] >= 4 * count  # masters in float32
    assert max(left) >= left[0] + 8 * count  # and two moments


@pytest.fixture
def trained(make_config):
    return fitted(make_config(benchmark_steps=1, zero_stage=2))


@pytest.mark.parametrize("action", ["backward", "optimizer_step", "saving a checkpoint"])
def test_whoever_needs_the_states_gets_them(trained, action):
    room = Room(trained.strategy)
    held = list(room.storages().values())
    before = [bytes(storage.tolist()) for storage in held]
    assert room.leave() == sum(map(len, before)) > 0
    assert [storage.nbytes() for storage in held] == [0] * len(held)
    assert room.leave() == 0
    get_engine(trained.actor, action)
    assert [bytes(storage.tolist()) for storage in held] == before
    assert not AWAY


def test_an_evaluation_ends_with_the_engine_asleep():
    slept = []
    engine = SimpleNamespace(room=object(), sleep=lambda: slept.append(True))
    parts = {"config": SimpleNamespace(flat=dict), "strategy": None}
    run = SimpleNamespace(rollout_engine=engine, **parts)
    (callback,) = of_rollouts(run)
    assert isinstance(callback, SleepAfterEvaluation)
    callback.on_evaluation(run, 1, {})
    assert slept == [True]
    for other in (SimpleNamespace(), SimpleNamespace(room=None)):
        assert of_rollouts(SimpleNamespace(rollout_engine=other, **parts)) == []
