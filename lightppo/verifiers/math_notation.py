r"""One notation for mathematical answers: :func:`tidy` for people, :func:`canonical` for a parser of LaTeX.

``√2``, ``sqrt(2)`` and ``\sqrt2`` become ``\sqrt{2}``, ``2½`` and ``2 1/2`` become ``(2+\frac{1}{2})``, ``25 000`` becomes
``25000``. Words stand in ``\text{…}``, so that no parser takes them for products of letters.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from typing import Any

# Every pattern runs in the trainer on texts that a model wrote: nothing that may overlap repeats without bound.
SPACING = r"(?:\\(?:q?quad|[,;:! ])|~)"
_DIGIT_SPACES = "[\u00a0\u2007\u2009\u202f]"  # those that stand between the digits of a number
_SIGNS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "⁄": "/",
    "∕": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "∈": r"\in ", "∉": r"\notin ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "°": r"^{\circ}",
    "√": r"\sqrt ", "∛": r"\sqrt[3]", "′": "'", "″": "''", "’": "'", "∣": r"\mid ", "π": r"\pi ", "∠": r"\angle ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "…": r"\ldots ", "∶": ":", "€": "€", "£": "£", "¥": "¥",
}  # fmt: skip
_REPLACED = [  # a backslash before another is the end of a matrix row
    (
        re.compile(r"(?<=\d)(?:,\s?\\!\s?|\\!,|\\,|" + _DIGIT_SPACES + r")(?=\d{3}(?!\d))"),
        ",",
    ),  # thousands
    (
        re.compile(
            rf"(?<!\\)(?:\\(?:left|right|displaystyle|[bB]ig+[lrm]?)(?![a-zA-Z])|{SPACING})"
        ),
        " ",
    ),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r" ?\{ ?, ?\} ?"), ","),
    (re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|°"), ""),
    (re.compile(r"\\?\$|(?<!\\)\\[()[\]]"), ""),
    (re.compile(r"[−–]"), "-"),
    # Python's power; at the ends it is bold type
    (re.compile(r"(?<=[\w)}])\*\*(-?\w+)"), r"^{\1}"),
    (re.compile(r"(?<=[\w)}])\*\*\("), r"^("),
    (re.compile(r"(?:\*\*|\s)+"), " "),
]


def tidy(answer: str) -> str:
    """Return the answer without parts that never change its meaning: math mode, spacing commands, a full stop."""
    if r"\begin" not in answer:  # written with the escapes of JSON
        answer = re.sub(r"\\\\(?=[A-Za-z{},!;:])", r"\\", answer)
    for pattern, replacement in _REPLACED:
        answer = pattern.sub(replacement, answer)
    return answer.strip().rstrip(".").strip()


# -- words -----------------------------------------------------------------------------------------------------------

MULTIPLIERS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# fmt: off
NO_UNITS = frozenset((  # words that change a value
    "and", "or", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "mod", "max", "min", "sqrt", "dozen",
    "squared", "cubed", "factorial", "halves", "thirds", "fourths", "fifths", "infinity", "alpha", "beta", "theta",
    "lambda", *MULTIPLIERS,
))
# Words that exclude each other: groups of kinds, each with its spellings. Other words behind a number are its unit, and
# may be left out or be different.
_KIND_GROUPS = (
    ("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
     "in inch inches", "ft foot feet", "yd yard", "mi mile"),
    ("sec second", "min minute", "hr hour", "day", "week", "month", "yr year"),
    ("cent", "dollar usd", "euro eur €", "£ gbp", "yen ¥", "rupee"),
    ("mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce", "ton tonne"),
    ("ml milliliter millilitre", "l liter litre", "gal gallon", "quart", "pint"),
    ("mph", "kph kmh kmph", "knot"), ("am", "pm"),
    ("increase gain profit rise up more above higher greater longer taller older faster",
     "decrease loss fall down less fewer below lower smaller shorter younger slower"),
    ("north", "south", "east", "west", "northeast", "northwest", "southeast", "southwest"),
    ("left", "right"), ("before", "after"), ("inside", "outside"), ("positive", "negative"), ("odd", "even"),
    ("clockwise", "counterclockwise anticlockwise"), ("bc bce", "ad ce"), ("yes true", "no false"),
    ("man men boy male", "woman women girl female"), ("forward", "backward"), ("horizontal", "vertical"),
)
_KIND_OF_WORD = {
    word: (group, kind)
    for group, kinds in enumerate(_KIND_GROUPS)
    for kind, spellings in enumerate(kinds)
    for word in spellings.split()
}
SHORT_UNITS = frozenset((
    "cm", "mm", "km", "kg", "mg", "lb", "lbs", "oz", "ft", "in", "hr", "hrs", "mins", "ml", "kb", "mb", "gb", "mph",
    "kph", "sq", "yd", "mi", "dm", "gal", "yr", "yrs", "pm", "am",
))
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arccot", "arcsec",
    "arccsc", "log", "ln", "exp",
    "max", "min", "gcd", "lcm",
))
_COMMANDS = {
    "pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty", "sqrt": "sqrt", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "cup": "cup", "union": "cup",
    **{name: name for name in ("alpha", "beta", "theta", "lambda", "phi", "omega", "sigma", "delta", "mu", "rho")},
    **{name: name for name in _FUNCTIONS},
}
# fmt: on


def words_in(text: str) -> tuple[str, ...]:
    """Return the words, with their powers as in ``cm^2``, and signs of money."""
    matches = re.findall(r"([€£¥]|[^\W\d_²³]+)(?: *\^ *\{? *(-?\d) *\}?|([²³]))?", text.casefold())
    powers = {"": "", "²": "^2", "³": "^3"}
    return tuple(
        f"{word}^{power}" if power else word + powers[sign] for word, power, sign in matches
    )


def kind_of(word: str) -> tuple[int, int] | None:
    """Return the group of words that exclude each other, and the word's kind in it."""
    word = word.casefold().strip(".")
    return _KIND_OF_WORD.get(word) or _KIND_OF_WORD.get(word.removesuffix("s"))


def exclude_each_other(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Tell whether the words of two quantities contradict each other, as a.m. and p.m., or cm^2 and cm^3 do."""
    gold_kinds = _kinds_by_group(gold)
    kinds = _kinds_by_group(answer)
    for group in gold_kinds.keys() & kinds.keys():
        gold_kind, gold_power = gold_kinds[group]
        kind, power = kinds[group]
        if gold_kind != kind or (gold_power and power and gold_power != power):
            return True
    return False


def _kinds_by_group(words: tuple[str, ...]) -> dict[int, tuple[int, str]]:
    """Return the kind and the power of the words that exclude others, by their group."""
    kinds = {}
    for word in words:
        name, _, power = word.partition("^")
        if group_and_kind := kind_of(name):
            group, kind = group_and_kind
            kinds[group] = (kind, power)
    return kinds


def is_unit(word: str, attached: bool = False) -> bool:
    """Tell whether letters behind a number are a word, not a product; ``attached`` to it: 5xyz is a product, 5cm is not."""
    if word.lower() in SHORT_UNITS or (len(word) > 2 and kind_of(word)):
        return True
    has_vowel = not set("aeiou").isdisjoint(word.lower())
    return not attached and len(word) > 2 and has_vowel and word[1:].islower()


# -- for a parser ----------------------------------------------------------------------------------------------------

_FONT = re.compile(
    r"\\(?P<font>text(?:bf|it|rm|sf|normal)?|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|operatorname\*?|rm|bf)\s*"
    r"\{(?P<content>[^{}]*)\}"
)
_DOTTED = re.compile(  # p.m., behind a number also PM
    r"(?<=[\d}]) ?([aApP])\.? ?[mM]\b\.?|(?<![A-Za-z\\])([aApP])\. ?[mM]\b\.?"
)
_LETTERS = re.compile(
    r"\\text\{[^{}]*\}|\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+|(?P<word>[A-Za-z]{2,})"
)
_TAKES = re.compile(r"\\(?P<name>frac|binom|sqrt)(?![A-Za-z])(?P<root>\s*\[[^][]*\])?|[\^_]")
_ONE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_SIGNED = re.compile(r"[-+]?\d+(?:\.\d+)?")
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<head>\d{0,30})(?:\\(?:overline|bar|dot)\s*(?:\{(?P<bar>\d{1,30})\}|(?P<one>\d))"
    r"|\((?P<round>\d{1,30})\))(?!\d)"
)
_UNIT_FRACTION = re.compile(r"\\frac\s*\{ *(\\text\{[^{}]*\}) *\} *\{ *(\\text\{[^{}]*\}) *\}")
_MIXED = re.compile(
    r"(?<![\d.,_^}])(?P<whole>\d+)\s*\\frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?<![\d.,_^}/])(?P<whole2>\d+) +(?P<top2>\d+) ?/ ?(?P<bottom2>\d+)(?![\d.])"
)
_CANONICAL: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d/])"), lambda m: m.group().replace(" ", "")),
    (re.compile(r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=|=<"), r" \\le "),
    (re.compile(r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>="), r" \\ge "),
    (re.compile(r"\\not\s*=|\\neq?(?![A-Za-z])|(?<![\d)])!="), r" \\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:mathbb|Bbb|mathbf)\s*\{?\s*([RNZQC])\s*\}?"), r"\\mathbb{\1}"),
    (re.compile(r"\\(?:R|Reals?)(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:vert|lvert|rvert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\pmod\s*\{?\s*(\w+)\s*\}?"), r" \\pmod{\1}"),
    (re.compile(r"\\(?:dots|cdots|dotsc)(?![A-Za-z])|\.\.\.+"), r"\\ldots "),
    (re.compile(r"\\(?:phantom|label|tag|mathstrut)\{[^{}]*\}|\\(?:limits|nolimits|\|)"), " "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"''|\""), "''"),
    (re.compile(r"\\begin\{(?:array|smallmatrix)\}\s*(?:\{[lcr| ]*\})?"), r"\\begin{matrix}"),
    (re.compile(r"\\end\{(?:array|smallmatrix)\}"), r"\\end{matrix}"),
    (re.compile(r"\|\s*\\begin\{matrix\}((?:(?!\\end\{).)*)\\end\{matrix\}\s*\|", re.S),
     r"\\begin{vmatrix}\1\\end{vmatrix}"),
    (re.compile(r"[\[(]\s*\\begin\{matrix\}((?:(?!\\end\{).)*)\\end\{matrix\}\s*[\])]", re.S),
     r"\\begin{pmatrix}\1\\end{pmatrix}"),
]  # fmt: skip


def canonical(answer: str) -> str:
    """Return the answer in the notation that :mod:`~lightppo.verifiers.math_equality` reads."""
    notation = tidy(_as_latex(answer))
    for pattern, replacement in _CANONICAL:
        notation = pattern.sub(replacement, notation)
    for _ in range(3):  # fonts in fonts
        notation = _FONT.sub(_without_font, notation)
    notation = _DOTTED.sub(lambda match: rf" \text{{{(match[1] or match[2]).lower()}m}} ", notation)
    notation = _UNIT_FRACTION.sub(r"\1/\2", _LETTERS.sub(_latex_word, notation))
    notation = _REPEATING.sub(_fraction, _with_braces(notation))
    notation = _MIXED.sub(_mixed_number, notation)
    return re.sub(r"\s+", " ", notation).strip().rstrip(".").strip()


def _as_latex(answer: str) -> str:
    """Return ASCII for signs of Unicode: by the table, Greek letters by name, the rest by how Unicode decomposes them."""
    if answer.isascii():
        return answer
    runs = itertools.groupby(answer, _decomposition)
    return "".join(
        _latex_of(decomposition, "".join(characters)) for decomposition, characters in runs
    )


def _decomposition(character: str) -> str:
    """Return how Unicode decomposes a character, such as ``<super>``; empty for the signs of the table."""
    if character in _SIGNS:
        return ""
    return unicodedata.decomposition(character).partition(" ")[0]


def _latex_of(form: str, characters: str) -> str:
    """Return LaTeX for neighbours of one decomposition."""
    if form in ("<super>", "<sub>"):
        plain = unicodedata.normalize("NFKC", characters).replace("−", "-")
        sign = "^" if form == "<super>" else "_"
        return f"{sign}{{{plain}}}"
    latex = []
    for character in characters:
        plain = unicodedata.normalize("NFKC", character)
        if form == "<fraction>":
            numerator, _, denominator = plain.partition("⁄")
            latex.append(rf"\frac{{{numerator}}}{{{denominator}}}")
        elif form in ("<wide>", "<font>", "<compat>"):
            latex.append(plain)
        else:
            latex.append(_SIGNS.get(character) or _greek(character))
    return "".join(latex)


def _greek(character: str) -> str:
    words = unicodedata.name(character, "").split() if "Ͱ" <= character <= "Ͽ" else []
    if words[:1] != ["GREEK"] or len(words) != 4:
        return character
    letter = words[3].lower().replace("lamda", "lambda")
    if words[1] == "CAPITAL":
        letter = letter.capitalize()
    return f"\\{letter} "


def _without_font(match: re.Match[str]) -> str:
    r"""Return the content of ``\text{…}`` and fonts: letters of a text as a word, one behind a number as a unit."""
    content = match["content"].replace("~", " ")
    word = content.strip()
    previous = match.string[: match.start()].rstrip()[-1:]
    if match["font"] in ("mathbf", "mathit", "boldsymbol", "bm", "bf", "mathsf"):
        return content
    if match["font"].startswith("operatorname") and not is_unit(word):
        return f"\\{word} " if word in _FUNCTIONS else content
    if len(word) == 1 and word.isalpha():
        is_behind_number = previous.isdigit() or previous in ("}", ")")
        is_unit_letter = is_behind_number and word not in "eEiIdT"
        return rf" \text{{{word}}} " if is_unit_letter else word
    if word.isalpha() and not word.isupper() and word.lower() not in (*_COMMANDS, "and", "or"):
        return rf" \text{{{word}}} "
    return f" {content} "


def _latex_word(match: re.Match[str]) -> str:
    word = match["word"]
    if word is None:
        return match.group()
    lowered = word.lower()
    previous = match.string[: match.start()][-2:]
    if lowered in ("and", "or"):
        return rf" \text{{{lowered}}} "
    if word.isupper() and not previous.strip()[-1:].isdigit():  # points: AM is no unit, but in 5 AM
        return word
    if lowered in _COMMANDS:
        return f"\\{_COMMANDS[lowered]} "
    if word[:-1] in _FUNCTIONS and not is_unit(word):  # sinx
        return f"\\{word[:-1]} {word[-1]}"
    if is_unit(word, attached=previous[-1:].isdigit()):
        return rf" \text{{{word}}} "
    return word


def _with_braces(notation: str) -> str:
    r"""Write ``\frac12`` as ``\frac{1}{2}``, ``x^(2)`` and ``\sqrt(2)`` with braces; from the inside out."""
    pieces = []
    position = 0
    while match := _TAKES.search(notation, position):
        pieces.append(notation[position : match.start()] + match.group().replace(" ", ""))
        position = match.end()
        is_pair = match["name"] in ("frac", "binom")
        for _ in range(1 + is_pair):
            argument, position = _argument(notation, position, is_pair)
            pieces.append(f"{{{_with_braces(argument)}}}")
    return "".join(pieces) + notation[position:]


def _argument(notation: str, start: int, is_pair: bool) -> tuple[str, int]:
    """Return what a command takes: a group; one that takes no pair also one in parentheses or a whole number."""
    while notation[start : start + 1] == " ":
        start += 1
    bracket = notation[start : start + 1]
    if bracket == "{" or (bracket == "(" and not is_pair):
        end = closing(notation, start)
        return notation[start + 1 : end].strip(), min(end + 1, len(notation))
    match = _ONE.match(notation, start)
    if not is_pair:
        match = _SIGNED.match(notation, start) or match
    if match is None:
        return "", start
    if match.group() in ("\\sqrt", "\\frac"):  # takes arguments itself
        argument, end = _argument(notation, match.end(), match.group() == "\\frac")
        return match.group() + f"{{{argument}}}", end
    return match.group(), match.end()


def closing(notation: str, start: int) -> int:
    """Return where the bracket at ``start`` closes; the end of the text if it does not."""
    opening = notation[start]
    bracket = {"{": "}", "(": ")"}[opening]
    depth = 0
    for position in range(start, len(notation)):
        if position and notation[position - 1] == "\\" and opening == "{":
            continue
        depth += (notation[position] == opening) - (notation[position] == bracket)
        if depth == 0:
            return position
    return len(notation)


def _fraction(decimal: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    head = decimal["head"]
    repeated = decimal["bar"] or decimal["one"] or decimal["round"]
    nines = 10 ** len(repeated) - 1
    numerator = int((decimal["whole"] or "0") + head) * nines + int(repeated)
    return rf"\frac{{{numerator}}}{{{nines * 10 ** len(head)}}}"


def _mixed_number(match: re.Match[str]) -> str:
    integer, numerator, denominator = (
        match[name] or match[f"{name}2"] for name in ("whole", "top", "bottom")
    )
    if len(numerator + denominator) < 20 and int(numerator) < int(denominator):
        return rf"({integer}+\frac{{{numerator}}}{{{denominator}}})"
    return rf"{integer} \cdot \frac{{{numerator}}}{{{denominator}}}"
