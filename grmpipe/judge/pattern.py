r"""What a judgement may look like, as regular expressions that an engine's grammar holds it to. Pure.

A pattern is its parser turned round: free text, then the verdict in the last line that isn't blank. What it lets
through parses; what parses with its verdict there is let through. Numbers stand as one writes them: no leading zeros.

Only what the grammars of vLLM and SGLang know: classes, groups, alternatives, repetition; nothing that looks around.
"""

from __future__ import annotations

from collections.abc import Callable

from grmpipe.judge.scale import Scale

MAX_SCORES = 1001  # alternatives in one pattern

LINES = r"(?:[^\n]*\n)*"
BLANK = r"[ \t\r]*"
ENDS = r"[ \t\r\n]*"


def score_line(scale: Scale, num_scores: int = 1) -> str:
    """Whatever, then a line `Score: N`. It holds one score only."""
    assert num_scores == 1, num_scores
    return f"{LINES}{BLANK}Score: {scores(scale)}{ENDS}"


def boxed(scale: Scale, num_scores: int = 1) -> str:
    r"""Whatever, then \boxed{s_1, ..., s_n} in a line that is no quotation; on its right anything that opens no other
    box."""
    inside = ",".join([f" *{scores(scale)} *"] * num_scores)
    return rf"{LINES}(?:[ \t]*[^ \t\n>][^\n]*|[ \t]*)\\boxed\{{{inside}\}}[^\\\n]*{ENDS}"


PATTERNS: dict[str, Callable[[Scale, int], str]] = {"score_line": score_line, "boxed": boxed}


def scores(scale: Scale) -> str:
    """Raises ValueError where there are too many to list."""
    if scale.high - scale.low >= MAX_SCORES:
        raise ValueError(
            f"structured: {scale.high - scale.low + 1} different scores are too many for a pattern; "
            "type judge.structured=false, or a shorter scale (judge.score_min, judge.score_max)"
        )
    return "(?:" + "|".join(str(score) for score in range(scale.low, scale.high + 1)) + ")"
