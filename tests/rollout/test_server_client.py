"""One fake vLLM server that is made to fail and to lie in every way we know."""

import json
import logging
import math
import threading

import pytest
from support.fake_vllm import FakeVLLM, made_up_ids
from support.ranks import free_port

from lightppo.rollout.dispatch import ServerLostError
from lightppo.rollout.server_client import ServerRefusedError, UnreachableError, VLLMServer

KEY = "s3cret-Key/+=="
ASKED = {"max_tokens": 3, "seed": 5, "logprobs": 0}


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = FakeVLLM({"vocab_size": 30})
    yield server
    server.close()


class Sleeps(list):
    def __call__(self, seconds):
        self.append(seconds)


def client(fake, **options):
    return VLLMServer(fake.url, **({"timeout": 20.0, "retries": 0, "sleep": Sleeps()} | options))


def says(content, status=200):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda body, n: (status, content)


def test_a_completion_is_asked_by_ids_and_read_by_ids(fake):
    answer = client(fake, key=KEY).complete(ASKED, [4, 7], 30)
    assert answer.token_ids == made_up_ids([4, 7], 5, 3, 30) == [16, 17, 18]
    assert answer.log_probs == [-0.5] * 3
    assert answer.finish_reason == "length"
    more = {"prompt": [4, 7], "return_token_ids": True, "return_tokens_as_token_ids": True}
    assert fake.requests == [("/v1/completions", ASKED | more)]
    assert fake.headers["Authorization"] == f"Bearer {KEY}"


def test_without_a_key_none_is_sent(fake, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    client(fake).complete(ASKED, [4], 30)
    assert "Authorization" not in fake.headers


@pytest.mark.parametrize(
    ("status", "route", "advice"),
    [
        (401, "/v1/completions", "set --vllm_server_api_key_env"),
        (403, "/v1/completions", "set --vllm_server_api_key_env"),
        (404, "/v1/completions", "this is no vLLM server: start it by examples/serve_vllm.py"),
        (400, "/v1/completions", "HTTP 400"),
        (422, "/v1/completions", "HTTP 422"),
        (404, "/collective_rpc", "no routes for weights: start it by examples/serve_vllm.py"),
        (401, "/collective_rpc", "set --vllm_server_api_key_env"),
    ],
)
def test_what_no_retry_mends_says_what_to_do(fake, status, route, advice):
    fake.replies[route] = says(f"<html>{KEY} is wrong".encode(), status)
    server = client(fake, retries=3, key=KEY)
    with pytest.raises(ServerRefusedError) as caught:
        server.describe() if route == "/collective_rpc" else server.complete(ASKED, [4], 30)
    message = str(caught.value)
    assert message.startswith(f"vLLM server {fake.url}: {route}: HTTP {status}: <html>*** is wrong")
    assert advice in message
    assert len(fake.requests) == 1


def test_what_vllm_says_of_log_probs_that_are_no_numbers(fake):
    error = {"error": {"message": "Out of range float values are not JSON compliant"}}
    fake.replies["/v1/completions"] = says(error, 400)
    with pytest.raises(ServerRefusedError, match=r"no token can be drawn: .*have its weights diverged"):
        client(fake).complete(ASKED, [4], 30)


def test_redirects_are_not_followed(fake):
    fake.replies["/v1/completions"] = says(b"", 307)
    with pytest.raises(ServerRefusedError, match="HTTP 307: redirects are not followed, give its own address"):
        client(fake).complete(ASKED, [4], 30)


GOOD = {"token_ids": [1], "prompt_token_ids": [4], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}
LIES = {
    "html": (b"<html>hello</html>", "the answer is not JSON"),
    "cut": (b'{"choices": [', "the answer is not JSON"),
    "nothing": (b"", "no single choice"),
    "list": ([1], "no single choice"),
    "no_choice": ({"choices": []}, "no single choice"),
    "two_choices": ({"choices": [GOOD, GOOD]}, "no single choice"),
    "no_ids": ({"choices": [{"text": "abc", "finish_reason": "stop"}]}, "no single choice"),
    "no_log_probs": ({"choices": [GOOD | {"logprobs": None}]}, "no single choice"),
    "other_prompt": ({"choices": [GOOD | {"prompt_token_ids": [5]}]}, "to another prompt"),
    "aborted": ({"choices": [GOOD | {"finish_reason": "abort"}]}, "ended with 'abort'"),
    "no_tokens": ({"choices": [GOOD | {"token_ids": []}]}, "0 tokens for max_tokens 3"),
    "too_many": ({"choices": [GOOD | {"token_ids": [1] * 4}]}, "4 tokens for max_tokens 3"),
    "unknown_id": ({"choices": [GOOD | {"token_ids": [30]}]}, "no ids of the model"),
    "negative_id": ({"choices": [GOOD | {"token_ids": [-1]}]}, "no ids of the model"),
    "true_as_id": ({"choices": [GOOD | {"token_ids": [True]}]}, "no ids of the model"),
    "text_as_ids": ({"choices": [GOOD | {"token_ids": "abc"}]}, "no ids of the model"),
    "fewer_log_probs": ({"choices": [GOOD | {"token_ids": [1, 2]}]}, "do not fit 2 token ids"),
    "text_log_probs": ({"choices": [GOOD | {"logprobs": {"token_logprobs": ["x"]}}]}, "do not fit 1 token ids"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_none_loses_the_server(fake, lie):
    content, reason = LIES[lie]
    fake.replies["/v1/completions"] = says(content)
    with pytest.raises(ServerLostError, match=reason) as caught:
        client(fake).complete(ASKED, [4], 30)
    assert str(caught.value).startswith(f"vLLM server {fake.url}: /v1/completions: ")
    assert not isinstance(caught.value, UnreachableError)


def test_log_probs_that_are_no_numbers_stay_so(fake):
    fake.replies["/v1/completions"] = says({"choices": [GOOD | {"logprobs": {"token_logprobs": [None]}}]})
    assert math.isnan(client(fake).complete(ASKED, [4], 30).log_probs[0])


def test_failures_that_pass_are_tried_again(fake, caplog):
    fake.replies["/v1/completions"] = lambda body, n: [(503, b"busy"), (429, b"later"), None][n - 1]
    sleeps = Sleeps()
    with caplog.at_level(logging.WARNING):
        answer = client(fake, retries=2, sleep=sleeps).complete(ASKED, [4], 30)
    assert answer.token_ids == made_up_ids([4], 5, 3, 30)
    assert sleeps == [1.0, 2.0]
    assert [record.message for record in caplog.records if record.name.startswith("lightppo")] == [
        f"vLLM server {fake.url}: /v1/completions: HTTP 503: busy; next try in 1 s"  # the second one comes too soon
    ]


def test_after_the_last_try_the_server_is_lost(fake):
    fake.replies["/v1/completions"] = says(b"engine is dead", 500)
    with pytest.raises(ServerLostError, match="HTTP 500: engine is dead"):
        client(fake, retries=2).complete(ASKED, [4], 30)
    assert len(fake.requests) == 3


def test_a_closed_port_is_unreachable():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match=f"vLLM server {url}: /v1/completions: ConnectionError"):
        VLLMServer(url, timeout=5, retries=1, sleep=Sleeps()).complete(ASKED, [4], 30)


def test_a_silent_server_is_left_at_the_limit(fake):
    never = threading.Event()
    fake.replies["/v1/completions"] = lambda body, n: (never.wait(60), None)[1]
    with pytest.raises(ServerLostError, match="timed out"):
        client(fake, timeout=1.0, retries=3).complete(ASKED, [4], 30)
    never.set()
    assert len(fake.requests) == 1  # the wait was long enough


def test_a_dripping_server_is_left_at_the_limit(fake):
    stop = threading.Event()

    def drip(file, content):
        for byte in content * 100:
            if stop.wait(0.1):
                return
            file.write(bytes([byte]))
            file.flush()

    fake.drip = drip
    with pytest.raises(ServerLostError, match=r"not complete after 1 s"):
        client(fake, timeout=1.0).complete(ASKED, [4], 30)
    stop.set()


@pytest.mark.parametrize("answer", [{}, {"results": None}, {"results": []}, {"results": ["CPUWorker"]}, [1]])
def test_an_rpc_without_results(fake, answer):
    fake.replies["/collective_rpc"] = says(answer)
    with pytest.raises(ServerLostError, match=r"the answer (of lightppo_describe is|must be a JSON object)"):
        client(fake).describe()


def test_another_version_of_lightppo_is_refused(fake):
    fake.described["protocol"] = 0
    with pytest.raises(ServerRefusedError, match="another version of lightppo: start it by"):
        client(fake).describe()


def test_workers_that_differ_lose_the_server(fake):
    fake.replies["lightppo_describe"] = says({"results": [fake.described, fake.described | {"version": "old"}]})
    with pytest.raises(ServerLostError, match="its workers differ"):
        client(fake).describe()


LOAD = ["/pause?mode=abort", "lightppo_load", "/reset_prefix_cache", "/resume"]


def test_weights_are_loaded_while_the_server_is_paused(fake):
    client(fake).load_weights({"files": []}, "v7", (28, None))
    assert fake.routes() == LOAD
    assert fake.requests[1][1]["kwargs"] == {"files": [], "version": "v7", "vocabulary_limits": [28, None]}


def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(fake):
    fake.replies["lightppo_load"] = says({"results": [{"error": "KeyError: 'lm_head'"}]})
    with pytest.raises(ServerRefusedError, match=f"vLLM server {fake.url} could not load the weights: KeyError"):
        client(fake).load_weights({"files": []}, "v7", (None, None))
    assert fake.routes() == ["/pause?mode=abort", "lightppo_load", "/resume"]


def test_one_worker_without_the_weights_is_one_too_many(fake):
    fake.replies["lightppo_load"] = says({"results": [{"version": "v7"}, {"version": "v6"}]})
    with pytest.raises(ServerRefusedError, match=r"could not load the weights: .*v6"):
        client(fake).load_weights({"files": []}, "v7", (None, None))


def test_a_prefix_cache_that_stays_loses_the_server(fake):
    fake.replies["/reset_prefix_cache"] = says({"success": False})
    with pytest.raises(ServerLostError, match="could not empty its prefix cache"):
        client(fake).load_weights({"files": []}, "v7", (None, None))
    assert fake.routes() == LOAD


def test_weights_that_differ_are_named(fake):
    fake.replies["lightppo_differing"] = says(
        {"results": [{"differing": ["a"], "unknown": []}, {"differing": ["a", "b"], "unknown": ["c"]}]}
    )
    assert client(fake).differing_weights({"files": []}, 0.01) == ({"a", "b"}, {"c"})
    fake.replies["lightppo_differing"] = says({"results": [{"error": "gone"}]})
    with pytest.raises(ServerRefusedError, match="could not compare its weights: gone"):
        client(fake).differing_weights({"files": []}, 0.01)
