r"""The forms of a verdict: what ends a judgement, as regular expressions. Pure.

A form accepts what a judge writes when asked for `Score: 7` or `\boxed{7}`: in any case, in Markdown emphasis, as a
heading or a list item, as `7/10` if 10 is the highest score, with the number in the line after its label. A line of our
own forms holds nothing else: a sentence around the score could quote the work under judgement.

The expressions use only what the grammars of vLLM and SGLang support: classes, groups, alternatives, repetition; no
lookarounds. No two adjacent parts repeat the same characters, so a line is matched in linear time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import Scale

EMPHASIS = r"[ \t*_]*"
IN_NEXT_LINE = r"[ \t\r*_]*(?:\n[ \t\r\n]*[*_]*)?"  # or in the same one
LEAD = rf"[ \t*_#-]*(?:[0-9][.)]{EMPHASIS})?"  # a heading, an item of a list
TAIL = r"[ \t*_.]*"
MATH_OPENS = r"(?:(?:\$|\$\$|\\\(|\\\[)[ \t]*)?"
MATH_CLOSES = r"(?:[ \t]*(?:\$|\$\$|\\\)|\\\]))?"


def integers(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    return tuple(map(int, found))


def decimals(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    return tuple(map(float, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of the verdict, which is the last line, or several.

    line:       makes its pattern from the pattern of one number, the scale, and the number of scores.
    most_lines: over how many lines it may be written; blank ones don't count.
    closings:   lines that may follow without a meaning: the end of displayed mathematics, of a JSON object.
    num_scores: the scores that it always gives; None: as many as are asked for.
    lead:       pattern of what may stand before the verdict in its line; empty: nothing.
    lead_ends_thought: whether the lead is the end of the judge's thinking.
    halves:     whether numbers may end with .5 or .0.
    decimals:   whether numbers may have decimals.
    scores_of:  makes the scores from the groups of the pattern: a tuple of numbers.
    """

    line: Callable[[str, Scale, int], str]
    most_lines: int = 1
    closings: tuple[str, ...] = ()
    num_scores: int | None = None
    lead: str = ""
    lead_ends_thought: bool = False
    halves: bool = False
    decimals: bool = False
    scores_of: Callable[[Sequence[str], Scale], tuple[float, ...]] = integers

    def whole_line(self, number: str, scale: Scale, num_scores: int) -> str:
        """The pattern of the verdict's line, with all that may stand before the verdict."""
        return rf"{f'(?:{self.lead})?' if self.lead else ''}{self.line(number, scale, num_scores)}"


def score_line(number: str, scale: Scale, num_scores: int) -> str:
    """The pattern of `Score: N`, which holds one score only."""
    assert num_scores == 1, num_scores
    label = rf"(?:(?:{any_case('final')}|{any_case('overall')})[ \t]+)?{any_case('score')}"
    return rf"{LEAD}{label}{EMPHASIS}:{IN_NEXT_LINE}{number}{match_highest(scale)}{TAIL}"


def match_highest(scale: Scale) -> str:
    """The pattern of the highest score behind a score: `/10`, `out of 10`, or nothing."""
    return rf"(?:{EMPHASIS}(?:/[ \t]*|{any_case('out')}[ \t]+{any_case('of')}[ \t]+){scale.high})?"


def match_boxed(number: str, scale: Scale, num_scores: int) -> str:
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


SCORE_LINE = Form(line=score_line, most_lines=2, num_scores=1)
BOXED = Form(line=match_boxed, closings=("$$", "\\]"))


# -- public GRMs -------------------------------------------------------------------------------------------------------
# Their templates break in the policy's text whatever these forms would read, so prose may stand before a verdict.

PROSE = r"[^<>| \t\r\n][^\n]*"  # no quotation, no tag
PROSE_WITHOUT_BRACKETS = r"(?:[^\[<>| \t\r\n]|\[[^\[\n])(?:[^\[\n]|\[[^\[\n])*"  # without "[["
TAGS_WITHOUT_BRACKETS = r"(?:[^\[>| \t\r\n]|\[[^\[\n])(?:[^\[\n]|\[[^\[\n])*"
BEFORE_OVERALL = r"(?:[^\\<>| \t\r\n][^\\\n]*)?"  # without a box
AFTER_OVERALL = r"[^\\$\n]{0,32}"
THOUGHT_AND_ITS_END = r"(?:[^>| \t\r\n][^\n]*)?</think>[ \t]*"
RESULT_LABEL = rf"\[{any_case('result')}\](?:{EMPHASIS}:)?{IN_NEXT_LINE}"
BOLD_RESULT_LABEL = rf"{LEAD}{any_case('result')}{EMPHASIS}:{IN_NEXT_LINE}"
QUOTED_TAIL = r"""[ \t*_."'`”’)]*"""
CLOSED_TAIL = r"[ \t*_.)]*"
SPACE = r"[ \t]*"
GAP = r"[ \t\r\n]*"
MANY_LINES = 64
JSON_ENDS = ("}\n```", "}", "```")  # the longest first
JSON_VALUE = r'(?:"(?:[^"\\\n]|\\[^\n])*"|-?[0-9]+(?:\.[0-9]+)?|true|false|null)'


def json_field(key: str, value: str) -> str:
    """The pattern of a field of a JSON object, whose braces may be missing: the only one of this key."""
    other = rf'"{other_than(key)}"{GAP}:{GAP}{JSON_VALUE}'
    return rf'(?:\{{{GAP})?(?:{other}{GAP},{GAP})*"{key}"{GAP}:{GAP}{value}(?:{GAP},{GAP}{other})*{GAP}\}}?'


def other_than(key: str) -> str:
    """The pattern of every key but this one."""
    rest = r'[^"\\\n]'
    leaves = [rf'{key[:place]}(?:[^{key[place]}"\\\n]{rest}*)?' for place in range(len(key))]
    return f"(?:{'|'.join(leaves)}|{key}{rest}+)"


def match_boxed_score(number: str) -> str:
    r"""The pattern of `\boxed{7}`."""
    return rf"{MATH_OPENS}\\boxed\{{{SPACE}{number}{SPACE}\}}{MATH_CLOSES}{TAIL}"


def by_letter(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    """The better response gets the highest score and the other one the lowest; in a tie both get the lowest."""
    return {"A": (scale.high, scale.low), "B": (scale.low, scale.high), "C": (scale.low, scale.low)}[found[0]]


def by_ranking(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    """A ranking from low (the first response is much better) to high (the second one is)."""
    ranking = float(found[0])
    return (scale.low + scale.high - ranking, ranking)


RATING = Form(  # [[7]]
    line=lambda number, scale, num_scores: rf"\[\[{number}\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=1, decimals=True, scores_of=decimals,
)  # fmt: skip
LETTER = Form(  # [[A]] or [[B]]
    line=lambda number, scale, num_scores: rf"\[\[([AB])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=2, scores_of=by_letter,
)  # fmt: skip
LETTER_OR_TIE = Form(  # [[A]], [[B]], or [[C]] for a tie
    line=lambda number, scale, num_scores: rf"\[\[([ABC])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=2, scores_of=by_letter,
)  # fmt: skip
ANSWER_LETTER = Form(  # <answer>[[A]]</answer> or <answer>[[B]]</answer>
    line=lambda number, scale, num_scores: rf"<answer>{GAP}\[\[([AB])\]\]{GAP}</answer>",
    most_lines=3, lead=TAGS_WITHOUT_BRACKETS, num_scores=2, scores_of=by_letter,
)  # fmt: skip
ANSWER_SCORES = Form(  # <answer>3</answer><answer>5</answer>, one answer for each score
    line=lambda number, scale, num_scores: GAP.join([rf"<answer>{GAP}{number}{GAP}</answer>"] * num_scores),
    most_lines=MANY_LINES, lead=THOUGHT_AND_ITS_END, lead_ends_thought=True, decimals=True, scores_of=decimals,
)  # fmt: skip
RESULT = Form(  # [RESULT] 4 or [RESULT] (4)
    line=lambda number, scale, num_scores: rf"{RESULT_LABEL}\(?{number}\)?{match_highest(scale)}{CLOSED_TAIL}",
    most_lines=2, lead=PROSE, num_scores=1,
)  # fmt: skip
RESULT_LETTER = Form(  # [RESULT] A or [RESULT] (B)
    line=lambda number, scale, num_scores: rf"{RESULT_LABEL}\(?([AB]){CLOSED_TAIL}",
    most_lines=2, lead=PROSE, num_scores=2, scores_of=by_letter,
)  # fmt: skip
BOLD_RESULT = Form(  # **Result:** 4
    line=lambda number, scale, num_scores: rf"{BOLD_RESULT_LABEL}\(?{number}\)?{match_highest(scale)}{CLOSED_TAIL}",
    most_lines=2, num_scores=1,
)  # fmt: skip
BOLD_RESULT_LETTER = Form(  # **Result:** A or **Result:** B
    line=lambda number, scale, num_scores: rf"{BOLD_RESULT_LABEL}\(?([AB]){CLOSED_TAIL}",
    most_lines=2, num_scores=2, scores_of=by_letter,
)  # fmt: skip
CHOICE_FIELD = Form(  # the JSON field "Choice": "Model A"
    line=lambda number, scale, num_scores: json_field("Choice", r'"\[?Model ([AB])\]?"'),
    most_lines=MANY_LINES, closings=JSON_ENDS, num_scores=2, scores_of=by_letter,
)  # fmt: skip
RANKING_FIELD = Form(  # the JSON field "ranking": 2
    line=lambda number, scale, num_scores: json_field("ranking", number),
    most_lines=MANY_LINES, closings=JSON_ENDS, num_scores=2, decimals=True, scores_of=by_ranking,
)  # fmt: skip
RANKING_BOX = Form(  # \boxed{2}
    line=lambda number, scale, num_scores: match_boxed_score(number),
    closings=("[The End of Ranking Score]",), num_scores=2, scores_of=by_ranking,
)  # fmt: skip
OVERALL_BOXED = Form(  # Overall score: $\boxed{7.5}$, in any words: boxes of single criteria stand before it
    line=lambda number, scale, num_scores: (
        rf"{BEFORE_OVERALL}{any_case('overall')}{AFTER_OVERALL}{match_boxed_score(number)}"
    ),
    num_scores=1, halves=True, scores_of=decimals,
)  # fmt: skip
