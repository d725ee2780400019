"""The client against a real server that is made to fail and to lie in every way we know."""

import json
import logging
import socket
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from support.http_server import JsonServer, ok

from lightppo.errors import (
    RefusedError,
    RequestError,
    RewardError,
    SlowServerError,
    UnreachableError,
)
from lightppo.http_client import HTTPClient, check_bind, check_url, is_loopback, read_token

TOKEN = "s3cret-Token/+=="


@pytest.fixture(scope="module")
def shared():
    server = JsonServer()
    yield server
    server.close()


@pytest.fixture
def server(shared):
    return shared.reset()


@pytest.fixture
def closed_url():
    """Bound but not listening: refuses for as long as the test holds it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{probe.getsockname()[1]}"


def client(server, path="/rm", **options):
    url = server if isinstance(server, str) else server.url + path
    return HTTPClient(
        url, "toy server", **({"timeout": 20.0, "sleep": lambda seconds: None} | options)
    )


def failing(client, read=dict, path="", **options):
    with pytest.raises(RequestError) as caught:
        client.post(path, {}, read, **options)
    return caught.value


# --- what is sent, and what comes back


def test_what_is_posted(server):
    server.reply = lambda path, body, n: ok(path=path, body=body)
    asked = client(server, "", token=TOKEN)
    assert asked.post("/a?b=1", {"x": [1]}) == {"path": "/a?b=1", "body": {"x": [1]}}
    assert asked.post("/c", {}, read=lambda answer: answer["path"]) == "/c"
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert server.headers[0]["Content-Type"] == "application/json"
    server.reply = lambda path, body, n: (200, b"")
    assert asked.post("", {}) == {}
    with pytest.raises(ValueError, match="JSON"):
        asked.post("", {"x": float("nan")})
    assert len(server.requests) == 3


@pytest.mark.parametrize("token", [None, TOKEN])
def test_neither_netrc_nor_cookies_nor_proxies(server, tmp_path, monkeypatch, closed_url, token):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password pass\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", closed_url)
    server.cookie = "a=b"
    asked = client(server, token=token, keep_alive=True)
    asked.post("", {})
    asked.post("", {})
    assert server.headers[1].get("Authorization") == (token and f"Bearer {token}")
    assert "Cookie" not in server.headers[1]


def test_no_more_requests_at_a_time_than_allowed(server):
    """Two are under way together at some moment, never three."""
    both = threading.Barrier(2)
    server.reply = lambda path, body, n: (both.wait(120), ok())[1]
    asked = client(server, max_concurrent=2)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda i: asked.post("", {}), range(6))) == [{}] * 6
    assert server.most_at_once == 2


# --- failures that may pass, and those that do not


ANSWERS = {
    "500": (500, b"Traceback: out of memory", "HTTP 500: Traceback: out of memory"),
    "503": (503, b"", "HTTP 503"),
    "408": (408, b"", "HTTP 408"),
    "425": (425, b"", "HTTP 425"),
    "429": (429, b"slow down", "HTTP 429: slow down"),
    "204": (204, b"", "HTTP 204"),
    "list": (200, b"[1]", "JSON object, got list"),
    "html": (200, b"<html>busy</html>", "<html>busy"),
    "deep": (200, b"[" * 100_000, "not JSON"),
    "not utf-8": (200, b'{"rewards": "\xff"}', "not JSON"),
    "no key": (200, b"{}", "'x'"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_may_pass_is_tried_again(server, name):
    status, content, message = ANSWERS[name]
    server.reply = lambda path, body, n: (status, content)
    sleeps, failures = [], []
    error = failing(
        client(server, retries=3, sleep=sleeps.append),
        lambda answer: answer["x"],
        "/a?b=1",
        on_failure=failures.append,
    )
    assert str(error).startswith(f"toy server {server.url}/rm: /a: ")
    assert message in str(error)
    assert "4 of 4 tries" in str(error)
    assert sleeps == [1.0, 2.0, 4.0]
    assert len(server.requests) == len(failures) == 4
    assert not isinstance(error, RefusedError)
    assert not error.timed_out
    assert error.status == status


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 403, 404, 422])
def test_what_stays_wrong_is_not_tried_again(server, status):
    server.location = f"{server.url}/elsewhere"
    server.reply = lambda path, body, n: (status, b"no")
    error = failing(client(server, retries=3))
    assert isinstance(error, RefusedError)
    assert error.status == status
    assert ("final URL" if status < 400 else f"HTTP {status}: no") in str(error)
    assert [path for path, _ in server.requests] == ["/rm"]


def test_a_server_that_recovers_is_used(server, caplog):
    server.reply = lambda path, body, n: (500, b"warming up") if n < 3 else ok(x=n)
    failures = []
    with caplog.at_level(logging.WARNING, logger="lightppo"):
        answer = client(server, retries=2).post("", {}, on_failure=failures.append)
    assert answer == {"x": 3}
    assert [failure.status for failure in failures] == [500, 500]
    assert caplog.text.count(f"{server.url}/rm: HTTP 500: warming up; next try in") == 2


def test_requests_that_fail_together_warn_once(server, caplog):
    server.reply = lambda path, body, n: (500, b"")
    asked = client(server, retries=1)
    with caplog.at_level(logging.WARNING, logger="lightppo"), ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda i: failing(asked), range(5)))
    assert len(server.requests) == 10
    assert len(caplog.records) == 1


def test_waits_are_bounded(server):
    server.reply = lambda path, body, n: (500, b"")
    sleeps = []
    asked = client(server, retries=7, sleep=sleeps.append)
    failing(asked)
    assert sleeps == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert len(server.requests) == 8


def test_what_the_reader_refuses_is_no_answer(server):
    def read(answer):
        raise RewardError("two scores for five samples")

    error = failing(client(server, retries=1), read)
    assert "two scores for five samples" in str(error)
    assert len(server.requests) == 2


def test_closing_ends_the_waits(server):
    asked = client(server, retries=9, sleep=None)
    server.reply = lambda path, body, n: (500, b"")
    assert "closed" in str(failing(asked, on_failure=lambda failure: asked.close()))
    assert len(server.requests) == 1


# --- no answer in time


def test_a_server_that_takes_no_connection_is_left_at_the_limit_for_connecting():
    with socket.socket() as full, ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # from then on Linux answers no further one
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        error = failing(
            client(f"http://127.0.0.1:{full.getsockname()[1]}", timeout=60.0, connect_timeout=0.2)
        )
    assert isinstance(error, UnreachableError)
    assert error.timed_out
    assert "no connection within 0.2 s" in str(error)


def test_a_closed_port_is_unreachable(closed_url):
    error = failing(client(closed_url, retries=1))
    assert isinstance(error, UnreachableError)
    assert f"toy server {closed_url}: Connection refused" in str(error)
    assert "Pool" not in str(error)
    assert "2 of 2 tries" in str(error)


@pytest.mark.parametrize(("retry_timeouts", "tries"), [(True, 2), (False, 1)])
def test_a_silent_server_is_left_at_the_limit(server, retry_timeouts, tries):
    release = threading.Event()
    server.reply = lambda path, body, n: (release.wait(600), ok())[1]
    try:
        error = failing(client(server, retries=1, timeout=0.3, retry_timeouts=retry_timeouts))
    finally:
        release.set()
    assert isinstance(error, SlowServerError)
    assert error.timed_out
    assert len(server.requests) == tries


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# What a server sends at once, and what it then sends piece by piece, for ever.
DRIPS = {
    "nothing": (b"", b""),
    "status line": (b"HTTP/1.1 200 ", b"O"),
    "a header": (HEAD + b"X: ", b"x"),
    "headers": (HEAD, b"X: 1\r\n"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers of 100 Continue": (b"HTTP/1.1 100 Continue\r\n", b"X: 1\r\n"),
    "body": (HEAD + b"Content-Length: 9999999\r\n\r\n{", b" "),
    "body without an end": (HEAD + b"\r\n{", b" "),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "size of a chunk": (CHUNKED, b"0"),
    "trailers": (CHUNKED + b"0\r\n", b"X: 1\r\n"),
    # a file name
    "gzip": (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\0", b"n"),
}
_DRIPS = 1500  # then it gives up: the client did not leave in time


@contextmanager
def dripping(first, piece):
    """The port of a server that accepts."""
    over = threading.Event()

    def drip(connection):
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):  # the client left
                connection.sendall(first)
                for _ in range(_DRIPS):
                    if over.wait(0.01):
                        return
                    for byte in piece:
                        connection.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(8) as pool:

        def accept():
            while not over.is_set():
                pool.submit(drip, listener.accept()[0])

        accepting = pool.submit(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            socket.create_connection(listener.getsockname()).close()
            accepting.result()


@pytest.mark.parametrize("name", DRIPS)
def test_one_deadline_for_the_whole_exchange(name):
    """Each byte comes well within the time-out; without a deadline the client would stay for all of them."""
    with dripping(*DRIPS[name]) as port:
        error = failing(client(f"http://127.0.0.1:{port}", timeout=0.1))
    assert isinstance(error, SlowServerError)
    assert error.timed_out
    assert "the answer was not complete after 0.1 s" in str(error)


@pytest.mark.parametrize("name", ["headers", "body"])
def test_the_deadline_of_connections_that_are_kept(name):
    with dripping(*DRIPS[name]) as port:
        error = failing(client(f"http://127.0.0.1:{port}", timeout=0.1, retries=1, keep_alive=True))
    assert "the answer was not complete after 0.1 s (2 of 2 tries)" in str(error)


@pytest.mark.parametrize("name", ["a tunnel's headers", "a TLS handshake"])
def test_the_deadline_of_a_tunnel_and_of_a_handshake(name, monkeypatch):
    drips = {
        "a tunnel's headers": (HEAD, b"X: 1\r\n"),
        "a TLS handshake": (b"\x16\x03\x03\x3f\xff\x02", b"\0"),
    }
    with dripping(*drips[name]) as port:
        url = f"https://127.0.0.1:{port}"
        if name == "a tunnel's headers":
            url = "https://reward.invalid"
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
        error = failing(client(url, timeout=0.2))
    assert isinstance(error, SlowServerError)
    assert "not complete after 0.2 s" in str(error)


def test_a_server_that_does_not_read_is_slow():
    """It is not unreachable: it accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(SlowServerError, match=r"not complete after 0.2 s") as caught:
            client(url, timeout=0.2).post("", {"x": "x" * 20_000_000})
    assert caught.value.timed_out


def test_a_kept_connection_has_a_new_deadline_for_each_request(server, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("lightppo.http_deadline.time.monotonic", lambda: clock[0])
    asked = client(server, timeout=5.0, keep_alive=True)
    for i in range(3):
        assert asked.post("", {"x": i}) == {}
        clock[0] += 100.0


def test_an_answer_that_breaks_off_is_an_error(server):
    """Valid JSON, but fewer bytes than announced."""
    server.reply = lambda path, body, n: (200, b"{}" + b" " * 100)
    server.write = lambda wfile, answer: wfile.write(answer[:2])
    assert "IncompleteRead" in str(failing(client(server)))


def test_an_endless_answer_is_cut_off(server):
    server.reply = lambda path, body, n: ok(padding=" " * 1000)
    assert "longer than 1000 bytes" in str(failing(client(server, max_bytes=1000)))


# --- secrets


ECHOES = {
    "500": lambda secret: (500, f"you sent Bearer {secret} {secret}".encode()),
    "401": lambda secret: (401, json.dumps({"detail": f"bad {secret}"}).encode()),
    "long 500": lambda secret: (500, ("x" * 290 + secret).encode()),
    "not json": lambda secret: (200, f"Bearer {secret}".encode()),
    "key": lambda secret: (200, json.dumps({secret: 1}).encode()),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_secrets_are_in_no_error_and_no_log(server, caplog, echo):
    def read(answer):
        raise ValueError(f"keys {list(answer)}")

    in_query = "qu3ry-key%2Fx"
    texts = []
    asked = client(server, f"/rm?api_key={in_query}", token=TOKEN, retries=1)
    for secret in (TOKEN, in_query):
        server.reply = lambda path, body, n, secret=secret: ECHOES[echo](secret)
        with caplog.at_level(logging.DEBUG, logger="lightppo"):
            error = failing(asked, read)
        texts += ["".join(traceback.format_exception(error)), str(error.__context__)]
        assert f"{server.url}/rm" in str(error)
    texts += [
        record.getMessage() for record in caplog.records if record.name.startswith("lightppo")
    ]
    texts.append(repr(asked))
    for part in (TOKEN, "s3cret", "qu3ry"):
        assert not [text for text in texts if part in text]


def test_a_secret_in_the_query_of_a_dead_url_is_not_shown(closed_url):
    error = failing(client(f"{closed_url}/rm?api_key=s3cret"))
    text = "".join(traceback.format_exception(error))
    assert "s3cret" not in text
    assert f"{closed_url}/rm" in text


# --- addresses, tokens, options


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:s3cret@host/rm", "user or password"),
        ("https://s3cret@host:port/rm", "user or password"),
        ("ftp://host/rm", "ftp://host/rm"),
        ("http:///rm", "http:///rm"),
        ("http://host:99999/rm?key=s3cret", "http://host:99999/rm"),
        ("host:5000", "host:5000"),
    ],
)
def test_bad_addresses_are_refused(url, message):
    for check in (
        lambda: check_url(url, "--some_url", "--some_token_env"),
        lambda: HTTPClient(url, "--some_url"),
    ):
        with pytest.raises(ValueError, match=f"^--some_url: .*{message}") as caught:
            check()
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_url_with_a_password_names_the_flag_for_tokens():
    with pytest.raises(ValueError, match="--b"):
        check_url("http://me:hunter2@host", "--a", "--b")


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"retries": -1}, {"max_concurrent": 0}, {"token": ""}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="toy server"):
        client("http://host", **options)


def test_read_token(monkeypatch):
    monkeypatch.delenv("RM_TOKEN", raising=False)
    assert read_token() is None
    with pytest.raises(ValueError, match=r"--some_token_env.* RM_TOKEN"):
        read_token(env="RM_TOKEN", option="--some_token_env")
    monkeypatch.setenv("RM_TOKEN", f"{TOKEN}\n")
    assert read_token(env="RM_TOKEN") == TOKEN


@pytest.mark.parametrize("token", ["", "s3cret two", "s3cret\nX-Evil: 1", "s3crét"])
def test_a_token_no_header_can_carry_is_refused_unseen(token, monkeypatch):
    monkeypatch.setenv("RM_TOKEN", token)
    for check in (
        lambda: read_token(env="RM_TOKEN"),
        lambda: HTTPClient("http://host", "RM_TOKEN", token=token),
    ):
        with pytest.raises(ValueError, match="RM_TOKEN") as caught:
            check()
        assert "s3cr" not in str(caught.value)


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "192.0.2.1", "no.such.name.invalid")))
    check_bind("0.0.0.0", has_token=True)
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="--token_env"):
            check_bind(host, has_token=False)
    with pytest.raises(ValueError, match="--api_key_env"):
        check_bind("0.0.0.0", has_token=False, token_option="--api_key_env")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"--host 127.0.0.1 --port {port}: Address already in use: choose"
        ):
            check_bind("127.0.0.1", has_token=False, port=port)
    check_bind("127.0.0.1", has_token=False, port=port)
