"""One vLLM server over HTTP: requests with time-outs, and errors that say what to do."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import tenacity
import urllib3

from lightppo.http import cleaned, is_loopback, secret_texts, shown_url
from lightppo.rollout.dispatch import ServerLostError
from lightppo.rollout.server_worker import PROTOCOL

logger = logging.getLogger(__name__)

_PASSING_STATUS = (408, 425, 429)  # client errors that say "later"
_LONGEST_WAIT = 30.0  # seconds between tries
_QUIET_SECONDS = 5.0  # between two warnings of failed tries of one server
_CONNECT_SECONDS = 10.0
_QUICK_SECONDS = 30.0  # for what needs no computing
_READ_BYTES = 1 << 16
_SHOWN_BYTES = 4096
_MOST_BYTES = 1 << 28  # of an answer
_TIME_OUTS = (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)
_START = "start it by examples/serve_vllm.py"
_DESCRIBED = {"protocol", "version", "model", "dtype", "max_model_len", "sleep_mode", "architecture"}


class UnreachableError(ServerLostError):
    """No connection: the server may still be starting."""


class SlowServerError(ServerLostError):
    """No answer within the limit: too long a wait to begin it again."""


class ServerRefusedError(Exception):
    """A server's answer that no retry and no other server mends; the message says what to do."""


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        token_ids: sampled ids, the stop id included.
        log_probs: of each, NaN where the server could not say.
        finish_reason: "stop" or "length".
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


class VLLMServer:
    """Asks one server. Threads may share it.

    Failures that may pass (no connection, HTTP 5xx, an answer that is none) are tried again with waits of 1, 2, 4, … up
    to 30 seconds between; after the last try the server is lost, and so it is at the first time-out.

    Args:
        url: its address, ``http://HOST:PORT``.
        timeout: limit of one completion or weight load, in seconds.
        retries: further tries after a failure that may pass.
        key: sent as ``Authorization: Bearer …``, never in logs and errors.
        sleep: waits that many seconds between tries.

    Attributes:
        name: what logs and errors call it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"vLLM server {shown_url(self.url)}"
        self.timeout = timeout
        self.retries = retries
        self._is_here = is_loopback(urlsplit(url).hostname or "")
        self._auth = _Bearer(key)
        self._secrets = secret_texts([url], key)
        self._sleep = sleep
        self._warned_at = -math.inf
        self._local = threading.local()

    # -- what a server is asked ------------------------------------------------------------------------------------

    def describe(self, tries: int | None = None) -> dict[str, Any]:
        """What it serves: :meth:`~lightppo.rollout.server_worker.WeightReceiver.lightppo_describe` of its workers,
        which must agree, and ``workers``: how many there are.

        Raises:
            ServerRefusedError, ServerLostError: as of every call.
        """
        described = self._rpc("lightppo_describe", {}, _QUICK_SECONDS, tries)
        if any(one != described[0] for one in described):
            raise ServerLostError(f"{self.name}: its workers differ: {described}")
        if described[0].get("protocol") != PROTOCOL or not described[0].keys() >= _DESCRIBED:
            raise ServerRefusedError(f"{self.name} runs another version of lightppo: {_START} of this version")
        return described[0] | {"workers": len(described)}

    def complete(self, parameters: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Completion:
        """One response to a prompt of token ids."""
        body = {**parameters, "prompt": prompt_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}

        def read(answer: Any) -> Completion:
            return _completion(answer, prompt_ids, parameters["max_tokens"], vocab_size)

        return self._call("/v1/completions", body, self.timeout, read)

    def load_weights(self, source: dict[str, Any], version: str, limits: Sequence[int | None]) -> None:
        """Replaces its weights while it is paused, and empties its prefix cache.

        What it still computes then is of nobody who waits for it, and is aborted.

        Args:
            source: ``{"files": paths}``, or ``{"broadcast": invitation}``, which is for one try alone.
            version: of these weights.
            limits: of the vocabulary; see :meth:`~lightppo.rollout.server_worker.WeightReceiver.lightppo_load`.

        Raises:
            ServerRefusedError: the weights cannot be read there or do not fit.
            ServerLostError: as of every call.
        """
        arguments = {**source, "version": version, "vocabulary_limits": list(limits)}
        self._call("/pause?mode=abort", {}, self.timeout, _object)
        try:
            for answer in self._rpc("lightppo_load", arguments, self.timeout, _tries(source)):
                if answer.get("version") != version:
                    raise ServerRefusedError(f"{self.name} could not load the weights: {self._reason(answer)}")
            reset = self._call("/reset_prefix_cache", {}, _QUICK_SECONDS, _object)
            if reset.get("success") is not True:
                raise ServerLostError(f"{self.name} could not empty its prefix cache, which holds the old weights'")
        finally:
            self._resume()

    def differing_weights(self, source: dict[str, Any], tolerance: float) -> tuple[set[str], set[str]]:
        """Names of weights that are not those of the trainer's fingerprints, and of those that cannot be compared."""
        arguments = {**source, "tolerance": tolerance}
        answers = self._rpc("lightppo_differing", arguments, self.timeout, _tries(source))
        for answer in answers:
            if "error" in answer:
                raise ServerRefusedError(f"{self.name} could not compare its weights: {self._reason(answer)}")
        differing, unknown = ({name for answer in answers for name in answer[k]} for k in ("differing", "unknown"))
        return differing, unknown

    def sleep(self, level: int) -> None:
        """Frees its device memory."""
        self._call(f"/sleep?level={level}", {}, self.timeout, _object)

    def wake(self) -> None:
        """Takes its device memory back."""
        self._call("/wake_up", {}, self.timeout, _object)

    def close(self) -> None:
        """Forgets its connections."""
        self._local = threading.local()

    # -- how -------------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"vLLM server {self.shown}"

    def _reason(self, answer: dict[str, Any]) -> str:
        return cleaned(str(answer.get("error", answer)), self._secrets)

    def _resume(self) -> None:
        try:
            self._call("/resume", {}, _QUICK_SECONDS, _object, tries=1)
        except (ServerLostError, ServerRefusedError) as error:  # the push failed before, or the next call will
            logger.warning("%s", error)

    def _rpc(
        self, method: str, arguments: dict[str, Any], timeout: float, tries: int | None = None
    ) -> list[dict[str, Any]]:
        def read(answer: Any) -> list[dict[str, Any]]:
            results = _object(answer).get("results")
            if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
                raise _NoAnswerError(f"the answer of {method} is {_short(answer)}")
            return results

        body = {"method": method, "kwargs": arguments, "timeout": timeout}
        return self._call("/collective_rpc", body, timeout, read, tries)

    def _call(
        self, path: str, body: dict[str, Any], timeout: float, read: Callable[[Any], Any], tries: int | None = None
    ) -> Any:
        """POST, and ``read`` of the JSON that comes back, after the retries."""

        def log_retry(state: tenacity.RetryCallState) -> None:
            reason = state.outcome.exception() if state.outcome else None
            wait = state.next_action.sleep if state.next_action else 0.0
            now = time.monotonic()
            # One line for the hundreds of requests that fail together.
            level = logging.WARNING if now - self._warned_at > _QUIET_SECONDS else logging.DEBUG
            self._warned_at = now if level == logging.WARNING else self._warned_at
            logger.log(level, "%s; next try in %.0f s", reason, wait)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(tries or self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=1, max=_LONGEST_WAIT),
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, ServerLostError) and not isinstance(error, SlowServerError)
            ),
            sleep=self._sleep,
            before_sleep=log_retry,
            reraise=True,
        )
        return retrying(self._try, path, body, timeout, read)

    def _try(self, path: str, body: dict[str, Any], timeout: float, read: Callable[[Any], Any]) -> Any:
        """One request. Errors are raised outside ``except``: a chained one would show what is cleaned here."""
        route, failure, kind = path.partition("?")[0], "", ServerLostError
        try:
            status, content = self._post(path, json.dumps(body).encode(), timeout)
            text = cleaned(content[:_SHOWN_BYTES].decode(errors="replace"), self._secrets)
            if status == 200:
                return read(_parsed(content))
            if 300 <= status < 500 and status not in _PASSING_STATUS:
                raise ServerRefusedError(f"{self.name}: {route}: HTTP {status}{_advice(status, route, text)}")
            failure = f"HTTP {status}: {text}"
        except (requests.RequestException, urllib3.exceptions.HTTPError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {cleaned(str(error), self._secrets)}"
            kind = SlowServerError if isinstance(error, _TIME_OUTS) else kind
            kind = UnreachableError if isinstance(error, requests.ConnectionError) else kind
        except _NoAnswerError as error:
            failure = cleaned(str(error), self._secrets)
        raise kind(f"{self.name}: {route}: {failure}")

    def _post(self, path: str, content: bytes, timeout: float) -> tuple[int, bytes]:
        deadline = time.monotonic() + timeout
        # The time-out of requests is between two bytes; the deadline is for a server that drips.
        with self._session().post(
            self.url + path,
            data=content,
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            auth=self._auth,
            timeout=(min(_CONNECT_SECONDS, timeout), timeout),
            allow_redirects=False,
            stream=True,
        ) as response:
            body = bytearray()
            while chunk := response.raw.read1(_READ_BYTES, decode_content=True):
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise requests.RequestException(f"the answer is longer than {_MOST_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer was not complete after {timeout:g} s")
            return response.status_code, bytes(body)

    def _session(self) -> requests.Session:
        """One per thread: connections are kept, and a session is not for several threads."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = not self._is_here  # a proxy cannot reach this machine's loopback
        return self._local.session


class _Bearer(requests.auth.AuthBase):
    """The key or nothing; given to every request, so that ``~/.netrc`` is never read and sent instead."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class _NoAnswerError(Exception):
    """HTTP 200 with something else than was asked for."""


def _tries(source: dict[str, Any]) -> int | None:
    """A broadcast is not sent again; files can be read again."""
    return 1 if "broadcast" in source else None


def _advice(status: int, route: str, text: str) -> str:
    """What a client error says, and what to do about it."""
    if status < 400:
        return ": redirects are not followed, give its own address"
    advice = ""
    if status in (401, 403):
        advice = "; set --vllm_server_api_key_env to the environment variable that holds the server's key"
    if "not JSON compliant" in text:  # how vLLM answers when a log prob is NaN
        advice = (
            "; no token can be drawn: the model's logits are NaN or infinite (have its weights diverged?), or "
            "bad_words and min_new_tokens ban every id"
        )
    if status == 404:
        what = "this is no vLLM server" if route == "/v1/completions" else "it has no routes for weights"
        advice = f"; {what}: {_START}"
    return f": {text}{advice}"


def _parsed(content: bytes) -> Any:
    if not content:
        return {}  # some routes answer with nothing
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _NoAnswerError(f"the answer is not JSON: {content[:_SHOWN_BYTES]!r}") from None


def _object(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise _NoAnswerError(f"the answer must be a JSON object, got {_short(answer)}")
    return answer


def _short(answer: Any) -> str:
    return repr(answer)[:_SHOWN_BYTES]


def _completion(answer: Any, prompt_ids: list[int], max_tokens: int, vocab_size: int) -> Completion:
    """What /v1/completions answered, checked against what it was asked."""
    try:
        (choice,) = answer["choices"]
        ids, reason, echoed = choice["token_ids"], choice["finish_reason"], choice["prompt_token_ids"]
        log_probs = choice["logprobs"]["token_logprobs"]
    except (TypeError, KeyError, ValueError):
        raise _NoAnswerError(f"the answer has no single choice with token_ids and logprobs: {_short(answer)}") from None
    if reason not in ("stop", "length"):  # e.g. abort, when the server is paused
        raise _NoAnswerError(f"the request ended with {reason!r}")
    if echoed != prompt_ids:
        raise _NoAnswerError("the answer is to another prompt")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise _NoAnswerError(f"token_ids are no ids of the model: {_short(ids)}")
    if not 0 < len(ids) <= max_tokens:
        raise _NoAnswerError(f"{len(ids)} tokens for max_tokens {max_tokens}")
    numbers = isinstance(log_probs, list) and all(value is None or type(value) in (int, float) for value in log_probs)
    if not numbers or len(log_probs) != len(ids):
        raise _NoAnswerError(f"token_logprobs do not fit {len(ids)} token ids: {_short(log_probs)}")
    return Completion(ids, [float("nan") if value is None else float(value) for value in log_probs], reason)
