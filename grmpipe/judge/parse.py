r"""Scores parsed from a judgement, or the cause why there are none. Pure; never a default, never a guess.

The verdict is what ends the judgement: the last line that isn't blank or, for some forms, the last few. Text elsewhere
(a draft, the score of a criterion, a quotation of the work under judgement) is never used instead. The verdict is not
part of the judge's thinking: thinking that begins a judgement must end, in a line that isn't a quotation, before the
verdict's first line.

A line ends at "\n" only: other line breaks may stand within a quotation.

Below, the patterns of judgements: regular expressions for an engine's grammar. A pattern and its parser accept the same
language: what the pattern matches parses, and what parses is matched. Numbers have no leading zeros.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.config.keys.user_code import UserCodeError, describe_code, describe_error, format_value
from grmpipe.judge.verdict_forms import Form
from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers
from grmpipe.models.types import Completion
from grmpipe.types import DataCause

Scores = tuple[float, ...]
Unparseable = Literal["unparseable"]
Parser = Callable[[str, int, Scale], Scores | Unparseable]

NUMBER = r"(0|-?[1-9][0-9]{0,5})"  # short: int() refuses thousands of digits
HALVES = r"((?:0|-?[1-9][0-9]{0,5})(?:\.[05])?)"
DECIMALS = r"((?:0|-?[1-9][0-9]{0,5})(?:\.[0-9]{1,4})?)"
BLANK = " \t\r"
THOUGHT_BEGINS, THOUGHT_ENDS = KNOWN_MARKERS[0]  # of a judgement whose thought isn't marked


def parser_named(name: str) -> Parser:
    """Reads the end of a judgement, which must be of the form that `judge.parser` names, with exactly `num_scores`
    scores.
    """
    return functools.partial(scores_in, form_named(name))


def form_named(name: str) -> Form:
    """The form of verdicts that `judge.parser` names. Raises ValueError if it can't be imported, or isn't a Form."""
    return PARSERS.find_object(name, Form)


def parse_scores(completion: Completion, parser: Parser, num_scores: int, scale: Scale) -> Scores | DataCause:
    """The scores of a judgement, read after its thought, or why there are none. A truncated one is `truncated`, even
    with a verdict in it, which may have been a draft.
    """
    if completion.finish_reason == "length":
        return "truncated"
    return parser(in_usual_markers(completion), num_scores, scale)


def in_usual_markers(completion: Completion) -> str:
    """The text with a short thought between the usual markers in place of its own, whatever markers that had."""
    if not completion.thought_chars:
        return completion.text
    return f"{THOUGHT_BEGINS}\n...\n{THOUGHT_ENDS}{completion.text[completion.thought_chars :]}"


def scores_in(form: Form, text: str, num_scores: int, scale: Scale) -> Scores | Unparseable:
    if form.num_scores not in (None, num_scores):
        return "unparseable"
    pattern = compile_pattern(form, scale, num_scores)
    match = next(filter(None, map(pattern.fullmatch, find_ends(text, form))), None)
    if match is None:
        return "unparseable"
    with blame(form.scores_of):
        found = form.scores_of(match.groups(), scale)
    scores = check_scores(found, num_scores, form)
    return scores if all(scale.low <= score <= scale.high for score in scores) else "unparseable"


class FormError(UserCodeError, ValueError):
    """A form of the user's can't be used. The text names its code."""


@contextlib.contextmanager
def blame(code: object) -> Iterator[None]:
    """Context: code of a form, which may be the user's. Whatever it raises becomes a FormError."""
    try:
        yield
    except Exception as error:
        raise FormError(f"judge.parser: {describe_code(code)} raised {describe_error(error)}") from error


def check_scores(found: object, num_scores: int, form: Form) -> Scores:
    """The scores that a form made. Raises FormError if a form of the user's own made anything else."""
    if isinstance(found, tuple) and len(found) == num_scores:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            scores = tuple(map(float, found))
            if all(map(math.isfinite, scores)):
                return scores
    raise FormError(
        f"judge.parser: {describe_code(form.scores_of)} returned {format_value(found)}; return a tuple of {num_scores} "
        f"numbers, from the groups of the pattern of {describe_code(form.line)}"
    )


@functools.lru_cache(maxsize=256)
def compile_pattern(form: Form, scale: Scale, num_scores: int) -> re.Pattern[str]:
    """Raises FormError, which names the user's code, for a form whose pattern can't be made or has no group."""
    number = DECIMALS if form.decimals else HALVES if form.halves else NUMBER
    with blame(form.line):
        pattern = re.compile(form.whole_line(number, scale, num_scores))
    if not pattern.groups:
        raise FormError(
            f"judge.parser: the pattern of {describe_code(form.line)} has no group to read a score from; use `number`, "
            "which it is given"
        )
    return pattern


def find_ends(text: str, form: Form) -> Iterator[str]:
    """What the verdict may be: the last line, the last two, and so on. Nothing if the judge wrote only thinking."""
    lines = [line for line in (line.strip(BLANK) for line in text.split("\n")) if line]
    for closing in form.closings:
        ends = closing.split("\n")
        if lines[-len(ends) :] == ends:
            lines = lines[: -len(ends)]
            break
    for start in reversed(range(max(0, len(lines) - form.most_lines), len(lines))):
        if not is_still_thinking(text, lines if form.lead_ends_thought else lines[:start]):
            yield "\n".join(lines[start:])


def is_still_thinking(text: str, lines_before: Sequence[str]) -> bool:
    """Whether a judgement begins with thinking that doesn't end within these lines. An end inside a quotation doesn't
    count.
    """
    if not text.lstrip(BLANK + "\n").startswith(THOUGHT_BEGINS):
        return False
    return not any(THOUGHT_ENDS in line and not line.startswith((">", "|")) for line in lines_before)


# -- patterns ---------------------------------------------------------------------------------------------------------

MAX_SCORES = 1001  # alternatives in one pattern
USUAL = ThinkingMarkers(open=THOUGHT_BEGINS, close=THOUGHT_ENDS)

BLANKS = r"[ \t\r]*"
BLANK_LINES = r"[ \t\r\n]*"
LINES = r"(?:[^\n]*\n)*"
OWN = rf"{BLANKS}(?:[^ \t\r\n>][^\n]*)?"  # the beginning of a line that isn't a quotation


def judgement_pattern(form: Form, scale: Scale, num_scores: int = 1, markers: ThinkingMarkers | None = None) -> str:
    """Whatever, or a thought and whatever; then the verdict's line, as the form has it. A thought that the
    prompt has opened must end.
    """
    markers = markers or USUAL
    verdict = verdict_pattern(form, scale, num_scores)
    if markers.in_prompt:
        markers, begun = replace(markers, open=""), ""
        whole = rf"{match_thought(markers)}{verdict}"
    else:
        begun = rf"{literal(markers.open)}[^\n]*\n"
        whole = rf"(?:{match_thought(markers)}|{no_thought(markers.open)})?{verdict}"
    if form.lead_ends_thought:
        line = form.line(match_scores(form, scale), scale, num_scores)
        whole = rf"(?:{whole}|{begun}{LINES}{BLANKS}{form.lead}{line}{match_closing(form)}{BLANK_LINES})"
    return whole if markers.in_prompt else rf"{BLANK_LINES}{whole}"


def answer_pattern(form: Form, scale: Scale, num_scores: int = 1) -> str:
    """What may come after a thought: whatever, then the verdict's line."""
    return rf"{LINES}{verdict_pattern(form, scale, num_scores)}"


def verdict_pattern(form: Form, scale: Scale, num_scores: int) -> str:
    line = form.whole_line(match_scores(form, scale), scale, num_scores)
    return rf"{BLANKS}{line}{match_closing(form)}{BLANK_LINES}"


def match_closing(form: Form) -> str:
    return f"(?:{'|'.join(map(match_lines, form.closings))})?" if form.closings else ""


def match_lines(closing: str) -> str:
    """The pattern of further lines."""
    return "".join(rf"{BLANKS}\n{BLANK_LINES}{literal(line)}" for line in closing.split("\n"))


def match_thought(markers: ThinkingMarkers) -> str:
    """The pattern of lines that begin with thinking, which ends in one of them that isn't a quotation."""
    opening, closing = literal(markers.open), literal(markers.close)
    first = r"[^\n]*" if opening else OWN
    return rf"{opening}(?:[^\n]*\n{LINES}{OWN}|{first}){closing}[^\n]*\n{LINES}"


def no_thought(opening: str) -> str:
    """The pattern of lines that don't begin with thinking."""
    leaves = [rf"[^{literal(opening[0])} \t\r\n][^\n]*"]
    for place, character in enumerate(opening[1:], start=1):
        leaves.append(rf"{literal(opening[:place])}(?:[^{literal(character)}\n][^\n]*)?")
    return rf"(?:{'|'.join(leaves)})\n{LINES}"


def literal(text: str) -> str:
    """The pattern of a text itself: only what has a meaning in patterns is escaped."""
    return re.sub(r"([\[\](){}|.*+?^$\\-])", r"\\\1", text)


def match_scores(form: Form, scale: Scale) -> str:
    """The pattern of all scores of a scale, as a form writes numbers. ValueError if there are too many to list."""
    if scale.high - scale.low >= MAX_SCORES:
        raise ValueError(
            f"format.structured: {scale.high - scale.low + 1} different scores are too many for a pattern; "
            "type judge.format.structured=false, or a smaller scale (judge.scale.low, judge.scale.high)"
        )
    numbers = (f"{score}{match_decimals(form, score, scale)}" for score in range(scale.low, scale.high + 1))
    return f"(?:{'|'.join(numbers)})"


def match_decimals(form: Form, score: int, scale: Scale) -> str:
    """The pattern of the decimals of a score. They lead away from zero, and may leave the scale."""
    leaves = score == (scale.high if score >= 0 else scale.low)
    if form.decimals:
        return r"(?:\.0{1,4})?" if leaves else r"(?:\.[0-9]{1,4})?"
    return "" if not form.halves else r"(?:\.0)?" if leaves else r"(?:\.[05])?"
