"""Addresses of services: which can be used, and which are of this machine."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from lightppo.redaction import shown_url
from lightppo.shown_urls import GIVE_WHOLE, is_cut


def check_url(
    url: str, option: str = "--remote_rm_url", token_option: str | None = "--remote_rm_token_env"
) -> None:
    """Refuses what is not an http(s) address with a host, or contains a user or password, with a ``ValueError``."""
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
    """Whether every address of a host name or IP address belongs to this machine alone; False for an unknown name."""
    if not host:
        return False  # all interfaces
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(
        ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses
    )
