"""What a server does about adapters of its trainer: a new one is served, and older ones go when nobody uses them.

vLLM's own routes load adapters from any path, and leave them in the workers.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from urllib.parse import parse_qs

GENERATE = "/inference/v1/generate"
ADAPTERS = "/lightppo/adapters"


class AdapterRoutes:
    """ASGI middleware with the route ``ADAPTERS``. By ``{"name": NAME}`` an adapter that the workers hold is served, and
    all others end with their last request. The answer has the requests of each, and the problem if there is one.

    A request says whom it uses by its ``model`` and, since it is counted by that, in its query: ``?adapter=NAME``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._under_way: Counter[str] = Counter()  # requests, by adapter
        self._served: dict[str, Any] = {}  # name → vLLM's LoRARequest
        self._newest: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in (GENERATE, ADAPTERS):
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        if scope["path"] == ADAPTERS:
            name = json.loads(await _body(receive)).get("name")
            problem = None if name is None else await self._serve(state, name)
            served = {name: self._under_way[name] for name in self._served}
            await _answer(send, {"problem": problem, "served": served})
            return
        asked = parse_qs(scope["query_string"].decode())
        name = asked.get("adapter", [""])[0]
        self._under_way[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]
                await self._remove_unused(state)

    async def _serve(self, state: Any, name: str) -> str | None:
        """Why it cannot be served, or None."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        models = state.openai_serving_models
        # Without a path: the workers know the adapter by its name.
        answer = await models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=name)
        )
        if isinstance(answer, ErrorResponse):
            return answer.error.message
        self._served[name] = models.lora_requests[name]
        self._newest = name
        for other in self._served:
            if other != name:
                models.lora_requests.pop(other, None)  # no new request gets it
        await self._remove_unused(state)
        return None

    async def _remove_unused(self, state: Any) -> None:
        used = {self._newest, *self._under_way}
        unused = [self._served.pop(name) for name in self._served.keys() - used]
        for request in unused:
            await state.engine_client.remove_lora(request.lora_int_id)
            names = [request.lora_name]
            await state.engine_client.collective_rpc("lightppo_forget_adapters", args=(names,))


async def _body(receive: Any) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            return content


async def _answer(send: Any, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
