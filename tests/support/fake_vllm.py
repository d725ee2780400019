"""A vLLM server that computes nothing: the routes that the trainer uses, made to fail and to lie as a test tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightppo.rollout.server_worker import PROTOCOL

Reply = tuple[int, bytes] | None


def made_up_ids(prompt: list[int], seed: int, max_tokens: int, vocab_size: int) -> list[int]:
    """The response of every fake server to a request."""
    return [(sum(prompt) + seed + i) % vocab_size for i in range(max_tokens)]


def tensors_of(files: list[str] | None, broadcast: dict[str, Any] | None) -> dict[str, Any]:
    """What the trainer brings, by files or by a broadcast."""
    from safetensors.torch import load_file

    from lightppo.rollout.weight_broadcast import receive_tensors

    if broadcast is not None:
        return dict(receive_tensors(broadcast, 1))
    return {name: tensor for path in files or () for name, tensor in load_file(path).items()}


class FakeVLLM:
    """One server on loopback.

    Attributes:
        requests: (route, body) of all requests, in their order.
        replies: route → function of (body, number of the request to this route from 1) → (status, bytes), or ``None``
            for the usual answer.
        described: what the server says of itself.
        loaded: tensors of each push, by name.
        headers: of the last request.
        drip: writes an answer instead of all at once.
    """

    def __init__(self, architecture: dict[str, Any], port: int = 0) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.replies: dict[str, Callable[[dict[str, Any], int], Reply]] = {}
        self.headers: dict[str, str] = {}
        self.loaded: list[dict[str, Any]] = []
        self.drip: Callable[[Any, bytes], None] | None = None
        self.described = {
            "protocol": PROTOCOL,
            "version": None,
            "model": "some-model",
            "dtype": "float32",
            "max_model_len": 256,
            "device": "cpu",
            "sleep_mode": False,
            "architecture": architecture,
        }
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, content = server.answer(self.path, body, dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                if server.drip:
                    server.drip(self.wfile, content)
                else:
                    self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *args: None  # a client that left
        self._http.block_on_close = False  # a test's handler may be waiting for ever
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def routes(self) -> list[str]:
        """The routes asked, in order; of RPCs the method."""
        return [body.get("method", route) for route, body in self.requests]

    def count(self, route: str) -> int:
        return sum(asked == route for asked, _ in self.requests)

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        route = path.partition("?")[0]
        with self._lock:
            self.requests.append((path, body))
            self.headers = headers
            number = sum(asked.partition("?")[0] == route for asked, _ in self.requests)
        reply = self.replies.get(body.get("method", route)) or self.replies.get(route)
        made = reply(body, number) if reply else None
        return made or (200, json.dumps(self._usual(route, body)).encode())

    def _usual(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "/collective_rpc":
            return {"results": [getattr(self, body["method"])(**body["kwargs"])]}
        if route == "/v1/completions":
            return {"choices": [self.choice(body)]}
        return {"success": True}

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        vocab_size = self.described["architecture"]["vocab_size"]
        ids = made_up_ids(body["prompt"], body["seed"], body["max_tokens"], vocab_size)
        log_probs = [-0.5] * len(ids)
        choice = {"index": 0, "token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "length"}
        return choice | {"logprobs": {"token_logprobs": log_probs}}

    def lightppo_describe(self) -> dict[str, Any]:
        return self.described

    def lightppo_load(
        self,
        version: str,
        vocabulary_limits: list[int | None],
        files: list[str] | None = None,
        broadcast: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        self.loaded.append(tensors_of(files, broadcast))
        self.described["version"] = version
        return {"version": version}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
