"""Rewards from HTTP servers: POST ``{"query", "prompts", "labels"}``, get ``{"rewards", "scores"?, "extra_logs"?}``.

All values are lists with one entry per sample; ``query`` is prompt + response. A server that is dead or lies is tried
again with back-off. Then it is an error that names it, or its samples are unscored; it never becomes a score.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import requests
import tenacity
import urllib3

from lightppo.config.address import check_token, check_url, cleaned, secret_texts, shown_url
from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.failures import OnFailure, check_failure_options
from lightppo.rewards.source import RewardOutput, check_output, join_outputs, output_from_result

logger = logging.getLogger(__name__)

_PASSING_STATUS = (408, 425, 429)  # client errors that say "later"; every other one stays however often it is asked
_LONGEST_WAIT = 30.0  # seconds
_READ_BYTES = 1 << 16
_SHOWN_BYTES = 4096  # of an answer; cut to a line after cleaning
_MOST_BYTES = 1 << 28  # of an answer
_TIME_OUTS = (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)


class RemoteReward:
    """Shares the samples of this rank out over several servers and asks them in parallel.

    Metrics per sample, where there are retries or ``on_reward_failure="unscored"``: ``failures`` (requests for it that
    failed) and ``timeouts`` (those of them that ran into the limit), each plus what the server itself sent under that
    name.

    Args:
        urls: http(s) addresses, all of the same service. Each gets a run of consecutive samples of nearly equal length.
        timeout: limit of one request, in seconds: of connecting, of any silence, and of the whole answer (looked at
            when bytes arrive, so that a dripping server is left after at most twice this).
        retries: further tries after a failed request; waits of 1, 2, 4, … up to 30 seconds lie between. A client error
            (4xx, but for 408, 425, 429) or a redirect is not tried again.
        on_reward_failure: what comes after the last try of a request: an ``"error"``, or its samples are
            ``"unscored"``. What no retry can help (a 4xx, a redirect) is an error always.
        token: sent as ``Authorization: Bearer …``; see :func:`lightppo.config.address.read_token`. Never in
            logs and errors.
        sleep: waits that many seconds between tries.
        name: what errors and metrics call it.

    Raises:
        ValueError: no URL, one that is not http(s) or carries a password, or a limit out of range.
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
        if token is not None:
            check_token(token, "token")
        self.urls = list(urls)
        self.timeout = timeout
        self.retries = retries
        self.on_reward_failure = on_reward_failure
        self.name = name
        self._sleep = sleep
        self._auth = _Bearer(token)
        self._secrets = secret_texts(self.urls, token)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples.

        Raises:
            RewardError: naming every server that gave no usable answer after the retries, and why.
        """
        shares = [(url, part) for url, part in zip(self.urls, _share_out(rollouts, len(self.urls))) if part]
        if not shares:
            return RewardOutput([])
        with ThreadPoolExecutor(max_workers=len(shares), thread_name_prefix="reward") as pool:
            results = list(pool.map(lambda share: self._ask(*share), shares))
        failures = [
            r.error for r in results if r.error is not None and (self.on_reward_failure == "error" or r.lasting)
        ]
        if failures:
            raise RewardError("; ".join(failures))
        for result, (_, part) in zip(results, shares):
            if result.error is not None:
                logger.warning("%s; its %d samples stay unscored", result.error, len(part))
        return join_outputs([self._counted(result, len(part)) for result, (_, part) in zip(results, shares)])

    def _counted(self, result: _Result, n: int) -> RewardOutput:
        """The answer, or n unscored samples, with the counts of failed requests."""
        output = result.output or RewardOutput([None] * n)
        if self.retries or self.on_reward_failure == "unscored":
            for name, count in (("failures", result.failures), ("timeouts", result.timeouts)):
                sent = output.metrics.get(name, [None] * n)
                output.metrics[name] = [float(count) + (value or 0.0) for value in sent]
        return output

    def _ask(self, url: str, rollouts: list[Rollout]) -> _Result:
        """One server's share, after the retries."""
        result = _Result()

        def note(state: tenacity.RetryCallState) -> None:
            failure = state.outcome.exception() if state.outcome else None
            if isinstance(failure, _Failure):
                result.failures += 1
                result.timeouts += failure.timed_out

        def log_retry(state: tenacity.RetryCallState) -> None:
            reason = state.outcome.exception() if state.outcome else None
            wait = state.next_action.sleep if state.next_action else 0.0
            logger.warning("%s; next try in %.0f s", reason, wait)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=1, max=_LONGEST_WAIT),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, _Failure) and error.passing),
            sleep=self._sleep,
            after=note,
            before_sleep=log_retry,
            reraise=True,
        )
        try:
            result.output = retrying(self._try, url, rollouts)
        except _Failure as failure:
            result.error = f"{failure} ({retrying.statistics['attempt_number']} of {self.retries + 1} tries)"
            result.lasting = not failure.passing
        return result

    def _try(self, url: str, rollouts: list[Rollout]) -> RewardOutput:
        """One request. Failures are raised outside ``except``: a chained exception would show what is cleaned here."""
        server, reason = f"reward server {shown_url(url)}", ""
        passing, timed_out = True, False
        try:
            status, body = self._post(url, _payload(rollouts, server))
            if status == 200:
                output = output_from_result(_parse_json(body, server), len(rollouts), server)
                return check_output(output, rollouts, server)
            reason = f"{server}: HTTP {status}: {cleaned(body.decode(errors='replace'), self._secrets)}"
            passing = not 300 <= status < 500 or status in _PASSING_STATUS
            if 300 <= status < 400:
                reason = f"{server}: HTTP {status}: redirects are not followed, give the final URL"
        except (requests.RequestException, urllib3.exceptions.HTTPError, TimeoutError) as error:
            reason = f"{server}: {type(error).__name__}: {cleaned(str(error), self._secrets)}"
            timed_out = isinstance(error, _TIME_OUTS)
        except _UnusableRequest as error:
            reason, passing = str(error), False
        except RewardError as error:
            reason = cleaned(str(error), self._secrets)
        raise _Failure(reason, passing, timed_out)

    def _post(self, url: str, payload: bytes) -> tuple[int, bytes]:
        deadline = time.monotonic() + self.timeout
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        # requests' own time-out is between two bytes; a server that drips would hold all ranks, hence the deadline
        with requests.post(
            url,
            data=payload,
            headers=headers,
            auth=self._auth,
            timeout=self.timeout,
            allow_redirects=False,
            stream=True,
        ) as response:
            body = bytearray()
            while chunk := response.raw.read1(_READ_BYTES, decode_content=True):
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise requests.RequestException(f"the answer is longer than {_MOST_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer was not complete after {self.timeout:g} s")
            return response.status_code, bytes(body)


class _Failure(Exception):
    """A failed try; ``passing``: another one may help. Its text holds no secret."""

    def __init__(self, reason: str, passing: bool, timed_out: bool) -> None:
        super().__init__(reason)
        self.passing = passing
        self.timed_out = timed_out


@dataclass
class _Result:
    """What one request came to: an answer or an error (``lasting``: no retry would help), and how often it failed."""

    output: RewardOutput | None = None
    error: str | None = None
    lasting: bool = False
    failures: int = 0
    timeouts: int = 0


class _UnusableRequest(Exception):
    """The samples cannot be sent."""


class _Bearer(requests.auth.AuthBase):
    """The token or nothing; given to every request, so that ``~/.netrc`` is never read and sent instead."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


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
        raise _UnusableRequest(f"{server}: labels cannot be sent as JSON: {error}") from None


def _parse_json(body: bytes, server: str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{server}: the answer is not JSON ({error}): {body[:_SHOWN_BYTES]!r}") from None
    if not isinstance(answer, dict):
        raise RewardError(f"{server}: the answer must be a JSON object with 'rewards', got {type(answer).__name__}")
    return answer
