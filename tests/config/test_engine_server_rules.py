"""What is refused of ``--rollout_engine vllm_server`` before anything is asked."""

import pytest

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError

LOCAL = ("http://127.0.0.1:8000", "http://localhost:8001")


def problems(**options) -> str:
    base = {"pretrain": "m", "prompt_data": "p.jsonl", "reward_fn": "reward.py"}
    base |= {"rollout_engine": "vllm_server", "vllm_server_url": LOCAL}
    try:
        PPOConfig.from_flat(**(base | options)).validate()
    except ConfigError as error:
        return str(error)
    return ""


def test_servers_of_this_machine() -> None:
    assert problems() == ""
    assert problems(vllm_server_sync="shm", vllm_server_timeout=5.0, vllm_server_retries=0) == ""
    assert problems(vllm_server_sync="disk", vllm_server_sync_dir="/somewhere") == ""
    assert problems(vllm_server_sync="collective") == ""
    assert problems(vllm_server_sync="collective", vllm_server_sync_address="localhost") == ""


def test_servers_elsewhere_need_a_folder_that_both_see_or_an_address_of_the_trainer() -> None:
    remote = {"vllm_server_url": ("http://127.0.0.1:8000", "http://192.0.2.1:8000")}
    message = problems(**remote)
    assert "--vllm_server_url http://192.0.2.1:8000 is on another machine: set --vllm_server_sync collective" in message
    assert "--vllm_server_sync_address to this machine's address there, or --vllm_server_sync disk" in message
    assert "--vllm_server_sync_dir to a folder that both see" in message
    for sync in ("shm", "disk", "collective"):
        assert "is on another machine" in problems(vllm_server_sync=sync, **remote)
    assert problems(vllm_server_sync="disk", vllm_server_sync_dir="/shared", **remote) == ""
    assert problems(vllm_server_sync="collective", vllm_server_sync_address="192.0.2.7", **remote) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_server_url": ()}, "--rollout_engine vllm_server needs --vllm_server_url"),
        ({"vllm_server_url": ("127.0.0.1:8000",)}, "--vllm_server_url: '127.0.0.1:8000' is not an http(s) address"),
        (
            {"vllm_server_url": ("http://127.0.0.1:1/?key=x",)},
            "http://127.0.0.1:1/?…: give http://HOST:PORT, with nothing",
        ),
        ({"vllm_server_url": ("http://a:b@host",)}, "use --vllm_server_api_key_env instead"),
        ({"vllm_server_url": (LOCAL[0], LOCAL[0] + "/")}, "--vllm_server_url has http://127.0.0.1:8000 twice"),
        ({"vllm_server_sync_dir": "/x"}, "--vllm_server_sync_dir has no effect without --vllm_server_sync disk"),
        (
            {"vllm_server_sync": "collective", "vllm_server_sync_dir": "/x"},
            "--vllm_server_sync_dir has no effect without --vllm_server_sync disk",
        ),
        (
            {"vllm_server_sync_address": "192.0.2.7"},
            "--vllm_server_sync_address has no effect without --vllm_server_sync collective",
        ),
        (
            {"vllm_server_sync": "collective", "vllm_server_sync_address": "0.0.0.0"},
            "--vllm_server_sync_address '0.0.0.0': servers cannot connect to that",
        ),
        ({"tensor_parallel_size": 2}, "--tensor_parallel_size has no effect with --rollout_engine vllm_server"),
        ({"max_num_seqs": 8}, "--max_num_seqs has no effect with --rollout_engine vllm_server"),
        ({"sleep_level": 1, "free_cache_engine": False}, "--sleep_level has no effect with --no_free_cache_engine"),
        ({"vllm_server_timeout": 0.0}, "--vllm_server_timeout 0.0 is out of range"),
        (
            {"vllm_server_timeout": 900.0},
            "--vllm_server_timeout 900: the other ranks wait for the one that asks servers",
        ),
        (
            {"vllm_server_start_timeout": 180.0, "dist_timeout": 2.0, "vllm_server_timeout": 20.0},
            "raise --dist_timeout",
        ),
        ({"rollout_engine": "hf"}, "--vllm_server_url has no effect with --rollout_engine hf: it is for vllm_server"),
        (
            {"rollout_engine": "vllm", "vllm_server_url": (), "vllm_server_concurrency": 3},
            "--vllm_server_concurrency has no effect with --rollout_engine vllm: it is for vllm_server",
        ),
    ],
)
def test_refused(options, message) -> None:
    assert message in problems(**options)
