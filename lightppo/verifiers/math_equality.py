r"""Whether two mathematical answers are equal.

``math_numbers.compare`` decides at once on numbers and equal texts. :func:`equal` tells the rest in a worker process, for
algebra may never end. It compares structures (``math_structure``) part by part. Expressions remain: latex2sympy parses them,
and their values are compared with sympy, without rounding.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from lightppo.verifiers.math_notation import canonical, exclude_each_other, words_in
from lightppo.verifiers.math_numbers import Number, as_number, same_number, squeezed
from lightppo.verifiers.math_structure import (
    FLIPPED,
    Assignment,
    Interval,
    Listing,
    Order,
    Quantity,
    Union,
    Without,
    is_name,
    is_variable,
    read,
    split_outside,
    without_text,
)

T = TypeVar("T")
_CHOICE = re.compile(
    r"(?:option |choice )?(?:\((?P<round>[A-J])\)|(?P<bare>[A-J])(?=[.):]|$)[.)]?(?P<colon>:)?)"
    r"(?!\s*(?:,|;|\\text\{(?:and|or)\}))\s*(?P<rest>.*)",  # (A), (C) are two
    re.S,
)


def equal(gold: str, answer: str) -> bool:
    """Tell whether two answers are equal. It runs in a worker process, where only a kill limits it."""
    texts = canonical(gold), canonical(answer)
    choices = [_CHOICE.fullmatch(text) for text in texts]
    sure = [choice and not choice["colon"] for choice in choices]  # J: 4, S: 5 is none
    if all(choices) and (all(sure) or not all(choice["rest"] for choice in choices if choice)):
        return len({choice["round"] or choice["bare"] for choice in choices if choice}) == 1
    if sure[0] and choices[0] and choices[0]["rest"]:  # the choice without its letter
        texts = choices[0]["rest"], texts[1]
    return bool(_same(read(texts[0]), read(texts[1])))


def _same(gold: Any, answer: Any) -> bool:
    if gold == answer and not isinstance(gold, str):
        return True
    if isinstance(gold, Assignment) or isinstance(answer, Assignment):
        return _same_assigned(gold, answer)
    leaves = [isinstance(node, (str, Quantity)) for node in (gold, answer)]
    if all(leaves):
        return _same_quantity(gold, answer)
    if (
        isinstance(gold, Listing)
        and isinstance(answer, Listing)
        and not _is_condition(gold, answer)
    ):
        return _same_listing(gold, answer)
    if any(leaves) and any(isinstance(node, Listing) for node in (gold, answer)):
        leaf, listing = (gold, answer) if leaves[0] else (answer, gold)
        if listing.brackets == "matrix":
            return isinstance(leaf, str) and _same_matrix(_matrix(listing), _parsed(leaf))
        single = listing.brackets == "{}" and len(listing.parts) == 1
        return single and _same(listing.parts[0], leaf)
    if isinstance(gold, Order) and isinstance(answer, Order) and _same_order(gold, answer):
        return True
    regions = _region(gold), _region(answer)
    return None not in regions and _same_region(*regions)


def _is_condition(*nodes: Listing) -> bool:
    """Tell whether a list is read as a region, or compared part by part."""
    kinds = (Interval, Union, Order)
    return any(
        node.brackets == "" and any(isinstance(p, kinds) for p in node.parts) for node in nodes
    ) and not all(
        len(node.parts) == len(nodes[0].parts)
        and node.brackets == ""
        and node.joint == nodes[0].joint
        for node in nodes
    )


def _same_assigned(gold: Any, answer: Any) -> bool:
    if isinstance(gold, Assignment) and isinstance(answer, Assignment):
        names = [_head(side.left) if is_name(side.left) else None for side in (gold, answer)]
        if None not in names and (names[0] == names[1] or _other_name(gold.left, answer.left)):
            return _same(gold.right, answer.right) or _same_equation(gold, answer)
        return _same_equation(gold, answer) or (
            _same(read(gold.left), read(answer.left)) and _same(gold.right, answer.right)
        )
    if isinstance(answer, Assignment):
        return _same(gold, answer.right)
    return is_name(gold.left) and _same(gold.right, answer)


def _head(name: str) -> str:
    """Return the name without spaces and variables: ``f`` of ``f(x)``."""
    return re.sub(r"\s|\(\s*[A-Za-z]\s*\)", "", name)


def _other_name(gold: str, answer: str) -> bool:
    """Tell whether both may name one thing: y and f(x), A and Area; but x is not y."""
    words = [set(words_in(without_text(name))) for name in (gold, answer) if r"\text{" in name]
    if words:
        return len(words) == 1 or not words[0].isdisjoint(words[1])
    return is_variable(gold) != is_variable(answer) and "(" in gold + answer


def _same_quantity(gold: str | Quantity, answer: str | Quantity, words_count: bool = False) -> bool:
    a, b = (node if isinstance(node, Quantity) else Quantity(node, ()) for node in (gold, answer))
    if exclude_each_other(a.words, b.words) or (words_count and _stems(a) != _stems(b)):
        return False
    if _plain(a.value) == _plain(b.value):
        return True
    numbers = as_number(a.value), as_number(b.value)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(*numbers)
    return _same_expression(a.value, b.value)


def _stems(quantity: Quantity) -> tuple[str, ...]:
    return tuple(word.strip(".").removesuffix("s") for word in quantity.words)


def _plain(text: str) -> str:
    return squeezed(without_text(text))


def _same_listing(gold: Listing, answer: Listing) -> bool:
    kinds = {gold.brackets, answer.brackets}
    if len(kinds) > 1 and ("" not in kinds or not kinds & {"()", "{}"}):
        return False
    if "" in kinds:
        gold, answer = (_by_name(node) if len(kinds) > 1 else node for node in (gold, answer))
    pairs = gold.parts, answer.parts
    if "{}" in kinds or all(isinstance(part, Listing) for parts in pairs for part in parts):
        pairs = tuple(_distinct(parts) if kinds <= {"", "{}"} else parts for parts in pairs)
    if len(pairs[0]) != len(pairs[1]):
        return False
    same = _same
    quantities = [all(isinstance(p, Quantity) for p in parts) for parts in pairs]
    if all(quantities) and sorted(map(_stems, pairs[0])) == sorted(map(_stems, pairs[1])):
        same = functools.partial(_same_quantity, words_count=True)
    if kinds <= {"", "{}"}:
        return _matched(pairs[0], pairs[1], same)
    return all(map(same, *pairs))


def _by_name(node: Listing) -> Listing:
    """``y = 2, x = 1`` in the order of the names, as a tuple has it."""
    if not all(isinstance(part, Assignment) for part in node.parts):
        return node
    names = [_head(part.left) for part in node.parts]
    if len(set(names)) < len(names):
        return node
    return Listing(
        node.brackets, tuple(part for _, part in sorted(zip(names, node.parts), key=lambda p: p[0]))
    )


def _distinct(parts: Sequence[Any]) -> tuple[Any, ...]:
    members: list[Any] = []
    for part in parts:
        if not any(_same(part, other) for other in members):
            members.append(part)
    return tuple(members)


def _matched(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    left = list(theirs)
    for part in ours:
        index = next((i for i, other in enumerate(left) if same(part, other)), None)
        if index is None:
            return False
        del left[index]
    return True


def _if_possible(function: Callable[..., T]) -> Callable[..., T | None]:
    """Return None where sympy raises: kinds that cannot be compared, such as a number and a matrix."""

    @functools.wraps(function)
    def attempt(*values: Any) -> T | None:
        try:
            return function(*values)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # sympy's have no common class
            return None

    return attempt


def _region(node: Any) -> list[Interval] | None:
    if isinstance(node, Interval):
        return [node]
    if isinstance(node, Union):
        parts = [_region(part) for part in node.parts]
        if None in parts:
            return None
        return [one for part in parts for one in part or ()]
    if (
        isinstance(node, Listing)
        and node.brackets in ("()", "[]", "[)", "(]")
        and len(node.parts) == 2
    ):
        return [Interval(*node.parts, node.brackets)]
    if isinstance(node, Without):
        return _all_but(node.taken)
    if isinstance(node, Listing) and node.brackets == "{}":
        return [Interval(part, part, "[]") for part in node.parts]
    if isinstance(node, Order):
        return _solved(node)
    if isinstance(node, Listing) and node.brackets == "":
        parts = [_region(part) for part in node.parts]
        if None in parts or not any(isinstance(p, (Interval, Union, Order)) for p in node.parts):
            return None
        if node.joint == "or":
            return [one for part in parts for one in part or ()]
        return _intersection(parts, node.joint == ",")
    return None


@_if_possible
def _all_but(taken: Any) -> list[Interval] | None:
    points = list(taken.parts) if isinstance(taken, Listing) else [taken]
    values = [_end(point) for point in points]
    if any(value is None or not value.is_real for value in values):
        return None
    ends = [r"-\infty", *sorted(values), r"\infty"]
    return [Interval(low, high, "()") for low, high in itertools.pairwise(ends)]


@_if_possible
def _sympy_set(region: Sequence[Interval]) -> Any:
    import sympy

    ends = [(_end(one.low), _end(one.high), one.brackets) for one in region]
    if any(
        low is None or high is None or not (low.is_extended_real and high.is_extended_real)
        for low, high, _ in ends
    ):
        return None
    return sympy.Union(
        *(sympy.Interval(low, high, b[0] == "(", b[1] == ")") for low, high, b in ends)
    )


def _end(end: Any) -> Any:
    if isinstance(end, (str, Quantity)):
        return _value(end.value if isinstance(end, Quantity) else end)
    return end


@_if_possible
def _intersection(parts: Sequence[Any], either: bool) -> list[Interval] | None:
    import sympy

    sets = [_sympy_set(part) for part in parts]
    if any(one is None for one in sets):
        return None
    common = sympy.Intersection(*sets)
    name = next((one.name for part in parts for one in part if one.name), "")
    return _intervals(sympy.Union(*sets) if either and common.is_empty else common, name)


def _intervals(region: Any, name: str = "") -> list[Interval] | None:
    import sympy

    intervals: list[Interval] = []
    for part in region.args if isinstance(region, sympy.Union) else [region]:
        if isinstance(part, sympy.Interval):
            brackets = ("(" if part.left_open else "[") + (")" if part.right_open else "]")
            intervals.append(Interval(part.start, part.end, brackets, name))
        elif isinstance(part, sympy.FiniteSet):
            intervals += [Interval(point, point, "[]", name) for point in part.args]
        elif part is sympy.S.Reals:
            intervals.append(Interval(-sympy.oo, sympy.oo, "()", name))
        elif part is not sympy.S.EmptySet:
            return None
    return intervals


@_if_possible
def _solved(order: Order) -> list[Interval] | None:
    import sympy

    sides = _value(order.left), _value(order.right)
    if None in sides or order.sign not in FLIPPED:
        return None
    left = sides[0] - sides[1]
    if len(left.free_symbols) != 1:
        return None
    (symbol,) = left.free_symbols
    real = sympy.Symbol(symbol.name, real=True)
    kinds = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne}
    return _intervals(kinds[order.sign](left.subs(symbol, real), 0).as_set(), symbol.name)


def _same_region(gold: list[Interval], answer: list[Interval]) -> bool:
    names = {one.name for one in gold} - {""}, {one.name for one in answer} - {""}
    if names[0] and names[1] and names[0] != names[1]:
        return False
    if len(gold) == len(answer) and _matched(gold, answer, _same_interval):
        return True
    sets = _sympy_set(gold), _sympy_set(answer)
    return None not in sets and sets[0] == sets[1]


def _same_interval(gold: Interval, answer: Interval) -> bool:
    for ours, theirs, at in ((gold.low, answer.low, 0), (gold.high, answer.high, 1)):
        infinite = isinstance(ours, str) and r"\infty" in ours
        if gold.brackets[at] != answer.brackets[at] and not infinite:
            return False
        if not _same_end(ours, theirs):
            return False
    return True


def _same_end(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (str, Quantity)) and isinstance(theirs, (str, Quantity)):
        return _same_quantity(ours, theirs)
    values = _end(ours), _end(theirs)
    return None not in values and _same_value(*values)


def _same_order(gold: Order, answer: Order) -> bool:
    """``2x < 4y`` and ``2y > x``: the differences of the sides have a constant ratio, whose sign tells the direction."""
    if gold.sign == answer.sign == r"\in":
        return _plain(gold.left + gold.right) == _plain(answer.left + answer.right)
    ratio = _constant_ratio(gold.left, gold.right, answer.left, answer.right)
    if ratio is None or gold.sign not in FLIPPED:
        return False
    return gold.sign == (answer.sign if ratio > 0 else FLIPPED.get(answer.sign))


def _same_equation(gold: Assignment, answer: Assignment) -> bool:
    return _constant_ratio(gold.left, gold.right_text, answer.left, answer.right_text) is not None


_POINTS = 9  # at which expressions with variables are compared
_DIGITS_AT_FIRST = 50
_DIGITS_AT_MOST = 600
_TIME = re.compile(r"0?(\d{1,2}):(\d{2})(?::(\d{2}))?")
_LETTERS_ONLY = re.compile(r"[A-Za-z]{2,}")


def _same_expression(gold: str, answer: str) -> bool:
    """Compare two expressions. Letters alone are a word or a row of points; 3:45 is a time; 2:4 is a ratio."""
    texts = gold, answer
    if all(map(_LETTERS_ONLY.fullmatch, texts)) and not all(map(_is_product, texts)):
        return _plain(gold) == _plain(answer)
    ratios = [split_outside(text, re.compile(":"))[0] for text in (gold, answer)]
    if len(ratios[0]) > 1 or len(ratios[1]) > 1:
        return _same_ratio(gold, answer, *ratios)
    numbers = [as_number(text) for text in (gold, answer)]
    values = _value(gold), _value(answer)
    if values[0] is None or values[1] is None:
        return False
    for number, value in ((numbers[0], values[1]), (numbers[1], values[0])):
        if number is not None and number.may_be_rounded and _rounds_to(number, value):
            return True
    return _same_value(*values)


def _is_product(letters: str) -> bool:
    return letters.islower() and set("aeiou").isdisjoint(letters)


def _same_ratio(gold: str, answer: str, ours: list[str], theirs: list[str]) -> bool:
    times = [_TIME.fullmatch(text) for text in (gold, answer)]
    if times[0] and times[1]:
        return times[0].groups() == times[1].groups()
    if 1 in (len(ours), len(theirs)) and len(ours) + len(theirs) == 3:  # 2:3 is 2/3
        ours, theirs = (parts if len(parts) == 2 else [parts[0], "1"] for parts in (ours, theirs))
    values = [[_value(part) for part in parts] for parts in (ours, theirs)]
    if len(ours) != len(theirs) or None in (*values[0], *values[1]):
        return False
    return all(
        _same_value(values[0][0] * theirs_part, values[1][0] * ours_part)
        for ours_part, theirs_part in zip(*values)
    )


@_if_possible
def _rounds_to(number: Number, value: Any) -> bool:
    if value.free_symbols or not value.is_number:
        return False
    exact = value.evalf((number.decimals or 0) + number.digits + 30)
    if not exact.is_Float:
        return exact.is_Rational and number.stands_for(Fraction(int(exact.p), int(exact.q)))
    return number.stands_for(Fraction(str(exact)))


def _value(text: Any) -> Any:
    """Return the expression of a canonical text, or ``None``."""
    from sympy import Expr, MatrixExpr

    value = _parsed(text)
    if isinstance(value, Expr) and not value.has(MatrixExpr):
        return value
    return None


def _matrix(rows: Listing) -> Any:
    from sympy import Matrix

    entries = [[_value(entry) for entry in row.parts] for row in rows.parts]
    whole = len({len(row) for row in entries}) == 1 and all(
        e is not None for row in entries for e in row
    )
    return Matrix(entries) if whole else None


def _same_matrix(a: Any, b: Any) -> bool:
    shapes = getattr(a, "shape", None), getattr(b, "shape", None)
    return shapes[0] is not None and shapes[0] == shapes[1] and all(map(_same_value, a, b))


@functools.lru_cache(maxsize=1000)
def _parsed(text: Any) -> Any:
    """Return what sympy reads in a canonical text, with exact numbers and evaluated; ``None`` if nothing."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Basic, I, MatrixBase, Symbol
    from sympy.core.function import AppliedUndef

    if not isinstance(text, str) or not re.search(r"\w", text):
        return None
    if _UNREADABLE.search(_RANGE.sub("", text)):
        return None
    try:
        expression = latex2sympy(
            _for_parser(text),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        if not isinstance(expression, (Basic, MatrixBase)):
            return None
        expression = expression.doit()
        names = {call: Symbol(str(call)) for call in expression.atoms(AppliedUndef)}
        units = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
        return expression.xreplace(names).xreplace(units)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser has no exception of its own
        return None


_UNREADABLE = re.compile(
    r"\\text|'|\\ldots|\d \d|[=<>;]|\\mathbb|\\%$|(?<![A-Za-z])\\(?:le|ge|ne|in)(?![A-Za-z])"
)
_RANGE = re.compile(r"\\(?:sum|prod)_\{[^{}]*\}")  # k=1 below a sum
_DECIMALS = re.compile(r"(\d*)\.(\d+)")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")
_CALL = re.compile(r"(?<![A-Za-z\\{])(?P<letter>[A-Za-eh-z])(?=\()")


def _for_parser(text: str) -> str:
    """Numbers as fractions; products in front of brackets with a sign, which the parser takes for calls or mixed numbers."""

    def fraction(match: re.Match[str]) -> str:
        return rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}"

    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _DECIMALS.sub(fraction, text)
    text = re.sub(r"([\d)}])\s*\((?!\))", r"\1 \\cdot (", text)
    text = re.sub(
        r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log|exp)[_^]\{[^{}]*\}) \\cdot \(", r"\1(", text
    )
    text = re.sub(r"(?<!\\cdot )(?<=\))\s*(?=\\frac|\d|\\sqrt)", r" \\cdot ", text)
    return _CALL.sub(r"\g<letter> \\cdot ", text).replace("*", r" \cdot ")


@_if_possible
def _same_value(a: Any, b: Any) -> bool:
    if a == b:
        return True
    a, b = _same_case(a, b)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _same_constant(a, b)
    outcomes = [
        outcome for point in _points(symbols) if (outcome := _same_at(a, b, point)) is not None
    ]
    if len(outcomes) >= 3:
        return all(outcomes)
    import sympy

    return sympy.simplify(a - b) == 0


def _same_case(a: Any, b: Any) -> tuple[Any, Any]:
    """Return symbols in lower case, unless the case tells symbols of an expression apart, as in πR² - πr²."""
    from sympy import Symbol

    for expression in (a, b):
        names = {symbol.name for symbol in expression.free_symbols}
        if len({name.lower() for name in names}) < len(names):
            return a, b
    low = [{s: Symbol(s.name.lower()) for s in e.free_symbols} for e in (a, b)]
    return a.xreplace(low[0]), b.xreplace(low[1])


def _points(symbols: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Return integers, fractions and negative numbers, another one for each symbol."""
    from sympy import Integer, Rational

    for n in range(_POINTS):
        at = [(3 * n + 7 * i + 2, 5 + 2 * i) for i in range(len(symbols))]
        if n % 3 == 0:
            yield {s: Integer(top) for s, (top, _) in zip(symbols, at)}
        else:
            sign = -1 if n % 3 == 2 else 1
            yield {
                s: Rational(sign * (top * 11 + i), bottom * 7)
                for i, (s, (top, bottom)) in enumerate(zip(symbols, at))
            }


def _same_at(a: Any, b: Any, point: dict[Any, Any]) -> bool | None:
    """At a point; ``None`` where the first one has no real value."""
    from sympy import I

    values = [_approximate(e.xreplace(point).doit(), _DIGITS_AT_FIRST) for e in (a, b)]
    if values[0] is None or (values[0].imag and not a.has(I)):
        return None
    return values[1] is not None and _close(*values, _DIGITS_AT_FIRST)


def _approximate(value: Any, digits: int) -> Any:
    """Return the number as mpmath's, or ``None``."""
    import mpmath

    real, imaginary = value.evalf(digits).as_real_imag()
    if not (real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite):
        return None
    with mpmath.workdps(digits + 5):
        # precision 1: all digits have cancelled
        real, imaginary = (
            mpmath.mpf(0 if part.is_Float and part._prec == 1 else str(part))
            for part in (real, imaginary)
        )
        noise = abs(imaginary) <= abs(real) * mpmath.mpf(10) ** (-digits + 5)
        return mpmath.mpc(real, 0 if noise else imaginary)


def _close(a: Any, b: Any, digits: int) -> bool:
    import mpmath

    with mpmath.workdps(digits + 5):
        return abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** (-(digits * 3) // 4)


def _same_constant(a: Any, b: Any) -> bool:
    """Compare rational numbers exactly, others to hundreds of digits, relative to their size."""
    from sympy import nan, oo, zoo

    if a.has(oo, zoo, nan) or b.has(oo, zoo, nan):
        return a == b and not a.has(zoo, nan)
    if a.is_Rational and b.is_Rational:
        return a == b
    for digits in (_DIGITS_AT_FIRST, _DIGITS_AT_MOST):
        values = [_approximate(one, digits) for one in (a, b)]
        if None in values or not _close(*values, digits):
            return False
    return True


@_if_possible
def _constant_ratio(*sides: str) -> Any:
    """(left - right) of the first relation by that of the second, if it is the same number everywhere."""
    values = [_value(side) for side in sides]
    if any(value is None for value in values):
        return None
    first = values[0] - values[1]
    second = values[2] - values[3]
    first, second = _same_case(first, second)
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols or first.free_symbols != second.free_symbols:
        return None
    ratios = []
    for point in _points(symbols):
        pair = [_approximate(e.xreplace(point), _DIGITS_AT_FIRST) for e in (first, second)]
        if None not in pair and pair[0] and pair[1]:
            ratios.append(pair[0] / pair[1])
    if len(ratios) < 3 or not all(_close(ratio, ratios[0], _DIGITS_AT_FIRST) for ratio in ratios):
        return None
    return ratios[0].real
