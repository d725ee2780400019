"""Callbacks of users: by the constructor and by ``--callback``, on runs of PPO and of training on data."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import logged, trained_rows

from lightppo import Callback, PPOTrainer
from lightppo.callbacks import Callbacks, load_callbacks
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


BASE = "from contextlib import contextmanager\nfrom lightppo import Callback\n\nclass Mine(Callback):\n"
METRICS = {"rollout/reward": 1.0}


def loaded(tmp_path, methods: str) -> Callbacks:
    lines = "".join(f"    {line}\n" for line in methods.splitlines())
    (tmp_path / "mine.py").write_text(BASE + lines)
    return Callbacks(load_callbacks([f"{tmp_path}/mine.py:Mine"]))


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (
            "def on_step_ends(self, run, step, metrics): pass",
            "'on_step_ends', which no run calls (did you mean 'on_step_end'?)",
        ),
        (
            "def on_log(self, run): pass",
            "'on_log', which no run calls (known: on_start, before_steps, ",
        ),
        ("def vote(self, run): pass", "(did you mean 'votes'?)"),
        (
            "def on_step_end(self, run, step): pass",
            "on_step_end(run, step, metrics): too many positional arguments",
        ),
        ("def votes(self, run, step): pass", "votes(run): missing a required argument: 'step'"),
        (
            "async def on_start(self, run): pass",
            "on_start is async, and nothing would await it: write def",
        ),
        ("def on_start(self, run): yield", "on_start has a yield, so its lines would never run"),
        (
            "def around_step(self, run, step): yield",
            "would never run: put @contextmanager above it",
        ),
    ],
)
def test_a_method_that_no_run_can_call_is_refused(tmp_path, methods, says):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, methods)
    text = str(caught.value)
    assert text.startswith(f"the callback Mine ({tmp_path}/mine.py:4)")
    assert says in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (
            "def __init__(self, rate): pass",
            "Mine() fails: TypeError: Mine.__init__() missing 1 required",
        ),
        ("def __init__(self): {}['x']", "Mine() fails: KeyError: 'x' ({path}:5 in __init__: "),
        ("def __init__(self): raise SystemExit(0)", "Mine() fails: SystemExit: 0 ({path}:5 in"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(tmp_path, methods, says):
    path = f"{tmp_path}/mine.py"
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, methods)
    assert str(caught.value).startswith(f"--callback {path}:Mine: {says.format(path=path)}")


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (
            "def on_step_end(self, run, step, metrics): return {'mine': 'good'}",
            "on_step_end returns 'good' as 'mine': return a number",
        ),
        (
            "def on_step_end(self, run, step, metrics): return {1: 2.0}",
            "on_step_end returns 1, which is no text, as a name",
        ),
        (
            "def on_step_end(self, run, step, metrics): return 0.5",
            "on_step_end must return numbers by name, or None, not float",
        ),
        ("def votes(self, run): return {'halt': 1}", "votes returns 'halt'"),
        (
            "def votes(self, run): return {'halt': 1}",
            "known: stop, save, evaluate, and names that its own on_votes reads",
        ),
        (
            "def votes(self, run): return 'stop'",
            "votes must return numbers by name, or None, not str",
        ),
        (
            "def votes(self, run): return ['stop']",
            "votes must return numbers by name, or None, not list",
        ),
        (
            "def votes(self, run): return {'stop': 'yes'}",
            "votes returns 'yes' as 'stop': return a number",
        ),
        (
            "def around_step(self, run, step): pass",
            "around_step must return a context, not NoneType",
        ),
    ],
)
def test_what_a_callback_gives_is_looked_at(tmp_path, methods, says):
    callbacks = loaded(tmp_path, methods)
    with pytest.raises(ConfigError) as caught, callbacks.around_step(None, 1):  # noqa: PT012
        callbacks.on_step_end(None, 1, METRICS)
        callbacks.votes(None)
    assert str(caught.value).startswith(f"the callback Mine ({tmp_path}/mine.py:4): ")
    assert says in str(caught.value)


def test_what_a_callback_may_give(tmp_path):
    callbacks = loaded(
        tmp_path,
        """@contextmanager
def around_step(self, run, step): yield
def on_step_end(self, run, step, metrics):
    import torch
    return {"mine/tensor": torch.tensor(2.0), "mine/nan": float("nan"), "mine/count": 3}
def votes(self, run): return {"stop": True, "mine": 2}
def on_votes(self, run, step, votes): pass
def helper(self): pass""",
    )
    with callbacks.around_step(None, 1):
        metrics = callbacks.on_step_end(None, 1, METRICS)
    assert metrics["mine/tensor"] == 2.0
    assert isinstance(metrics["mine/tensor"], float)
    assert metrics["mine/count"] == 3
    assert callbacks.votes(None) == {"stop": 1, "save": 0, "evaluate": 0, "mine": 2}
