"""A vLLM server that computes nothing: the routes that the trainer uses, made to fail and to lie as a test tells it."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

from lightppo.rollout.vllm.weight_routes import GENERATE, OTHER_WEIGHTS, WEIGHTS
from lightppo.rollout.vllm.weights import PROTOCOL, GlooGroup
from support.http_server import JsonServer

Reply = tuple[int, bytes] | None


def made_up_ids(prompt: list[int], seed: int, max_tokens: int, vocab_size: int) -> list[int]:
    """The response of every fake server to a request."""
    return [(sum(prompt) + seed + i) % vocab_size for i in range(max_tokens)]


def answers(content: Any, status: int = 200) -> Callable[[dict[str, Any], int], Reply]:
    """A reply that is always the same."""
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda body, n: (status, content)


class FakeVLLM(JsonServer):
    """One server on loopback.

    Attributes:
        replies: route, or method of an RPC → function of (body, number of the request to this route from 1) → (status,
            bytes), or ``None`` for the usual answer.
        described: what the server says of itself.
        version: of its weights.
        loaded: tensors of each whole push, by name.
        obstacle: why it takes no adapters.
        adapters: tensors of each adapter, by its name and theirs.
    """

    def __init__(self, architecture: dict[str, Any], port: int = 0) -> None:
        self.replies: dict[str, Callable[[dict[str, Any], int], Reply]] = {}
        self.loaded: list[dict[str, Any]] = []
        self.obstacle: str | None = "vLLM was started without LoRA"
        self.adapters: dict[str, dict[str, Any]] = {}
        self.version = "default"
        self.described = {
            "protocol": PROTOCOL,
            "model": "some-model",
            "dtype": "float32",
            "max_model_len": 256,
            "gpu": None,
            "sleep_mode": False,
            "architecture": architecture,
            "towers": False,
            "version": None,
        }
        self._active, self._arrived, self._group = False, {}, None
        super().__init__(port)
        self.reply = self.answer

    def routes(self) -> list[str]:
        """The routes asked, in order; of RPCs the method."""
        return [body.get("method", route) for route, body in self.requests]

    def bodies(self, route: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.requests if asked.partition("?")[0] == route]

    def answer(self, path: str, body: dict[str, Any], n: int = 0) -> tuple[int, bytes]:
        route = path.partition("?")[0]
        number = sum(asked.partition("?")[0] == route for asked, _ in self.requests)
        reply = self.replies.get(body.get("method", route)) or self.replies.get(route)
        made = reply(body, number) if reply else None
        return made or self._usual(route, body, parse_qs(path.partition("?")[2]))

    def _usual(
        self, route: str, body: dict[str, Any], query: dict[str, list[str]]
    ) -> tuple[int, bytes]:
        answer: dict[str, Any] = {}
        if route == "/collective_rpc":
            if body["method"] == "lightppo_admit":
                self._active = False
            fine = {"problem": None}
            known = {"lightppo_admit": self.described, "lightppo_problem": fine}
            known["lightppo_adapter_obstacle"] = {"obstacle": self.obstacle}
            known |= dict.fromkeys(("lightppo_receive_adapter", "lightppo_hold_adapter"), fine)
            if body["method"] == "lightppo_receive_adapter":
                self._arrived |= self._tensors(body["args"][0])
            if body["method"] == "lightppo_hold_adapter":
                self.adapters[body["args"][0]] = self._arrived
            answer = {"results": [known[body["method"]]]}
        elif route == "/lightppo/adapters":
            answer = {"problem": None, "served": {}}
        elif route == GENERATE:
            if query["weights"] != [self.version]:
                return OTHER_WEIGHTS, b"it has other weights"
            if body.get("model") not in (None, *self.adapters):
                return 404, b"the model does not exist"
            answer = {"choices": [self.choice(body)]}
        elif route == "/start_weight_update":
            if self._active:
                return 500, b"start_weight_update called while a weight update is already active"
            self._active, self._arrived, self.described["version"] = True, {}, None
        elif route == "/init_weight_transfer_engine":
            info, self._arrived = body["init_info"], {}
            self._coming = info.get("version")
            self._group = GlooGroup.join(info, 1) if info["transport"] == "gloo" else None
        elif route == "/update_weights":
            self._arrived |= self._tensors(body["update_info"])
        elif route == "/finish_weight_update":
            self._active, self.described["version"] = False, self._coming
            self.loaded.append(self._arrived)
        elif route == WEIGHTS:
            self.version = body["version"]
        return 200, json.dumps(answer).encode()

    def _tensors(self, told: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file

        if "path" in told:
            return load_file(told["path"])
        return dict(self._group.receive(told))

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        vocab_size, sampling = self.described["architecture"]["vocab_size"], body["sampling_params"]
        ids = made_up_ids(body["token_ids"], sampling["seed"], sampling["max_tokens"], vocab_size)
        return {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
        }


class TrainedVLLM(FakeVLLM):
    """A fake server whose answers depend on its weights, come after random waits, and fail from time to time.

    Attributes:
        longest_wait: seconds that an answer takes at most.
        deaths: share of the requests at which it dies, until weights are pushed to it; never all of ``others``.
        died: how often it did.
        sees_weights: its answers depend on them.
    """

    def __init__(self, architecture: dict[str, Any], longest_wait: float = 0.02) -> None:
        self.longest_wait = longest_wait
        self.deaths = 0.0
        self.died = 0
        self.sees_weights = True
        self.is_dead = False
        self.others: list[TrainedVLLM] = []
        self.prints: dict[int, int] = {}
        super().__init__(architecture)

    def answer(self, path: str, body: dict[str, Any], n: int = 0) -> tuple[int, bytes]:
        if path.startswith("/inference"):
            dice = random.SystemRandom()
            time.sleep(dice.uniform(0, self.longest_wait))
            with _ONE_DIES:
                has_others = any(not other.is_dead for other in self.others)
                if not self.is_dead and has_others and dice.random() < self.deaths:
                    self.is_dead = True
                    self.died += 1
            if self.is_dead:
                return 500, b"engine is dead"
        elif body.get("method") == "lightppo_admit":
            self.is_dead = False
        return super().answer(path, body, n)

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("model")
        weights = self.loaded[-1] | self.adapters.get(name, {}) if self.sees_weights else {}
        seed = (body["sampling_params"]["seed"] or 0) + self._print_of(
            weights, (name, len(self.loaded), self.sees_weights)
        )
        body = body | {"sampling_params": body["sampling_params"] | {"seed": seed}}
        choice = super().choice(body)
        length = 1 + seed % len(choice["token_ids"])
        choice["token_ids"] = choice["token_ids"][:length]
        log_prob = -0.1 - seed % 100 / 50
        choice["logprobs"]["content"] = [
            token | {"logprob": log_prob} for token in choice["logprobs"]["content"][:length]
        ]
        return choice

    def _print_of(self, weights: dict[str, Any], key: Any) -> int:
        """Return a number that another weight would change."""
        if key not in self.prints:
            digest = hashlib.sha256()
            for name in sorted(weights):
                digest.update(name.encode() + weights[name].float().numpy().tobytes())
            self.prints[key] = int.from_bytes(digest.digest()[:4], "big")
        return self.prints[key]


_ONE_DIES = threading.Lock()


@contextmanager
def trained_servers(architecture: dict[str, Any], count: int = 2) -> Iterator[list[TrainedVLLM]]:
    servers = [TrainedVLLM(architecture) for _ in range(count)]
    for server in servers:
        server.others = [other for other in servers if other is not server]
    yield servers
    for server in servers:
        server.close()
