"""Real vLLM servers, one of them with two workers: under the launcher with ZeRO 3 on two ranks, beside the engine in
process, in a whole run; weights by files and by torch.distributed; trainers and servers that are killed.

Servers are started once for the whole file, also where it is shared out over several test processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests
from support.once import once
from support.ranks import ENVIRONMENT, REPO, free_port, run_ranks
from support.tiny import read_jsonl, save_causal_lm, sums, write_jsonl
from support.vllm_servers import KEY, KEY_VARIABLE, SERVE, SHARED_MEMORY, Servers, wait_until_up

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

WORKER = Path(__file__).with_name("vllm_server_worker.py")
# Heads of 32, the smallest that vLLM's attention takes on a CPU; 21 rows of the embedding are no tokens.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
TOKENS = 43
REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


def see_everything(root: Path) -> dict:
    """Three servers, of which one takes adapters, and five launches."""
    for name, changes in {"untied": {}, "tied": {"tie_word_embeddings": True}}.items():
        save_causal_lm(root / name, max_position_embeddings=256, **SHAPE, **changes)
    models = [str(root / name) for name in ("tied", "untied", "untied")]
    shared_memory = shared_files()
    servers = Servers(models, root, more=[[], [], ["--tensor-parallel-size=2", "--lora_rank=1"]])
    try:
        third, first, second = servers.urls
        environment = {
            KEY_VARIABLE: KEY,
            "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests")]),
        }

        def launch(task, model, urls, others, **options):
            words = map(json.dumps, (urls, others, servers.pids[1:]))
            return run_ranks(
                WORKER, root, task, model, *words, env=environment, vllm=True, **options
            )

        seen = {"urls": [first, second]}
        servers.wait()
        ended = launch("killed_trainer", "untied", [first, second], [], check=False, world_size=1)
        seen["killed_trainer"] = ended.returncode
        launch("one_server", "tied", [third], [], world_size=1)
        seen["run"] = whole_run(root, third, environment)
        launch("adapters", "untied", [second], [], world_size=1)
        seen["adapters"] = json.loads((root / "adapters-rank0.json").read_text())
        launch("two_servers", "untied", [first, second], [third])
        seen["two"] = [
            json.loads((root / f"two_servers-rank{rank}.json").read_text()) for rank in range(2)
        ]
        seen["one"] = json.loads((root / "one_server-rank0.json").read_text())
        seen["exit_code"] = servers.terminate()
        seen["leftovers"] = servers.leftovers()
        seen["logs"] = "".join(log.read_text() for log in servers.logs)
        seen["sockets"] = len(list(servers.sockets.iterdir()))
        left = shared_files() - shared_memory
        seen["shared_memory"] = [path.name for path in left if not of_a_running_process(path)]
        return seen
    finally:
        servers.close()


def shared_files() -> set[Path]:
    """Of trainers, and of workers that share a model."""
    return {*SHARED_MEMORY.glob("lightppo*"), *SHARED_MEMORY.glob("vllm_dist*")}


def of_a_running_process(path: Path) -> bool:
    """Of a test beside this one, that is: all trainers of this one have ended."""
    number = path.name.removeprefix("lightppo-weights-").partition("-")[0]
    return number.isdigit() and psutil.pid_exists(int(number))


def whole_run(root: Path, url: str, environment: dict[str, str]) -> dict:
    """examples/train_ppo.py, two steps."""
    (root / "reward.py").write_text(REWARD)
    options = {
        "pretrain": root / "tied",
        "prompt_data": write_jsonl(root / "prompts.jsonl", sums(8)),
        "reward_fn": root / "reward.py",
        "save_path": root / "run",
        "ckpt_path": root / "ckpt",
        "rollout_engine": "vllm_server",
        "vllm_server_url": url,
        "vllm_server_api_key_env": KEY_VARIABLE,
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "prompt_max_len": 16,
        "generate_max_len": 8,
        "zero_stage": 2,
        "actor_learning_rate": 1e-2,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    result = run_ranks(
        REPO / "examples" / "train_ppo.py", *words, vllm=True, world_size=1, env=environment
    )
    rows = read_jsonl(root / "run" / "metrics.jsonl")
    return {"output": result.output, "steps": [row for row in rows if "rollout/reward" in row]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return once(
        tmp_path_factory,
        "vllm_server",
        lambda: see_everything(tmp_path_factory.mktemp("vllm_server")),
    )


@pytest.fixture(params=["untied, ZeRO 3, rank 0", "untied, ZeRO 3, rank 1", "tied"])
def rank(request, seen):
    return seen["one"] if request.param == "tied" else seen["two"][int(request.param[-1])]


@pytest.mark.parametrize("sync", ["pushes", "collective"])
def test_greedy_tokens_are_those_of_the_trainer_after_every_push(rank, sync, seen):
    if rank is seen["one"] and sync == "collective":
        pytest.skip("by files only")
    first, second, third = rank[sync]
    for pushed in (first, second, third):
        assert pushed["server"] == pushed["hf"]
    assert first["server"] != second["server"] != third["server"]


def test_a_trainer_killed_in_mid_push_leaves_the_servers_to_the_next_one(seen):
    """All other tests are of the next one."""
    assert seen["killed_trainer"] == -9


@pytest.mark.parametrize("case", ["stop", "minimum", "penalty"])
def test_greedy_tokens_with_options_are_those_of_the_trainer(seen, case):
    assert seen["one"][case]["server"] == seen["one"][case]["hf"]
    assert seen["one"][case]["server"] != seen["one"]["greedy"]


def test_samples_are_those_of_the_engine_in_process(seen):
    assert seen["one"]["sampled"] == seen["one"]["in_process"]


def test_log_probs_are_those_of_the_trainer_at_its_temperature(seen):
    for rank in seen["two"]:
        assert rank["difference"] < 1e-4


def test_samples_do_not_depend_on_order_and_servers(seen):
    for rank in seen["two"]:
        assert sorted(rank["reversed"]) == sorted(rank["sampled"])
        assert rank["one_server"] == rank["sampled"]
        assert max(max(ids) for _, _, ids, _, _ in rank["sampled"]) < TOKENS


class TestAdapters:
    """The server has two workers, each of which has a part of every layer."""

    @pytest.mark.parametrize("way", ["pushes", "collective", "merged"])
    def test_greedy_tokens_are_those_of_the_trainer_after_every_push(self, seen, way):
        pushes = seen["adapters"][way]
        for pushed in pushes:
            assert pushed["server"] == pushed["hf"]
        assert pushes[0]["server"] != pushes[1]["server"]

    def test_log_probs_are_those_of_the_trainer(self, seen):
        assert seen["adapters"]["difference"] < 3e-4  # rounding is larger at rank 1

    def test_a_push_sends_at_most_a_hundredth_of_a_merged_one(self, seen):
        seen = seen["adapters"]
        assert seen["alone"]
        assert 0 < seen["sent"] <= 0.01 * seen["sent merged"]
        # the frozen weights go first, and again when the server has others
        assert seen["first"] == seen["sent again"] == seen["sent"] + seen["sent merged"]

    def test_only_the_newest_adapter_is_left(self, seen):
        for held in ("held", "held after"):
            workers, adapter = seen["adapters"][held]
            assert len(workers) == 2
            for worker in workers:
                assert worker["held"] == [adapter]
                assert len(worker["slots"]) == 1

    def test_a_request_keeps_its_adapter_through_a_push(self, seen):
        during = seen["adapters"]["during"]
        assert during["served"]
        assert during["held"]
        assert during["old"][0] == during["old"][1]
        assert during["new"][0] == during["new"][1]
        assert during["new"][0][0][2] != during["old"][0][0]

    def test_a_server_with_other_weights_is_not_believed_and_gets_them_again(self, seen):
        message, _ = seen["adapters"]["taken"]
        assert "has other weights than were pushed" in message
        again = seen["adapters"]["again"]
        assert again["server"] == again["hf"]


def test_weights_that_were_not_pushed_are_named(seen):
    for rank in seen["two"]:
        differing, unknown = rank["unpushed"]
        assert "model.layers.1.self_attn.v_proj.weight" in differing
        assert unknown == []
        assert rank["pushed"] == [[], []]


def test_a_wrong_key_is_an_error_on_every_rank(seen):
    for rank in seen["two"]:
        message, _ = rank["wrong_key"]
        assert "HTTP 401" in message
        assert (
            "set --vllm_server_api_key_env to the environment variable that holds the server's key"
            in message
        )
        assert "barley" not in message
    assert KEY not in seen["logs"]


def test_another_model_is_an_error_on_every_rank(seen):
    for rank in seen["two"]:
        message, _ = rank["other_model"]
        assert "which is not the model of --pretrain" in message
        assert "tie_word_embeddings True for False" in message


def test_a_server_with_the_weights_of_another_run_is_not_believed(seen):
    for rank in seen["two"]:
        (message, _), lost = rank["taken"]
        assert message == "no error"
        assert list(lost) == ["0"]
        assert "has other weights than were pushed" in lost["0"]


def test_weights_of_another_model_are_an_error_that_names_them(seen):
    for rank in seen["two"]:
        message, _ = rank["wrong_names"]
        assert "of_another_model" in message
        assert all(url in message for url in seen["urls"])
        (after,) = rank["after_wrong_names"]
        assert after["server"] == after["hf"]


def test_a_server_killed_in_mid_rollout_changes_no_sample(seen):
    for rank in seen["two"]:
        assert rank["killed_one"] == rank["before"]
        assert rank["after"] == rank["before"]
        assert list(rank["lost"]) == ["1"]
        assert seen["urls"][1] in rank["lost"]["1"]


def test_without_any_server_every_rank_ends_with_an_error(seen):
    """The last one was killed in mid-push."""
    for rank in seen["two"]:
        message, seconds = rank["killed_both"]
        assert "none of the 2 servers is left" in message
        assert all(url in message for url in seen["urls"])
        assert seconds < 120  # not --vllm_server_timeout
        assert "none of the 2 servers is left" in rank["then"][0]


def test_the_default_group_is_what_it_was(seen):
    assert [rank["initialized"] for rank in seen["two"]] == [2, 2]


def test_a_whole_run(seen):
    steps = seen["run"]["steps"]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/logp_diff_max"] < 1e-4
    assert "rollout check: log probs differ by" in seen["run"]["output"]


@pytest.mark.long
def test_the_script_becomes_a_server_and_ends_as_one(tmp_path):
    """In a process of its own; the servers above are forked."""
    model, port = (
        save_causal_lm(tmp_path / "model", max_position_embeddings=256, **SHAPE),
        free_port(),
    )
    sockets = Path(tempfile.mkdtemp(prefix="lppo-", dir="/tmp"))
    command = [
        sys.executable,
        str(SERVE),
        f"--model={model}",
        f"--port={port}",
        f"--api_key_env={KEY_VARIABLE}",
    ]
    command += [
        "--dtype=float32",
        f"--kv-cache-memory-bytes={32 << 20}",
        "--max-model-len=128",
        "--block-size=32",
    ]
    environment = os.environ | ENVIRONMENT | {KEY_VARIABLE: KEY, "VLLM_RPC_BASE_PATH": str(sockets)}
    url, body = f"http://127.0.0.1:{port}", {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            wait_until_up(url, lambda: server.poll() is None)
            assert requests.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 401
            key = {"Authorization": f"Bearer {KEY}"}
            answer = requests.post(
                f"{url}/v1/completions", json=body, headers=key, timeout=60
            ).json()
            assert answer["usage"]["completion_tokens"] <= 4
            server.terminate()
            assert server.wait(120) == 0
            assert list(sockets.iterdir()) == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            shutil.rmtree(sockets)


def test_nothing_is_left_behind(seen):
    # At its end vLLM looks up which process still has the port, and fails if that process has just ended.
    vllms_own = (
        "in serve_http" in seen["logs"]
        and re.search(r"psutil\.(NoSuch|Zombie)Process", seen["logs"]) is not None
    )
    assert seen["exit_code"] == int(vllms_own), seen["logs"][-4000:]
    assert seen["leftovers"] == []
    assert seen["sockets"] == 2  # those of killed servers, which the next one removes
    assert seen["shared_memory"] == []
