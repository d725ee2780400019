"""From options to a source: each option reaches it, contradictions name their flags, weighted sums and routes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import fakes
from support.tiny import save_reward_model

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError, RewardError
from lightppo.plugins.reward_sources.reward_files import check_reward_files
from lightppo.plugins.reward_sources.reward_inputs import Retemplated, SameIds
from lightppo.plugins.verifiers.formats import has_think
from lightppo.ranks import Alone
from lightppo.rewards import (
    CombinedReward,
    FunctionReward,
    RemoteReward,
    RewardModelSource,
    build_reward_source,
)
from lightppo.rewards.registry import RewardRequest, build_reward

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
