"""Reward servers that fail and lie; what the HTTP client does about it is in tests/test_http_client.py."""

import json
import logging
import threading

import pytest
from support.fakes import FakeStrategy
from support.http_server import ok

from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards import RemoteReward

TOKEN = "s3cret-Token/+=="
NO_FAILURES = {"failures": [0.0] * 5, "timeouts": [0.0] * 5}


def remote(*servers, **options):
    urls = [f"{server.url}/get_reward" for server in servers]
    return RemoteReward(
        urls, **({"timeout": 20.0, "retries": 1, "sleep": lambda seconds: None} | options)
    )


def score_by_label(path, body, n):
    return ok(rewards=[float(label) for label in body["labels"]])


def test_posts_the_contract_and_reads_the_answer(server, rollouts):
    logs = {"fmt": [1, 0, 1, None, 1], "load": 0.25}
    server.reply = lambda path, body, n: ok(
        rewards=[0, 1.5, None, -2, 1e-3], scores=[1, 0, 0, 0, 0], extra_logs=logs
    )
    output = remote(server, token=TOKEN).score(rollouts)
    query = [f"question {i}: answer {i}" for i in range(5)]
    prompts = [f"question {i}: " for i in range(5)]
    assert server.requests == [
        ("/get_reward", {"query": query, "prompts": prompts, "labels": ["0", "1", "2", "3", "4"]})
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert output.scores == [0.0, 1.5, None, -2.0, 0.001]
    assert (
        output.metrics
        == {"score": [1, 0, 0, 0, 0], "fmt": [1, 0, 1, None, 1], "load": [0.25] * 5} | NO_FAILURES
    )


def test_several_servers_share_the_batch_in_order(make_server, rollouts):
    first, second = make_server(), make_server()
    first.reply = lambda path, body, n: ok(rewards=[0.0, 1.0], extra_logs={"a": 1.0})
    second.reply = score_by_label
    output = remote(first, second).score(rollouts)
    assert [len(server.requests[0][1]["query"]) for server in (first, second)] == [2, 3]
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    # the second server logs none
    assert output.metrics == {"a": [1.0, 1.0, None, None, None]} | NO_FAILURES


@pytest.mark.parametrize(("ranks", "asked"), [(2, [4, 4]), (4, [8, 8]), (1, [2, 2])])
def test_each_server_has_its_part_of_the_samples_of_all_ranks(
    make_server, make_rollout, ranks, asked
):
    """Two servers, four samples on each rank: with two ranks or more a rank asks one of them."""
    servers = [make_server(), make_server()]
    for server in servers:
        server.reply = score_by_label
    for rank in range(ranks):
        rollouts = [make_rollout(i, label=str(10 * rank + i)) for i in range(4)]
        assert remote(*servers, ranks=FakeStrategy(rank, ranks)).score(rollouts).scores == [
            10.0 * rank + i for i in range(4)
        ]
    assert [sum(len(body["query"]) for _, body in server.requests) for server in servers] == asked
    assert sum(len(server.requests) for server in servers) == max(2, ranks)


def test_three_servers_of_two_ranks_have_equally_many(make_server, make_rollout):
    servers = [make_server() for _ in range(3)]
    for server in servers:
        server.reply = score_by_label
    for rank in range(2):
        remote(*servers, ranks=FakeStrategy(rank, 2)).score(
            [make_rollout(i, label="1") for i in range(6)]
        )
    # of 12 samples each has 4: rank 0 asks the first for 4 and the second for 2
    assert [[len(body["query"]) for _, body in server.requests] for server in servers] == [
        [4],
        [2, 2],
        [4],
    ]


def test_samples_that_come_one_by_one_go_to_all_servers(make_server, make_rollout):
    servers = [make_server() for _ in range(3)]
    for server in servers:
        server.reply = score_by_label
    source = remote(*servers)
    assert [source.score([make_rollout(0, label=str(i))]).scores for i in range(6)] == [
        [float(i)] for i in range(6)
    ]
    assert [len(server.requests) for server in servers] == [2, 2, 2]


def test_servers_without_a_share_are_not_asked(make_server, rollouts):
    servers = [make_server() for _ in range(3)]
    for server in servers:
        server.reply = score_by_label
    assert remote(*servers).score(rollouts[:1]).scores == [0.0]
    assert remote(servers[0]).score([]).scores == []
    assert sum(len(server.requests) for server in servers) == 1


def test_token_scores_of_all_servers(make_server, make_rollout):
    servers = [make_server(), make_server()]
    for server in servers:
        server.reply = lambda path, body, n: ok(
            rewards=[0.5], token_scores=[[float(body["labels"][0])]]
        )
    rollouts = [make_rollout(0, label="7"), make_rollout(0, label="8")]
    assert remote(*servers).score(rollouts).token_scores == [[7.0], [8.0]]


LIES = {
    "too few": (b'{"rewards": [1, 2]}', "2 scores for 5 samples"),
    "too many": (b'{"rewards": [1, 2, 3, 4, 5, 6]}', "6 scores for 5 samples"),
    "nan": (b'{"rewards": [1, 2, NaN, 4, 5]}', r"score of sample 2 \(prompt row 102, .* is nan"),
    "infinity": (b'{"rewards": [-Infinity, 2, 3, 4, 5]}', "score of sample 0 .* is -inf"),
    "strings": (b'{"rewards": [1, "2", 3, 4, 5]}', "score of sample 1 .* is '2'"),
    "one number": (b'{"rewards": 1.0}', "'rewards'"),
    "no rewards": (b'{"reward": [1, 2, 3, 4, 5]}', "'rewards'"),
    "null rewards": (b'{"rewards": null}', "'rewards'"),
    "bad logs": (
        b'{"rewards": [1, 2, 3, 4, 5], "extra_logs": {"a": [1]}}',
        "1 metric 'a's for 5 samples",
    ),
    "logs no object": (b'{"rewards": [1, 2, 3, 4, 5], "extra_logs": [1]}', "'extra_logs'"),
    "list": (b"[1, 2, 3, 4, 5]", "list"),
    "empty": (b"", "'rewards'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_an_error_that_names_the_url_after_the_retries(server, rollouts, lie):
    content, message = LIES[lie]
    server.reply = lambda path, body, n: (200, content)
    with pytest.raises(
        RewardError,
        match=rf"^reward server {server.url}/get_reward: .*{message}.*\(2 of 2 tries\)$",
    ) as caught:
        remote(server).score(rollouts)
    assert len(server.requests) == 2
    assert type(caught.value) is (
        NonFiniteRewardError if lie in ("nan", "infinity") else RewardError
    )


@pytest.mark.parametrize("on_reward_failure", ["error", "unscored"])
@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 403, 404, 422])
def test_a_refusal_is_never_taken_for_a_number_that_is_not_finite(
    server, rollouts, status, on_reward_failure
):
    """Such a step would be left out and the run would go on, with one request that nobody answered."""
    server.location = f"{server.url}/elsewhere"
    server.reply = lambda path, body, n: (status, b"no")
    with pytest.raises(RewardError, match=f"HTTP {status}") as caught:
        remote(server, on_reward_failure=on_reward_failure, retries=3).score(rollouts)
    assert type(caught.value) is RewardError
    assert [path for path, _ in server.requests] == ["/get_reward"]


@pytest.mark.parametrize(
    ("last", "kind"),
    [((401, b"no"), RewardError), ((200, b'{"rewards": [NaN, 1, 1, 1, 1]}'), NonFiniteRewardError)],
)
def test_the_last_try_decides_whether_the_step_is_left_out(server, rollouts, last, kind):
    nan = (200, b'{"rewards": [1, 1, 1, 1, NaN]}')
    answers = {1: nan, 2: (500, b"busy"), 3: last}
    server.reply = lambda path, body, n: answers[n]
    with pytest.raises(RewardError) as caught:
        remote(server, retries=2).score(rollouts)
    assert (type(caught.value), len(server.requests)) == (kind, 3)


def test_a_dead_server_is_named_and_the_living_one_is_not(make_server, rollouts):
    living, dead = make_server(), make_server()
    living.reply = score_by_label
    dead.reply = lambda path, body, n: (503, b"")
    with pytest.raises(RewardError) as caught:
        remote(living, dead).score(rollouts)
    assert f"{dead.url}/get_reward" in str(caught.value)
    assert living.url not in str(caught.value)


def test_failed_requests_are_counted_for_their_samples(make_server, rollouts):
    good, shaky = make_server(), make_server()
    good.reply = score_by_label
    answers = [
        (500, b"busy"),
        (200, b"<html>"),
        ok(rewards=[2.0, 3.0, 4.0], extra_logs={"failures": [1, 0, None]}),
    ]
    shaky.reply = lambda path, body, n: answers[n - 1]
    output = remote(good, shaky, retries=3).score(rollouts)
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    # two requests failed for the three samples of the second server; it had one failure of its own with the first
    assert output.metrics == {"failures": [0.0, 0.0, 3.0, 2.0, 2.0], "timeouts": [0.0] * 5}
    # nothing to count: a failure ends it
    assert remote(good, retries=0).score(rollouts).metrics == {}


def test_a_time_out_is_counted_as_one(server, rollouts):
    answered = threading.Event()

    def reply(path, body, n):
        if n == 1:
            answered.wait(60)  # longer than the client waits
        return score_by_label(path, body, n)

    server.reply = reply
    output = remote(server, timeout=2.0, sleep=lambda seconds: answered.set()).score(rollouts)
    assert output.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert output.metrics == {"failures": [1.0] * 5, "timeouts": [1.0] * 5}


def test_unscored_where_asked_for(make_server, rollouts, caplog):
    good, bad = make_server(), make_server()
    good.reply = score_by_label
    bad.reply = lambda path, body, n: (500, b"dead for good")
    source = remote(good, bad, on_reward_failure="unscored")
    with caplog.at_level(logging.WARNING):
        output = source.score(rollouts)
    assert output.scores == [0.0, 1.0, None, None, None]
    assert output.metrics == {"failures": [0.0, 0.0, 2.0, 2.0, 2.0], "timeouts": [0.0] * 5}
    assert (
        f"{bad.url}/get_reward: HTTP 500: dead for good (2 of 2 tries); its 3 samples"
        in caplog.text
    )
    # a mistake of ours, which no sample should pay for
    bad.reply = lambda path, body, n: (401, b"who are you?")
    with pytest.raises(RewardError, match="HTTP 401"):
        source.score(rollouts)


@pytest.mark.parametrize("retries", [0, 2])
def test_no_failure_ever_becomes_a_score(server, make_rollout, retries):
    """30% of the requests fail: errors, garbage, too few, NaN, answers that break off."""
    right = [float(10 + i) for i in range(3)]
    whole = json.dumps({"rewards": right}).encode()
    failures = [
        (500, b"oops"),
        (200, b"<html>"),
        (200, b'{"rewards": [0]}'),
        (200, b'{"rewards": [NaN, 0, 0]}'),
    ]
    fates = [
        "right",
        "right",
        "wrong",
        "right",
        "right",
        "wrong",
        "breaks off",
        "right",
        "right",
        "right",
    ] * 20

    def break_off(wfile, answer):
        wfile.write(
            answer[: len(answer) // 2] if fates[len(server.requests)] == "breaks off" else answer
        )

    server.reply = lambda path, body, n: (
        failures[n // 10 % 4] if fates[n] == "wrong" else (200, whole)
    )
    server.write = break_off
    rollouts = [make_rollout(i) for i in range(3)]
    source = remote(server, retries=retries, on_reward_failure="unscored")
    outputs = [source.score(rollouts) for _ in range(40)]
    unscored = [output for output in outputs if output.scores != right]
    assert all(output.scores == [None] * 3 for output in unscored)
    assert all(output.metrics["failures"] == [retries + 1.0] * 3 for output in unscored)
    failed = sum(output.metrics["failures"][0] for output in outputs)
    assert failed == len(server.requests) - (len(outputs) - len(unscored))
    assert failed == sum(fate != "right" for fate in fates[1 : len(server.requests) + 1])
    assert len(unscored) == (12 if retries == 0 else 0)  # 30% of 40; never three failures in a row


@pytest.mark.parametrize("label", [{1, 2}, float("nan")])
def test_labels_that_are_not_json_are_not_sent(server, make_rollout, label):
    with pytest.raises(RewardError, match=f"reward server {server.url}/get_reward: .*labels"):
        remote(server, on_reward_failure="unscored").score([make_rollout(0, label=label)])
    assert server.requests == []


def test_secrets_are_in_no_error(server, rollouts):
    for secret in (TOKEN, "qu3ry-key"):
        server.reply = lambda path, body, n, secret=secret: ok(rewards=[secret] * 5)
        with pytest.raises(RewardError) as caught:
            RemoteReward([f"{server.url}/?key=qu3ry-key"], token=TOKEN, retries=0).score(rollouts)
        assert secret not in str(caught.value)
        assert server.url in str(caught.value)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="--remote_rm_url"):
        RemoteReward([])
    with pytest.raises(ValueError, match=r"--remote_rm_url.*--remote_rm_token_env") as caught:
        RemoteReward(["http://me:s3cret@host/rm"])
    assert "s3cret" not in str(caught.value)
    for options in ({"timeout": 0}, {"retries": -1}, {"token": ""}):
        with pytest.raises(ValueError, match="reward server"):
            RemoteReward(["http://host"], **options)
