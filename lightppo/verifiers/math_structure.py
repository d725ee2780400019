"""The outer structure of an answer in one notation: lists, tuples, sets, intervals, relations, quantities with words.

Expressions and words stay texts.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
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


def read(notation: str) -> Any:
    """Return the structure of a canonical text; expressions and words stay texts."""
    notation = notation.strip().strip(",;").strip()
    if matrix := _MATRIX.fullmatch(notation):
        rows = [
            Listing("row", tuple(map(read, re.split(r"(?<!\\)&", row))))
            for row in re.split(r"\\\\", matrix["body"])
            if row.strip()
        ]
        return Listing("matrix", tuple(rows))
    notation = _joined_thousands(notation)
    parts, separators = split_outside(notation, _SEPARATOR)
    if {";", ","} <= {match.group() for match in separators}:  # x = 1, y = 2; x = 3, y = 4
        parts, separators = split_outside(notation, re.compile(";"))
    parts = [term for term in parts if term]
    if separators and len(parts) > 1:
        return _listed(parts, "".join(match.group() for match in separators))
    if separators and parts:
        return read(parts[0])
    sides, signs = split_outside(notation, _RELATION)
    if signs and not sides[0]:
        if signs[0].group() in ("=", r"\approx"):
            return read(notation[signs[0].end() :])
        return notation
    if signs and all(sides):
        return _related(sides, [sign.group() for sign in signs])
    sets, cups = split_outside(notation, _CUP)
    if cups:
        return Union(tuple(map(read, sets)))
    if notation.startswith(r"\mathbb{R}"):
        (base, *taken), _ = split_outside(notation, _MINUS)
        if base == r"\mathbb{R}" and not taken:
            return Without(Listing("{}", ()))
        if base == r"\mathbb{R}" and len(taken) == 1:
            return Without(read(taken[0]))
    if notation in (r"\emptyset", "{}"):
        return Union(())
    return _bracketed(notation)


def split_outside(notation: str, pattern: re.Pattern[str]) -> tuple[list[str], list[re.Match[str]]]:
    """Return the parts of a text around what matches outside brackets, and the matches."""
    depth = 0
    positions = set()
    for token in _TOKEN.finditer(notation):
        depth -= token.group() in _CLOSES
        if depth == 0:
            positions.add(token.start())
        depth += token.group() in _OPENS
    separators = [match for match in pattern.finditer(notation) if match.start() in positions]
    starts = [0, *(match.end() for match in separators)]
    ends = [*(match.start() for match in separators), len(notation)]
    return [notation[start:end].strip() for start, end in zip(starts, ends)], separators


def _enclosed(notation: str) -> tuple[str, str] | None:
    """Return the brackets around the whole text and what they enclose."""
    opening = _TOKEN.match(notation)
    if opening is None or opening.group() not in _OPENS - {r"\begin", r"\lfloor", r"\lceil"}:
        return None
    depth = 0
    for token in _TOKEN.finditer(notation):
        depth += (token.group() in _OPENS) - (token.group() in _CLOSES)
        if depth > 0:
            continue
        if token.end() < len(notation):
            return None
        brackets = opening.group()[-1:] + token.group()[-1:]
        if opening.group() == r"\langle":
            brackets = "()"
        return brackets, notation[opening.end() : token.start()].strip()
    return None


def _joined_thousands(notation: str) -> str:
    """Write ``1,234`` as one number, unless it may be a list: in brackets other commas need a space for it."""
    is_spaced = ", " in notation

    def joined(number: re.Match[str]) -> str:
        previous = notation[: number.start()].rstrip()[-1:]
        following = notation[number.end() :].lstrip()[:1]
        in_list = previous in ("(", "[", "{", ",") or following in (")", "]", "}", ",")
        if in_list and not is_spaced and ",0" not in number.group():
            return number.group()
        return number.group().replace(",", "")

    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)", joined, notation)


def _listed(parts: list[str], separators: str) -> Any:
    nodes = [read(notation) for notation_part in parts for notation in _both_signs(notation_part)]
    members = [
        node for node in nodes if not (isinstance(node, Order) and node.sign == r"\in")
    ] or nodes
    if len(members) == 1:
        return members[0]
    conjunction = re.search("(or|vee)|(and|wedge)", separators)
    if conjunction is None:
        joint = ","
    elif conjunction[1]:
        joint = "or"
    else:
        joint = "and"
    return Listing("", tuple(members), joint)


def _both_signs(notation: str) -> list[str]:
    r"""Return ``2 + 1`` and ``2 - 1`` for ``2 \pm 1``."""
    if _PLUS_MINUS.search(notation) is None:
        return [notation]
    upper = {"pm": "+", "mp": "-"}
    lower = {"pm": "-", "mp": "+"}
    return [
        _PLUS_MINUS.sub(lambda match, signs=signs: signs[match[1]], notation)
        for signs in (upper, lower)
    ]


def _related(sides: list[str], signs: list[str]) -> Any:
    if signs == [r"\in"]:
        variable, region = sides
        if _DECLARED.fullmatch(region):
            return Order(variable, r"\in", region)
        node = read(region)
        if isinstance(node, Interval):
            return replace(node, name=variable)
        return node
    if r"\approx" in signs:  # the exact one counts
        exact_signs = signs[: signs.index(r"\approx")]
        if exact_signs:
            return _related(sides[: len(exact_signs) + 1], exact_signs)
        if is_name(sides[0]):
            return _related(sides[:2], ["="])
        return read(sides[0])
    if set(signs) == {"="}:
        return _equated(sides)
    return _ordered(sides, signs)


def _equated(sides: list[str]) -> Any:
    left = sides[0]
    right = sides[-1]
    if not is_name(left) and len(sides) > 2:  # a calculation
        return read(right)
    if not is_name(left) and is_name(right):
        left, right = right, left
    if _enclosed(left) and isinstance(read(left), Listing):  # (x, y) = (1, 2)
        return read(right)
    return Assignment(left, _read_both_signs(right) or read(right), right)


def _read_both_signs(notation: str) -> Listing | None:
    values = _both_signs(notation)
    if len(values) == 1:
        return None
    return Listing("", tuple(map(read, values)))


def _ordered(sides: list[str], signs: list[str]) -> Any:
    """Return an interval for ``1 < x <= 2``, ``x < 2`` and ``x != 2``; otherwise orders."""
    is_down = len(sides) == 3 and set(signs) <= {">", r"\ge"}
    is_behind = len(sides) == 2 and is_variable(sides[1]) and not is_variable(sides[0])
    if is_down or (is_behind and signs[0] in FLIPPED):
        sides = sides[::-1]
        signs = [FLIPPED[sign] for sign in signs[::-1]]
    if len(sides) == 3 and is_variable(sides[1]) and set(signs) <= {"<", r"\le"}:
        opening = "[" if signs[0] == r"\le" else "("
        closing = "]" if signs[1] == r"\le" else ")"
        return Interval(sides[0], sides[2], opening + closing, sides[1])
    if len(sides) == 2 and is_variable(sides[0]):
        variable, bound = sides
        below = Interval(r"-\infty", bound, "()", variable)
        above = Interval(bound, r"\infty", "()", variable)
        regions = {
            "<": below,
            ">": above,
            r"\le": replace(below, brackets="(]"),
            r"\ge": replace(above, brackets="[)"),
            r"\ne": Union((below, above)),
        }
        if signs[0] in regions:
            return regions[signs[0]]
    orders = tuple(Order(left, sign, right) for left, sign, right in zip(sides, signs, sides[1:]))
    if len(orders) == 1:
        return orders[0]
    return Listing("", orders, "and")


def is_variable(notation: str) -> bool:
    return bool(_VARIABLE.fullmatch(notation)) and notation not in (r"\infty", r"\pi", "e")


def is_name(notation: str) -> bool:
    """Tell whether this may stand before ``=`` as the name of a value: ``x``, ``f(x)``, ``\\angle ABC``, words."""
    return bool(_NAME.fullmatch(notation)) and notation not in ("e", "i")


def _bracketed(notation: str) -> Any:
    if values := _read_both_signs(notation):
        return values
    enclosed = _enclosed(notation)
    if enclosed is None:
        return _quantities(notation)
    brackets, content = enclosed
    if _MATRIX.fullmatch(content):
        return read(content)
    if brackets == "{}":
        (name, *condition), separators = split_outside(content, _SUCH_THAT)
        name = re.sub(r"\s*\\in\s*\\mathbb\{R\}$", "", name)
        if condition and is_name(name):
            return read(content[separators[0].end() :])
        if notation[0] == "{":  # group of LaTeX
            return read(content)
    elements = [element for element in split_outside(content, re.compile("[,;]"))[0] if element]
    if len(elements) == 1 and brackets == "()":
        return read(elements[0])
    if brackets == "{}":
        elements = [value for element in elements for value in _both_signs(element)]
    return Listing(brackets, tuple(map(read, elements)))


def _quantities(notation: str) -> Any:
    """Split a text into quantities by its words: ``2 hours 30 minutes`` are two. Words alone stay a text."""
    notation = re.sub(r"(?<=\d)\s*([€£¥])|([€£¥])\s*(?=\d)", _money, notation)
    notation = re.sub(r"(?<=\d) ([mgslLhNJWVAKCF])$", r" \\text{\1}", notation)
    pieces = _WORDS.split(notation)
    unit_words = [words_in(without_text(piece)) for piece in pieces[1::2]]
    values = [piece.strip() for piece in pieces[::2]]
    positions = [number for number, value in enumerate(values) if re.search(r"[\w\\]", value)]
    if not unit_words or not positions or not NO_UNITS.isdisjoint(itertools.chain(*unit_words)):
        return notation
    units: dict[int, list[str]] = {position: [] for position in positions}
    for number, words in enumerate(unit_words):
        # to the quantity before; what stands before the first one, to that
        units[
            max((position for position in positions if position <= number), default=positions[0])
        ] += words
    quantities = tuple(
        Quantity(values[position], tuple(words)) for position, words in units.items()
    )
    if len(quantities) == 1:
        return quantities[0]
    return Listing("", quantities, "and")


def _money(match: re.Match[str]) -> str:
    return rf" \text{{{match[1] or match[2]}}} "


def without_text(notation: str) -> str:
    r"""Return the words of ``\text{…}`` as they are."""
    return _TEXT.sub(r" \1", notation)
