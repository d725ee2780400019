"""Rollouts made by hand, and servers on loopback that answer as a test tells them to."""

import pytest
from support.http_server import JsonServer

from lightppo.data.records import Prompt, Rollout


def _make_rollout(i, response="", label=None, **prompt_fields):
    prompt = Prompt(text=f"question {i}: ", token_ids=[10 + i], label=label, index=100 + i, **prompt_fields)
    return Rollout(prompt, 0, response_ids=[3] * (i + 1), response_text=response or f"answer {i}", finish_reason="stop")


@pytest.fixture
def make_rollout():
    return _make_rollout


@pytest.fixture
def rollouts():
    return [_make_rollout(i, label=str(i)) for i in range(5)]


@pytest.fixture(scope="module")
def _servers():
    servers = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def make_server(_servers):
    """Another server for this test; those of earlier tests of the module are used again."""
    free = list(_servers)

    def make():
        if not free:
            _servers.append(JsonServer())
            return _servers[-1]
        return free.pop().reset()

    return make


@pytest.fixture
def server(make_server):
    return make_server()
