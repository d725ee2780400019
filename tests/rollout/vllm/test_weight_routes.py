"""Which weights a response is of, as servers say it for every release of vLLM."""

import asyncio
import json

import pytest

from lightppo.rollout.vllm.weight_routes import GENERATE, WEIGHTS, WeightRoutes

ANSWER = [
    {"type": "http.response.start", "status": 200},
    {"type": "http.response.body", "body": b"sampled"},
]


class Server:
    """WeightRoutes before an app that answers after ``meanwhile``; ``served``: the paths that reached it."""

    def __init__(self):
        self.served = []
        self.meanwhile = []
        self.routes = WeightRoutes(self.app)

    async def app(self, scope, receive, send):
        self.served.append(scope["path"])
        for path, body in self.meanwhile if scope["path"] == GENERATE else ():
            await self.request(path, body)
        for message in ANSWER:
            await send(message)

    async def request(self, path, body=None):
        content = json.dumps(body).encode()
        parts = [{"body": content[:3], "more_body": True}, {"body": content[3:]}]
        sent = []

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        route, _, query = path.partition("?")
        scope = {"type": "http", "path": route, "query_string": query.encode()}
        await self.routes(scope, receive, send)
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])

    def ask(self, path, body=None):
        return asyncio.run(self.request(path, body))


@pytest.fixture
def server():
    server = Server()
    assert server.ask(WEIGHTS, {"version": "v1"}) == (200, b"{}")
    return server


def test_the_named_weights_are_those_that_came_last(server):
    assert server.ask(f"{GENERATE}?weights=v1&adapter=a") == (200, b"sampled")
    server.ask(WEIGHTS, {"version": "v2"})
    assert server.ask(f"{GENERATE}?weights=v2") == (200, b"sampled")


def test_other_weights_are_refused_before_anything_is_computed(server):
    server.served.clear()
    assert server.ask(f"{GENERATE}?weights=v0") == (409, b'{"weights": "v1"}')
    assert server.served == []


def test_a_server_that_was_started_anew_has_none():
    assert Server().ask(f"{GENERATE}?weights=v1") == (409, b'{"weights": null}')


def test_from_the_start_of_a_push_on_they_have_no_name(server):
    assert server.ask("/start_weight_update") == (200, b"sampled")
    assert server.ask(f"{GENERATE}?weights=v1")[0] == 409


@pytest.mark.parametrize(
    "meanwhile",
    [
        [("/start_weight_update", None)],
        [("/start_weight_update", None), (WEIGHTS, {"version": "v2"})],
        [("/start_weight_update", None), (WEIGHTS, {"version": "v1"})],
    ],
)
def test_a_response_under_which_weights_change_does_not_count(server, meanwhile):
    server.meanwhile = meanwhile
    status, answer = server.ask(f"{GENERATE}?weights=v1")
    assert status == 409
    assert b"sampled" not in answer


def test_who_names_no_weights_gets_any(server):
    server.meanwhile = [("/start_weight_update", None)]
    assert server.ask(GENERATE) == (200, b"sampled")


def test_other_routes_and_kinds_go_through(server):
    assert server.ask("/health") == (200, b"sampled")
    passed = []

    async def app(scope, receive, send):
        passed.append(scope["type"])

    asyncio.run(WeightRoutes(app)({"type": "lifespan"}, None, None))
    assert passed == ["lifespan"]
