"""Real vLLM servers that get weights by torch.distributed, one of them shared by two workers: pushes under ZeRO 3 on
two ranks, a trainer and a server that are killed in mid-push, weights that do not fit.

Servers are started once for the whole file, also where it is shared out over several test processes.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from filelock import FileLock
from support.ranks import REPO, run_ranks
from support.tiny import save_causal_lm
from support.vllm_servers import KEY, KEY_VARIABLE, SHARED_MEMORY, Servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # two servers and two launches in the first test
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("vllm_collective_worker.py")
# Two heads of 32 for two workers; heads of 32 are the smallest that vLLM's attention takes on a CPU.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


def see_everything(root: Path) -> dict:
    """Two servers, two launches."""
    save_causal_lm(root / "untied", max_position_embeddings=256, **SHAPE)
    files = shared_files()
    servers = Servers([str(root / "untied")] * 2, root, more=[{}, {"tensor-parallel-size": 2}])
    try:
        servers.wait()
        pids = [process.pid for process in servers.processes]
        environment = {KEY_VARIABLE: KEY, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests")])}

        def launch(task, **options):
            words = map(json.dumps, (servers.urls, pids))
            return run_ranks(WORKER, root, task, *words, env=environment, timeout=400, **options)

        seen = {"urls": servers.urls}
        seen["killed_trainer"] = launch("killed_trainer", launcher="python", world_size=1, check=False).returncode
        launch("collective")
        seen["ranks"] = [json.loads((root / f"collective-rank{rank}.json").read_text()) for rank in range(2)]
        seen["exit_code"] = servers.terminate(1)
        seen["leftovers"] = servers.leftovers()
        seen["sockets"] = len(list(servers.sockets.iterdir()))
        seen["logs"] = "".join(log.read_text() for log in servers.logs)
        seen["files"] = [path.name for path in shared_files() - files]
        return seen
    finally:
        servers.close()


def shared_files() -> set[Path]:
    """Of trainers, and of workers that share a model."""
    return {*SHARED_MEMORY.glob("lightppo*"), *SHARED_MEMORY.glob("vllm_dist*")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What was seen; the first test process makes it, others wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return see_everything(tmp_path_factory.mktemp("vllm_collective"))
    shared = tmp_path_factory.getbasetemp().parent
    with FileLock(str(shared / "vllm_collective.lock"), timeout=1100):
        result = shared / "vllm_collective.json"
        if not result.exists():
            result.write_text(json.dumps(see_everything(tmp_path_factory.mktemp("vllm_collective"))))
        return json.loads(result.read_text())


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request, seen):
    return seen["ranks"][request.param]


def test_greedy_tokens_are_those_of_the_trainer_after_every_push(rank):
    first, second, third = rank["pushes"]
    for pushed in (first, second, third):
        assert pushed["server"] == pushed["hf"]
    assert first["server"] != second["server"] != third["server"]


def test_a_trainer_killed_in_mid_push_leaves_the_servers_to_the_next_one(seen):
    """All other tests are of the next one."""
    assert seen["killed_trainer"] == -9


def test_weights_that_were_not_pushed_are_named(rank):
    differing, unknown = rank["unpushed"]
    assert "model.layers.1.self_attn.v_proj.weight" in differing
    assert unknown == []
    assert rank["pushed"] == [[], []]


def test_a_wrong_key_is_an_error_on_every_rank(rank, seen):
    message, _ = rank["wrong_key"]
    assert "HTTP 401" in message
    assert "set --vllm_server_api_key_env to the environment variable that holds the server's key" in message
    assert KEY not in seen["logs"]


def test_weights_of_another_model_are_an_error_that_names_them(rank, seen):
    message, _ = rank["wrong_names"]
    for url in seen["urls"]:
        assert f"vLLM server {url} could not load the weights: " in message
    assert "of_another_model" in message


def test_a_server_is_right_again_after_weights_that_did_not_fit(rank):
    assert rank["after_wrong_names"]["server"] == rank["after_wrong_names"]["hf"]


def test_a_server_killed_in_mid_push_is_lost_and_the_other_has_the_weights(rank, seen):
    error, seconds = rank["killed"]
    assert error == "no error"
    assert seconds < 120  # not --vllm_server_timeout
    assert list(rank["lost"]) == ["0"]
    assert seen["urls"][0] in rank["lost"]["0"]
    for later in ("after_kill", "after_that"):
        assert rank[later]["server"] == rank[later]["hf"]
    assert rank["after_kill"]["server"] != rank["after_wrong_names"]["server"] != rank["after_that"]["server"]


def test_the_default_group_is_what_it_was(rank):
    assert rank["initialized"] == 2


def test_nothing_is_left_behind(seen):
    assert seen["exit_code"] == 0
    assert seen["leftovers"] == []
    assert seen["sockets"] == 1  # the killed one's, which the next server removes
    assert seen["files"] == []
