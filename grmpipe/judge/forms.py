r"""The forms of a verdict: lines that end a judgement, as regular expressions. Pure; reads no judgement.

A form is what a judge writes who was told to write `Score: 7`, or `\boxed{7}`: the same in any case, in Markdown's
emphasis, as a heading or an item of a list, as `7/10` where 10 is the highest score. A line of a form holds nothing
else: no sentence around it in which the work under judgement could be quoted.

Only what the grammars of vLLM and SGLang know: classes, groups, alternatives, repetition; nothing that looks around.
No two neighbours repeat the same characters: a line is read in linear time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grmpipe.config.judge import Scale

EMPHASIS = r"[ \t*_]*"
LEAD = rf"[ \t*_#-]*(?:[0-9][.)]{EMPHASIS})?"  # a heading, an item of a list
TAIL = r"[ \t*_.]*"
MATH_OPENS = r"(?:(?:\$|\$\$|\\\(|\\\[)[ \t]*)?"
MATH_CLOSES = r"(?:[ \t]*(?:\$|\$\$|\\\)|\\\]))?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """line:     its pattern, of the pattern of one number, the scale, and how many scores are wanted.
    closings: what may stand alone in one more line, without a meaning: the end of displayed mathematics.
    one_score: it can't hold several.
    """

    line: Callable[[str, Scale, int], str]
    closings: tuple[str, ...] = ()
    one_score: bool = False


def score_line(number: str, scale: Scale, num_scores: int) -> str:
    """`Score: N`. It holds one score only."""
    assert num_scores == 1, num_scores
    label = rf"(?:(?:{any_case('final')}|{any_case('overall')})[ \t]+)?{any_case('score')}"
    return rf"{LEAD}{label}{EMPHASIS}:{EMPHASIS}{number}(?:{EMPHASIS}/[ \t]*{scale.high})?{TAIL}"


def boxed(number: str, scale: Scale, num_scores: int) -> str:
    r"""`\boxed{s_1, ..., s_n}`, with or without `Score:` or `The final score is` before it."""
    therefore = rf"(?:{either('therefore', 'thus', 'hence', 'so')},?[ \t]+)?"
    whose = rf"(?:{either('the', 'my')}[ \t]+)?(?:{either('final', 'overall')}[ \t]+)?"
    score = rf"{any_case('score')}[Ss]?{EMPHASIS}(?:{either('is', 'are')}{EMPHASIS})?(?::{EMPHASIS})?"
    inside = ",".join([f" *{number} *"] * num_scores)
    return rf"{LEAD}(?:{therefore}{whose}{score})?{MATH_OPENS}\\boxed\{{{inside}\}}{MATH_CLOSES}{TAIL}"


def either(*words: str) -> str:
    return f"(?:{'|'.join(map(any_case, words))})"


def any_case(word: str) -> str:
    """ASCII only: a flag for all of Unicode would let other letters through."""
    return "".join(f"[{letter.upper()}{letter}]" for letter in word)


SCORE_LINE = Form(line=score_line, one_score=True)
BOXED = Form(line=boxed, closings=("$$", "\\]"))
