r"""The number that a text gives as its answer. Pure; never a guess: what isn't one plain number is none.

A number is 12, -3, 1,234.50, 1{,}000, .5, 1e5, 3/2, \frac{3}{2} or 1 1/2; a unit or a currency beside it is left out.
Of a text with a \boxed{} the last one counts, and must hold one number and nothing to work out. Of any other text the
last number counts; where it is part of an expression (2^10, \sqrt{3}) there is none. ASCII digits only.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 1000  # characters of a number; longer ones are nobody's answer, and take their time
NEARBY = 12  # characters before a number that say whether it is part of an expression

DECIMAL = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
PLAIN = rf"(?:{DECIMAL})(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?"
# Not the 5 of "v2.5", nor a sign that subtracts ("10-4" ends with 4).
BEGINS = r"(?<![\w.])"
OVER, UNDER = (rf"(?:\{{ *(?P<{name}_braced>-?(?:{PLAIN})) *\}}|(?P<{name}_digit>[0-9]))" for name in ("over", "under"))
NUMBER = re.compile(
    rf"{BEGINS}(?P<sign>-?)(?:(?P<whole>[0-9]+) *)?\\[dt]?frac *{OVER} *{UNDER}"
    rf"|{BEGINS}(?P<sign_of_slash>-?)(?:(?P<whole_of_slash>[0-9]+) +)?(?P<over>{PLAIN}) ?/ ?(?P<under>{PLAIN})"
    rf"|{BEGINS}(?P<plain>-?(?:{PLAIN}))"
)
SEPARATORS = re.compile(r",|\{,\}|\\,")
BOXED = "\\boxed{"

UNIT = r"(?:mm|cm|dm|km|m|inch(?:es)?|in|ft|feet|foot|yd|mi|miles?|met(?:er|re)s?|units?|kg|mg|g|lb|oz|L|ml|ms|s|min|h)"
CLEANINGS = (
    (re.compile("\N{MINUS SIGN}"), "-"),
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[ ;:!()\[\]]|~|\\,(?![0-9]{3})|\\(?:left|right|quad|displaystyle)(?![a-z])"), " "),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"), " "),
    (re.compile(rf"(?<![A-Za-z])({UNIT})\s*\^\s*(?:\{{\s*-?[0-9]\s*\}}|-?[0-9])"), r"\1"),
)
MARKS = ("\\", "^", "~", "\N{MINUS SIGN}")  # of these one stands in whatever CLEANINGS match
# What makes a number part of an expression: what stands before it, or after it.
PART_BEFORE = re.compile(r"(?:[\^_√{/]|\\(?:sqrt|cdot|times|pm))\s*-?\Z")
PART_AFTER = re.compile(r"\s*(?:[\^√π]|\\(?:sqrt|pi|cdot|times|frac|pm)|/ ?[0-9]|[eE][+-]?[0-9])")
# What may stand beside the only number: "The answer is", "x =", "$"; "%", "km/h", "apples".
BEFORE = re.compile(r"\s*(?:[A-Za-z][A-Za-z' ]*(?:\([A-Za-z0-9]\))? *[ :=]\s*)?\$?\s*(?:\\?[$€£¥]\s*)?\+?")
AFTER = re.compile(rf"\s*(?:\\?%|°|{UNIT}|(?<=\s)[A-Za-z]{{2,}})?(?:[ /.]+[A-Za-z]+)*\s*[.$\s]*")
NO_UNIT = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|log|ln|exp|sqrt|pi|mod|and|or|to|not)(?![A-Za-z])")


def answer_of(text: str) -> Fraction | None:
    """None where it gives no number, or none that can be told."""
    if BOXED in text:
        return only_number(inside_of_last_box(text))
    text = cleaned(text)
    found = deque(NUMBER.finditer(text), maxlen=1)
    if not found:
        return None
    last = found[0]
    before = PART_BEFORE.search(text, max(0, last.start() - NEARBY), last.start())
    return None if before or PART_AFTER.match(text, last.end()) else value_of(last)


@lru_cache(maxsize=4096)
def reference_answer(reference: str) -> Fraction:
    r"""The number of a reference, which holds no other: alone, after the last `####` or `Answer:`, or in its one box.

    ValueError where that isn't one plain number.
    """
    if "####" in reference:
        number = only_number(reference.rpartition("####")[2])
    elif BOXED in reference:
        number = only_number(inside_of_last_box(reference)) if reference.count(BOXED) == 1 else None
    else:
        number = only_number(re.split(r"(?i)\banswer *:", reference)[-1])
    if number is None:
        raise ValueError(
            f"reference {reference[:80]!r} isn't one number, alone or after ####, after Answer: or in one \\boxed{{}}; "
            "give one, or type judge.rule=math_verify for other mathematics, judge.rule=contains_reference for a text"
        )
    return number


def only_number(text: str) -> Fraction | None:
    """Of a text that is one number, with what may stand beside it."""
    text = cleaned(text)
    before = BEFORE.match(text)
    assert before is not None, "it may be empty"
    number = NUMBER.match(text, before.end())
    if number is None or not AFTER.fullmatch(text, number.end()) or NO_UNIT.search(text):
        return None
    return value_of(number)


def inside_of_last_box(text: str) -> str:
    """Up to the brace that closes it; nothing where none does."""
    inside, depth = text.rpartition(BOXED)[2], 1
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:place]
    return ""


def cleaned(text: str) -> str:
    """Without what only sets it in type, and without the powers of units."""
    if not any(mark in text for mark in MARKS):  # most answers are plain text, and every rollout is asked for one
        return text
    for pattern, replacement in CLEANINGS:
        text = pattern.sub(replacement, text)
    return text


def value_of(number: re.Match[str]) -> Fraction | None:
    if len(number[0]) > MAX_LENGTH:
        return None
    if number["plain"] is not None:
        return exact(number["plain"])
    over, under = (number[name] or number[f"{name}_braced"] or number[f"{name}_digit"] for name in ("over", "under"))
    if exact(under) == 0:
        return None
    whole = exact(number["whole"] or number["whole_of_slash"] or "0")
    size = whole + exact(over) / exact(under)
    return -size if number["sign"] or number["sign_of_slash"] else size


def exact(digits: str) -> Fraction:
    return Fraction(SEPARATORS.sub("", digits))
