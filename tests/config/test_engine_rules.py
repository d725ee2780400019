"""Options of rollout engines: what is refused before anything loads."""

import pytest

from lightppo.config import PPOConfig
from lightppo.config.engine_rules import READ_BY, problems
from lightppo.config.engine_section import EngineConfig


def found(world_size=1, **options):
    return problems(PPOConfig.from_flat({"pretrain": "model", **options}), world_size)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 8}, ["--max_num_seqs has no effect with --rollout_engine hf", "it is for vllm"]),
        ({"rollout_check": "warn"}, ["--rollout_check has no effect with --rollout_engine hf"]),
        ({"rollout_engine": "vllm", "temperature": 0.001}, ["--temperature 0.001", "0.01"]),
        ({"rollout_engine": "vllm", "eval_temperature": 0.005}, ["--eval_temperature 0.005"]),
        ({"rollout_engine": "vllm", "fire_sampling": True}, ["--fire_sampling needs --rollout_engine hf"]),
        ({"rollout_engine": "vllm", "max_model_len": 100}, ["--max_model_len 100", "2048"]),
        (
            {"rollout_engine": "vllm", "free_cache_engine": False, "sleep_level": 1},
            ["--sleep_level has no effect with --no_free_cache_engine"],
        ),
        (
            {"rollout_engine": "vllm", "rollout_check": "off", "logp_diff_tolerance": 0.1},
            ["--logp_diff_tolerance has no effect with --rollout_check off"],
        ),
        ({"rollout_engine": "vllm", "load_format": "auto", "override_config": "{}"}, ["--override_config"]),
        ({"rollout_engine": "vllm", "load_format": "auto", "init_from_scratch": True}, ["--init_from_scratch"]),
        ({"rollout_engine": "vllm", "load_format": "auto", "pretrain": None}, ["--pretrain, which is not set"]),
        (
            {"rollout_engine": "vllm", "trust_remote_code": True, "override_config": "{}"},
            ["--trust_remote_code reads --pretrain without --override_config"],
        ),
    ],
)
def test_what_cannot_work_is_said(options, words):
    (message,) = found(**options)
    for word in words:
        assert word in message


def test_ranks_are_parted_evenly():
    (message,) = found(world_size=3, rollout_engine="vllm", tensor_parallel_size=2)
    assert "--tensor_parallel_size 2 does not divide the 3 ranks" in message
    assert found(world_size=4, rollout_engine="vllm", tensor_parallel_size=2) == []


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_defaults_are_fine(engine):
    assert found(rollout_engine=engine) == []


def test_greedy_rollouts_are_fine():
    assert found(rollout_engine="vllm", temperature=0.0, eval_temperature=0.0) == []


def test_every_option_says_who_reads_it():
    import dataclasses

    names = {f.name for f in dataclasses.fields(EngineConfig)} - {"rollout_engine"}
    assert names == set(READ_BY)
