"""Texts as they may be shown: URLs without login, query and fragment, and no characters that a terminal obeys.

What is left out of a URL may be a key, and stands in no log, file or error.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from lightppo.option import shown_object

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]+")
# Before the @ of these stands the name of a container or repository, and no login.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
_REPOSITORIES = ("github",)
_LIST = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # between two URLs
GIVE_WHOLE = "a run keeps no login and nothing after ? of an address: give the whole address again"
_END_OF_SENTENCE = ".,:;)]}"


def shown_url(url: str) -> str:
    """Return the URL with ``…`` for user and password, for its query and for its fragment; see :func:`is_cut`."""
    if "://" not in url:
        return url
    scheme, _, address = url.partition("://")
    login, host, tail = _parts(address)
    if login:
        login = f"{'…' if login_of(url) else login}@"
    path, mark = re.match(r"([^?#]*)([?#]?)", tail).groups()
    return f"{scheme}://{login}{host}{path}{f'{mark}…' * bool(mark)}"


def login_of(url: str) -> str:
    """Return user and password of a URL; empty where it has none."""
    scheme, _, address = url.partition("://")
    login, _, _ = _parts(address)
    is_name = scheme in _REPOSITORIES or (scheme in _CONTAINERS and ":" not in login)
    return "" if is_name else login


def _parts(address: str) -> tuple[str, str, str]:
    """Return login, host with port, and what follows."""
    authority = re.match(r"[^/?#]*", address)[0]
    login, _, host = authority.rpartition("@")
    name, colon, port = host.rpartition(":")
    if not login and "@" in address and colon and not port.isdigit() and not name.startswith("["):
        login, _, tail = address.rpartition("@")  # a password with a / ? or # that is not quoted
        host = re.match(r"[^/?#]*", tail)[0]
        return login, host, tail[len(host) :]
    return login, host, address[len(authority) :]


def is_cut(url: str) -> bool:
    """Tell whether a URL was written by :func:`shown_url`, and lacks a part."""
    return bool(re.search(r"://…@|://[^?#]*[?#]…$", url))


def without_secrets(text: str) -> str:
    """Return a text, such as an error, with every URL in it as it may be shown."""

    def shown(match: re.Match[str]) -> str:
        urls = match[0].rstrip(_END_OF_SENTENCE)
        return ",".join(map(shown_url, _LIST.split(urls))) + match[0][len(urls) :]

    return URL.sub(shown, text) if "://" in text else text


def cut_urls(value: Any) -> list[str]:
    """Return the URLs in the value of an option that lack a part."""
    if isinstance(value, (tuple, list)):
        return [url for item in value for url in cut_urls(item)]
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if is_cut(part)]
    return []


def shown_value(value: Any) -> Any:
    """Return the value of an option (a URL, a list, a text with commas) with its URLs as they may be shown."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(shown_value, value))
    if not isinstance(value, str) or "://" not in value:
        return shown_object(value)
    parts = value.split(",")
    return ",".join(shown_url(part) if URL.fullmatch(part.strip()) else part for part in parts)


# -- in a terminal ----------------------------------------------------------------------------------------------------

# Control characters but for line ends and tabs; line and paragraph separators; what turns the direction of a line, and
# so shows it in another order; halves of characters, which cannot be printed at all.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: object) -> str:
    """Return the text with such characters spelled out, as ``\\x1b``. Line ends and tabs stay."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


class PlainFormatter(logging.Formatter):
    """Write lines of a log, whatever the messages quote."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the whole entry, also the traceback; of URLs without login and query."""
        return plain(without_secrets(super().format(record)))


def log_to_terminal(level: int, form: str) -> None:
    """Call ``logging.basicConfig`` with plain lines; where the script has handlers of its own, nothing."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
