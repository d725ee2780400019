"""The engine of episodes that options ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.chats import BLIND, CHATML, DEAF, XML, chat_tokenizer
from support.fakes import FakeStrategy
from support.puppet import Puppet

from lightppo.config import PPOConfig
from lightppo.data.datasets import PromptDataset
from lightppo.episodes.chat_format import ChatFormat
from lightppo.episodes.episode import PlainText
from lightppo.episodes.episode_engine import check_openings, with_episodes
from lightppo.errors import ConfigError

ENVIRONMENTS = '''
class Talk:
    def reset(self, **row): ...

    def step(self, text):
        return text


class Guess:
    def reset(self, **row): ...

    def guess(self, x: int) -> str:
        """Guess. Args: x: a number."""
        return "no"


def double(x: int) -> str:
    """Double it. Args: x: a number."""
    return str(2 * x)


def half(x: int) -> str:
    """Half of it. Args: x: a number."""
    return str(x // 2)
'''


@pytest.fixture
def engine_of(tmp_path):
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    made = []

    def make(template: str = CHATML, **options):
        options = {
            name: tuple(f"{tmp_path}/worlds.py:{one}" if one != "python" else one for one in value)
            if name in ("env", "tools")
            else value
            for name, value in options.items()
        }
        tokenizer = chat_tokenizer(template)
        config = PPOConfig.from_flat(
            pretrain="model", prompt_data="rows.jsonl", reward_fn="reward.py", **options
        )
        engine = with_episodes(
            Puppet(tokenizer, lambda turn: ""), config, FakeStrategy(), tokenizer
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def names_of(engine) -> list[str]:
    return [tool["function"]["name"] for one in engine.formats.values() for tool in one.tools]


def test_tools_of_functions(engine_of):
    assert names_of(engine_of(tools=("double,half",))) == ["double", "half"]


def test_tools_stand_beside_those_of_an_environment(engine_of):
    assert sorted(names_of(engine_of(env=("Guess",), tools=("double",)))) == ["double", "guess"]


def test_contracts(engine_of):
    for contract in ("lightppo", "trl"):
        engine = engine_of(env=("Guess",), env_contract=contract)
        assert engine.environments.contract == contract


def test_a_talk_needs_no_template(engine_of):
    assert isinstance(engine_of(env=("Talk",)).formats["Talk"], PlainText)
    chat = engine_of(env=("Talk",), apply_chat_template=True).formats["Talk"]
    assert isinstance(chat, ChatFormat)


def test_formats_of_calls(engine_of):
    hermes, xml = engine_of(env=("Guess",)), engine_of(XML, env=("Guess",))
    assert "<function=" not in hermes.formats["Guess"].format.markers
    assert "<function=" in xml.formats["Guess"].format.markers
    with pytest.raises(ConfigError, match="--tool_format hermes"):
        engine_of(XML, env=("Guess",), tool_format="hermes")


def test_a_template_that_drops_answers_is_refused_at_the_start(engine_of):
    with pytest.raises(ConfigError, match="tool"):
        engine_of(DEAF, env=("Guess",))


def test_tools_that_nobody_names_are_refused_at_the_start(engine_of):
    """Of functions alone, the first messages are the row's; a reset may name them, too."""
    rows = PromptDataset(
        Dataset.from_list([{"prompt": [{"role": "user", "content": "2+2?"}]}]),
        chat_tokenizer(BLIND),
    )
    build = SimpleNamespace(rows={"prompt_data": rows})
    build.rollout_engine = engine_of(BLIND, tools=("double",))
    build.config = PPOConfig.from_flat(tools=("worlds.py:double",))
    with pytest.raises(ConfigError, match=r"^row 1: the chat template does not show .*\(double\)"):
        check_openings(build)
    told = "Call double."
    build.rollout_engine = engine_of(BLIND, tools=("double",), system_prompt=told)
    check_openings(build)
    build.rollout_engine = engine_of(BLIND, env=("Guess",))
    check_openings(build)


def test_options_of_the_template(engine_of):
    options = {"env": ("Guess",), "system_prompt": "Play.", "apply_chat_template": True}
    chat = engine_of(chat_template_kwargs='{"level": 3}', **options).formats["Guess"]
    assert (chat.template_options, chat.system_prompt) == ({"level": 3}, "Play.")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"reward_fn": None, "reward_source": ("environment",)},
            "--reward_source environment: there is none",
        ),
        (
            {"reward_fn": None, "reward_source": ("environment",), "env": ("a.py:A",)}
            | {"env_reward": "none"},
            "--env_reward sum or turns",
        ),
        ({"env": ("a.py:A",), "env_reward": "turns"}, "set --use_dense_reward"),
        (
            {"env": ("a.py:A",), "rollout_engine": "vllm", "tensor_parallel_size": 2},
            "--tensor_parallel_size 1",
        ),
        ({"env": ("a.py:A",), "fire_sampling": True}, "leave it out with --env"),
        ({"max_turns": 3}, "--max_turns"),
    ],
)
def test_what_cannot_be(options, told):
    base = {"pretrain": "model", "prompt_data": "rows.jsonl", "reward_fn": "reward.py"}
    with pytest.raises(ConfigError) as refused:
        PPOConfig.from_flat(base | options).validate(world_size=2)
    assert told in str(refused.value)
