"""Scores out of what a judge wrote, or the cause why there are none. Pure; never a default, never a guess.

The last verdict counts, and it must be exact: where the last thing that looks like one is malformed, an earlier one
doesn't step in. Lines that begin with ">" are quotations of the work under judgement and hold no verdict. A line ends
at "\\n" only: other line breaks may stand within a quotation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from grmpipe.judge.scale import Scale
from grmpipe.types import DataCause
from models.types import Completion

Scores = tuple[int, ...]
Unparseable = Literal["unparseable"]
Parser = Callable[[str, int, Scale], Scores | Unparseable]

VERDICT_LIKE = re.compile(r"[ \t*_#-]*score[ \t*_]*:", re.IGNORECASE)
SCORE_LINE = re.compile(r"Score: (-?[0-9]{1,6})")
BOXED = "\\boxed{"
INTEGER = re.compile(r"-?[0-9]{1,6}")  # short: int() refuses thousands of digits


def parse_score_line(text: str, num_scores: int, scale: Scale) -> Scores | Unparseable:
    """The last line that claims a score, which must be `Score: N` and nothing else."""
    claims = [line for line in own_lines(text) if VERDICT_LIKE.match(line)]
    match = SCORE_LINE.fullmatch(claims[-1]) if claims else None
    return within(scale, (int(match[1]),), num_scores) if match else "unparseable"


def parse_boxed(text: str, num_scores: int, scale: Scale) -> Scores | Unparseable:
    r"""The last \boxed{s_1, ..., s_n}: exactly `num_scores` integers (SPCT, arXiv 2504.02495)."""
    _, opened, rest = "\n".join(own_lines(text)).rpartition(BOXED)
    inside, closed, _ = rest.partition("}")
    numbers = [number.strip(" ") for number in inside.split(",")]
    if not opened or not closed or not all(INTEGER.fullmatch(number) for number in numbers):
        return "unparseable"
    return within(scale, tuple(int(number) for number in numbers), num_scores)


PARSERS: dict[str, Parser] = {"score_line": parse_score_line, "boxed": parse_boxed}


def scores_of(completion: Completion, parser: Parser, num_scores: int, scale: Scale) -> Scores | DataCause:
    """A cut judgement is `truncated`, whatever verdict stands in it: it may have been about to say otherwise."""
    if completion.finish_reason == "length":
        return "truncated"
    return parser(completion.text, num_scores, scale)


def own_lines(text: str) -> list[str]:
    """The judge's own lines, without the quoted ones."""
    return [line.strip(" \t\r") for line in text.split("\n") if not line.lstrip(" \t").startswith(">")]


def within(scale: Scale, scores: Scores, num_scores: int) -> Scores | Unparseable:
    if len(scores) == num_scores and all(scale.low <= score <= scale.high for score in scores):
        return scores
    return "unparseable"
