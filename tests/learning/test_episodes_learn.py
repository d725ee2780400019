"""What models learn from environments: to ask before they answer, and to need fewer turns."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import logged
from support.scripts import beside
from support.world import one_rank

from lightppo import PPOTrainer
from lightppo.config import PPOConfig, parse_args
from lightppo.config.supervised_options import SFTConfig
from lightppo.supervised.trainer import SupervisedTrainer

ENVIRONMENTS = Path(__file__).parents[2] / "examples" / "environments"
CLASSES = {"lookup": "Drawers", "guess": "Between"}


@pytest.fixture(autouse=True)
def started_as_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples are run from the project's folder, and find what is beside them."""
    monkeypatch.chdir(ENVIRONMENTS.parents[1])
    with beside(ENVIRONMENTS):
        yield


def trained(name: str, folder: Path, *, max_len: int, warm_up_steps: int, steps: int) -> PPOConfig:
    """The run of ``make quickstart ENV=name``, with fewer steps."""
    importlib.import_module(name).main(folder)
    with one_rank():
        warm_up = SFTConfig.from_flat(
            pretrain=str(folder / "model"),
            dataset=str(folder / "sft.jsonl"),
            output_key="output",
            save_path=str(folder / "sft"),
            max_len=max_len,
            max_steps=warm_up_steps,
            train_batch_size=128,
            micro_train_batch_size=128,
            learning_rate=5e-3,
            adam_betas=(0.9, 0.99),
        )
        SupervisedTrainer.from_config(warm_up).fit()
        script = ENVIRONMENTS / f"{name}.py"
        options = ["--config", str(script.with_suffix(".yaml"))]
        options += ["--env", f"{script}:{CLASSES[name]}"]
        options += ["--pretrain", str(folder / "sft")]
        options += ["--prompt_data", str(folder / "prompts.jsonl")]
        options += ["--eval_data", str(folder / "eval.jsonl"), "--save_path", str(folder / "ppo")]
        config = parse_args([*options, "--total_training_steps", str(steps), "--zero_stage", "0"])
        PPOTrainer.from_config(config).fit()
    return config


def evaluated(config: PPOConfig, metric: str) -> list[float]:
    return [row[metric] for row in logged(config) if metric in row]


@pytest.mark.learning
def test_it_asks_before_it_answers(tmp_path):
    config = trained("lookup", tmp_path, max_len=24, warm_up_steps=400, steps=40)
    accuracy = evaluated(config, "eval/accuracy")
    assert 0.2 < accuracy[0] < 0.7  # a guess is right once in a hundred
    assert accuracy[-1] > 0.9


@pytest.mark.learning
def test_it_guesses_a_number_in_fewer_turns(tmp_path):
    """By a cost of each turn: always the middle takes 4.2 guesses, the demonstrations take 6.7."""
    config = trained("guess", tmp_path, max_len=96, warm_up_steps=200, steps=20)
    turns, found = evaluated(config, "eval/turns"), evaluated(config, "eval/accuracy")
    assert turns[0] > 6
    assert turns[-1] < 5.5
    assert found[-1] > 0.95  # not by giving up
