"""The outer structure of an answer in one notation: lists, tuples, sets, intervals, relations, quantities with words.

Expressions and words stay texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lightppo.verifiers.math_notation import NO_UNITS, words_in


@dataclass(frozen=True)
class Listing:
    """Several parts: a tuple, a set, a matrix with its rows, or without brackets."""

    brackets: str  # the opening and the closing one; "" without; "matrix"
    parts: tuple[Any, ...]
    joint: str = ","  # without brackets: ",", "and" or "or"


@dataclass(frozen=True)
class Assignment:
    """``x = 5`` and other equations; of more sides, the first and the last count."""

    left: str
    right: Any
    right_text: str


@dataclass(frozen=True)
class Order:
    """``2x + 1 < 5``: what is no interval of one variable."""

    left: str
    sign: str
    right: str


@dataclass(frozen=True)
class Interval:
    """The numbers between two ends; ``name`` is the variable of ``1 < x < 2``."""

    low: Any
    high: Any
    brackets: str
    name: str = ""


@dataclass(frozen=True)
class Union:
    """Intervals and sets joined by ``\\cup`` or "or"."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Without:
    r"""``\mathbb{R} \setminus \{1, 2\}``: all real numbers but some."""

    taken: Any


@dataclass(frozen=True)
class Quantity:
    """An expression with words around it, such as its unit."""

    value: str
    words: tuple[str, ...]


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENS = frozenset(("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"))
_CLOSES = frozenset((")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"))
_SEPARATOR = re.compile(r",|;|\\text\{(and|or)\}|\\(?:land|wedge|lor|vee)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|notin|approx)(?![A-Za-z])|[<>=]")
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_MINUS = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])|\\\\")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_SUCH_THAT = re.compile(r"\\mid(?![A-Za-z])|\||:")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|bar|hat|text|mathbb|[a-z]*theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|"
    r"sigma|rho|tau|psi|Delta|prime|frac)(?![a-z])|[A-Za-z]|\^\{-1\}|_(?:\{[^{}=<>]{1,40}\}|\w+(?!\w))|[{}'|, /:])+"
    r"(?:\([^()=<>]*\))?(?:\\text\{[^{}]*\}| )*"
)
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?")
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[pbB]?matrix)\}(?P<body>(?:(?!\\end\{).)*)\\end\{(?P=kind)\}",
    re.S,
)
_DECLARED = re.compile(r"\\mathbb\{[NZ]\}")
_WORDS = re.compile(
    r"(?P<words>(?:(?:/|\\cdot|\\times|per)? *\\text\{[^{}]*\}(?: *\^ *\{-?\d\})?(?: */ *[a-z](?![A-Za-z]))? *)+)"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def read(text: str) -> Any:
    """Return the structure of a canonical text; expressions and words stay texts."""
    text = text.strip().strip(",;").strip()
    if matrix := _MATRIX.fullmatch(text):
        rows = [
            re.split(r"(?<!\\)&", row) for row in re.split(r"\\\\", matrix["body"]) if row.strip()
        ]
        return Listing("matrix", tuple(Listing("row", tuple(map(read, row))) for row in rows))
    text = _joined_thousands(text)
    parts, separators = split_outside(text, _SEPARATOR)
    if {";", ","} <= {match.group() for match in separators}:  # x = 1, y = 2; x = 3, y = 4
        parts, separators = split_outside(text, re.compile(";"))
    parts = [part for part in parts if part]
    if separators and len(parts) > 1:
        return _listed(parts, "".join(match.group() for match in separators))
    if separators and parts:
        return read(parts[0])
    sides, signs = split_outside(text, _RELATION)
    if signs and not sides[0]:
        if signs[0].group() in ("=", r"\approx"):
            return read(text[signs[0].end() :])
        return text
    if signs and all(sides):
        return _related(sides, [sign.group() for sign in signs])
    pieces, cups = split_outside(text, _CUP)
    if cups:
        return Union(tuple(map(read, pieces)))
    if text.startswith(r"\mathbb{R}"):
        (base, *taken), _ = split_outside(text, _MINUS)
        if base == r"\mathbb{R}" and len(taken) < 2:
            return Without(read(taken[0]) if taken else Listing("{}", ()))
    if text in (r"\emptyset", "{}"):
        return Union(())
    return _bracketed(text)


def split_outside(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[re.Match[str]]]:
    """Return the parts of a text around what matches outside brackets, and the matches."""
    depth = 0
    outside = set()
    for token in _TOKEN.finditer(text):
        depth -= token.group() in _CLOSES
        if depth == 0:
            outside.add(token.start())
        depth += token.group() in _OPENS
    matches = [match for match in pattern.finditer(text) if match.start() in outside]
    ends = [0, *(match.end() for match in matches)]
    starts = [*(match.start() for match in matches), len(text)]
    return [text[end:start].strip() for end, start in zip(ends, starts)], matches


def _enclosed(text: str) -> tuple[str, str] | None:
    """Return the brackets around the whole text and what they enclose."""
    first = _TOKEN.match(text)
    if first is None or first.group() not in _OPENS or first.group() == r"\begin":
        return None
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token.group() in _OPENS) - (token.group() in _CLOSES)
        if depth == 0:
            inner = text[first.end() : token.start()].strip()
            pair = first.group()[-1:] + token.group()[-1:]
            pair = "()" if first.group() == r"\langle" else pair
            whole = token.end() == len(text) and first.group() not in (r"\lfloor", r"\lceil")
            return (pair, inner) if whole else None
    return None


def _joined_thousands(text: str) -> str:
    """``1,234`` is one number, unless it may be a list; in brackets that holds where other commas have a space."""
    spaced = re.search(r", ", text)

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()].rstrip()
        after = text[match.end() :].lstrip()
        in_list = before[-1:] in ("(", "[", "{", ",") or after[:1] in (")", "]", "}", ",")
        sure = ",0" in match.group() or not in_list or spaced
        if sure:
            return match.group().replace(",", "")
        return match.group()

    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)", joined, text)


def _listed(parts: list[str], joints: str) -> Any:
    expanded = [one for part in parts for one in _both_signs(part)]
    items = [read(part) for part in expanded]
    members = [one for one in items if not (isinstance(one, Order) and one.sign == r"\in")] or items
    if len(members) == 1:
        return members[0]
    conjunction = re.search("(or|vee)|(and|wedge)", joints)
    return Listing(
        "", tuple(members), "," if conjunction is None else "or" if conjunction[1] else "and"
    )


def _both_signs(text: str) -> list[str]:
    r"""``2 \pm 1`` is ``2 + 1`` and ``2 - 1``."""
    if _PLUS_MINUS.search(text) is None:
        return [text]
    return [
        _PLUS_MINUS.sub(lambda m, names=names: names[m[1]], text)
        for names in ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
    ]


def _related(sides: list[str], signs: list[str]) -> Any:
    if signs == [r"\in"]:
        inside = sides[1]
        if _DECLARED.fullmatch(inside):
            return Order(sides[0], r"\in", inside)
        return _named(sides[0], read(inside))
    if r"\approx" in signs:  # the exact one counts
        first = signs.index(r"\approx")
        signs, sides = (
            (signs[:first], sides[: first + 1])
            if first or not is_name(sides[0])
            else (["="], sides[:2])
        )
        return _related(sides, signs) if signs else read(sides[0])
    if set(signs) == {"="}:
        left = sides[0]
        right = sides[-1]
        if not is_name(left) and len(sides) > 2:  # a calculation
            return read(right)
        if not is_name(left) and is_name(right):
            left, right = right, left
        if _enclosed(left) and isinstance(read(left), Listing):  # (x, y) = (1, 2)
            return read(right)
        both = _both_signs(right)
        values = read(right) if len(both) == 1 else Listing("", tuple(map(read, both)))
        return Assignment(left, values, right)
    signs = ["=" if sign == "=" else sign for sign in signs]
    return _ordered(sides, signs)


def _ordered(sides: list[str], signs: list[str]) -> Any:
    """Return an interval for ``1 < x <= 2``, ``x < 2`` and ``x != 2``; otherwise orders."""
    down = all(sign in (">", r"\ge") for sign in signs)
    if down and len(sides) == 3:
        sides = sides[::-1]
        signs = [FLIPPED[sign] for sign in signs[::-1]]
    if (
        len(sides) == 2
        and signs[0] in FLIPPED
        and is_variable(sides[1])
        and not is_variable(sides[0])
    ):
        sides = sides[::-1]
        signs = [FLIPPED[signs[0]]]
    if len(sides) == 3 and is_variable(sides[1]) and set(signs) <= {"<", r"\le"}:
        brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
        return Interval(sides[0], sides[2], brackets, sides[1])
    if len(sides) == 2 and is_variable(sides[0]):
        name, end = sides
        if signs[0] in ("<", r"\le"):
            return Interval(r"-\infty", end, "(" + ("]" if signs[0] == r"\le" else ")"), name)
        if signs[0] in (">", r"\ge"):
            return Interval(end, r"\infty", ("[" if signs[0] == r"\ge" else "(") + ")", name)
        if signs[0] == r"\ne":
            return Union(
                (Interval(r"-\infty", end, "()", name), Interval(end, r"\infty", "()", name))
            )
    orders = tuple(Order(a, sign, b) for a, sign, b in zip(sides, signs, sides[1:]))
    if len(orders) == 1:
        return orders[0]
    return Listing("", orders, "and")


def is_variable(text: str) -> bool:
    return bool(_VARIABLE.fullmatch(text)) and text not in (r"\infty", r"\pi", "e")


def is_name(text: str) -> bool:
    """Tell whether this may stand before ``=`` as the name of a value: ``x``, ``f(x)``, ``\\angle ABC``, words."""
    return bool(_NAME.fullmatch(text)) and text not in ("e", "i")


def _named(name: str, node: Any) -> Any:
    if isinstance(node, Interval):
        return Interval(node.low, node.high, node.brackets, name)
    return node


def _bracketed(text: str) -> Any:
    both = _both_signs(text)
    if len(both) > 1:
        return Listing("", tuple(map(read, both)))
    inside = _enclosed(text)
    if inside is None:
        return _quantities(text)
    brackets, content = inside
    if _MATRIX.fullmatch(content):
        return read(content)
    if brackets == "{}":
        (name, *condition), separators = split_outside(content, _SUCH_THAT)
        name = re.sub(r"\s*\\in\s*\\mathbb\{R\}$", "", name)
        if separators and condition and is_name(name):
            conditions = read(content[separators[0].end() :])
            return conditions
    parts = [part for part in split_outside(content, re.compile("[,;]"))[0] if part]
    if brackets == "{}" and text[0] == "{":  # group of LaTeX
        return read(content)
    if len(parts) == 1 and brackets == "()":
        return read(parts[0])
    items = [
        read(one) for part in parts for one in (_both_signs(part) if brackets == "{}" else [part])
    ]
    return Listing(brackets, tuple(items))


def _quantities(text: str) -> Any:
    """Split a text into quantities by its words: ``2 hours 30 minutes`` are two. Words alone stay a text."""
    text = re.sub(
        r"(?<=\d)\s*([€£¥])|([€£¥])\s*(?=\d)", lambda m: rf" \text{{{m[1] or m[2]}}} ", text
    )
    text = re.sub(r"(?<=\d) ([mgslLhNJWVAKCF])$", r" \\text{\1}", text)
    pieces = _WORDS.split(text)
    words = [words_in(without_text(piece)) for piece in pieces[1::2]]
    values = [piece.strip() for piece in pieces[::2]]
    places = [i for i, value in enumerate(values) if re.search(r"[\w\\]", value)]
    if not words or not places or any(word in NO_UNITS for some in words for word in some):
        return text
    groups: list[list[str]] = [[] for _ in places]
    for i, some in enumerate(
        words
    ):  # to the quantity before; what stands before the first one, to that
        groups[max((n for n, at in enumerate(places) if at <= i), default=0)] += some
    quantities = tuple(Quantity(values[at], tuple(some)) for at, some in zip(places, groups))
    if len(quantities) == 1:
        return quantities[0]
    return Listing("", quantities, "and")


def without_text(text: str) -> str:
    r"""Return the words of ``\text{…}`` as they are."""
    return _TEXT.sub(r" \1", text)
