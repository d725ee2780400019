"""The reward source of a script, and what the source of a reward file shows."""

import subprocess
import sys

import pytest
import torch

from lightppo.config import PPOConfig
from lightppo.ranks import Alone
from lightppo.rewards import (
    CombinedReward,
    FunctionReward,
    RemoteReward,
    RewardModelSource,
    build_reward_source,
)
from lightppo.rewards.function import check_reward_files

URL = "http://127.0.0.1:5000/get_reward"

MODULE = """
from lightppo.rewards import CombinedReward, FunctionReward

def reward_func(queries, prompts, labels):
    return [1.0] * len(queries)

def two(queries, prompts, labels):
    return [2.0] * len(queries)

def reward_fn(scores):
    return sum(scores)

class Source:
    name = "source"

    def score(self, rollouts):
        raise NotImplementedError

both = CombinedReward({FunctionReward(reward_func): 1.0, FunctionReward(two): 10.0})
number = 3
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "rewards.py").write_text(MODULE)
    return str(tmp_path / "rewards.py")


def length(sequences, attention_mask):
    return attention_mask.sum(1)


def score_batch(queries, prompts, labels):
    return [0.0] * len(queries)


def test_urls_make_a_remote_source():
    source = build_reward_source(
        remote_rm_url=[URL, "https://host/rm"],
        remote_options={"timeout": 7.0, "retries": 9, "token": "t"},
    )
    assert isinstance(source, RemoteReward)
    assert (source.urls, source.timeout, source.retries) == ([URL, "https://host/rm"], 7.0, 9)
    assert isinstance(build_reward_source(remote_rm_url=URL), RemoteReward)


@pytest.mark.parametrize("flag", ["remote_rm_url", "reward_fn"])
@pytest.mark.parametrize(("name", "score"), [("", 1.0), (":two", 2.0)])
def test_a_file_makes_a_function_source(module, rollouts, flag, name, score):
    spec = module + name
    source = build_reward_source(**{flag: [spec] if flag == "remote_rm_url" else spec})
    assert isinstance(source, FunctionReward)
    assert source.name == f"rewards.py:{name[1:] or 'reward_func'}"
    assert source.score(rollouts).scores == [score] * 5


def test_a_callable_and_a_source_are_taken_as_they_are():
    source = build_reward_source(reward_fn=score_batch)
    assert isinstance(source, FunctionReward)
    assert source.name == "score_batch"
    combined = CombinedReward({source: 1.0})
    assert build_reward_source(reward_fn=combined) is combined


def test_a_file_may_build_a_source(module, rollouts):
    output = build_reward_source(reward_fn=f"{module}:both").score(rollouts)
    assert output.scores == [21.0] * 5  # 1·1 + 10·2
    assert set(output.metrics) == {"reward_func", "two"}


@pytest.mark.parametrize("as_file", [True, False])
def test_reward_fn_combines_reward_models(module, rollouts, as_file):
    asked = []
    ranks = Alone()
    ranks.same_count = lambda count: asked.append(count) or count
    source = build_reward_source(
        reward_fn=module if as_file else lambda scores: scores[0] + scores[1],
        reward_models=[length, lambda s, m: torch.ones(len(s))],
        model_options={"pad_token_id": 0, "micro_batch_size": 3, "ranks": ranks, "device": "cpu"},
    )
    assert isinstance(source, RewardModelSource)
    assert source.score(rollouts).scores == [3.0, 4.0, 5.0, 6.0, 7.0]  # lengths 2…6, plus 1
    assert asked == [2, 2]  # 5 rows in micro batches of 3, for each model


def test_one_reward_model_needs_no_reward_fn(rollouts):
    source = build_reward_source(reward_models=[length], model_options={"pad_token_id": 0})
    assert source.score(rollouts).scores == [2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "--remote_rm_url .*--reward_fn or --reward_pretrain"),
        ({"remote_rm_url": []}, "--remote_rm_url .*--reward_fn or --reward_pretrain"),
        (
            {"remote_rm_url": [URL], "reward_models": [length]},
            "--remote_rm_url and --reward_pretrain",
        ),
        ({"remote_rm_url": [URL], "reward_fn": score_batch}, "--remote_rm_url and --reward_fn"),
        ({"remote_rm_url": ["x.py"], "reward_fn": "y.py"}, "--remote_rm_url and --reward_fn"),
        ({"reward_models": [length, length], "model_options": {"pad_token_id": 0}}, "--reward_fn"),
        ({"reward_models": [length]}, "pad_token_id"),
        (
            {
                "reward_models": [length],
                "reward_fn": CombinedReward({FunctionReward(score_batch): 1.0}),
            },
            "--reward_fn .*--reward_pretrain",
        ),
        ({"reward_fn": 3}, "--reward_fn: 3 "),
        ({"reward_fn": "reward.json"}, "--reward_fn: 'reward.json'"),
        ({"reward_fn": URL}, f"--reward_fn: '{URL}'"),
        ({"reward_fn": "/nowhere/at/all.py"}, "--reward_fn: no file /nowhere/at/all.py"),
        ({"remote_rm_url": ["/nowhere/at/all.py"]}, "--remote_rm_url: no file /nowhere/at/all.py"),
        ({"remote_rm_url": ["host:5000"]}, "--remote_rm_url: 'host:5000'"),
        ({"remote_rm_url": ["grpc://host"]}, "--remote_rm_url: 'grpc://host'"),
        ({"remote_rm_url": [URL, "x.py"]}, "--remote_rm_url: 'x.py'"),
        ({"remote_rm_url": ["x.py", "y.py"]}, "--remote_rm_url: 'x.py'"),
        ({"remote_rm_url": "host"}, "--remote_rm_url: 'host'"),
        (
            {"reward_fn": "{module}:rewrad"},
            "--reward_fn: .*'rewrad'.* reward_func, two, reward_fn, Source",
        ),
        ({"remote_rm_url": ["{module}:number"]}, "--remote_rm_url: 3 "),
        ({"reward_fn": "{module}:Source"}, "--reward_fn: .*Source'> "),
        ({"reward_fn": "{module}:reward_fn"}, r"--reward_fn: .*reward_fn\(scores\) must take"),
        (
            {"reward_fn": "{module}:number", "reward_models": [length]},
            "--reward_fn: .*:number' .* int",
        ),
    ],
)
def test_contradictions_and_unknown_forms_name_the_flag(module, options, named):
    def written(value):
        return value.replace("{module}", module) if isinstance(value, str) else value

    for name, value in options.items():
        options = options | {
            name: [written(item) for item in value] if isinstance(value, list) else written(value)
        }
    with pytest.raises(ValueError, match=named):
        build_reward_source(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reward_fn": "reward.json"}, "--reward_fn: 'reward.json'"),
        ({"reward_fn": "/nowhere.py:f"}, "--reward_fn: no file /nowhere.py"),
        ({"remote_rm_url": ["/nowhere.py"]}, "--remote_rm_url: no file /nowhere.py"),
    ],
)
def test_files_are_looked_at_before_anything_is_loaded(module, options, named):
    with pytest.raises(ValueError, match=named):
        check_reward_files(PPOConfig.from_flat(**options))
    for good in ({"reward_fn": module}, {"remote_rm_url": [module]}, {"remote_rm_url": [URL]}, {}):
        check_reward_files(PPOConfig.from_flat(**good))


def test_secrets_in_mixed_urls_are_not_shown():
    with pytest.raises(ValueError, match="--remote_rm_url") as caught:
        build_reward_source(remote_rm_url=["http://me:s3cret@host/rm?key=s3cret", "x.py"])
    assert "s3cret" not in str(caught.value)


def test_making_a_source_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from lightppo.rewards import build_reward_source\n"
        f"assert build_reward_source(remote_rm_url=[{URL!r}]).name == 'remote'\n"
        "print([name for name in ('torch', 'requests', 'transformers', 'deepspeed') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
