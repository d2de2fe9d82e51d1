r"""The forms of a verdict: lines that end a judgement, as regular expressions. Pure; reads no judgement.

A form accepts what a judge writes when asked for `Score: 7` or `\boxed{7}`: in any case, in Markdown emphasis, as a
heading or a list item, as `7/10` if 10 is the highest score. A line of a form holds nothing else: a sentence around the
score could quote the work under judgement.

The expressions use only what the grammars of vLLM and SGLang support: classes, groups, alternatives, repetition; no
lookarounds. No two adjacent parts repeat the same characters, so a line is matched in linear time.
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
    """A form of the verdict's line.

    line:     makes its pattern from the pattern of one number, the scale, and the number of scores.
    closings: what may stand alone in one more line without a meaning: the end of displayed mathematics.
    one_score: whether it holds only one score.
    """

    line: Callable[[str, Scale, int], str]
    closings: tuple[str, ...] = ()
    one_score: bool = False


def score_line(number: str, scale: Scale, num_scores: int) -> str:
    """The pattern of `Score: N`, which holds one score only."""
    assert num_scores == 1, num_scores
    label = rf"(?:(?:{any_case('final')}|{any_case('overall')})[ \t]+)?{any_case('score')}"
    return rf"{LEAD}{label}{EMPHASIS}:{EMPHASIS}{number}(?:{EMPHASIS}/[ \t]*{scale.high})?{TAIL}"


def boxed(number: str, scale: Scale, num_scores: int) -> str:
    r"""The pattern of `\boxed{s_1, ..., s_n}`, with or without `Score:` or `The final score is` before it."""
    therefore = rf"(?:{either('therefore', 'thus', 'hence', 'so')},?[ \t]+)?"
    whose = rf"(?:{either('the', 'my')}[ \t]+)?(?:{either('final', 'overall')}[ \t]+)?"
    score = rf"{any_case('score')}[Ss]?{EMPHASIS}(?:{either('is', 'are')}{EMPHASIS})?(?::{EMPHASIS})?"
    inside = ",".join([f" *{number} *"] * num_scores)
    return rf"{LEAD}(?:{therefore}{whose}{score})?{MATH_OPENS}\\boxed\{{{inside}\}}{MATH_CLOSES}{TAIL}"


def either(*words: str) -> str:
    return f"(?:{'|'.join(map(any_case, words))})"


def any_case(word: str) -> str:
    """The pattern of a word in any case. ASCII only: the ignore-case flag would let other Unicode letters match."""
    return "".join(f"[{letter.upper()}{letter}]" for letter in word)


SCORE_LINE = Form(line=score_line, one_score=True)
BOXED = Form(line=boxed, closings=("$$", "\\]"))
