"""Addresses and tokens of servers: what is accepted, and how they are kept out of logs and errors."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_SNIPPET_CHARS = 300


def read_token(*, env: str | None = None, file: str | None = None, option: str = "--remote_rm_token_env") -> str | None:
    """Reads a bearer token from an environment variable or from a file; ``None`` where neither is given.

    Args:
        env: the variable.
        file: the file.
        option: the flag that named the variable, for errors.

    Raises:
        ValueError: both given, variable unset, file missing, or a token with characters no header can carry.
    """
    if env is not None and file is not None:
        raise ValueError("the token of a server comes from a variable or from a file, not from both")
    if env is not None:
        if env not in os.environ:
            raise ValueError(f"{option}: environment variable {env} is not set")
        return check_token(os.environ[env].strip(), f"environment variable {env}")
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ValueError(f"token file {path} does not exist")
        return check_token(path.read_text(encoding="utf-8", errors="replace").strip(), f"token file {path}")
    return None


def check_token(token: str, where: str) -> str:
    """Returns the token. Refuses one that is empty or not printable ASCII, without showing it."""
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{where}: the token is empty or has spaces, line ends or non-ASCII characters")
    return token


def check_url(url: str, option: str = "--remote_rm_url", token_option: str = "--remote_rm_token_env") -> None:
    """Refuses what is not an http(s) address with a host, or has a user or password in it.

    Args:
        url: the address.
        option: the flag that it comes from, for errors.
        token_option: the flag that takes a token instead.

    Raises:
        ValueError: naming the flag.
    """
    try:
        parts = urlsplit(url)
        host, port_ok = parts.hostname, parts.port != 0
    except ValueError:  # e.g. a port that is no number; its text may quote a password
        host, port_ok = None, False
    if host and parts.username is None and parts.password is None and parts.scheme in ("http", "https") and port_ok:
        return
    if "@" in url:
        raise ValueError(f"{option}: a URL has a user or password in it; use {token_option} instead")
    raise ValueError(f"{option}: {shown_url(url)!r} is not an http(s) address")


def shown_url(url: str) -> str:
    """The address without user, password, query and fragment, for logs and errors."""
    try:
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "…" if parts.query else "", ""))
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2]


def secret_texts(urls: Sequence[str], token: str | None) -> list[str]:
    """Whatever must not be shown, in the forms in which an error text may hold it; longest first."""
    secrets = {token, quote(token, safe=""), json.dumps(token)[1:-1]} if token else set()
    for url in urls:
        query = urlsplit(url).query
        values = [part.partition("=")[2] or part for part in query.split("&")]
        # one or two characters are no secret, and would blank half the text
        secrets |= {text for text in [query, *values, *map(unquote, values)] if len(text) > 2}
    return sorted(secrets, key=len, reverse=True)


def cleaned(text: str, secrets: Sequence[str]) -> str:
    """One line of at most 300 characters without the secrets."""
    for secret in secrets:  # before cutting, which could leave half of one
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    return text if len(text) <= _SNIPPET_CHARS else text[:_SNIPPET_CHARS] + "…"


def check_bind(host: str, has_token: bool, token_option: str = "--token_env") -> None:
    """Refuses an address to listen on that other machines can reach, unless a token keeps strangers out.

    Raises:
        ValueError: naming the flags.
    """
    if not has_token and not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines: set {token_option} NAME, the environment variable of "
            "a bearer token, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether every address of a host name or IP address is of this machine alone; an unknown name is not."""
    if not host:
        return False  # all interfaces
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)
