"""Operators of an actor's update, which a GPU's host launches one by one: their number is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fakes import FakeEngine, FakeReward
from support.launches import Launches, norm_kernels
from support.sampled import SCORES, sample
from support.tiny import save_causal_lm

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.trainer import build

# Of an optimizer step with two micro batches: at most so many for each layer, and for all else. In float32 the products
# of forward and backward depend on the processor.
MOST: dict[str, dict[str, tuple[int, int]]] = {
    "0": {"step": (0, 15)},
    "1 --bf16": {"forward": (44, 188), "backward": (66, 136), "step": (0, 42)},
    "2 --bf16": {"forward": (44, 188), "backward": (84, 142), "step": (0, 76)},
}


def launched(stage: str, depth: int, folder: Path) -> Launches:
    """The operators of GRPO's second optimizer step, of a model with so many layers."""
    config = PPOConfig.from_flat(
        pretrain=save_causal_lm(folder, num_hidden_layers=depth),
        zero_stage=int(stage[0]),
        bf16="bf16" in stage,
        advantage_estimator="grpo",
        init_kl_coef=0.0,
        n_samples_per_prompt=2,
        rollout_batch_size=2,
        train_batch_size=4,
        micro_train_batch_size=2,
        num_examine=0,
        save_path=str(folder / "run"),
    ).resolved()
    strategy = build.build_strategy(config)
    actor = build.build_models(config, strategy).actor
    tokenizer = build.build_tokenizer(config, actor)
    trained = build.with_optimizer(actor, 1e-3, 100, config, strategy)
    actor, optimizer, schedule = strategy.prepare(trained)
    trainer = PPOTrainer(
        *(strategy, actor, None, None, None, None, optimizer, None, schedule, None),
        config=config,
        tokenizer=tokenizer,
        rollout_engine=FakeEngine(),
        reward_source=FakeReward(SCORES),
    )
    sample(trainer)
    trainer.ppo_train(1)  # makes AdamW's state
    launches = Launches()
    launches.count("forward", trainer, "training_step_actor")
    launches.count("backward", strategy, "backward")
    launches.count("step", strategy, "optimizer_step")
    with launches:
        trainer.ppo_train(2)
    return launches


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("stage", MOST)
def test_an_update_launches_no_more_than_before(stage: str, tmp_path: Path) -> None:
    with norm_kernels():
        of_two, of_three = (launched(stage, depth, tmp_path / str(depth)) for depth in (2, 3))
    grown = []
    for phase, most in MOST[stage].items():
        for_each_layer = of_three.by_origin[phase] - of_two.by_origin[phase]
        others = of_two.total(phase) - 2 * for_each_layer.total()
        numbers = for_each_layer.total(), others
        if numbers > most or others > most[1]:
            grown.append(
                f"{phase}: {numbers}, not {most}; of each layer {dict(for_each_layer)}; of two layers and all else "
                f"{dict(of_two.by_origin[phase])}"
            )
    assert not grown, "\n".join(grown)
