"""A real HTTP server that is made to fail and to lie in every way we know."""

import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import RemoteReward, read_token

TOKEN = "s3cret-Token/+=="
NO_FAILURES = {"failures": [0.0] * 5, "timeouts": [0.0] * 5}


class Sleeps(list):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def failing(rollouts: list[Rollout], urls: list[str], **options: Any) -> RewardError:
    options = {"retries": 1, "timeout": 5.0, "sleep": Sleeps()} | options
    with pytest.raises(RewardError) as caught:
        RemoteReward(urls, **options).score(rollouts)
    return caught.value


def test_posts_the_contract_and_reads_the_answer(server: Any, rollouts: list[Rollout]) -> None:
    server.reply = lambda body, n: server.good(
        [0, 1.5, None, -2, 1e-3], scores=[1, 0, 0, 0, 0], extra_logs={"fmt": [1, 0, 1, None, 1], "load": 0.25}
    )
    output = RemoteReward([server.url]).score(rollouts)
    assert server.requests == [
        {
            "query": [f"question {i}: answer {i}" for i in range(5)],
            "prompts": [f"question {i}: " for i in range(5)],
            "labels": ["0", "1", "2", "3", "4"],
        }
    ]
    assert output.scores == [0.0, 1.5, None, -2.0, 0.001]
    assert output.metrics == {"score": [1, 0, 0, 0, 0], "fmt": [1, 0, 1, None, 1], "load": [0.25] * 5} | NO_FAILURES
    assert "Authorization" not in server.headers[0]


def test_several_servers_share_the_batch_in_order(make_server: Callable[[], Any], rollouts: list[Rollout]) -> None:
    first, second = make_server(), make_server()
    first.reply = lambda body, n: first.good([float(label) for label in body["labels"]], extra_logs={"a": 1.0})
    second.reply = lambda body, n: second.good([float(label) for label in body["labels"]])
    output = RemoteReward([first.url, second.url]).score(rollouts)
    assert [len(server.requests[0]["query"]) for server in (first, second)] == [2, 3]
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert output.metrics == {"a": [1.0, 1.0, None, None, None]} | NO_FAILURES  # the second server logs none


def test_servers_without_a_share_are_not_asked(make_server: Callable[[], Any], rollouts: list[Rollout]) -> None:
    servers = [make_server() for _ in range(3)]
    output = RemoteReward([server.url for server in servers]).score(rollouts[:1])
    assert output.scores == [0.0]
    assert sum(len(server.requests) for server in servers) == 1
    assert RemoteReward([servers[0].url]).score([]).scores == []
    assert sum(len(server.requests) for server in servers) == 1


LIES: dict[str, tuple[tuple[int, bytes], str]] = {
    "too few": ((200, b'{"rewards": [1, 2]}'), "2 scores for 5 samples"),
    "too many": ((200, b'{"rewards": [1, 2, 3, 4, 5, 6]}'), "6 scores for 5 samples"),
    "nan": ((200, b'{"rewards": [1, 2, NaN, 4, 5]}'), r"score of sample 2 \(prompt row 102, .* is nan"),
    "infinity": ((200, b'{"rewards": [-Infinity, 2, 3, 4, 5]}'), "score of sample 0 .* is -inf"),
    "strings": ((200, b'{"rewards": [1, "2", 3, 4, 5]}'), "score of sample 1 .* is '2'"),
    "one number": ((200, b'{"rewards": 1.0}'), "'rewards' must be a list"),
    "no rewards": ((200, b'{"reward": [1, 2, 3, 4, 5]}'), "the keys must be 'rewards'"),
    "null rewards": ((200, b'{"rewards": null}'), "the keys must be 'rewards'"),
    "bad logs": ((200, b'{"rewards": [1, 2, 3, 4, 5], "extra_logs": {"a": [1]}}'), "1 metric 'a's for 5 samples"),
    "logs no object": ((200, b'{"rewards": [1, 2, 3, 4, 5], "extra_logs": [1]}'), "'extra_logs' must map"),
    "list": ((200, b"[1, 2, 3, 4, 5]"), "must be a JSON object with 'rewards', got list"),
    "html": ((200, b"<html>busy</html>"), "not JSON .*<html>busy"),
    "deep": ((200, b"[" * 100_000), "not JSON"),
    "empty": ((200, b""), "not JSON"),
    "not utf-8": ((200, b'{"rewards": "\xff"}'), "not JSON"),
    "500": ((500, b"Traceback: out of memory"), "HTTP 500: Traceback: out of memory"),
    "503": ((503, b""), "HTTP 503"),
    "429": ((429, b"slow down"), "HTTP 429: slow down"),
    "204": ((204, b""), "HTTP 204"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_an_error_that_names_the_url_after_the_retries(server: Any, rollouts: list[Rollout], lie: str) -> None:
    answer, message = LIES[lie]
    server.reply = lambda body, n: answer
    sleeps = Sleeps()
    error = failing(rollouts, [server.url], retries=3, sleep=sleeps)
    assert error.args[0].startswith(f"reward server {server.url}: ")
    assert error.args[0].endswith("(4 of 4 tries)")
    assert len(server.requests) == 4
    assert sleeps == [1.0, 2.0, 4.0]
    with pytest.raises(RewardError, match=message):
        raise error


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 403, 404, 422])
def test_what_stays_wrong_is_not_tried_again(server: Any, rollouts: list[Rollout], status: int) -> None:
    server.reply = lambda body, n: (status, b"no")
    error = failing(rollouts, [server.url], retries=3)
    assert f"{server.url}: HTTP {status}" in str(error)
    assert "(1 of 4 tries)" in str(error)
    assert len(server.requests) == 1


def test_redirects_take_the_samples_nowhere_else(make_server: Callable[[], Any], rollouts: list[Rollout]) -> None:
    first, elsewhere = make_server(), make_server()
    first.reply = lambda body, n: (307, b"")
    first.location = elsewhere.url
    assert "HTTP 307: redirects are not followed" in str(failing(rollouts, [first.url], token=TOKEN))
    assert elsewhere.requests == []


def test_a_server_that_recovers_is_used(server: Any, rollouts: list[Rollout], caplog: pytest.LogCaptureFixture) -> None:
    server.reply = lambda body, n: (500, b"warming up") if n < 3 else server.good([n] * 5)
    with caplog.at_level(logging.WARNING):
        output = RemoteReward([server.url], retries=2, sleep=Sleeps()).score(rollouts)
    assert output.scores == [3.0] * 5
    assert caplog.text.count(f"{server.url}: HTTP 500: warming up; next try in") == 2


def test_failed_requests_are_counted_for_their_samples(make_server: Callable[[], Any], rollouts: list[Rollout]) -> None:
    good, shaky = make_server(), make_server()
    answers = [(500, b"busy"), (200, b"<html>"), shaky.good([2.0, 3.0, 4.0], extra_logs={"failures": [1, 0, None]})]
    shaky.reply = lambda body, n: answers[n - 1]
    output = RemoteReward([good.url, shaky.url], sleep=Sleeps()).score(rollouts)
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    # two requests failed for the three samples of the second server; it had one failure of its own with the first
    assert output.metrics == {"failures": [0.0, 0.0, 3.0, 2.0, 2.0], "timeouts": [0.0] * 5}
    assert RemoteReward([good.url], retries=0).score(rollouts).metrics == {}  # nothing to count: a failure ends it


def test_a_time_out_is_counted_as_one(server: Any, rollouts: list[Rollout]) -> None:
    answered = threading.Event()

    def reply(body: Any, n: int) -> Any:
        if n == 1:
            answered.wait(60)  # longer than the client waits
        return server.good(range(5))

    def sleep(seconds: float) -> None:
        answered.set()
        source.timeout = 60.0  # the second try is not the matter

    server.reply = reply
    source = RemoteReward([server.url], timeout=0.5, sleep=sleep)
    try:
        output = source.score(rollouts)
    finally:
        answered.set()
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert output.metrics == {"failures": [1.0] * 5, "timeouts": [1.0] * 5}


def test_unscored_where_asked_for(
    make_server: Callable[[], Any], rollouts: list[Rollout], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = make_server(), make_server()
    bad.reply = lambda body, n: (500, b"dead for good")
    options = {"retries": 1, "sleep": Sleeps(), "on_reward_failure": "unscored"}
    with caplog.at_level(logging.WARNING):
        output = RemoteReward([good.url, bad.url], **options).score(rollouts)
    assert output.scores == [0.0, 1.0, None, None, None]
    assert output.metrics == {"failures": [0.0, 0.0, 2.0, 2.0, 2.0], "timeouts": [0.0] * 5}
    assert f"{bad.url}: HTTP 500: dead for good (2 of 2 tries); its 3 samples stay unscored" in caplog.text
    bad.reply = lambda body, n: (401, b"who are you?")  # a mistake of ours, which no sample should pay for
    with pytest.raises(RewardError, match="HTTP 401"):
        RemoteReward([good.url, bad.url], **options).score(rollouts)


@pytest.mark.parametrize("retries", [0, 2])
def test_no_failure_ever_becomes_a_score(server: Any, make_rollout: Callable[..., Rollout], retries: int) -> None:
    """30% of the requests fail: errors, garbage, too few, NaN, answers that break off."""
    right = [float(10 + i) for i in range(3)]
    whole = json.dumps({"rewards": right}).encode()
    failures = [(500, b"oops"), (200, b"<html>"), (200, b'{"rewards": [0]}'), (200, b'{"rewards": [NaN, 0, 0]}')]
    fates = ["right", "right", "wrong", "right", "right", "wrong", "breaks off", "right", "right", "right"] * 20

    def break_off(wfile: Any, answer: bytes) -> None:
        wfile.write(answer[: len(answer) // 2] if fates[len(server.requests)] == "breaks off" else answer)

    server.reply = lambda body, n: failures[n // 10 % 4] if fates[n] == "wrong" else (200, whole)
    server.write = break_off
    rollouts = [make_rollout(i) for i in range(3)]
    source = RemoteReward([server.url], retries=retries, sleep=Sleeps(), on_reward_failure="unscored")
    outputs = [source.score(rollouts) for _ in range(40)]
    unscored = [output for output in outputs if output.scores != right]
    assert all(output.scores == [None] * 3 for output in unscored)
    assert all(output.metrics["failures"] == [retries + 1.0] * 3 for output in unscored)
    failed = sum(output.metrics["failures"][0] for output in outputs)
    assert failed == len(server.requests) - (len(outputs) - len(unscored))
    assert failed == sum(fate != "right" for fate in fates[1 : len(server.requests) + 1])
    assert len(unscored) == (12 if retries == 0 else 0)  # 30% of 40; never three failures in a row


def test_token_scores_of_all_servers(make_server: Callable[[], Any], make_rollout: Callable[..., Rollout]) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.reply = lambda body, n: servers[0].good([0.5], token_scores=[[float(body["labels"][0])]])
    rollouts = [make_rollout(0, label="7"), make_rollout(0, label="8")]
    assert RemoteReward([server.url for server in servers]).score(rollouts).token_scores == [[7.0], [8.0]]


def test_an_endless_answer_is_cut_off(server: Any, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightppo.rewards.remote._MOST_BYTES", 1000)
    server.reply = lambda body, n: server.good(range(5), padding=" " * 1000)
    text = str(failing(rollouts, [server.url], retries=0))
    assert text.startswith(f"reward server {server.url}: RequestException: the answer is longer than 1000 bytes")


def test_waits_are_bounded(server: Any, rollouts: list[Rollout]) -> None:
    server.reply = lambda body, n: (500, b"")
    sleeps = Sleeps()
    failing(rollouts, [server.url], retries=7, sleep=sleeps)
    assert sleeps == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_dead_server_is_named_and_the_living_one_is_not(server: Any, rollouts: list[Rollout]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound but not listening: refuses for as long as the test holds it
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}/rm"
        text = str(failing(rollouts, [server.url, dead]))
    assert f"reward server {dead}: ConnectionError" in text
    assert "refused" in text
    assert server.url not in text


def test_every_failing_server_is_named(make_server: Callable[[], Any], rollouts: list[Rollout]) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.reply = lambda body, n: (500, b"")
    text = str(failing(rollouts, [server.url for server in servers]))
    assert all(server.url in text for server in servers)


def test_silence_is_a_time_out(rollouts: list[Rollout]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connects, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/rm"
        text = str(failing(rollouts, [url], timeout=0.3))
    assert f"reward server {url}: ReadTimeout" in text
    assert "(2 of 2 tries)" in text


def test_a_dripping_answer_is_cut_off(server: Any, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lightppo.rewards.remote.time.monotonic", lambda: clock[0])

    def drip(wfile: Any, answer: bytes) -> None:
        for byte in answer:
            clock[0] += 1.0  # each byte a second after the one before, well within the silence allowed
            wfile.write(bytes([byte]))

    server.reply = lambda body, n: server.good(range(5), padding=" " * 1000)
    server.write = drip
    assert "TimeoutError: the answer was not complete after 5 s" in str(failing(rollouts, [server.url], retries=0))


def test_a_cut_off_answer_is_an_error(server: Any, rollouts: list[Rollout]) -> None:
    whole = server.good(range(5))[1]
    server.reply = lambda body, n: (200, whole + b" " * 100)

    def stop_early(wfile: Any, answer: bytes) -> None:  # valid JSON, but fewer bytes than announced
        wfile.write(answer[: len(whole)])

    server.write = stop_early
    assert f"reward server {server.url}: " in str(failing(rollouts, [server.url]))


def test_labels_that_are_not_json_are_not_sent(server: Any, make_rollout: Callable[..., Rollout]) -> None:
    text = str(failing([make_rollout(0, label={1, 2})], [server.url], retries=3))
    assert "labels cannot be sent as JSON" in text
    assert server.requests == []
    assert "labels cannot be sent" in str(failing([make_rollout(0, label=float("nan"))], [server.url]))


def test_token_is_sent(server: Any, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", f"{TOKEN}\n")
    RemoteReward([server.url], token=read_token(env="RM_TOKEN")).score(rollouts)
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"


def test_netrc_is_not_sent(
    server: Any, rollouts: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password pass\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    RemoteReward([server.url]).score(rollouts)
    RemoteReward([server.url], token=TOKEN).score(rollouts)
    assert "Authorization" not in server.headers[0]
    assert server.headers[1]["Authorization"] == f"Bearer {TOKEN}"


ECHOES: dict[str, Callable[[str], tuple[int, bytes]]] = {
    "500": lambda secret: (500, f"you sent Bearer {secret} {secret}".encode()),
    "401": lambda secret: (401, json.dumps({"detail": f"bad {secret}"}).encode()),
    "long 500": lambda secret: (500, ("x" * 290 + secret).encode()),
    "not json": lambda secret: (200, f"Bearer {secret}".encode()),
    "score": lambda secret: (200, json.dumps({"rewards": [secret] * 5}).encode()),
    "key": lambda secret: (200, json.dumps({secret: 1}).encode()),
    "metric": lambda secret: (200, json.dumps({"rewards": [1] * 5, "extra_logs": {secret: [1]}}).encode()),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_secrets_are_in_no_error_and_no_log(
    server: Any, rollouts: list[Rollout], caplog: pytest.LogCaptureFixture, echo: str
) -> None:
    in_query = "qu3ry-key%2Fx"
    texts = []
    for secret in (TOKEN, in_query):
        server.reply = lambda body, n, secret=secret: ECHOES[echo](secret)
        with caplog.at_level(logging.DEBUG, logger="lightppo"):
            error = failing(rollouts, [f"{server.url}?api_key={in_query}"], token=TOKEN)
        texts.append("".join(traceback.format_exception(error)))
        texts.append(str(error.__context__))
        assert server.url in str(error)
    texts += [record.getMessage() for record in caplog.records if record.name.startswith("lightppo")]
    texts.append(repr(RemoteReward([server.url], token=TOKEN)))
    for part in (TOKEN, "s3cret", "qu3ry"):
        assert not [text for text in texts if part in text]


def test_secret_in_the_query_of_a_dead_url_is_not_shown(rollouts: list[Rollout]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/rm"
        error = failing(rollouts, [f"{address}?api_key=s3cret"])
    text = "".join(traceback.format_exception(error))
    assert "s3cret" not in text
    assert address in text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:s3cret@host/rm", "user or password"),
        ("https://s3cret@host:port/rm", "user or password"),
        ("ftp://host/rm", "is not an http"),
        ("http:///rm", "is not an http"),
        ("http://host:99999/rm?key=s3cret", "is not an http"),
        ("host:5000", "is not an http"),
    ],
)
def test_bad_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--remote_rm_url: .*{message}") as caught:
        RemoteReward([url])
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no URL"):
        RemoteReward([])
    for options in ({"timeout": 0}, {"retries": -1}):
        with pytest.raises(ValueError, match="timeout must be > 0 and retries ≥ 0"):
            RemoteReward(["http://host"], **options)


def test_read_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RM_TOKEN", raising=False)
    assert read_token() is None
    file = tmp_path / "token"
    file.write_text(f"  {TOKEN}\n")
    assert read_token(file=str(file)) == TOKEN
    with pytest.raises(ValueError, match="RM_TOKEN is not set"):
        read_token(env="RM_TOKEN")
    with pytest.raises(ValueError, match="does not exist"):
        read_token(file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not from both"):
        read_token(env="RM_TOKEN", file=str(file))


@pytest.mark.parametrize("token", ["", "s3cret two", "s3cret\nX-Evil: 1", "s3crét"])
def test_a_token_no_header_can_carry_is_refused_unseen(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", token)
    with pytest.raises(ValueError, match="environment variable RM_TOKEN: the token") as caught:
        read_token(env="RM_TOKEN")
    assert "s3cr" not in str(caught.value)
    with pytest.raises(ValueError, match="the token is empty or has"):
        RemoteReward(["http://host"], token=token)
