"""From options to a source: each option reaches it, contradictions name their flags, weighted sums and routes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import fakes
from support.tiny import save_reward_model

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError, RewardError
from lightppo.ranks import Alone
from lightppo.rewards import (
    FunctionReward,
    RemoteReward,
)
from lightppo.rewards.reward_model import Retemplated, SameIds
from lightppo.rewards.reward_source import RewardRequest
from lightppo.trainer.build import build_reward
from lightppo.verifiers.formats import has_think

# --- of a whole run


GOOD = "<think>2 + 2</think><answer>4</answer>"

THREE = """
from lightppo.rewards import RewardOutput

class Three:
    name = "function"

    def score(self, rollouts):
        return RewardOutput([3.0] * len(rollouts))

reward_func = Three()
"""


def length(sequences, attention_mask):
    return attention_mask.sum(1)


def five(sequences, attention_mask):
    return torch.full((len(sequences),), 5.0)


@pytest.fixture
def source(tmp_path):
    """``source(**options)``: a run's source; ``function`` gives 3 and ``model`` 5."""
    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=None)
    (tmp_path / "three.py").write_text(THREE)

    def make(*models, **options):
        asked = str(options.get("reward_source")) + str(options.get("reward_routes"))
        if "function" in asked:
            options.setdefault("reward_fn", str(tmp_path / "three.py"))
        if "model" in asked:
            models = models or (five,)
            options.setdefault("reward_pretrain", [str(tmp_path)])
        reads = options.pop("tokenizer", tokenizer)
        return build_reward(PPOConfig.from_flat(**options), list(models), reads, Alone())

    return make


def scores(reward_source, *texts, **fields):
    rollouts = [fakes.make_rollout(label="4", response_text=text, **fields) for text in texts]
    return reward_source.score(rollouts).scores


def test_one_source_is_itself(source):
    math = source(reward_source=["math"])
    assert math.name == "math"
    assert scores(math, GOOD, "it is 5") == [1.0, 0.0]


def test_weights_add_up(source):
    both = source(reward_source=["math=2", "format=0.5", "function=-1"])
    assert scores(both, GOOD, "the answer is 4", "<think>a</think><answer>5</answer>") == [
        -0.5,
        -1.0,
        -2.5,
    ]
    assert scores(source(reward_source=["function=0.5"]), "a") == [1.5]
    three = source(reward_source=["model=0.5", "function=10", "math"])
    assert scores(three, "4") == [0.5 * 5 + 10 * 3 + 1]
    assert three.needs_all_ranks


def test_routes_by_data_source_and_by_label(source):
    routes = json.dumps({"gsm8k": {"math": 1}, "chat": {"model": 2, "function": 1}})
    routed = source(reward_routes=routes)
    assert scores(routed, GOOD, data_source="gsm8k") == [1.0]
    assert scores(routed, GOOD, data_source="chat") == [13.0]
    with pytest.raises(RewardError, match="'code'"):
        scores(routed, GOOD, data_source="code")
    by_label = source(
        reward_routes=json.dumps({"4": {"math": 1}, "*": {"model": 1}}), reward_routes_by="label"
    )
    assert scores(by_label, GOOD) == [1.0]


def test_options_of_mathematics(source):
    options = {
        "reward_timeout": 2.5,
        "reward_workers": 3,
        "reward_retries": 4,
        "on_reward_failure": "error",
    }
    math = source(reward_source=["math"], math_unmarked=False, **options)
    assert (math.math_unmarked, math.reward_retries, math.on_reward_failure) == (False, 4, "error")
    assert scores(math, "I guess 4") == [0.0]  # not marked
    assert source(reward_source=["math"]).on_reward_failure == "unscored"


def test_options_of_formats(source):
    assert source(reward_source=["format"], reward_format="think").check is has_think
    checked = source(reward_source=["math"], check_xml_format=True)
    assert scores(checked, GOOD, "<think>a</think><answer>5</answer>", "5") == [1.0, -0.8, -1.0]
    with pytest.raises(ConfigError, match=r"--check_xml_format.*--reward_minimum"):
        source(reward_source=["function"], check_xml_format=True)
    assert (
        source(reward_source=["function"], check_xml_format=True, reward_minimum=3.0).wrong == 3.0
    )


def test_options_of_functions():
    options = {
        "reward_fn_style": "trl",
        "reward_manager": "prime",
        "reward_workers": 2,
        "reward_timeout": 3.0,
    }
    config = PPOConfig.from_flat(**options, reward_retries=1, on_reward_failure="unscored")
    asked = RewardRequest(config, None).options_of(FunctionReward)
    assert asked == options | {"reward_retries": 1, "on_reward_failure": "unscored"}
    asked = RewardRequest(PPOConfig(), None).options_of(FunctionReward)
    assert asked.keys() <= options.keys() | {"reward_retries"}


def test_options_of_servers(source):
    options = {"on_reward_failure": "unscored", "remote_rm_retries": 2, "remote_rm_timeout": 7.0}
    remote = source(remote_rm_url=["http://127.0.0.1:9/score"], tape="off", **options)
    assert isinstance(remote, RemoteReward)
    assert (remote.retries, remote.timeout, remote.on_reward_failure) == (2, 7.0, "unscored")
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        source(remote_rm_url=["http://127.0.0.1:9"], remote_rm_token_env="NO_SUCH_VARIABLE")


def test_verls_function_name_is_found(source, tmp_path):
    parameters = "data_source, solution_str, ground_truth, extra_info=None"
    (tmp_path / "verl.py").write_text(
        f"def compute_score({parameters}):\n    return len(solution_str)\n"
    )
    function = source(reward_fn=str(tmp_path / "verl.py"), reward_workers=1)
    assert function.name == "verl.py:compute_score"
    assert scores(function, "abc") == [3.0]


@pytest.fixture
def reward_model(tmp_path):
    return Path(save_reward_model(tmp_path / "rm"))


def test_a_model_of_the_same_tokenizer_reads_the_ids(source, reward_model, tiny_tokenizer):
    options = {
        "reward_pretrain": [str(reward_model)],
        "reward_max_length": 4,
        "reward_truncation": "left",
    }
    model = source(length, tokenizer=tiny_tokenizer, **options)
    assert isinstance(model.inputs[0], SameIds)
    output = model.score([fakes.make_rollout([5, 6], [7]), fakes.make_rollout([5, 6, 7], [8, 9])])
    assert (output.scores, output.metrics["input_truncated"]) == ([3.0, 4.0], [0.0, 1.0])


def test_another_tokenizer_is_refused_or_used(source, reward_model, tmp_path, tiny_tokenizer):
    path = reward_model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["9"] = vocabulary["9"], vocabulary["0"]
    path.write_text(json.dumps(tokenizer))
    options = {"reward_pretrain": [str(reward_model)], "tokenizer": tiny_tokenizer}
    with pytest.raises(
        ConfigError, match=r"--reward_pretrain .*rm .*2 of .*--reward_input_tokenizer"
    ):
        source(length, **options)
    other = shutil.copytree(reward_model, tmp_path / "tokenizer")
    model = source(length, **options, reward_input_tokenizer=[str(other)])
    assert isinstance(model.inputs[0], Retemplated)
    rollout = fakes.make_rollout([4], [13], response_text="9")
    rollout.prompt.text = "0"
    row = model.inputs[0].encode([rollout])[0]
    assert row[:2] == [13, 4]  # its ids, not the actor's: 0 is 13 and 9 is 4
