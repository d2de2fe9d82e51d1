r"""Judges by a rule: whether, or how well, a text gives the reference answer; and the number that a text gives as its
answer. The latter never guesses: anything but one plain number is no answer.

A number is 12, -3, 1,234.50, 1{,}000, .5, 1e5, 3/2, \frac{3}{2} or 1 1/2. A unit or a currency next to it is ignored.
In a text with a \boxed{}, the last box counts; it must hold one number and nothing to compute. In any other text the
last number counts; if it is part of an expression (2^10, \sqrt{3}) or of numbers in a row (3 4 5), there is no answer.
A minus before spaces is a sign where nothing stands before it that it could subtract from. ASCII digits only.
"""

import logging
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import cast

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import RULES
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, describe_code, format_value, to_number
from grmpipe.judge.kinds.math_rule import means_the_same as means_the_same
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.types import JudgeReport, Prompt, Rollout

log = logging.getLogger(__name__)

MAX_LENGTH = 1000  # characters of a number; longer ones are no real answers, and slow to parse
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
MARKS = ("\\", "^", "~", "\N{MINUS SIGN}")  # every text that CLEANINGS match contains one of these
# A number is part of an expression if one of these stands before or after it.
PART_BEFORE = re.compile(r"(?:[\^_√{/]|\\(?:sqrt|cdot|times|pm))\s*-?\Z")
PART_AFTER = re.compile(r"\s*(?:[\^√π]|\\(?:sqrt|pi|cdot|times|frac|pm)|/ ?[0-9]|[eE][+-]?[0-9])")
# A minus before spaces that is a sign: not that of "a - 5", nor the mark of an item in a list.
SIGN_APART = re.compile(r"(?:\A|[=:(\[{$])[ \t]*-[ \t]+\Z")
MINUS_APART = re.compile(r"-[ \t]+")
IN_A_ROW = re.compile(r"[0-9][ \t]+\Z")
# Allowed around the only number: "The answer is", "x =", "$"; "%", "km/h", "apples".
BEFORE = re.compile(r"\s*(?:[A-Za-z][A-Za-z' ]*(?:\([A-Za-z0-9]\))? *[ :=]\s*)?\$?\s*(?:\\?[$€£¥]\s*)?\+?")
AFTER = re.compile(rf"\s*(?:\\?%|°|{UNIT}|(?<=\s)[A-Za-z]{{2,}})?(?:[ /.]+[A-Za-z]+)*\s*[.$\s]*")
NO_UNIT = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|log|ln|exp|sqrt|pi|mod|and|or|to|not)(?![A-Za-z])")


@lru_cache(maxsize=1024)  # siblings often give the same text
def find_answer(text: str) -> Fraction | None:
    """The number that the text gives as its answer. None if there is none or it isn't clear."""
    if BOXED in text:
        return only_number(inside_of_last_box(text))
    text = strip_typesetting(text)
    found = deque(NUMBER.finditer(text), maxlen=1)
    if not found:
        return None
    last = found[0]
    nearby = (max(0, last.start() - NEARBY), last.start())
    if PART_BEFORE.search(text, *nearby) or IN_A_ROW.search(text, *nearby) or PART_AFTER.match(text, last.end()):
        return None
    value = parse_number(last)
    return -value if value is not None and SIGN_APART.search(text, *nearby) and last[0][0] != "-" else value


@lru_cache(maxsize=4096)
def reference_answer(reference: str) -> Fraction:
    r"""The number of a reference: alone, after the last `####` or `Answer:`, or in its only box.

    Raises ValueError if that isn't one plain number.
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
    """The number of a text that is one number with allowed words around it. None for any other text."""
    text = strip_typesetting(text)
    before = BEFORE.match(text)
    assert before is not None, "it may be empty"
    apart = MINUS_APART.match(text, before.end())
    is_negative = apart is not None and SIGN_APART.search(text, 0, apart.end()) is not None
    number = NUMBER.match(text, apart.end() if apart is not None and is_negative else before.end())
    if number is None or not AFTER.fullmatch(text, number.end()) or NO_UNIT.search(text):
        return None
    value = parse_number(number)
    return -value if value is not None and is_negative and number[0][0] != "-" else value


def inside_of_last_box(text: str) -> str:
    """The text inside the last box, up to its closing brace. Empty if no brace closes it."""
    inside, depth = text.rpartition(BOXED)[2], 1
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:place]
    return ""


def strip_typesetting(text: str) -> str:
    """The text without typesetting commands and without the powers of units."""
    if not any(mark in text for mark in MARKS):  # a fast path: most answers are plain text
        return text
    for pattern, replacement in CLEANINGS:
        text = pattern.sub(replacement, text)
    return text


def parse_number(number: re.Match[str]) -> Fraction | None:
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


Rule = Callable[[str, str], float]  # text, reference -> how right the text is, from 0 to 1


def is_right(text: str, reference: str) -> bool:
    """Whether the text's answer is the same number as the reference, however they are written.

    Raises ValueError for a reference that isn't one number.
    """
    return find_answer(text) == reference_answer(reference)


def contains_reference(text: str, reference: str) -> bool:
    """Whether the reference occurs in the text as whole words, ignoring case and spacing: no "no" in "nothing"."""
    words = normalise_words(reference)
    if not words:
        raise ValueError("reference is empty")
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", normalise_words(text)) is not None


def normalise_words(text: str) -> str:
    return " ".join(text.casefold().split())


class RuleBrokenError(ValueError):
    """A rule raised, or returned no number from 0 to 1. The text names its key, the function and the line."""


def rule_named(name: str, key: str = JUDGE) -> Rule:
    """What `judge.rule` names, behind its door: it returns a float from 0 to 1, and raises RuleBrokenError, or another
    ValueError for what it can't decide.

    key: the configuration's section of the judge.
    """
    rule = cast(Callable[[str, str], object], RULES.find_object(name))
    owner = f"{key}.rule: {describe_code(rule)}"

    def graded(text: str, reference: str) -> float:
        try:
            with call_guarded(owner, (ValueError,)):
                given = rule(text, reference)
        except UserCodeError as error:
            raise RuleBrokenError(str(error)) from error.__cause__
        grade = to_number(given)
        if grade is None or not 0 <= grade <= 1:
            raise RuleBrokenError(
                f"{owner} returned {format_value(given)}; return True or False, or a number from 0 to 1"
            )
        return grade

    return graded


class RuleJudge:
    """The rule's grade is the reward: right answers get the highest score and reward 1, wrong ones the lowest and 0. A
    prompt that the rule can't decide is Failed, and so is an answer on which the rule breaks.

    key: the configuration's section of the judge.
    """

    def __init__(self, rule: str, scale: Scale | None = None, key: str = JUDGE) -> None:
        self._rule = rule_named(rule, key)
        self._scale = scale or Scale()
        self._has_broken = False

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        if prompt.reference is None:
            return report_failures(make_failure("refused", f"prompt {prompt.prompt_id} has no reference"))
        try:
            grade = self._rule(rollout.answer, prompt.reference)
        except RuleBrokenError as error:
            # The first one is for the console, the others are for run.log.
            log.log(logging.INFO if self._has_broken else logging.WARNING, "no verdict: %s", error)
            self._has_broken = True
            return report_failures(make_failure("broken", f"prompt {prompt.prompt_id}: {error}"))
        except ValueError as error:
            return report_failures(make_failure("refused", f"prompt {prompt.prompt_id}: {error}"))
        return report_score(outcome(rollout, grade), self._scale.to_score(grade), {"rule": grade})
