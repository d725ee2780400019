"""How tensors get from the trainer to servers: by files, or by broadcasts. No collectives: what ranks agree on is the
engine's matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightppo.config.options import EngineConfig
from lightppo.errors import RolloutError
from lightppo.rollout.server_client import VLLMServer
from lightppo.rollout.server_pool import ServerPool
from lightppo.rollout.weight_broadcast import BroadcastError, WeightSender, send_tensors
from lightppo.rollout.weight_files import new_folder, remove_folder, write_weights

Source = Callable[[], dict[str, Any]]
"""Where a server finds the tensors: arguments for its worker. Called once, when it is about to look there."""

Take = Callable[[VLLMServer, Source], str | None]
"""Has a server take the tensors from a source; why it did not, or ``None``. It may raise the client's errors."""


class Delivery:
    """Brings tensors to servers as ``--vllm_server_sync`` says.

    Args:
        engine: that section of the config.
        pool: the servers.
        device: where the tensors are.
    """

    def __init__(self, engine: EngineConfig, pool: ServerPool, device: torch.device) -> None:
        self._engine, self._pool, self._device = engine, pool, device

    def __call__(
        self, tensors: Iterable[tuple[str, Tensor]], n_bytes: int, take: Take, among: Sequence[int] | None = None
    ) -> tuple[str | None, dict[int, str]]:
        """Reads ``tensors`` to the end, whatever happens to servers: other ranks iterate along.

        Args:
            tensors: names and whole tensors.
            n_bytes: size of all.
            take: has one server take them; all are asked at the same time.
            among: places of the servers; ``None``: all.

        Returns:
            Why nothing could be brought to anybody, or ``None``; and which servers failed, and why.
        """
        way = self._broadcast if self._engine.vllm_server_sync == "collective" else self._write
        return way(tensors, n_bytes, take, range(len(self._pool.servers)) if among is None else among)

    def _write(
        self, tensors: Iterable[tuple[str, Tensor]], n_bytes: int, take: Take, among: Sequence[int]
    ) -> tuple[str | None, dict[int, str]]:
        folder, problem = None, None
        try:
            try:
                folder = new_folder(self._engine.vllm_server_sync, self._engine.vllm_server_sync_dir, n_bytes)
            except RolloutError as error:
                problem = str(error)
            files, unwritten = write_weights(tensors, folder)
            if problem or unwritten:
                return problem or unwritten, {}
            return None, self._pool.each(lambda server: take(server, lambda: {"files": files}), among)
        finally:
            remove_folder(folder)

    def _broadcast(
        self, tensors: Iterable[tuple[str, Tensor]], n_bytes: int, take: Take, among: Sequence[int]
    ) -> tuple[str | None, dict[int, str]]:
        address, seconds = self._engine.vllm_server_sync_address, self._engine.vllm_server_timeout
        senders = {self._pool.servers[i].name: WeightSender(address, seconds) for i in among}

        def one(server: VLLMServer) -> str | None:
            """In the thread that asks this server, while this function sends."""
            sender, problem = senders[server.name], "the request failed"
            try:
                invite = lambda: {"broadcast": sender.invite(server.describe(tries=1)["workers"])}  # noqa: E731
                problem = take(server, invite)
            except BroadcastError as error:
                problem = f"{server.name}: {error}"
            except Exception as error:
                problem = str(error)
                raise
            finally:
                if problem is not None:
                    sender.fail(problem)
            return problem

        try:
            send = lambda: send_tensors(tensors, list(senders.values()), self._device)  # noqa: E731
            failures = self._pool.each(one, among, meanwhile=send)
        finally:
            for sender in senders.values():
                sender.close()
        for i in among:  # a server knows better why
            name = self._pool.servers[i].name
            if senders[name].failure is not None:
                failures.setdefault(i, f"{name}: {senders[name].failure}")
        return None, failures
