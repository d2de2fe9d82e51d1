r"""The patterns of judgements: regular expressions for an engine's grammar. Pure.

A pattern and its parser accept the same language: what the pattern matches parses, and what parses is matched. Numbers
have no leading zeros.
"""

import re
from dataclasses import replace

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.judge.parse import THOUGHT_BEGINS, THOUGHT_ENDS
from grmpipe.judge.verdict_forms import Form
from grmpipe.models.chat.thinking import ThinkingMarkers

MAX_SCORES = 1001  # alternatives in one pattern
USUAL = ThinkingMarkers(open=THOUGHT_BEGINS, close=THOUGHT_ENDS)

BLANK = r"[ \t\r]*"
BLANK_LINES = r"[ \t\r\n]*"
LINES = r"(?:[^\n]*\n)*"
OWN = rf"{BLANK}(?:[^ \t\r\n>][^\n]*)?"  # the beginning of a line that isn't a quotation


def judgement_pattern(name: str, scale: Scale, num_scores: int = 1, markers: ThinkingMarkers | None = None) -> str:
    """Whatever, or a thought and whatever; then the verdict's line, as `judge.parser` names it. A thought that the
    prompt has opened must end.
    """
    markers = markers or USUAL
    form, verdict = PARSERS.find_object(name, Form), verdict_pattern(name, scale, num_scores)
    if markers.in_prompt:
        markers, begun = replace(markers, open=""), ""
        whole = rf"{match_thought(markers)}{verdict}"
    else:
        begun = rf"{literal(markers.open)}[^\n]*\n"
        whole = rf"(?:{match_thought(markers)}|{no_thought(markers.open)})?{verdict}"
    if form.lead_ends_thought:
        line = form.line(match_scores(form, scale), scale, num_scores)
        whole = rf"(?:{whole}|{begun}{LINES}{BLANK}{form.lead}{line}{match_closing(form)}{BLANK_LINES})"
    return whole if markers.in_prompt else rf"{BLANK_LINES}{whole}"


def answer_pattern(name: str, scale: Scale, num_scores: int = 1) -> str:
    """What may come after a thought: whatever, then the verdict's line."""
    return rf"{LINES}{verdict_pattern(name, scale, num_scores)}"


def verdict_pattern(name: str, scale: Scale, num_scores: int) -> str:
    form = PARSERS.find_object(name, Form)
    line = form.whole_line(match_scores(form, scale), scale, num_scores)
    return rf"{BLANK}{line}{match_closing(form)}{BLANK_LINES}"


def match_closing(form: Form) -> str:
    return f"(?:{'|'.join(map(match_lines, form.closings))})?" if form.closings else ""


def match_lines(closing: str) -> str:
    """The pattern of further lines."""
    return "".join(rf"{BLANK}\n{BLANK_LINES}{literal(line)}" for line in closing.split("\n"))


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
