"""Callbacks of users: by the constructor and by ``--callback``, on runs of PPO and of training on data."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import logged, trained_rows

from lightppo import Callback, PPOTrainer
from lightppo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")

MINE = """
from lightppo import Callback

class Mine(Callback):
    def __init__(self):
        self.times = []

    def on_start(self, run):
        self.times.append("start")
        run.register_state("mine", self)

    def state_dict(self):
        return len(self.times)

    def load_state_dict(self, state):
        self.before = state

    def on_rollouts(self, run, step, collected):
        self.times.append(f"rollouts {len(collected.rollouts)}")

    def on_experience(self, run, step, experience):
        self.times.append(f"experience {len(experience)} {bool(experience[0].advantages is not None)}")

    def on_micro_batch(self, run, experience, log_probs, entropy):
        self.times.append(f"micro batch {tuple(log_probs.shape) == tuple(experience.action_mask.shape)}")

    def on_step_end(self, run, step, metrics):
        self.times.append(f"step {step}")
        return {"train/of_reward": 2 * metrics["rollout/reward"]}

    def votes(self, run):
        return {"stop": float(run.state.global_step == 2), "save": float(run.state.global_step == 1)}

    def on_save(self, run, step):
        self.times.append(f"save {step}")

    def after_step(self, run, step):
        self.times.append(f"after {step}")

    def on_evaluation(self, run, step, result):
        self.times.append(f"evaluation {step} {'eval/reward' in result}")
        return {"eval/of_reward": 2 * result["eval/reward"]}

    def on_end(self, run, error):
        self.times.append(f"end {error}")

mine = Mine()
"""


def test_the_times_of_a_run(make_config, tmp_path, assets, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    config = make_config(
        callback=(f"{tmp_path}/mine.py:mine",), eval_data=assets["prompt_data"], eval_steps=2
    )
    trainer = PPOTrainer.from_config(config.with_options(val_before_train=False))
    mine = next(callback for callback in trainer.callbacks if type(callback).__name__ == "Mine")
    trainer.fit()
    step = ["rollouts 4", "experience 4 True", "micro batch True", "micro batch True"]
    assert mine.times == [
        "start",
        *step,
        "step 1",
        "save 1",
        "after 1",
        *step,
        "step 2",
        "evaluation 2 True",
        "save 2",
        "end None",
    ]
    trained = [row for row in trained_rows(tmp_path / "run") if "rollout/reward" in row]
    assert [row["train/of_reward"] for row in trained] == [
        2 * row["rollout/reward"] for row in trained
    ]
    assert len(trained) == 2  # it voted to stop
    (evaluated,) = [row for row in logged(config) if "eval/reward" in row]
    assert evaluated["eval/of_reward"] == 2 * evaluated["eval/reward"]
    assert trainer.evaluation.result["eval/of_reward"] == evaluated["eval/of_reward"]
    assert (tmp_path / "run" / "config.json").is_file()  # and the model is saved all the same


def test_an_error_reaches_the_end(make_config):
    ends: list[Any] = []

    class Fails(Callback):
        def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
            raise KeyError("mine")

        def on_end(self, run: Any, error: BaseException | None) -> None:
            ends.append(error)

    with pytest.raises(KeyError, match="mine"):
        PPOTrainer.from_config(make_config(benchmark_steps=1), callbacks=[Fails()]).fit()
    assert isinstance(ends[0], KeyError)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mine.py:Other", "Other"),
        ("none.py:Mine", "none.py"),
        ("mine.py:text", "is no lightppo.Callback"),
    ],
)
def test_a_wrong_callback_is_refused_before_anything_loads(
    make_config, tmp_path, monkeypatch, spec, says
):
    (tmp_path / "mine.py").write_text(MINE + "\ntext = 'text'\n")
    monkeypatch.setattr("lightppo.trainer.build.begin", lambda *_: pytest.fail("it is built"))
    with pytest.raises(ConfigError, match=rf"--callback .*{says}"):
        PPOTrainer.from_config(make_config(callback=(f"{tmp_path}/{spec}",)))
