"""Rollouts made by hand, and servers on loopback that answer as a test tells them to."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.http_server import JsonServer

from lightppo.data.records import Prompt, Rollout


def _make_rollout(i: int, response: str = "", label: Any = None, **prompt_fields: Any) -> Rollout:
    prompt = Prompt(text=f"question {i}: ", token_ids=[10 + i], label=label, index=100 + i, **prompt_fields)
    return Rollout(prompt, 0, response_ids=[3] * (i + 1), response_text=response or f"answer {i}", finish_reason="stop")


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return _make_rollout


@pytest.fixture
def rollouts() -> list[Rollout]:
    return [_make_rollout(i, label=str(i)) for i in range(5)]


@pytest.fixture(scope="module")
def _servers() -> Iterator[list[JsonServer]]:
    servers: list[JsonServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def make_server(_servers: list[JsonServer]) -> Callable[[], JsonServer]:
    """Another server for this test; those of earlier tests of the module are used again."""
    free = list(_servers)

    def make() -> JsonServer:
        if not free:
            _servers.append(JsonServer())
            return _servers[-1]
        return free.pop().reset()

    return make


@pytest.fixture
def server(make_server: Callable[[], JsonServer]) -> JsonServer:
    return make_server()
