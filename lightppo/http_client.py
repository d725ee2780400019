"""The one HTTP client for servers we ask, and the checks that keep their addresses safe and their tokens secret."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from lightppo.errors import (
    ConfigError,
    RefusedError,
    RequestError,
    SlowServerError,
    UnreachableError,
    UserError,
)
from lightppo.ranks import heartbeat
from lightppo.redaction import GIVE_WHOLE, is_cut, plain, shown_url

if TYPE_CHECKING:
    import requests
    import tenacity

logger = logging.getLogger(__name__)

_PASSING_STATUS = (408, 425, 429)  # client errors that say "later"; all others are final
_LONGEST_WAIT = 30.0  # seconds between tries
_QUIET_SECONDS = 5.0  # between equal warnings
_READ_BYTES = 1 << 16
_SNIPPET_CHARS = 300

T = TypeVar("T")
Read = Callable[[dict[str, Any]], T]


@dataclass(eq=False, repr=False)
class HTTPClient:
    """Ask one server for JSON objects; threads may share it.

    A failure that may pass (no connection, a time-out, HTTP 5xx, 408, 425 or 429, an unusable answer) is tried again
    after 1, 2, 4, … up to 30 seconds. A redirect or another client error is final. Proxies are not used for this
    machine's own addresses; cookies and ``~/.netrc`` are never used.
    """

    url: str
    what: str = "server"  # what logs and errors call it
    _: KW_ONLY
    timeout: float = 60.0  # seconds per try, from connecting to the last byte of the answer
    connect_timeout: float = float("inf")  # seconds for connecting, if shorter
    retries: int = 0  # further tries after a failure that may pass
    retry_timeouts: bool = True  # False: time-outs are final
    token: str | None = None  # sent as Authorization: Bearer …, never logged; see read_token
    max_concurrent: int | None = None  # requests at a time, others wait
    max_bytes: int = 1 << 28  # the longest answer
    # Reuse connections. Then a request fails if the server closes an idle connection just as it is sent.
    keep_alive: bool = False
    sleep: Callable[[float], Any] | None = None

    def __post_init__(self) -> None:
        check_url(self.url, self.what, None)
        if self.token is not None:
            check_token(self.token, self.what)
        self.name = f"{self.what} {shown_url(self.url)}"
        if not self.timeout > 0 or self.retries < 0 or self.max_concurrent == 0:
            got = f"timeout {self.timeout}, retries {self.retries}, max_concurrent {self.max_concurrent}"
            raise ValueError(f"{self.name}: out of range: {got}")
        self._secrets = secret_texts(self.token, self.url)
        places = self.max_concurrent
        self._places = nullcontext() if places is None else threading.BoundedSemaphore(places)
        self._closed = threading.Event()
        self._warned_at: dict[tuple[Any, ...], float] = {}

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Read[T] = dict,
        *,
        timeout: float | None = None,
        on_failure: Callable[[RequestError], Any] = lambda error: None,
    ) -> T:
        """Send a JSON object, again and again until ``read`` accepts the answer; raises :class:`RequestError`.

        ``read`` takes the result out of the answer (``{}`` for an empty one), and raises ``ValueError``, ``TypeError``,
        ``LookupError`` or a ``UserError`` for an unusable one. ``timeout`` is per try, ``on_failure`` gets each error.
        """
        import tenacity

        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: the request cannot be sent as JSON: {error}") from None
        tries = self.retries + 1
        final = RefusedError if self.retry_timeouts else (RefusedError, SlowServerError)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(tries),
            wait=tenacity.wait_exponential(max=_LONGEST_WAIT),
            retry=tenacity.retry_if_exception(
                lambda e: isinstance(e, RequestError) and not isinstance(e, final)
            ),
            sleep=self.sleep or self._wait,
            after=lambda state: on_failure(state.outcome.exception()),
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            answer = retrying(self._try, path, content, read, timeout or self.timeout)
            heartbeat.beat()
            return answer
        except RequestError as error:
            if tries > 1:
                error.args = (
                    f"{error} ({retrying.statistics['attempt_number']} of {tries} tries)",
                )
            raise

    def clean(self, text: str) -> str:
        """Return the text in one line, without this server's secrets."""
        return cleaned(text, self._secrets)

    def close(self) -> None:
        """End idle connections and waits between tries; nothing is tried again."""
        self._closed.set()
        if "_shared_session" in vars(self):
            self._shared_session.close()

    def _try(self, path: str, content: bytes, read: Read[T], timeout: float) -> T:
        """Send one request. Failures are raised outside ``except``: a chained error would show what is cleaned here."""
        import requests
        import urllib3

        kind = RequestError
        status = None
        timed_out = False
        answer_error = None
        try:
            with self._places:
                status, answer = self._send(path, content, timeout)
            if status == 200:
                return read(_parse(answer))
            reason = f"HTTP {status}: {answer.decode(errors='replace')}"
            if 300 <= status < 400:
                reason = f"HTTP {status}: redirects are not followed, give the final URL"
            if 300 <= status < 500 and status not in _PASSING_STATUS:
                kind = RefusedError
        except (requests.RequestException, urllib3.exceptions.HTTPError, TimeoutError) as error:
            reason = _innermost_reason(error)
            timed_out = _is_time_out(error)
            kind = UnreachableError if isinstance(error, requests.ConnectionError) else kind
            if isinstance(error, requests.ConnectTimeout):
                reason = f"no connection within {min(self.connect_timeout, timeout):g} s"
            elif timed_out:
                kind = SlowServerError
                reason = f"the answer was not complete after {timeout:g} s"
        except (UserError, ValueError, TypeError, LookupError, RecursionError) as error:
            reason = f"its answer cannot be used: {'it lacks ' if isinstance(error, KeyError) else ''}{error}"
            answer_error = type(error)
        route = f"{path.partition('?')[0]}: " if path else ""
        text = f"{self.name}: {route}{self.clean(reason)}"
        raise kind(text, status=status, timed_out=timed_out, answer_error=answer_error)

    def _send(self, path: str, content: bytes, timeout: float) -> tuple[int, bytes]:
        """Return status and answer, within the time for the whole exchange."""
        import requests

        from lightppo.http_deadline import deadline

        with (
            deadline(timeout),
            nullcontext(self._shared_session) if self.keep_alive else self._session() as session,
            session.post(
                self.url + path,
                data=content,
                headers={"Content-Type": "application/json", "Accept": "application/json"},
                auth=self._authorise,
                timeout=(min(self.connect_timeout, timeout), timeout),
                allow_redirects=False,
                proxies=self._proxies,
                stream=True,
            ) as response,
        ):
            answer = bytearray()
            while chunk := response.raw.read1(_READ_BYTES, decode_content=True):
                answer += chunk
                if len(answer) > self.max_bytes:
                    raise requests.RequestException(
                        f"the answer is longer than {self.max_bytes} bytes"
                    )
            return response.status_code, bytes(answer)

    def _session(self, connections: int = 1) -> requests.Session:
        import requests

        from lightppo.http_deadline import DeadlineAdapter

        session = requests.Session()
        adapter = DeadlineAdapter(pool_connections=1, pool_maxsize=connections)
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        return session

    @cached_property
    def _shared_session(self) -> requests.Session:
        session = self._session(connections=self.max_concurrent or 1024)
        # Without cookies, threads can share the session.
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        return session

    @cached_property
    def _proxies(self) -> dict[str, str] | None:
        host = urlsplit(self.url).hostname or ""
        # a proxy cannot reach this machine's loopback
        return {"no_proxy": host} if is_loopback(host) else None

    def _authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add the token, if any. Every request gets this, or requests would read ``~/.netrc`` and send it."""
        if self.token is not None:
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    def _wait(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise RequestError(f"{self.name}: the client was closed before its next try")

    def _log_retry(self, state: tenacity.RetryCallState) -> None:
        """Log one warning for the hundreds of requests that fail together."""
        error = state.outcome.exception()
        wait = state.next_action.sleep
        now = time.monotonic()
        warning_key = (type(error), error.status, wait)
        is_quiet = now - self._warned_at.get(warning_key, float("-inf")) < _QUIET_SECONDS
        if not is_quiet:
            self._warned_at[warning_key] = now
        logger.log(
            logging.DEBUG if is_quiet else logging.WARNING, "%s; next try in %.0f s", error, wait
        )


def _innermost_reason(error: BaseException) -> str:
    """Return what the network says: requests and urllib3 wrap it in the names of their own objects."""
    outermost = error
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if error is outermost and f"{error}":
        return f"{error}"
    return f"{type(error).__name__}: {error}"


def _is_time_out(error: BaseException | None) -> bool:
    """Return whether a time-out is the cause; of sending, requests says only that the connection was aborted."""
    while error is not None and not isinstance(error, TimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None


def _parse(answer: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(answer or b"{}")  # some routes of vLLM answer with nothing
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}): {answer.decode(errors='replace')}") from None
    if not isinstance(parsed, dict):
        raise TypeError(f"it must be a JSON object, got {type(parsed).__name__}")
    return parsed


def check_url(
    url: str, option: str = "--remote_rm_url", token_option: str | None = "--remote_rm_token_env"
) -> None:
    """Refuse what is not an http(s) address with a host, or contains a user or password, with a ``ValueError``."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # e.g. a port that is not a number; its text may quote a password
        good = False
    if "@" in url and not (good and parts.username is None and parts.password is None):
        advice = f"use {token_option} instead" if token_option else "leave it out"
        raise ValueError(f"{option}: a URL has a user or password in it; {advice}")
    if not good:
        raise ValueError(f"{option}: {shown_url(url)!r} is not an http(s) address")
    if is_cut(url):
        raise ValueError(f"{option} {url}: {GIVE_WHOLE}")


def is_loopback(host: str) -> bool:
    """Return whether every address of a host name or IP address belongs to this machine alone; False for an unknown name."""
    if not host:
        return False  # all interfaces
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses
    )


def read_token(*, env: str | None = None, option: str = "--remote_rm_token_env") -> str | None:
    """Read a bearer token from an environment variable; ``None`` if there is no ``env``.

    ``ValueError`` names ``option``, the flag of the variable, and never shows the token.
    """
    if env is None:
        return None
    if env not in os.environ:
        raise ValueError(f"{option}: environment variable {env} is not set")
    return check_token(os.environ[env].strip(), f"environment variable {env}")


def check_token(token: str, where: str) -> str:
    """Return the token; refuse an empty token, or characters other than printable ASCII, without showing them."""
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(
            f"{where}: the token is empty or has spaces, line ends or non-ASCII characters"
        )
    return token


def secret_texts(token: str | None, url: str = "") -> list[str]:
    """Return the texts that must not be shown, in every form in which an error may hold them; longest first."""
    secrets = {token, quote(token, safe=""), json.dumps(token)[1:-1]} if token else set()
    query = urlsplit(url).query
    values = [assignment.partition("=")[2] or assignment for assignment in query.split("&")]
    # one or two characters are no secret, and would blank half the text
    secrets |= {text for text in [query, *values, *map(unquote, values)] if len(text) > 2}
    return sorted(secrets, key=len, reverse=True)


def cleaned(text: str, secrets: Sequence[str]) -> str:
    """Return the text in one line of at most 300 characters, without the secrets and what a terminal obeys."""
    for secret in secrets:  # before cutting, which could leave half of one
        text = text.replace(secret, "***")
    text = plain(" ".join(text.split()))
    if len(text) <= _SNIPPET_CHARS:
        return text
    return text[:_SNIPPET_CHARS] + "…"


def check_bind(
    host: str, has_token: bool, token_option: str = "--token_env", port: int = 0
) -> None:
    """Refuse, with a ``ValueError``, to listen where other machines can connect unless a token keeps strangers out,
    and at a port that another program has; 0: any."""
    if not has_token and not is_loopback(host):
        advice = f"name the variable of a bearer token with {token_option}, or listen on 127.0.0.1"
        raise ValueError(f"--host {host} can be reached from other machines: {advice}")
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ValueError(
                f"--host {host} --port {port}: {error.strerror}: choose another port"
            ) from error


def check_tokens(building: Any) -> None:
    """Check the tokens of the servers that the options name, on each rank."""
    options = building.config.flat()
    try:
        if not options.get("tape_from"):  # no server is asked then
            read_token(env=options.get("remote_rm_token_env"))
        for name in ("vllm_server_api_key_env", "teacher_api_key_env"):
            read_token(env=options.get(name), option=f"--{name}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
