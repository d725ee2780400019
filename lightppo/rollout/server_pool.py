"""Several vLLM servers: which of them are used, which are lost and why. No collectives: what ranks agree on is the
engine's matter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tenacity

from lightppo.rollout.dispatch import ServerLostError
from lightppo.rollout.server_client import ServerRefusedError, UnreachableError, VLLMServer

logger = logging.getLogger(__name__)

_START_TRY_SECONDS = 2.0  # between two looks at a server that is still starting


class ServerPool:
    """The servers of ``--vllm_server_url``, known by their place in it.

    Args:
        servers: all of them.
        misfit: why a server that describes itself so cannot sample for the actor, or ``None``.

    Attributes:
        lost: servers that are not used, and why.
    """

    def __init__(
        self, servers: Sequence[VLLMServer], misfit: Callable[[VLLMServer, dict[str, Any]], str | None]
    ) -> None:
        self.servers = list(servers)
        self.lost: dict[int, str] = {}
        self._misfit = misfit

    @property
    def live(self) -> list[int]:
        """Servers in use."""
        return [i for i in range(len(self.servers)) if i not in self.lost]

    def lose(self, reasons: Mapping[int, str]) -> None:
        """Uses some servers no more."""
        for i, reason in sorted(reasons.items()):
            if i not in self.lost:
                self.lost[i] = reason
                others = len(self.live)
                logger.warning("%s; lost until the next push of weights, %d servers are left", reason, others)

    def none_left(self) -> str:
        """What to tell the user when all are lost."""
        reasons = "; ".join(self.lost[i] for i in sorted(self.lost))
        return (
            f"--vllm_server_url: none of the {len(self.servers)} servers is left: {reasons}; look at their output, "
            "start them again by examples/serve_vllm.py and resume the run"
        )

    def wait_for_all(self, seconds: float) -> tuple[list[str], bool]:
        """Waits until all servers can be reached, and sees that they fit.

        Returns:
            What is wrong with them, and whether all of them can sleep.
        """

        def look(server: VLLMServer) -> dict[str, Any] | str:
            retrying = tenacity.Retrying(
                stop=tenacity.stop_after_delay(seconds),
                wait=tenacity.wait_fixed(_START_TRY_SECONDS),
                retry=tenacity.retry_if_exception_type(UnreachableError),
                reraise=True,
            )
            try:
                described = retrying(server.describe, tries=1)
            except UnreachableError as error:
                return (
                    f"{error}; waited {seconds:g} s (--vllm_server_start_timeout): start it by examples/serve_vllm.py, "
                    "and look at its output"
                )
            except (ServerLostError, ServerRefusedError) as error:
                return str(error)
            return self._misfit(server, described) or described

        found = self._of_all(look)
        return [x for x in found if isinstance(x, str)], all(isinstance(x, dict) and x["sleep_mode"] for x in found)

    def not_at(
        self, version: str | None, among: Iterable[int], tries: int | None = None
    ) -> dict[int, tuple[str, bool]]:
        """Servers that do not have the weights of that version: why, and whether they answered at all."""
        found = {}
        for i in among:
            try:
                has = self.servers[i].describe(tries)["version"]
            except (ServerLostError, ServerRefusedError) as error:
                found[i] = (str(error), False)
                continue
            if has != version:
                found[i] = (f"{self.servers[i].name} has other weights than were pushed: was it started anew?", True)
        return found

    def load(
        self, server: VLLMServer, source: Callable[[], dict[str, Any]], version: str, limits: Sequence[int | None]
    ) -> str | None:
        """Has one server load weights, also a lost one.

        Args:
            server: which.
            source: where the weights are; see :meth:`VLLMServer.load_weights`.
            version: of the weights.
            limits: of the vocabulary.

        Returns:
            Why it cannot sample for the actor, or ``None``.
        """
        # A look first: what is still away costs one try, not all.
        is_lost = self.servers.index(server) in self.lost
        if is_lost and (problem := self._misfit(server, server.describe(tries=1))):
            return problem
        server.load_weights(source(), version, limits)
        return None

    def each(
        self,
        call: Callable[[VLLMServer], str | None],
        among: Iterable[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, str]:
        """Calls several servers at the same time; which of them failed, and why.

        Args:
            call: says what is wrong, or raises the client's errors.
            among: which servers.
            meanwhile: called here while these calls run.
        """

        def guarded(server: VLLMServer) -> str | None:
            try:
                return call(server)
            except (ServerLostError, ServerRefusedError) as error:
                return str(error)

        among = list(among)
        reasons = zip(among, self._of_all(guarded, among, meanwhile))
        return {i: reason for i, reason in reasons if reason is not None}

    def close(self) -> None:
        """Ends the connections; the servers go on."""
        for server in self.servers:
            server.close()

    def _of_all(
        self,
        function: Callable[[VLLMServer], Any],
        among: Iterable[int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """``function`` of every server, or of some, at the same time."""
        servers = self.servers if among is None else [self.servers[i] for i in among]
        results: list[Any] = [None] * len(servers)
        failures: list[BaseException] = []

        def call(k: int) -> None:
            try:
                results[k] = function(servers[k])
            except BaseException as error:
                failures.append(error)

        # daemons: a server that is waited for must not keep a process alive that was told to end
        threads = [
            threading.Thread(target=call, args=(k,), name="vllm-server", daemon=True) for k in range(len(servers))
        ]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results
