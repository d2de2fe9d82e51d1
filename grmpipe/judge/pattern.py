r"""The patterns of judgements: regular expressions for an engine's grammar. Pure.

A pattern and its parser accept the same language: what the pattern matches parses, and what parses is matched. Numbers
have no leading zeros.
"""

from __future__ import annotations

import re
from dataclasses import replace

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.judge.forms import Form
from grmpipe.judge.parse import THOUGHT_BEGINS, THOUGHT_ENDS
from models.thinking import ThinkingMarkers

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
    verdict = verdict_pattern(name, scale, num_scores)
    if markers.in_prompt:
        return rf"{thought(replace(markers, open=''))}{verdict}"
    return rf"{BLANK_LINES}(?:{thought(markers)}|{no_thought(markers.open)})?{verdict}"


def answer_pattern(name: str, scale: Scale, num_scores: int = 1) -> str:
    """What may come after a thought: whatever, then the verdict's line."""
    return rf"{LINES}{verdict_pattern(name, scale, num_scores)}"


def verdict_pattern(name: str, scale: Scale, num_scores: int) -> str:
    form = PARSERS.found(name, Form)
    closing = rf"(?:{BLANK}\n{BLANK_LINES}(?:{'|'.join(map(literal, form.closings))}))?" if form.closings else ""
    return rf"{BLANK}{form.line(scores(scale), scale, num_scores)}{closing}{BLANK_LINES}"


def thought(markers: ThinkingMarkers) -> str:
    """The pattern of lines that begin with thinking, which ends in one of them that isn't a quotation."""
    opening, closing = plain(markers.open), plain(markers.close)
    first = r"[^\n]*" if opening else OWN
    return rf"{opening}(?:[^\n]*\n{LINES}{OWN}|{first}){closing}[^\n]*\n{LINES}"


def no_thought(opening: str) -> str:
    """The pattern of lines that don't begin with thinking."""
    leaves = [rf"[^{plain(opening[0])} \t\r\n][^\n]*"]
    for place, character in enumerate(opening[1:], start=1):
        leaves.append(rf"{plain(opening[:place])}(?:[^{plain(character)}\n][^\n]*)?")
    return rf"(?:{'|'.join(leaves)})\n{LINES}"


def plain(text: str) -> str:
    """The pattern of a text itself: only what has a meaning in patterns is escaped."""
    return re.sub(r"([\[\](){}|.*+?^$\\-])", r"\\\1", text)


def literal(text: str) -> str:
    return "".join(rf"\{character}" for character in text)


def scores(scale: Scale) -> str:
    """The pattern of all scores of a scale. Raises ValueError if there are too many to list."""
    if scale.high - scale.low >= MAX_SCORES:
        raise ValueError(
            f"structured: {scale.high - scale.low + 1} different scores are too many for a pattern; "
            "type judge.structured=false, or a smaller scale (judge.score_min, judge.score_max)"
        )
    return "(?:" + "|".join(str(score) for score in range(scale.low, scale.high + 1)) + ")"
