"""URLs as they may be shown: without login, query and fragment, which may be keys and stand in no log, file or error."""

from __future__ import annotations

import re
from typing import Any

from lightppo.redaction import URL, shown_url

# Before the @ of these stands the name of a container or repository, and no login.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
_REPOSITORIES = ("github",)
_LIST = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # between two URLs
GIVE_WHOLE = "a run keeps no login and nothing after ? of an address: give the whole address again"
_END_OF_SENTENCE = ".,:;)]}"


def without_login_and_query(url: str) -> str:
    """The URL with ``…`` for user and password, for its query and for its fragment; see :func:`is_cut`."""
    scheme, _, rest = url.partition("://")
    login, host, tail = _parts(rest)
    login = "…" if login_of(url) else login
    path, mark, _ = _cut_at(tail, "?#")
    return f"{scheme}://{login}{'@' * bool(login)}{host}{path}{mark}{'…' * bool(mark)}"


def login_of(url: str) -> str:
    """User and password of a URL; empty where it has none."""
    scheme, _, rest = url.partition("://")
    login = _parts(rest)[0]
    return "" if _is_name(scheme, login) else login


def _parts(rest: str) -> tuple[str, str, str]:
    """Login, host with port, and what follows."""
    authority = re.match(r"[^/?#]*", rest)[0]
    login, _, host = authority.rpartition("@")
    name, colon, port = host.rpartition(":")
    if not login and "@" in rest and colon and not port.isdigit() and not name.startswith("["):
        login, _, tail = rest.rpartition("@")  # a password with a / ? or # that is not quoted
        host = re.match(r"[^/?#]*", tail)[0]
        return login, host, tail[len(host) :]
    return login, host, rest[len(authority) :]


def _is_name(scheme: str, login: str) -> bool:
    return scheme in _REPOSITORIES or (scheme in _CONTAINERS and ":" not in login)


def _cut_at(text: str, marks: str) -> tuple[str, str, str]:
    """What is before the first of the marks, the mark, and what is after it."""
    found = re.search(f"[{re.escape(marks)}]", text)
    return (
        (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])
    )


def is_cut(url: str) -> bool:
    """Whether a URL was written by :func:`shown_url`, and lacks a part."""
    return bool(re.search(r"://…@|://[^?#]*[?#]…$", url))


def shown_urls(text: str) -> str:
    """A text, such as an error, with every URL in it as it may be shown."""

    def shown(found: re.Match[str]) -> str:
        urls = found[0].rstrip(_END_OF_SENTENCE)
        return ",".join(map(shown_url, _LIST.split(urls))) + found[0][len(urls) :]

    return URL.sub(shown, text)


def cut_urls(value: Any) -> list[str]:
    """The URLs in the value of an option that lack a part."""
    if isinstance(value, (tuple, list)):
        return [url for one in value for url in cut_urls(one)]
    return (
        [part.strip() for part in value.split(",") if is_cut(part)]
        if isinstance(value, str)
        else []
    )
