"""Rollout engines of the user's own: a name in the table, or a file; and what they say that they can do."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.runs import fitted

from lightppo.config import PPOConfig
from lightppo.config.cli import help_text
from lightppo.errors import ConfigError
from lightppo.plugin import ENGINES
from lightppo.rollout.engine import Capabilities, RolloutEngine, capabilities_of
from lightppo.table import Entry

ENGINE = """
from lightppo import Rollout


class Ones:
    # Answers "1" to everything.

    def __init__(self, config, strategy, actor, tokenizer):
        self.token = tokenizer.encode("1", add_special_tokens=False)
        self.syncs, self.is_closed = 0, False

    def generate(self, prompts, sampling):
        return [
            Rollout(prompt, i, self.token, "1", "stop", [-1.0]) for prompt in prompts for i in range(sampling.n)
        ]

    def sync_weights(self, actor):
        self.syncs += 1

    def sleep(self): ...

    def wake(self): ...

    def close(self):
        self.is_closed = True
"""


@pytest.fixture
def engine_file(tmp_path: Path) -> str:
    path = tmp_path / "my_engine.py"
    path.write_text(ENGINE)
    return f"{path}:Ones"


@pytest.fixture
def registered(engine_file):
    ENGINES.register("ones", Entry(engine_file))
    yield "ones"
    del ENGINES["ones"]


def test_a_run_samples_with_an_engine_of_a_file(world, make_config, engine_file):
    trainer = fitted(make_config(rollout_engine=engine_file, num_episodes=1))
    assert (type(trainer.rollout_engine).__name__, trainer.rollout_engine.syncs) == ("Ones", 3)
    assert trainer.rollout_engine.is_closed


def test_a_registered_engine_is_a_name_like_any_other(registered, make_config):
    assert make_config(rollout_engine="ones").engine.rollout_engine == "ones"
    assert "--rollout_engine hf|vllm|vllm_server|ones" in help_text("lightppo ppo", True, PPOConfig)


def test_options_of_another_engine_are_refused(registered, make_config):
    with pytest.raises(ConfigError, match="--max_num_seqs needs --rollout_engine vllm"):
        make_config(rollout_engine="ones", max_num_seqs=8).validate(1)


def test_what_is_no_engine_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="has no function 'Ones'"):
        PPOConfig.from_flat(rollout_engine=f"{tmp_path}/empty.py:Ones")


def test_an_engine_without_capabilities_has_the_defaults_and_what_it_says_in_the_old_way():
    assert capabilities_of(SimpleNamespace()) == Capabilities()
    assert not any(vars(Capabilities()).values())
    older = SimpleNamespace(keeps_weights=True, differing_weights=lambda: ([], []))
    assert capabilities_of(older) == Capabilities(keeps_weights=True, compares_weights=True)
    declared = SimpleNamespace(capabilities=Capabilities(reports_finished=True), keeps_weights=True)
    assert capabilities_of(declared) == Capabilities(reports_finished=True)
    assert not isinstance(SimpleNamespace(), RolloutEngine)
