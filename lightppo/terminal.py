"""Texts of servers, models and files as a terminal may show them: without the characters that it obeys."""

from __future__ import annotations

import logging
import re

from lightppo.urls import without_secrets

# Control characters but for line ends and tabs; line and paragraph separators; what turns the direction of a line, and
# so shows it in another order; halves of characters, which cannot be printed at all.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: object) -> str:
    """The text with such characters spelled out, as ``\\x1b``. Line ends and tabs stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


class PlainFormatter(logging.Formatter):
    """Lines of a log, whatever the messages quote."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole entry, also the traceback; of URLs without login and query."""
        return plain(without_secrets(super().format(record)))


def log_to_terminal(level: int, form: str) -> None:
    """``logging.basicConfig``, with plain lines; where the script has handlers of its own, nothing."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
