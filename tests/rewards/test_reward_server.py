"""Real server processes on loopback: asked, overfed, slowed down, killed, and ended."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from support.tiny import save_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightppo.cli import serve_reward
from lightppo.errors import RewardError
from lightppo.rewards import RemoteReward, RewardOutput

pytest.importorskip("fastapi", reason="lightppo[serve] is not installed")

from lightppo.rewards.reward_server import RewardApp, serve

REPO = Path(__file__).parents[2]
TOKEN = "s3cret-Token/+=="
MOST_SECONDS = 90  # for a process to start or to do what it was told

REWARDS = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def reward_func(queries, prompts, labels, responses, **extra):
    with open(HERE / "seen", "a") as seen:
        seen.write("".join(query + "\\n" for query in queries))
    mode = labels[0] if isinstance(labels[0], str) else ""
    if mode.startswith("wait:"):
        (HERE / f"{mode[5:]}.waits").touch()
        while not (HERE / f"{mode[5:]}.go").exists():
            time.sleep(0.01)
    if mode == "raise":
        raise ValueError("cannot say " + os.environ["RM_TOKEN"])
    if mode == "exit":
        raise SystemExit(3)
    answers = {"nan": [float("nan")] * len(queries), "short": [1.0], "none": [None] * len(queries)}
    rewards = answers.get(mode, [float(len(response)) for response in responses])
    return {"rewards": rewards, "scores": [0.5] * len(queries), "extra_logs": {"n": len(queries), "pred": responses,
            "label": [str(label) for label in labels]}}
"""


class ServerProcess:
    """``lightppo serve-reward`` with some flags; what it prints is in files."""

    def __init__(self, folder, *args, port=0):
        folder.mkdir(exist_ok=True)
        self.output, self.log = folder / "stdout", folder / "stderr"
        environment = {
            name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
        }
        with open(self.output, "w") as out, open(self.log, "a") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lightppo", "serve-reward", *args, "--port", str(port)],
                env=environment
                | {"RM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        try:
            wait_for(
                lambda: "serving" in self.output.read_text() or self.process.poll() is not None
            )
            assert self.process.poll() is None, self.log.read_text()
        except BaseException:
            self.kill()
            raise
        self.url = self.output.read_text().split()[-1]
        self.port = int(self.url.split(":")[2].split("/")[0])

    def post(self, body, **options):
        headers = {"Authorization": f"Bearer {TOKEN}"} | options.pop("headers", {})
        return requests.post(self.url, headers=headers, timeout=MOST_SECONDS, json=body, **options)

    def kill(self):
        self.process.kill()
        self.process.wait()


def wait_for(condition):
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a reward function that does what the first label says."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


FLAGS = ("--token_env", "RM_TOKEN", "--max_samples", "100", "--max_bytes", "5000")


@pytest.fixture(scope="module")
def server(folder):
    process = ServerProcess(folder / "one", "--reward_fn", str(folder / "rewards.py"), *FLAGS)
    yield process
    process.kill()


def ask(server, rollouts, mode="", **options):
    for rollout in rollouts:
        rollout.prompt.label = mode or rollout.prompt.label
    options = {
        "token": TOKEN,
        "retries": 0,
        "timeout": MOST_SECONDS,
        "sleep": lambda seconds: None,
    } | options
    return RemoteReward([server.url], **options).score(rollouts)


def refused(server, rollouts, mode="", **options):
    with pytest.raises(RewardError) as caught:
        ask(server, rollouts, mode, **options)
    assert str(caught.value).startswith(f"reward server {server.url}: ")
    return str(caught.value)


def test_a_function_is_served(server, rollouts):
    rollouts[1].response_text = "é\n漢"
    output = ask(server, rollouts)
    assert output.scores == [8.0, 3.0, 8.0, 8.0, 8.0]  # len("answer 0"), len("é\n漢")
    assert output.metrics == {"score": [0.5] * 5, "n": [5.0] * 5}
    assert output.texts["pred"] == [rollout.response_text for rollout in rollouts]
    assert ask(server, rollouts, "none").scores == [None] * 5
    # labels may be left out
    assert server.post({"query": ["ab"], "prompts": ["a"]}).json()["rewards"] == [1.0]
    labelled = {"query": ["a", "b"], "prompts": ["", ""], "labels": ["first", 2]}
    # each at its sample
    assert server.post(labelled).json()["extra_logs"]["label"] == ["first", "2"]
    assert server.post({"query": [], "prompts": [], "labels": []}).json() == {"rewards": []}


def test_strangers_are_kept_out(server, folder, rollouts):
    before = (folder / "seen").read_text() if (folder / "seen").exists() else ""
    for token in (None, "another", TOKEN[:-1], TOKEN + "x"):
        text = refused(server, rollouts, token=token)
        assert 'HTTP 401: {"error":"the bearer token is missing or wrong"}' in text
    huge = {"query": ["x" * 1_000_000], "prompts": [""]}  # an answer comes, however much was sent
    assert server.post(huge, headers={"Authorization": "Bearer x"}).status_code == 401
    assert (
        requests.get(server.url.replace("get_reward", "docs"), timeout=MOST_SECONDS).status_code
        == 401
    )
    health = requests.get(server.url.replace("get_reward", "health"), timeout=MOST_SECONDS)
    assert health.json() == {"status": "ok", "source": "rewards.py:reward_func"}
    assert ((folder / "seen").read_text() if before else "") == before


BAD: dict[str, tuple[Any, int, str]] = {
    "no list": ({"query": "ab", "prompts": ["a"]}, 422, "query: Input should be a valid list"),
    "no prompts": ({"query": ["ab"]}, 422, "prompts: Field required"),
    "a number": ({"query": [3], "prompts": [""]}, 422, "query.0: Input should be a valid string"),
    "unknown": (
        {"query": ["a"], "prompts": [""], "images": []},
        422,
        "images: Extra inputs are not permitted",
    ),
    "lengths": ({"query": ["a"], "prompts": [""], "labels": []}, 422, "same length"),
    "no prefix": (
        {"query": ["a", "b"], "prompts": ["", "c"]},
        422,
        "query 1 does not begin with its prompt",
    ),
    "samples": ({"query": ["a"] * 101, "prompts": [""] * 101}, 413, "--max_samples is 100"),
    "long": ({"query": ["a" * 5000], "prompts": [""]}, 413, "longer than --max_bytes 5000"),
    "list": ([1, 2], 422, "valid dictionary"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_explained(server, case):
    body, status, message = BAD[case]
    answer = server.post(body)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_bytes_that_are_no_request(server):
    url, headers = server.url, {"Authorization": f"Bearer {TOKEN}"}
    for data, kind, message in (
        (b'{"query": [', "application/json", "JSON decode error"),
        (b'{"query": "\xff"}', "application/json", "pars"),
        # Python 3.13 reads brackets as deep as these
        (b"[" * 4000, "application/json", "pars|JSON decode error"),
        (
            b'{"query": ["a"], "prompts": [""]}',
            "text/plain",
            "must be JSON, with Content-Type: application/json",
        ),
    ):
        answer = requests.post(
            url, data, headers=headers | {"Content-Type": kind}, timeout=MOST_SECONDS
        )
        assert answer.status_code in (400, 422), answer.text
        assert re.search(message, answer.json()["error"])
    chunks = (b" " * 1000 for _ in range(10))  # a length that is not told beforehand
    answer = requests.post(
        url, chunks, headers=headers | {"Content-Type": "application/json"}, timeout=MOST_SECONDS
    )
    assert (answer.status_code, answer.json()) == (
        413,
        {"error": "the request is longer than --max_bytes 5000"},
    )


def test_failures_of_the_function_are_errors_without_secrets(server, rollouts):
    text = refused(server, rollouts, "raise")
    assert "HTTP 500" in text
    assert (
        "ValueError: cannot say ***"
        in server.post({"query": ["a"], "prompts": [""], "labels": ["raise"]}).json()["error"]
    )
    assert "score of sample 0" in refused(server, rollouts, "nan")
    assert "1 scores for 5 samples" in refused(server, rollouts, "short")
    assert "SystemExit" in refused(server, rollouts, "exit")
    assert ask(server, rollouts, "fine").scores == [8.0] * 5  # it lives on
    log = server.log.read_text()
    assert "cannot say ***" in log
    assert TOKEN not in log + server.output.read_text()


def test_a_slow_server_is_a_time_out_and_then_asked_again(server, folder, rollouts):
    wake = (folder / "slow.go").touch
    output = ask(
        server, rollouts, "wait:slow", timeout=2.0, retries=5, sleep=lambda seconds: wake()
    )
    assert output.scores == [8.0] * 5
    assert output.metrics["timeouts"] == output.metrics["failures"]
    assert min(output.metrics["timeouts"]) >= 1.0


def test_who_left_while_waiting_is_not_scored(server, folder, rollouts):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, rollouts, "wait:turn")
        wait_for((folder / "turn.waits").exists)
        body = b'{"query": ["of one who left"], "prompts": [""]}'
        head = f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as leaver:
            leaver.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(3):  # the server has seen the one before when it answers the next
            requests.get(server.url.replace("get_reward", "health"), timeout=MOST_SECONDS)
        (folder / "turn.go").touch()
        assert first.result(MOST_SECONDS).scores == [8.0] * 5
    wait_for(lambda: "a client left before its 1 samples were scored" in server.log.read_text())
    assert "of one who left" not in (folder / "seen").read_text()


def test_killed_in_mid_run_and_started_again(folder, rollouts):
    flags = ("--reward_fn", str(folder / "rewards.py"), "--token_env", "RM_TOKEN")
    servers = [ServerProcess(folder / "killed", *flags)]
    waits = folder / "kill.waits"
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            (folder / "kill.go").touch()
            servers.append(ServerProcess(folder / "killed", *flags, port=servers[0].port))

    try:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(ask, servers[0], rollouts, "wait:kill", retries=3, sleep=sleep)
            wait_for(waits.exists)
            servers[0].kill()
            output = run.result(MOST_SECONDS)
        assert output.scores == [8.0] * 5
        # the request it died with, and one to a closed port
        assert output.metrics["failures"] == [2.0] * 5
        assert output.metrics["timeouts"] == [0.0] * 5
        servers[1].kill()
        assert "(2 of 2 tries)" in refused(servers[1], rollouts, retries=1)
    finally:
        for server in servers:
            server.kill()


def test_sigterm_lets_requests_end(folder, make_rollout):
    flags = (
        "--reward_fn",
        str(folder / "rewards.py"),
        "--token_env",
        "RM_TOKEN",
        "--max_concurrent",
        "2",
    )
    server = ServerProcess(folder / "ended", *flags)
    names = ("end", "finish")
    try:
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(ask, server, [make_rollout(0)], f"wait:{name}") for name in names]
            # both at a time
            wait_for(lambda: all((folder / f"{name}.waits").exists() for name in names))
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "Shutting down" in server.log.read_text())
            for name in names:
                (folder / f"{name}.go").touch()
            assert [run.result(MOST_SECONDS).scores for run in runs] == [[8.0]] * 2
        assert server.process.wait(MOST_SECONDS) == 0
    finally:
        server.kill()
    assert "Traceback" not in server.log.read_text()


class Echo:
    name = "echo"

    def score(self, rollouts):
        if rollouts[0].response_text == "slow":
            time.sleep(1.2)
        return RewardOutput([1.0] * len(rollouts))


@pytest.fixture
def serve_echo():
    """``serve_echo(**options)``: the address of a server in a thread."""

    def start(**options):
        urls = queue.Queue()
        app = RewardApp(Echo(), token=TOKEN, **options)
        threading.Thread(
            target=serve, args=(app,), kwargs={"port": 0, "started": urls.put}, daemon=True
        ).start()
        return urls.get(timeout=MOST_SECONDS)

    return start


@pytest.fixture
def opened():
    """``opened(url, bytes)``: a connection that has sent them."""
    clients = []

    def open_one(url, data):
        clients.append(
            socket.create_connection(
                ("127.0.0.1", int(url.split(":")[2].split("/")[0])), MOST_SECONDS
            )
        )
        clients[-1].sendall(data)
        return clients[-1]

    yield open_one
    for client in clients:
        client.close()


def answer(client):
    """All that a server sends until it closes the connection."""
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data.decode()


def post(url, response="x"):
    body = {"query": [response], "prompts": [""]}
    return requests.post(
        url, json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=MOST_SECONDS
    )


BAD_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 9\r\n\r\n{"
GOOD_HEAD = BAD_HEAD.replace(b"Bearer x", b"Bearer " + TOKEN.encode())
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", ""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nAuthoriz", ""),
        (BAD_HEAD, "401 Unauthorized"),
        (GOOD_HEAD, "408 Request Timeout"),
        (HEALTH + b"POST / HT", "200 OK"),
    ],
)
def test_requests_that_never_end_are_ended(serve_echo, opened, sent, answered):
    url = serve_echo(stranger_timeout=0.6, body_timeout=0.3)
    text = answer(opened(url, sent))
    assert text.startswith(f"HTTP/1.1 {answered}") if answered else not text


def test_scoring_has_all_the_time(serve_echo):
    assert post(serve_echo(stranger_timeout=1.0, body_timeout=1.0), "slow").json() == {
        "rewards": [1.0]
    }


@pytest.mark.parametrize("sent", [b"", b"POST / HT", BAD_HEAD])
def test_half_open_connections_lock_nobody_out(serve_echo, opened, sent):
    """No time limit helps here: the oldest give way."""
    url = serve_echo(max_strangers=3, stranger_timeout=3600.0)
    strangers = [opened(url, sent) for _ in range(10)]
    uploading = opened(url, GOOD_HEAD)  # shows the token, so it stays
    strangers += [opened(url, sent) for _ in range(10)]
    assert post(url).json() == {"rewards": [1.0]}
    assert [answer(client) for client in strangers[:17]] == [""] * 17
    uploading.sendall(b"12345678")
    assert uploading.recv(1 << 16).startswith(b"HTTP/1.1 422")


@pytest.fixture
def command(monkeypatch):
    """``command(name, *args)``: calls a function of ``lightppo serve-reward`` with this command line."""

    def call(name, *args):
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        function = getattr(serve_reward, name)
        return function(args) if name == "main" else function(serve_reward.parse_args(args))

    return call


def test_a_reward_model_is_served(make_rollout, tmp_path, command):
    path = save_reward_model(tmp_path / "model", mean=0.5, std=2.0)
    source = command(
        "reward_model", "--reward_pretrain", path, "--normalize_reward", "--micro_batch_size", "2"
    )
    urls = queue.Queue()
    options = {"port": 0, "started": urls.put}
    threading.Thread(target=serve, args=(RewardApp(source),), kwargs=options, daemon=True).start()
    rollouts = [
        make_rollout(i, answer) for i, answer in enumerate(("yes", "no", "a longer answer"))
    ]
    scores = RemoteReward([urls.get(timeout=MOST_SECONDS)], retries=0).score(rollouts).scores
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    with torch.no_grad():
        rows = [
            tokenizer(r.prompt.text + r.response_text)["input_ids"] + [tokenizer.eos_token_id]
            for r in rollouts
        ]
        raw = [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    assert scores == pytest.approx([(score - 0.5) / 2.0 for score in raw], abs=1e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--reward_pretrain", "/nowhere", "--host", "0.0.0.0"], "--host 0.0.0.0 .*--token_env"),
        (
            ["--reward_fn", "/nowhere.py", "--token_env", "UNSET_TOKEN"],
            "--token_env: environment variable UNSET_TOKEN",
        ),
        (["--reward_fn", "/nowhere/r.py"], "--reward_fn: no file /nowhere/r.py"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(args, message, command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command("main", *args)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_without_its_packages_a_line_says_what_to_install(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightppo.rewards.reward_server", None)
    with pytest.raises(SystemExit) as stopped:
        command("main", "--reward_fn", "rewards.py")
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": pip install 'lightppo[serve]'")


def test_the_world_needs_a_token():
    class Source:
        name = "source"

    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 .*--token_env"):
        serve(RewardApp(Source()), host="0.0.0.0", port=0)


def test_bad_options_are_refused():
    class Source:
        name = "source"

        def score(self, rollouts):
            return RewardOutput([])

    for name in ("max_samples", "max_bytes", "max_concurrent", "max_strangers"):
        with pytest.raises(ValueError, match=f"--{name}"):
            RewardApp(Source(), **{name: 0})
    with pytest.raises(ValueError, match="token"):
        RewardApp(Source(), token="")
