"""An HTTP server on loopback that answers as a test tells it to, also badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]


def ok(**answer: Any) -> Reply:
    return 200, json.dumps(answer).encode()


class JsonServer:
    """``reply(path, body, n)`` makes the status and bytes of the n-th answer; requests are kept.

    Attributes:
        requests: (path, body) of each.
        headers: of each.
        most_at_once: requests that were answered at the same time.
        location: where redirects lead.
        cookie: set by answers.
        write: writes the answer's bytes, in place of all at once, before the connection ends.
    """

    def __init__(self, port: int = 0) -> None:
        self.lock = threading.Lock()
        self.reset()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null"
                )
                with server.lock:
                    server.requests.append((self.path, body))
                    server.headers.append(dict(self.headers))
                    n = len(server.requests)
                    server.now += 1
                    server.most_at_once = max(server.most_at_once, server.now)
                status, answer = server.reply(self.path, body, n)
                with server.lock:
                    server.now -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                if server.location:
                    self.send_header("Location", server.location)
                if server.cookie:
                    self.send_header("Set-Cookie", server.cookie)
                self.end_headers()
                (server.write or type(self.wfile).write)(self.wfile, answer)
                self.close_connection = server.write is not None

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda request, address: None  # a client that did not wait
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def reset(self) -> JsonServer:
        """As new, at the same address."""
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.now = 0
        self.reply: Callable[[str, Any, int], Reply] = lambda path, body, n: ok()
        self.location: str | None = None
        self.cookie: str | None = None
        self.write: Callable[[Any, bytes], Any] | None = None
        return self

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
