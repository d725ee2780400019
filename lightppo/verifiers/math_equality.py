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
from typing import Any

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

_CHOICE = re.compile(
    r"(?:option |choice )?(?:\((?P<round>[A-J])\)|(?P<bare>[A-J])(?=[.):]|$)[.)]?(?P<colon>:)?)"
    r"(?!\s*(?:,|;|\\text\{(?:and|or)\}))\s*(?P<rest>.*)",  # (A), (C) are two
    re.S,
)


def equal(gold: str, answer: str) -> bool:
    """Tell whether two answers are equal. It runs in a worker process, where only a kill limits it."""
    gold = canonical(gold)
    answer = canonical(answer)
    gold_choice = _CHOICE.fullmatch(gold)
    choice = _CHOICE.fullmatch(answer)
    if gold_choice and choice:
        is_sure = not (gold_choice["colon"] or choice["colon"])  # J: 4, S: 5 is none
        if is_sure or not (gold_choice["rest"] and choice["rest"]):
            letter = choice["round"] or choice["bare"]
            return letter in (gold_choice["round"], gold_choice["bare"])
    if gold_choice and not gold_choice["colon"] and gold_choice["rest"]:
        gold = gold_choice["rest"]  # the choice without its letter
    return bool(_same(read(gold), read(answer)))


def _same(gold: Any, answer: Any) -> bool:
    if gold == answer and not isinstance(gold, str):
        return True
    nodes = (gold, answer)
    if any(isinstance(node, Assignment) for node in nodes):
        return _same_assigned(gold, answer)
    leaves = [isinstance(node, str | Quantity) for node in nodes]
    listings = [isinstance(node, Listing) for node in nodes]
    if all(leaves):
        return _same_quantity(gold, answer)
    if all(listings) and not _is_condition(gold, answer):
        return _same_listing(gold, answer)
    if leaves[0] and listings[1]:
        return _is_only_part(gold, answer)
    if listings[0] and leaves[1]:
        return _is_only_part(answer, gold)
    if isinstance(gold, Order) and isinstance(answer, Order) and _same_order(gold, answer):
        return True
    regions = _region(gold), _region(answer)
    return None not in regions and _same_region(*regions)


def _is_only_part(leaf: str | Quantity, listing: Listing) -> bool:
    if listing.brackets == "matrix":
        return isinstance(leaf, str) and _same_matrix(_matrix(listing), _parsed(leaf))
    is_single = listing.brackets == "{}" and len(listing.parts) == 1
    return is_single and _same(listing.parts[0], leaf)


def _is_condition(gold: Listing, answer: Listing) -> bool:
    """Tell whether a list is read as a region, or compared part by part."""
    lists = [node for node in (gold, answer) if node.brackets == ""]
    if not any(_has_regions(node) for node in lists):
        return False
    same_form = len(gold.parts) == len(answer.parts) and gold.joint == answer.joint
    return not (same_form and len(lists) == 2)


def _has_regions(listing: Listing) -> bool:
    return any(isinstance(member, Interval | Union | Order) for member in listing.parts)


def _same_assigned(gold: Any, answer: Any) -> bool:
    if not isinstance(gold, Assignment):
        return _same(gold, answer.right)
    if not isinstance(answer, Assignment):
        return is_name(gold.left) and _same(gold.right, answer)
    if is_name(gold.left) and is_name(answer.left) and _may_name_one(gold.left, answer.left):
        return _same(gold.right, answer.right) or _same_equation(gold, answer)
    return _same_equation(gold, answer) or (
        _same(read(gold.left), read(answer.left)) and _same(gold.right, answer.right)
    )


def _may_name_one(gold: str, answer: str) -> bool:
    """Tell whether both may name one thing: y and f(x), A and Area; but x is not y."""
    if _head(gold) == _head(answer):
        return True
    words = [set(words_in(without_text(name))) for name in (gold, answer) if r"\text{" in name]
    if words:
        return len(words) == 1 or not words[0].isdisjoint(words[1])
    return is_variable(gold) != is_variable(answer) and "(" in gold + answer


def _head(name: str) -> str:
    """Return the name without spaces and variables: ``f`` of ``f(x)``."""
    return re.sub(r"\s|\(\s*[A-Za-z]\s*\)", "", name)


def _same_quantity(gold: str | Quantity, answer: str | Quantity, words_count: bool = False) -> bool:
    if isinstance(gold, str):
        gold = Quantity(gold, ())
    if isinstance(answer, str):
        answer = Quantity(answer, ())
    if exclude_each_other(gold.words, answer.words):
        return False
    if words_count and _stems(gold) != _stems(answer):
        return False
    if _plain(gold.value) == _plain(answer.value):
        return True
    gold_number = as_number(gold.value)
    answer_number = as_number(answer.value)
    if gold_number is not None and answer_number is not None:
        return same_number(gold_number, answer_number)
    return _same_expression(gold.value, answer.value)


def _stems(quantity: Quantity) -> tuple[str, ...]:
    return tuple(word.strip(".").removesuffix("s") for word in quantity.words)


def _plain(notation: str) -> str:
    return squeezed(without_text(notation))


def _same_listing(gold: Listing, answer: Listing) -> bool:
    brackets = {gold.brackets, answer.brackets}
    if len(brackets) > 1 and ("" not in brackets or not brackets & {"()", "{}"}):
        return False
    is_unordered = brackets <= {"", "{}"}
    parts = [gold.parts, answer.parts]
    if "" in brackets and len(brackets) > 1:
        parts = [_by_name(listing.parts) for listing in (gold, answer)]
    is_nested = all(isinstance(member, Listing) for member in [*parts[0], *parts[1]])
    if is_unordered and ("{}" in brackets or is_nested):
        parts = [_distinct(members) for members in parts]
    if len(parts[0]) != len(parts[1]):
        return False
    is_same = _same
    are_quantities = all(isinstance(member, Quantity) for member in [*parts[0], *parts[1]])
    if are_quantities and sorted(map(_stems, parts[0])) == sorted(map(_stems, parts[1])):
        is_same = functools.partial(_same_quantity, words_count=True)
    if is_unordered:
        return _matched(*parts, is_same)
    return all(map(is_same, *parts))


def _by_name(assignments: Sequence[Any]) -> Sequence[Any]:
    """Return ``y = 2, x = 1`` in the order of the names, as a tuple has it."""
    if not all(isinstance(assignment, Assignment) for assignment in assignments):
        return assignments
    assignments_by_name = {_head(assignment.left): assignment for assignment in assignments}
    if len(assignments_by_name) < len(assignments):
        return assignments
    return [assignments_by_name[name] for name in sorted(assignments_by_name)]


def _distinct(candidates: Sequence[Any]) -> Sequence[Any]:
    members: list[Any] = []
    for candidate in candidates:
        if not any(_same(candidate, member) for member in members):
            members.append(candidate)
    return members


def _matched(
    golds: Sequence[Any], answers: Sequence[Any], is_same: Callable[[Any, Any], bool]
) -> bool:
    unmatched = list(answers)
    for gold in golds:
        matches = (i for i, answer in enumerate(unmatched) if is_same(gold, answer))
        position = next(matches, None)
        if position is None:
            return False
        del unmatched[position]
    return True


def _if_possible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return None where sympy raises: kinds that cannot be compared, such as a number and a matrix."""

    @functools.wraps(function)
    def attempt(*values: Any) -> Any:
        try:
            return function(*values)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # sympy's have no common class
            return None

    return attempt


def _region(structure: Any) -> list[Interval] | None:
    if isinstance(structure, Interval):
        return [structure]
    if isinstance(structure, Without):
        return _all_but(structure.taken)
    if isinstance(structure, Order):
        return _solved(structure)
    if isinstance(structure, Union):
        return _joined([_region(member) for member in structure.parts])
    if not isinstance(structure, Listing):
        return None
    if structure.brackets in ("()", "[]", "[)", "(]") and len(structure.parts) == 2:
        return [Interval(*structure.parts, structure.brackets)]
    if structure.brackets == "{}":
        return [Interval(member, member, "[]") for member in structure.parts]
    if structure.brackets or not _has_regions(structure):
        return None
    regions = [_region(member) for member in structure.parts]
    if structure.joint == "or":
        return _joined(regions)
    if None in regions:
        return None
    return _intersection(regions, structure.joint == ",")


def _joined(regions: Sequence[Any]) -> list[Interval] | None:
    if None in regions:
        return None
    return list(itertools.chain(*regions))


@_if_possible
def _all_but(excluded: Any) -> list[Interval] | None:
    points = excluded.parts if isinstance(excluded, Listing) else [excluded]
    values = [_end(point) for point in points]
    if any(value is None or not value.is_real for value in values):
        return None
    ends = [r"-\infty", *sorted(values), r"\infty"]
    return [Interval(lower, upper, "()") for lower, upper in itertools.pairwise(ends)]


@_if_possible
def _sympy_set(region: Sequence[Interval]) -> Any:
    import sympy

    intervals = []
    for interval in region:
        ends = _end(interval.low), _end(interval.high)
        if any(end is None or not end.is_extended_real for end in ends):
            return None
        opened, closed = interval.brackets
        intervals.append(sympy.Interval(*ends, opened == "(", closed == ")"))
    return sympy.Union(*intervals)


def _end(end: Any) -> Any:
    if isinstance(end, Quantity):
        end = end.value
    if isinstance(end, str):
        return _value(end)
    return end


@_if_possible
def _intersection(regions: Sequence[Any], is_either: bool) -> list[Interval] | None:
    import sympy

    sets = [_sympy_set(region) for region in regions]
    if any(sympy_set is None for sympy_set in sets):
        return None
    common = sympy.Intersection(*sets)
    if is_either and common.is_empty:
        common = sympy.Union(*sets)
    names = (interval.name for region in regions for interval in region if interval.name)
    return _intervals(common, next(names, ""))


def _intervals(region: Any, variable: str = "") -> list[Interval] | None:
    import sympy

    intervals: list[Interval] = []
    for component in region.args if isinstance(region, sympy.Union) else [region]:
        if isinstance(component, sympy.Interval):
            opening = "(" if component.left_open else "["
            closing = ")" if component.right_open else "]"
            intervals.append(Interval(component.start, component.end, opening + closing, variable))
        elif isinstance(component, sympy.FiniteSet):
            intervals += [Interval(point, point, "[]", variable) for point in component.args]
        elif component is sympy.S.Reals:
            intervals.append(Interval(-sympy.oo, sympy.oo, "()", variable))
        elif component is not sympy.S.EmptySet:
            return None
    return intervals


@_if_possible
def _solved(order: Order) -> list[Interval] | None:
    import sympy

    sides = _value(order.left), _value(order.right)
    if None in sides or order.sign not in FLIPPED:
        return None
    difference = sides[0] - sides[1]
    if len(difference.free_symbols) != 1:
        return None
    (symbol,) = difference.free_symbols
    relations = {
        "<": sympy.Lt,
        ">": sympy.Gt,
        r"\le": sympy.Le,
        r"\ge": sympy.Ge,
        r"\ne": sympy.Ne,
    }
    difference = difference.subs(symbol, sympy.Symbol(symbol.name, real=True))
    return _intervals(relations[order.sign](difference, 0).as_set(), symbol.name)


def _same_region(gold: list[Interval], answer: list[Interval]) -> bool:
    gold_names = {interval.name for interval in gold} - {""}
    answer_names = {interval.name for interval in answer} - {""}
    if gold_names and answer_names and gold_names != answer_names:
        return False
    if len(gold) == len(answer) and _matched(gold, answer, _same_interval):
        return True
    sets = _sympy_set(gold), _sympy_set(answer)
    return None not in sets and sets[0] == sets[1]


def _same_interval(gold: Interval, answer: Interval) -> bool:
    ends = (gold.low, answer.low), (gold.high, answer.high)
    for (gold_end, end), gold_bracket, bracket in zip(ends, gold.brackets, answer.brackets):
        is_infinite = isinstance(gold_end, str) and r"\infty" in gold_end
        if gold_bracket != bracket and not is_infinite:
            return False
        if not _same_end(gold_end, end):
            return False
    return True


def _same_end(gold: Any, answer: Any) -> bool:
    if isinstance(gold, str | Quantity) and isinstance(answer, str | Quantity):
        return _same_quantity(gold, answer)
    values = _end(gold), _end(answer)
    return None not in values and _same_value(*values)


def _same_order(gold: Order, answer: Order) -> bool:
    """Tell whether ``2x < 4y`` is ``2y > x``: the sign of the sides' constant ratio tells the direction."""
    if gold.sign == answer.sign == r"\in":
        return _plain(gold.left + gold.right) == _plain(answer.left + answer.right)
    ratio = _constant_ratio(gold.left, gold.right, answer.left, answer.right)
    if ratio is None or gold.sign not in FLIPPED:
        return False
    if ratio > 0:
        return gold.sign == answer.sign
    return gold.sign == FLIPPED.get(answer.sign)


def _same_equation(gold: Assignment, answer: Assignment) -> bool:
    return _constant_ratio(gold.left, gold.right_text, answer.left, answer.right_text) is not None


_POINTS = 9  # at which expressions with variables are compared
_DIGITS_AT_FIRST = 50
_DIGITS_AT_MOST = 600
_TIME = re.compile(r"0?(\d{1,2}):(\d{2})(?::(\d{2}))?")
_COLON = re.compile(":")
_LETTERS_ONLY = re.compile(r"[A-Za-z]{2,}")


def _same_expression(gold: str, answer: str) -> bool:
    """Compare two expressions. Letters alone are a word or a row of points; 3:45 is a time; 2:4 is a ratio."""
    notations = (gold, answer)
    if all(map(_LETTERS_ONLY.fullmatch, notations)) and not all(map(_is_product, notations)):
        return _plain(gold) == _plain(answer)
    gold_parts, answer_parts = (split_outside(notation, _COLON)[0] for notation in notations)
    if len(gold_parts) > 1 or len(answer_parts) > 1:
        return _same_ratio(gold, answer, gold_parts, answer_parts)
    gold_value = _value(gold)
    value = _value(answer)
    if gold_value is None or value is None:
        return False
    if _rounds_to(as_number(gold), value) or _rounds_to(as_number(answer), gold_value):
        return True
    return _same_value(gold_value, value)


def _is_product(letters: str) -> bool:
    return letters.islower() and set("aeiou").isdisjoint(letters)


def _same_ratio(gold: str, answer: str, gold_parts: list[str], answer_parts: list[str]) -> bool:
    gold_time = _TIME.fullmatch(gold)
    answer_time = _TIME.fullmatch(answer)
    if gold_time and answer_time:
        return gold_time.groups() == answer_time.groups()
    if {len(gold_parts), len(answer_parts)} == {1, 2}:  # 2:3 is 2/3
        gold_parts = [*gold_parts, "1"][:2]
        answer_parts = [*answer_parts, "1"][:2]
    gold_values = [_value(term_notation) for term_notation in gold_parts]
    answer_values = [_value(term_notation) for term_notation in answer_parts]
    if len(gold_values) != len(answer_values) or None in (*gold_values, *answer_values):
        return False
    return all(
        _same_value(gold_values[0] * value, answer_values[0] * gold_value)
        for gold_value, value in zip(gold_values, answer_values)
    )


@_if_possible
def _rounds_to(number: Number | None, value: Any) -> bool:
    if number is None or not number.may_be_rounded:
        return False
    if value.free_symbols or not value.is_number:
        return False
    exact = value.evalf((number.decimals or 0) + number.digits + 30)
    if not exact.is_Float:
        return exact.is_Rational and number.stands_for(Fraction(int(exact.p), int(exact.q)))
    return number.stands_for(Fraction(str(exact)))


def _value(notation: Any) -> Any:
    """Return the expression of a canonical text, or ``None``."""
    from sympy import Expr, MatrixExpr

    expression = _parsed(notation)
    if isinstance(expression, Expr) and not expression.has(MatrixExpr):
        return expression
    return None


def _matrix(rows: Listing) -> Any:
    from sympy import Matrix

    entries = [[_value(matrix_entry) for matrix_entry in row.parts] for row in rows.parts]
    if len({len(row) for row in entries}) != 1:
        return None
    if any(matrix_entry is None for row in entries for matrix_entry in row):
        return None
    return Matrix(entries)


def _same_matrix(gold: Any, answer: Any) -> bool:
    shapes = getattr(gold, "shape", None), getattr(answer, "shape", None)
    is_same_shape = shapes[0] is not None and shapes[0] == shapes[1]
    return is_same_shape and all(map(_same_value, gold, answer))


@functools.lru_cache(maxsize=1000)
def _parsed(notation: Any) -> Any:
    """Return what sympy reads in a canonical text, with exact numbers and evaluated; ``None`` if nothing."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Basic, I, MatrixBase, Symbol
    from sympy.core.function import AppliedUndef

    if not isinstance(notation, str) or not re.search(r"\w", notation):
        return None
    if _UNREADABLE.search(_RANGE.sub("", notation)):
        return None
    try:
        expression = latex2sympy(
            _for_parser(notation),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        if not isinstance(expression, (Basic, MatrixBase)):
            return None
        expression = expression.doit()
        symbols = {call: Symbol(str(call)) for call in expression.atoms(AppliedUndef)}
        units = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
        return expression.xreplace(symbols).xreplace(units)
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


def _for_parser(notation: str) -> str:
    """Write numbers as fractions, and a sign before brackets, where the parser sees calls or mixed numbers."""

    def fraction(decimal: re.Match[str]) -> str:
        return rf"\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"

    notation = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", notation)
    notation = _DECIMALS.sub(fraction, notation)
    notation = re.sub(r"([\d)}])\s*\((?!\))", r"\1 \\cdot (", notation)
    notation = re.sub(
        r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log|exp)[_^]\{[^{}]*\}) \\cdot \(", r"\1(", notation
    )
    notation = re.sub(r"(?<!\\cdot )(?<=\))\s*(?=\\frac|\d|\\sqrt)", r" \\cdot ", notation)
    return _CALL.sub(r"\g<letter> \\cdot ", notation).replace("*", r" \cdot ")


@_if_possible
def _same_value(gold: Any, answer: Any) -> bool:
    if gold == answer:
        return True
    gold, answer = _same_case(gold, answer)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _same_constant(gold, answer)
    outcomes = [_same_at(gold, answer, point) for point in _points(symbols)]
    outcomes = [outcome for outcome in outcomes if outcome is not None]
    if len(outcomes) >= 3:
        return all(outcomes)
    import sympy

    return sympy.simplify(gold - answer) == 0


def _same_case(*expressions: Any) -> list[Any]:
    """Return symbols in lower case, unless the case tells symbols of an expression apart, as in πR² - πr²."""
    from sympy import Symbol

    lowered = []
    for expression in expressions:
        symbols = {symbol: symbol.name.lower() for symbol in expression.free_symbols}
        if len(set(symbols.values())) < len({symbol.name for symbol in symbols}):
            return list(expressions)
        lowered.append(
            expression.xreplace({symbol: Symbol(name) for symbol, name in symbols.items()})
        )
    return lowered


def _points(symbols: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Yield integers, fractions and negative numbers, another one for each symbol."""
    from sympy import Integer, Rational

    for number in range(_POINTS):
        point = {}
        for i, symbol in enumerate(symbols):
            numerator = 3 * number + 7 * i + 2
            denominator = 7 * (5 + 2 * i)
            if number % 3 == 0:
                point[symbol] = Integer(numerator)
            elif number % 3 == 1:
                point[symbol] = Rational(numerator * 11 + i, denominator)
            else:
                point[symbol] = Rational(-(numerator * 11 + i), denominator)
        yield point


def _same_at(gold: Any, answer: Any, point: dict[Any, Any]) -> bool | None:
    """Compare at a point; ``None`` where the first one has no real value."""
    from sympy import I

    gold_value, value = (
        _approximate(expression.xreplace(point).doit(), _DIGITS_AT_FIRST)
        for expression in (gold, answer)
    )
    if gold_value is None or (gold_value.imag and not gold.has(I)):
        return None
    return value is not None and _close(gold_value, value, _DIGITS_AT_FIRST)


def _approximate(value: Any, digits: int) -> Any:
    """Return the number as mpmath's, or ``None``."""
    import mpmath

    parts = value.evalf(digits).as_real_imag()
    if not all(component.is_Number and component.is_finite for component in parts):
        return None
    with mpmath.workdps(digits + 5):
        # precision 1: all digits have cancelled
        real_part, imaginary_part = (
            mpmath.mpf(0 if component.is_Float and component._prec == 1 else str(component))
            for component in parts
        )
        if abs(imaginary_part) <= abs(real_part) * mpmath.mpf(10) ** (-digits + 5):  # noise
            imaginary_part = 0
        return mpmath.mpc(real_part, imaginary_part)


def _close(gold: Any, answer: Any, digits: int) -> bool:
    import mpmath

    with mpmath.workdps(digits + 5):
        tolerance = mpmath.mpf(10) ** (-(digits * 3) // 4)
        return abs(gold - answer) <= max(abs(gold), abs(answer)) * tolerance


def _same_constant(gold: Any, answer: Any) -> bool:
    """Compare rational numbers exactly, others to hundreds of digits, relative to their size."""
    from sympy import nan, oo, zoo

    if gold.has(oo, zoo, nan) or answer.has(oo, zoo, nan):
        return gold == answer and not gold.has(zoo, nan)
    if gold.is_Rational and answer.is_Rational:
        return gold == answer
    for digits in (_DIGITS_AT_FIRST, _DIGITS_AT_MOST):
        values = [_approximate(constant, digits) for constant in (gold, answer)]
        if None in values or not _close(*values, digits):
            return False
    return True


@_if_possible
def _constant_ratio(*sides: str) -> Any:
    """Divide (left - right) of the first relation by that of the second; ``None`` if that is no constant."""
    values = [_value(side_notation) for side_notation in sides]
    if any(value is None for value in values):
        return None
    differences = _same_case(values[0] - values[1], values[2] - values[3])
    symbols = differences[0].free_symbols
    if not symbols or symbols != differences[1].free_symbols:
        return None
    ratios = []
    for point in _points(sorted(symbols, key=str)):
        numbers = [
            _approximate(difference.xreplace(point), _DIGITS_AT_FIRST) for difference in differences
        ]
        if None not in numbers and all(numbers):
            ratios.append(numbers[0] / numbers[1])
    if len(ratios) < 3 or not all(_close(ratio, ratios[0], _DIGITS_AT_FIRST) for ratio in ratios):
        return None
    return ratios[0].real
