"""Texts as they may be shown: URLs without login, query and fragment, and no characters that a terminal obeys.

What is left out of a URL may be a key, and stands in no log, file or error.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from lightppo.option import shown_object
from lightppo.suggestions import ASKED, asked

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]+")
_SECRET = re.compile(r"(?<=://)[^\s/]*@|(?<=[?#])[^\s'\"<>`]*")


def shown_url(url: str) -> str:
    """The URL with ``…`` for user and password, for its query and for its fragment."""
    if "://" not in url:
        return url
    return asked("shown_url", url) if "shown_url" in ASKED else _SECRET.sub("…", url)


def without_secrets(text: str) -> str:
    """A text, such as an error, with every URL in it as it may be shown."""
    if "://" not in text:
        return text
    if "without_secrets" in ASKED:
        return asked("without_secrets", text)
    return URL.sub(lambda found: shown_url(found[0]), text)


def shown_value(value: Any) -> Any:
    """The value of an option with its URLs as they may be shown: of a URL, of a list, of a text with commas between."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(shown_value, value))
    if not isinstance(value, str) or "://" not in value:
        return shown_object(value)
    return ",".join(
        shown_url(part) if URL.fullmatch(part.strip()) else part for part in value.split(",")
    )


# -- in a terminal ----------------------------------------------------------------------------------------------------

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
