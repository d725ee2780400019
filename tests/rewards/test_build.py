import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightppo.data.records import Rollout
from lightppo.rewards import (
    CombinedReward,
    FunctionReward,
    RemoteReward,
    RewardModelSource,
    build_reward_source,
    check_reward_options,
)

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
def module(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(MODULE)
    return str(tmp_path / "rewards.py")


def length(sequences: Tensor, attention_mask: Tensor) -> Tensor:
    return attention_mask.sum(1)


def score_batch(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    return [0.0] * len(queries)


def test_urls_make_a_remote_source() -> None:
    source = build_reward_source(
        remote_rm_url=[URL, "https://host/rm"], remote_timeout=7.0, remote_retries=9, remote_token="t"
    )
    assert isinstance(source, RemoteReward)
    assert (source.urls, source.timeout, source.retries) == ([URL, "https://host/rm"], 7.0, 9)
    assert isinstance(build_reward_source(remote_rm_url=URL), RemoteReward)


@pytest.mark.parametrize("flag", ["remote_rm_url", "reward_fn"])
@pytest.mark.parametrize(("name", "score"), [("", 1.0), (":two", 2.0)])
def test_a_file_makes_a_function_source(
    module: str, rollouts: list[Rollout], flag: str, name: str, score: float
) -> None:
    spec = module + name
    source = build_reward_source(**{flag: [spec] if flag == "remote_rm_url" else spec})
    assert isinstance(source, FunctionReward)
    assert source.name == f"rewards.py:{name[1:] or 'reward_func'}"
    assert source.score(rollouts).scores == [score] * 5


def test_a_callable_and_a_source_are_taken_as_they_are() -> None:
    source = build_reward_source(reward_fn=score_batch)
    assert isinstance(source, FunctionReward)
    assert source.name == "score_batch"
    combined = CombinedReward({source: 1.0})
    assert build_reward_source(reward_fn=combined) is combined


def test_a_file_may_build_a_source(module: str, rollouts: list[Rollout]) -> None:
    output = build_reward_source(reward_fn=f"{module}:both").score(rollouts)
    assert output.scores == [21.0] * 5  # 1·1 + 10·2
    assert set(output.metrics) == {"reward_func", "two"}


@pytest.mark.parametrize("as_file", [True, False])
def test_reward_fn_combines_reward_models(module: str, rollouts: list[Rollout], as_file: bool) -> None:
    asked = []
    source = build_reward_source(
        reward_fn=module if as_file else lambda scores: scores[0] + scores[1],
        reward_models=[length, lambda s, m: torch.ones(len(s))],
        pad_token_id=0,
        micro_batch_size=3,
        same_count=lambda count: asked.append(count) or count,
        device="cpu",
    )
    assert isinstance(source, RewardModelSource)
    assert source.score(rollouts).scores == [3.0, 4.0, 5.0, 6.0, 7.0]  # lengths 2…6, plus 1
    assert asked == [2, 2]  # 5 rows in micro batches of 3, for each model


def test_one_reward_model_needs_no_reward_fn(rollouts: list[Rollout]) -> None:
    source = build_reward_source(reward_models=[length], pad_token_id=0)
    assert source.score(rollouts).scores == [2.0, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(ValueError, match="need pad_token_id"):
        build_reward_source(reward_models=[length])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set --remote_rm_url .*, --reward_fn or --reward_pretrain"),
        ({"remote_rm_url": []}, "no rewards"),
        ({"remote_rm_url": [URL], "n_reward_models": 1}, "--remote_rm_url and --reward_pretrain are both set"),
        ({"remote_rm_url": [URL], "reward_fn": score_batch}, "--remote_rm_url and --reward_fn are both set"),
        ({"remote_rm_url": ["x.py"], "reward_fn": "y.py"}, "--remote_rm_url and --reward_fn are both set"),
        ({"n_reward_models": 2}, "--reward_pretrain has 2 models: --reward_fn must say how"),
        (
            {"n_reward_models": 1, "reward_fn": CombinedReward({FunctionReward(score_batch): 1.0})},
            "--reward_pretrain would not be used",
        ),
        ({"reward_fn": 3}, "--reward_fn must be .* got 3"),
        ({"reward_fn": "reward.json"}, "--reward_fn: 'reward.json' is not of the form"),
        ({"reward_fn": URL}, "--reward_fn: .* is not of the form"),
        ({"reward_fn": "/nowhere/at/all.py"}, "--reward_fn: no file /nowhere/at/all.py"),
        ({"remote_rm_url": ["/nowhere/at/all.py"]}, "--remote_rm_url: no file /nowhere/at/all.py"),
        ({"remote_rm_url": ["host:5000"]}, "--remote_rm_url: 'host:5000' is not of the form"),
        ({"remote_rm_url": ["grpc://host"]}, "--remote_rm_url: 'grpc://host' is not an http"),
        ({"remote_rm_url": [URL, "x.py"]}, r"--remote_rm_url takes http\(s\) URLs or one path.py"),
        ({"remote_rm_url": ["x.py", "y.py"]}, r"--remote_rm_url takes http\(s\) URLs or one path.py"),
        ({"remote_rm_url": "host"}, "--remote_rm_url: 'host' is not of the form"),
    ],
)
def test_contradictions_and_unknown_forms_name_the_flag(options: dict[str, Any], message: str) -> None:
    options = {"remote_rm_url": None, "reward_fn": None, "n_reward_models": 0} | options
    with pytest.raises(ValueError, match=message):
        check_reward_options(**options)
    n_models = options.pop("n_reward_models")
    with pytest.raises(ValueError, match=message):
        build_reward_source(**options, reward_models=[length] * n_models, pad_token_id=0)


def test_names_that_are_no_reward_name_the_flag(module: str) -> None:
    with pytest.raises(ValueError, match=r"--reward_fn: .*has no 'rewrad'; it has reward_func, two, reward_fn, Source"):
        build_reward_source(reward_fn=f"{module}:rewrad")
    with pytest.raises(ValueError, match="--remote_rm_url: 3 is neither a function nor a reward source"):
        build_reward_source(remote_rm_url=[f"{module}:number"])
    with pytest.raises(ValueError, match=r"--reward_fn: .*Source'> is neither"):
        build_reward_source(reward_fn=f"{module}:Source")
    with pytest.raises(ValueError, match=r"--reward_fn: .*must take"):
        build_reward_source(reward_fn=f"{module}:reward_fn")
    with pytest.raises(ValueError, match=r"--reward_fn: .*is of type int, not a function"):
        build_reward_source(reward_fn=f"{module}:number", reward_models=[length], pad_token_id=0)


def test_secrets_in_mixed_urls_are_not_shown() -> None:
    with pytest.raises(ValueError, match="--remote_rm_url takes") as caught:
        build_reward_source(remote_rm_url=["http://me:s3cret@host/rm?key=s3cret", "x.py"])
    assert "s3cret" not in str(caught.value)


def test_checking_options_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from lightppo.rewards import check_reward_options\n"
        f"assert check_reward_options(remote_rm_url=[{URL!r}], reward_fn=None, n_reward_models=0) == 'remote'\n"
        "print([name for name in ('torch', 'requests', 'transformers', 'deepspeed') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
