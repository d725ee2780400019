"""On a server: which weights it has, and that a response is of those that its request names.

vLLM's releases tell the version of a response in different ways, and older ones not at all.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

GENERATE = "/inference/v1/generate"
WEIGHTS = "/lightppo/weights"
OTHER_WEIGHTS = 409
"""The status where a response would be, or has been, of other weights than its request names."""

_START = "/start_weight_update"  # vLLM's


class WeightRoutes:
    """ASGI middleware with the route ``WEIGHTS``: ``{"version": NAME}`` names the weights that have come.

    They have no name from the start of a push on. A request names those that it wants in its query: ``?weights=NAME``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._version: str | None = None
        self._changes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if path == WEIGHTS:
            self._name(json.loads(await read_body(receive))["version"])
            await answer(send, {})
        elif path == GENERATE:
            await self._generate(scope, receive, send)
        else:
            if path == _START:
                self._name(None)
            await self._app(scope, receive, send)

    def _name(self, version: str | None) -> None:
        self._version = version
        self._changes += 1

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse other weights before the response is computed, and when they have changed meanwhile."""
        wanted = query_of(scope).get("weights", [None])[0]
        if wanted is None:
            await self._app(scope, receive, send)
            return
        if wanted != self._version:
            await answer(send, self._has(), OTHER_WEIGHTS)
            return
        changes = self._changes
        is_refused = False

        async def send_checked(message: Any) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start" and self._changes != changes:
                is_refused = True
                await answer(send, self._has(), OTHER_WEIGHTS)
            if not is_refused:
                await send(message)

        await self._app(scope, receive, send_checked)

    def _has(self) -> dict[str, str | None]:
        return {"weights": self._version}


def query_of(scope: Any) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode())


async def read_body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def answer(send: Any, content: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
