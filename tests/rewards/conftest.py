"""Rollouts made by hand, and a reward server on loopback that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightppo.data.records import Prompt, Rollout

Reply = tuple[int, bytes]


def _make_rollout(i: int, response: str = "", label: Any = None, **prompt_fields: Any) -> Rollout:
    prompt = Prompt(text=f"question {i}: ", token_ids=[10 + i], label=label, index=100 + i, **prompt_fields)
    return Rollout(prompt, 0, response_ids=[3] * (i + 1), response_text=response or f"answer {i}", finish_reason="stop")


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return _make_rollout


@pytest.fixture
def rollouts() -> list[Rollout]:
    return [_make_rollout(i, label=str(i)) for i in range(5)]


class RewardServer:
    """``reply(body, try_number)`` makes the status and bytes of each answer; requests are kept."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[dict[str, Any], int], Reply] = lambda body, n: self.good(range(len(body["query"])))
        self.location: str | None = None
        self.write: Callable[[Any, bytes], None] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                status, answer = server.reply(body, len(server.requests))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                if server.location:
                    self.send_header("Location", server.location)
                self.end_headers()
                if server.write:
                    server.write(self.wfile, answer)
                else:
                    self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/get_reward"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @staticmethod
    def good(rewards: Any, **more: Any) -> Reply:
        return 200, json.dumps({"rewards": list(rewards), **more}).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], RewardServer]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[RewardServer] = []

    def make() -> RewardServer:
        servers.append(RewardServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: Callable[[], RewardServer]) -> RewardServer:
    return make_server()
