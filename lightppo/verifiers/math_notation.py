r"""One notation for mathematical answers: :func:`tidy` for people, :func:`canonical` for a parser of LaTeX.

``√2``, ``sqrt(2)`` and ``\sqrt2`` become ``\sqrt{2}``, ``2½`` and ``2 1/2`` become ``(2+\frac{1}{2})``, ``25 000`` becomes
``25000``. Words stand in ``\text{…}``, so that no parser takes them for products of letters.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

# Every pattern runs in the trainer on texts that a model wrote: nothing that may overlap repeats without bound.
SPACING = r"(?:\\(?:q?quad|[,;:! ])|~)"
_SPACES = "[\u00a0\u2007\u2009\u202f]"  # those that stand between the digits of a number
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
        re.compile(r"(?<=\d)(?:,\s?\\!\s?|\\!,|\\,|" + _SPACES + r")(?=\d{3}(?!\d))"),
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
_KINDS = (
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
_KIND = {
    word: (group, kind)
    for group, kinds in enumerate(_KINDS)
    for kind, words in enumerate(kinds)
    for word in words.split()
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
    powers = {"²": "2", "³": "3"}
    return tuple(
        word + (f"^{power or powers[sign]}" if power or sign else "")
        for word, power, sign in matches
    )


def kind_of(word: str) -> tuple[int, int] | None:
    """Return the group of words that exclude each other, and the word's kind in it."""
    word = word.casefold().strip(".")
    return _KIND.get(word) or _KIND.get(word.removesuffix("s"))


def exclude_each_other(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Tell whether the words of two quantities contradict each other, as a.m. and p.m., or cm^2 and cm^3 do."""
    kinds: list[dict[int, tuple[int, str]]] = []
    for words in (ours, theirs):
        split = [word.partition("^") for word in words]
        kinds.append({k[0]: (k[1], power) for name, _, power in split if (k := kind_of(name))})
    return any(
        a[0] != b[0] or (a[1] and b[1] and a[1] != b[1])
        for a, b in (
            (kinds[0][group], kinds[1][group]) for group in kinds[0].keys() & kinds[1].keys()
        )
    )


def is_unit(word: str, attached: bool = False) -> bool:
    """Tell whether letters behind a number are a word, not a product; ``attached`` to it: 5xyz is a product, 5cm is not."""
    if word.lower() in SHORT_UNITS or (len(word) > 2 and kind_of(word)):
        return True
    spoken = len(word) > 2 and not set("aeiou").isdisjoint(word.lower())
    return spoken and word[1:].islower() and not attached


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
    text = tidy(_as_latex(answer))
    for pattern, replacement in _CANONICAL:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # fonts in fonts
        text = _FONT.sub(_without_font, text)
    text = _DOTTED.sub(lambda match: rf" \text{{{(match[1] or match[2]).lower()}m}} ", text)
    text = _UNIT_FRACTION.sub(r"\1/\2", _LETTERS.sub(_named, text))
    text = _REPEATING.sub(_fraction, _with_braces(text))
    text = _MIXED.sub(_mixed, text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def _as_latex(text: str) -> str:
    """Return ASCII for signs of Unicode: by the table, Greek letters by name, the rest by how Unicode decomposes them."""
    if text.isascii():
        return text
    return "".join(_latex_runs(text))


def _latex_runs(text: str) -> Iterator[str]:
    def kind(char: str) -> str:
        if char not in _SIGNS:
            return unicodedata.decomposition(char).partition(" ")[0]
        return ""

    for name, run in itertools.groupby(text, kind):
        chars = list(run)
        if name in ("<super>", "<sub>"):
            plain = unicodedata.normalize("NFKC", "".join(chars)).replace("−", "-")
            yield f"{'^' if name == '<super>' else '_'}{{{plain}}}"
            continue
        for char in chars:
            if name == "<fraction>":
                top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
                yield rf"\frac{{{top}}}{{{bottom}}}"
            elif name in ("<wide>", "<font>", "<compat>") and char not in _SIGNS:
                yield unicodedata.normalize("NFKC", char)
            else:
                yield _SIGNS.get(char) or _greek(char)


def _greek(char: str) -> str:
    words = unicodedata.name(char, "").split() if "Ͱ" <= char <= "Ͽ" else []
    if words[:1] != ["GREEK"] or len(words) != 4:
        return char
    name = words[3].lower().replace("lamda", "lambda")
    return f"\\{name.capitalize() if words[1] == 'CAPITAL' else name} "


def _without_font(match: re.Match[str]) -> str:
    r"""The content of ``\text{…}`` and fonts. Letters of a text are a word, a single one behind a number is a unit."""
    content = match["content"].replace("~", " ")
    bare = content.strip()
    before = match.string[: match.start()].rstrip()[-1:]
    if match["font"] in ("mathbf", "mathit", "boldsymbol", "bm", "bf", "mathsf"):
        return content
    if match["font"].startswith("operatorname") and not is_unit(bare):
        return f"\\{bare} " if bare in _FUNCTIONS else content
    if len(bare) == 1 and bare.isalpha():
        is_letter = bare in "eEiIdT" or not (before.isdigit() or before in ("}", ")"))
        return bare if is_letter else rf" \text{{{bare}}} "
    if bare.isalpha() and not bare.isupper() and bare.lower() not in (*_COMMANDS, "and", "or"):
        return rf" \text{{{bare}}} "
    return f" {content} "


def _named(match: re.Match[str]) -> str:
    word = match["word"]
    if word is None:
        return match.group()
    low = word.lower()
    before = match.string[: match.start()][-2:]
    if low in ("and", "or"):
        return rf" \text{{{low}}} "
    if word.isupper() and not before.strip()[-1:].isdigit():  # points: AM is no unit, but in 5 AM
        return word
    if low in _COMMANDS:
        return f"\\{_COMMANDS[low]} "
    if word[:-1] in _FUNCTIONS and not is_unit(word):  # sinx
        return f"\\{word[:-1]} {word[-1]}"
    if is_unit(word, attached=before[-1:].isdigit()):
        return rf" \text{{{word}}} "
    return word


def _with_braces(text: str) -> str:
    r"""``\frac12`` as ``\frac{1}{2}``, ``x^(2)`` and ``\sqrt(2)`` with braces; mended from the inside out."""
    out = []
    position = 0
    while match := _TAKES.search(text, position):
        out.append(text[position : match.start()] + match.group().replace(" ", ""))
        position = match.end()
        for _ in range(2 if match["name"] in ("frac", "binom") else 1):
            argument, position = _argument(text, position, match["name"])
            out.append(f"{{{_with_braces(argument)}}}")
    return "".join(out) + text[position:]


def _argument(text: str, start: int, name: str | None) -> tuple[str, int]:
    """Return what a command takes: a group, with a power, index or root also one in parentheses or a whole number."""
    while text[start : start + 1] == " ":
        start += 1
    first = text[start : start + 1]
    if first == "{" or (first == "(" and name not in ("frac", "binom")):
        end = closing(text, start)
        return text[start + 1 : end].strip(), min(end + 1, len(text))
    pattern = _SIGNED if name not in ("frac", "binom") else _ONE
    match = pattern.match(text, start) or _ONE.match(text, start)
    if match is None:
        return "", start
    if match.group() in ("\\sqrt", "\\frac"):  # takes arguments itself
        inner, end = _argument(text, match.end(), match.group()[1:])
        return match.group() + f"{{{inner}}}", end
    return match.group(), match.end()


def closing(text: str, start: int) -> int:
    """Return where the bracket at ``start`` closes; the end of the text if it does not."""
    pairs = {"{": "}", "(": ")"}
    opened = text[start]
    closed = pairs[text[start]]
    depth = 0
    for position in range(start, len(text)):
        if position and text[position - 1] == "\\" and opened == "{":
            continue
        depth += (text[position] == opened) - (text[position] == closed)
        if depth == 0:
            return position
    return len(text)


def _fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    head = match["head"]
    repeated = match["bar"] or match["one"] or match["round"]
    whole = int((match["whole"] or "0") + head)
    top = whole * (10 ** len(repeated) - 1) + int(repeated)
    return rf"\frac{{{top}}}{{{(10 ** len(repeated) - 1) * 10 ** len(head)}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = (match[name] or match[f"{name}2"] for name in ("whole", "top", "bottom"))
    if len(top + bottom) < 20 and int(top) < int(bottom):
        return rf"({whole}+\frac{{{top}}}{{{bottom}}})"
    return rf"{whole} \cdot \frac{{{top}}}{{{bottom}}}"
