r"""Scores parsed from a judgement by the form of its verdict, or the cause why there are none. Pure; never a default,
never a guess.

The verdict is what ends the judgement: the last line that isn't blank or, for some forms, the last few. Text elsewhere
(a draft, the score of a criterion, a quotation of the work under judgement) is never used instead. The verdict is not
part of the judge's thinking: thinking that begins a judgement must end, in a line that isn't a quotation, before the
verdict's first line. A line ends at "\n" only: other line breaks may stand within a quotation.

A form accepts what a judge writes when asked for `Score: 7` or `\boxed{7}`: in any case, in Markdown emphasis, as a
heading or a list item, as `7/10` if 10 is the highest score, with the number in the line after its label. A line of our
own forms holds nothing else: a sentence around the score could quote the work under judgement. The expressions use only
what the grammars of vLLM and SGLang support: classes, groups, alternatives, repetition; no lookarounds. No two adjacent
parts repeat the same characters, so a line is matched in linear time.

Last, the patterns of judgements: regular expressions for an engine's grammar. A pattern and its parser accept the same
language: what the pattern matches parses, and what parses is matched. Numbers have no leading zeros.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.config.keys.user_code import UserCodeError, describe_code, describe_error, format_value
from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers
from grmpipe.models.types import Completion
from grmpipe.types import DataCause

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
    words:      what the verdict may be, if it isn't a number: scores by tokens need each to be one token.
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
    words: tuple[str, ...] = ()
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


def yes_or_no(number: str, scale: Scale, num_scores: int) -> str:
    """The pattern of `Yes` or `No`."""
    return rf"[ \t*_]*({either('yes', 'no')}){TAIL}"


def by_answer(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    """The highest score for yes, the lowest for no."""
    return (scale.high if found[0].lower() == "yes" else scale.low,)


SCORE_LINE = Form(line=score_line, most_lines=2, num_scores=1)
YES_NO = Form(line=yes_or_no, num_scores=1, words=("Yes", "No"), scores_of=by_answer)
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


AB = ("A", "B")
RATING = Form(  # [[7]]
    line=lambda number, scale, num_scores: rf"\[\[{number}\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=1, decimals=True, scores_of=decimals,
)  # fmt: skip
LETTER = Form(  # [[A]] or [[B]]
    line=lambda number, scale, num_scores: rf"\[\[([AB])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
LETTER_OR_TIE = Form(  # [[A]], [[B]], or [[C]] for a tie
    line=lambda number, scale, num_scores: rf"\[\[([ABC])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=2, words=(*AB, "C"), scores_of=by_letter,
)  # fmt: skip
ANSWER_LETTER = Form(  # <answer>[[A]]</answer> or <answer>[[B]]</answer>
    line=lambda number, scale, num_scores: rf"<answer>{GAP}\[\[([AB])\]\]{GAP}</answer>",
    most_lines=3, lead=TAGS_WITHOUT_BRACKETS, num_scores=2, words=AB, scores_of=by_letter,
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
    most_lines=2, lead=PROSE, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
BOLD_RESULT = Form(  # **Result:** 4
    line=lambda number, scale, num_scores: rf"{BOLD_RESULT_LABEL}\(?{number}\)?{match_highest(scale)}{CLOSED_TAIL}",
    most_lines=2, num_scores=1,
)  # fmt: skip
BOLD_RESULT_LETTER = Form(  # **Result:** A or **Result:** B
    line=lambda number, scale, num_scores: rf"{BOLD_RESULT_LABEL}\(?([AB]){CLOSED_TAIL}",
    most_lines=2, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
CHOICE_FIELD = Form(  # the JSON field "Choice": "Model A"
    line=lambda number, scale, num_scores: json_field("Choice", r'"\[?Model ([AB])\]?"'),
    most_lines=MANY_LINES, closings=JSON_ENDS, num_scores=2, words=AB, scores_of=by_letter,
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
    """The text with a short thought between the usual markers in place of its own, whatever markers that had. A verdict
    that was asked for is read alone.
    """
    if completion.asked is not None:
        return completion.text[completion.asked.text_start :]
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
    """Where the verdict may be: the last line, the last two, and so on. Nothing if the judge wrote only thinking."""
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
    """Any text, or a thought and any text, then the verdict's line as the form has it. A thought that the prompt has
    opened must end.
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
    """What may come after a thought: any text, then the verdict's line."""
    return rf"{LINES}{verdict_pattern(form, scale, num_scores)}"


def verdict_pattern(form: Form, scale: Scale, num_scores: int) -> str:
    line = form.whole_line(match_scores(form, scale), scale, num_scores)
    return rf"{BLANKS}{line}{match_closing(form)}{BLANK_LINES}"


IN_ANY_CASE = re.compile(r"(?:\[[A-Z][a-z]\])+")  # a word, as `any_case` makes it
DIGITS = re.compile(r"(\\d|\[[^\]]*0-9[^\]]*\])([*+])")  # a number as a form of the user's may write it
REPEATED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[*+]")  # escapes and classes, whose signs repeat nothing; repetition


def short_verdict_pattern(form: Form, scale: Scale, num_scores: int) -> str:
    """A verdict that was asked for: its line as people write it, without what may stand around it. Nothing is repeated
    without an end, so its tokens are few, and what a small judge would like to add can't fill them.
    """
    line = form.line(match_scores(form, scale), scale, num_scores).removeprefix(LEAD).removesuffix(TAIL)
    line = IN_ANY_CASE.sub(lambda word: re.sub(r"[\[\]]|(?<=[A-Z])[a-z]", "", word[0]).capitalize(), line)
    line = DIGITS.sub(lambda found: f"{found[1]}{{{int(found[2] == '+')},6}}", line)
    return REPEATED.sub(lambda found: {"*": "?", "+": "{1}"}.get(found[0], found[0]), line)


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
            f"scale: {scale.high - scale.low + 1} different scores are too many for a pattern; type a smaller scale "
            "(judge.scale.low, judge.scale.high), or judge.format.structured=false judge.format.ask_verdict=false"
        )
    numbers = (f"{score}{match_decimals(form, score, scale)}" for score in range(scale.low, scale.high + 1))
    return f"(?:{'|'.join(numbers)})"


def match_decimals(form: Form, score: int, scale: Scale) -> str:
    """The pattern of the decimals of a score. They lead away from zero, and may leave the scale."""
    leaves = score == (scale.high if score >= 0 else scale.low)
    if form.decimals:
        return r"(?:\.0{1,4})?" if leaves else r"(?:\.[0-9]{1,4})?"
    return "" if not form.halves else r"(?:\.0)?" if leaves else r"(?:\.[05])?"
