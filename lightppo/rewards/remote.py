"""Rewards from HTTP servers: POST ``{"query", "prompts", "labels"}``, get ``{"rewards", "scores"?, "extra_logs"?}``.

All values are lists with one entry per sample; ``query`` is prompt + response.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from lightppo.data.records import Rollout
from lightppo.errors import RefusedError, RequestError, RewardError
from lightppo.http import HTTPClient, check_url
from lightppo.rewards.source import (
    OnFailure,
    RewardOutput,
    check_failure_options,
    check_output,
    join_outputs,
    output_from_result,
)

logger = logging.getLogger(__name__)


class RemoteReward:
    """Splits the samples of this rank over several servers and asks them in parallel.

    Metrics per sample, with retries or ``on_reward_failure="unscored"``: ``failures`` (failed requests) and
    ``timeouts``, each plus what the server itself sent under that name.

    Args:
        urls: http(s) addresses of servers of the same service.
        timeout: seconds per request.
        retries: further tries after a failed request; see :class:`~lightppo.http.HTTPClient`.
        on_reward_failure: after the last try, ``"error"`` or ``"unscored"``; what no retry can help is always an error.
        token: sent as ``Authorization: Bearer …``; see :func:`lightppo.http.read_token`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float = 60.0,
        retries: int = 3,
        on_reward_failure: OnFailure = "error",
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        name: str = "remote",
    ) -> None:
        if not urls:
            raise ValueError("--remote_rm_url: no URL given")
        for url in urls:
            check_url(url)
        if timeout <= 0 or retries < 0:
            raise ValueError(f"remote reward: timeout must be > 0 and retries ≥ 0, got {timeout} and {retries}")
        check_failure_options(on_reward_failure, retries, timeout)
        self.urls = list(urls)
        self.timeout = timeout
        self.retries = retries
        self.on_reward_failure = on_reward_failure
        self.name = name
        self._counts = retries > 0 or on_reward_failure == "unscored"
        options = {"timeout": timeout, "retries": retries, "token": token, "sleep": sleep}
        self._servers = [HTTPClient(url, "reward server", **options) for url in urls]

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; the :class:`RewardError` names every server that gave no usable answer, and why."""
        shares = [share for share in zip(self._servers, _share_out(rollouts, len(self._servers))) if share[1]]
        if not shares:
            return RewardOutput([])
        with ThreadPoolExecutor(max_workers=len(shares), thread_name_prefix="reward") as pool:
            answers = list(pool.map(lambda share: self._ask(*share), shares))
        unscored = self.on_reward_failure == "unscored"
        errors = [a.error for a in answers if a.error and not (unscored and not isinstance(a.error, RefusedError))]
        if errors:
            raise RewardError("; ".join(map(str, errors)))
        return join_outputs([self._counted(answer, len(part)) for answer, (_, part) in zip(answers, shares)])

    def close(self) -> None:
        """Ends waits between tries."""
        for server in self._servers:
            server.close()

    def _ask(self, server: HTTPClient, rollouts: list[Rollout]) -> _Answer:
        """Asks one server for its share, with retries."""
        payload, answer = _payload(rollouts, server.name), _Answer()

        def read(result: dict) -> RewardOutput:
            return check_output(output_from_result(result, len(rollouts), self.name), rollouts, self.name)

        try:
            answer.output = server.post("", payload, read, on_failure=answer.failures.append)
        except RequestError as error:
            answer.error = error
        return answer

    def _counted(self, answer: _Answer, n: int) -> RewardOutput:
        """The answer, or n unscored samples, with the counts of failed requests."""
        if answer.error is not None:
            logger.warning("%s; its %d samples stay unscored", answer.error, n)
        output = answer.output or RewardOutput([None] * n)
        if self._counts:
            timeouts = sum(failure.timed_out for failure in answer.failures)
            for name, count in (("failures", len(answer.failures)), ("timeouts", timeouts)):
                sent = output.metrics.get(name, [None] * n)
                output.metrics[name] = [float(count) + (value or 0.0) for value in sent]
        return output


@dataclass
class _Answer:
    """The answer to one server's share, and the tries that failed."""

    output: RewardOutput | None = None
    error: RequestError | None = None
    failures: list[RequestError] = field(default_factory=list)


def _share_out(rollouts: list[Rollout], n_parts: int) -> list[list[Rollout]]:
    """Consecutive runs whose lengths differ by at most one."""
    bounds = [len(rollouts) * i // n_parts for i in range(n_parts + 1)]
    return [rollouts[start:end] for start, end in pairwise(bounds)]


def _payload(rollouts: list[Rollout], server: str) -> bytes:
    payload = {
        "query": [rollout.prompt.text + rollout.response_text for rollout in rollouts],
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "labels": [rollout.prompt.label for rollout in rollouts],
    }
    try:
        return json.dumps(payload, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(f"{server}: labels cannot be sent as JSON: {error}") from None
