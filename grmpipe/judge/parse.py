r"""Scores parsed from a judgement by the form of its verdict, or the cause why there are none. Pure; never a default,
never a guess.

The verdict is what ends the judgement: the last line that isn't blank or, for some forms, the last few. Text elsewhere
(a draft, the score of a criterion, a quotation of the work under judgement) is never used instead. The verdict is not
part of the judge's thinking: thinking that begins a judgement must end, outside of a quotation, before the verdict. A
line ends at "\n" only: other line breaks may stand within a quotation.

Each form has one strict pattern, which the last lines must match as a whole: as they stand, or in one spelling
(normalise.py), in which `**Rating** = 7.0/10` is `Score: 7`. After a verdict may stand its explanation, if it can be
nothing else and no other line has another score. Whatever could mean two scores, or none, is unparseable: a range, a
negative or quoted score, one outside the scale, one with decimals that the scale doesn't have.

Last, the patterns of judgements: regular expressions for an engine's grammar, made of the strict patterns alone. What
such a pattern matches parses (unless the line before says that the work is quoted); much that parses isn't matched. The
expressions use only what the grammars of vLLM and SGLang support: classes, groups, alternatives, repetition; no
lookarounds. No two adjacent parts repeat the same characters, so a line is matched in linear time. Numbers have no
leading zeros.
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
from grmpipe.judge.normalise import (
    THOUGHT_BEGINS,
    THOUGHT_ENDS,
    Ending,
    clean,
    cut_thought,
    find_endings,
    find_explained,
    is_explanation,
    spell_box,
    spell_brackets,
    spell_result,
    spell_score_line,
    split_lines,
)
from grmpipe.models.chat.thinking import ThinkingMarkers
from grmpipe.models.types import Completion
from grmpipe.types import DataCause

EMPHASIS = r"[ \t*_]*"
IN_NEXT_LINE = r"[ \t\r*_]*(?:\n[ \t\r\n]*[*_]*)?"  # or in the same one
LEAD = rf"[ \t*_#-]*(?:[0-9][.)]{EMPHASIS})?"  # a heading, an item of a list
TAIL = r"[ \t*_.]*"
MATH_OPENS = r"(?:(?:\$|\$\$|\\\(|\\\[)[ \t]*)?"
MATH_CLOSES = r"(?:[ \t]*(?:\$|\$\$|\\\)|\\\]))?"


def numbers(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    return tuple(map(float, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of the verdict, which is the last line, or several.

    line:       makes its pattern from the pattern of one number, the scale, and the number of scores.
    most_lines: over how many lines it may be written; blank ones don't count.
    most_chars: longer lines hold no verdict; None: no limit.
    closings:   lines that may follow without a meaning: the end of displayed mathematics, of a JSON object.
    num_scores: the scores that it always gives; None: as many as are asked for.
    lead:       pattern of what may stand before the verdict in its line; empty: nothing.
    lead_ends_thought: whether the lead is the end of the judge's thinking.
    alone:      whether the verdict must be all that the judge writes after its thought.
    halves:     whether numbers may end with .5 or .0, whatever the scale's steps.
    decimals:   whether numbers may have decimals.
    words:      what the verdict may be, if it isn't a number: scores by tokens need each to be one token.
    spell:      brings spellings of the verdict to the one of the pattern, after `clean`.
    also:       forms that are read as well, though an engine's grammar has only this one.
    scores_of:  makes the scores from the groups of the pattern: a tuple of numbers.
    """

    line: Callable[[str, Scale, int], str]
    most_lines: int = 1
    most_chars: int | None = None
    closings: tuple[str, ...] = ()
    num_scores: int | None = None
    lead: str = ""
    lead_ends_thought: bool = False
    alone: bool = False
    halves: bool = False
    decimals: bool = False
    words: tuple[str, ...] = ()
    spell: Callable[[str, Scale], str] = lambda text, scale: text
    also: "tuple[Form, ...]" = ()
    scores_of: Callable[[Sequence[str], Scale], tuple[float, ...]] = numbers

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
    """The highest score for right, in the words of a form, and the lowest for anything else that it reads."""
    return (scale.high if next(filter(None, found)).lower() in ("yes", "correct", "a") else scale.low,)


YES_NO = Form(line=yes_or_no, num_scores=1, words=("Yes", "No"), scores_of=by_answer)
BOXED = Form(line=match_boxed, closings=("$$", "\\]"), spell=spell_box)


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
GRADES = "|".join(  # what ends the line of CompassVerifier's grade, with the word that repeats it
    rf"({letter})\}}{MATH_CLOSES}(?: ?[-\u2013\u2014:] ?<?{either(*words)}>?)?{TAIL}"
    for letter, words in (
        ("A", ("correct",)), ("B", ("incorrect",)), ("C", ("incomplete", "repetitive", "refusal", "invalid")),
    )
)  # fmt: skip
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


def quotable(number: str, scale: Scale) -> str:
    """The pattern of a JSON number, or of a text that holds one."""
    return rf'"?{number}{match_highest(scale)}"?'


def match_scores_object(number: str, num_scores: int) -> str:
    """The pattern of RewardAnything's JSON object, with a score for each response."""
    scores = rf"{GAP},{GAP}".join(rf'"model-{index}"{GAP}:{GAP}{number}' for index in range(1, num_scores + 1))
    ranking = rf'{GAP},{GAP}"best-to-worst"{GAP}:{GAP}\[[^\[\]{{}}]*\]'
    return rf'\{{{GAP}"scores"{GAP}:{GAP}\{{{GAP}{scores}{GAP}\}}(?:{ranking})?{GAP}\}}'


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


def by_margin(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    """`A>>B`: the highest and the lowest score. `A>B`: a third of their difference. `A=B`: none."""
    better, sign, _ = re.split("([>=]+)", found[0])
    third = (scale.high - scale.low) / 6 * {">>": 3, ">": 1, "=": 0}[sign] * (1 if better == "A" else -1)
    middle = (scale.low + scale.high) / 2
    return (middle + third, middle - third)


def labelled_letter(label: str, before: str = "", after: str = "") -> Form:
    """The form `Label: A`, or `Label: B`. before, after: what may stand around the letter."""
    begins = rf"{LEAD}{any_case(label)}{EMPHASIS}:{IN_NEXT_LINE}{before}"
    return Form(
        line=lambda number, scale, num_scores: rf"{begins}\(?([AB]){after}{CLOSED_TAIL}",
        most_lines=2, num_scores=2, words=AB, scores_of=by_letter,
    )  # fmt: skip


AB = ("A", "B")
RATING = Form(  # [[7]]
    line=lambda number, scale, num_scores: rf"\[\[{number}\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, spell=spell_brackets, num_scores=1, decimals=True, scores_of=numbers,
)  # fmt: skip
LETTER = Form(  # [[A]] or [[B]]
    line=lambda number, scale, num_scores: rf"\[\[([AB])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, spell=spell_brackets, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
LETTER_OR_TIE = Form(  # [[A]], [[B]], or [[C]] for a tie
    line=lambda number, scale, num_scores: rf"\[\[([ABC])\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, spell=spell_brackets, num_scores=2, words=(*AB, "C"), scores_of=by_letter,
)  # fmt: skip
ANSWER_LETTER = Form(  # <answer>[[A]]</answer> or <answer>[[B]]</answer>
    line=lambda number, scale, num_scores: rf"<answer>{GAP}\[\[([AB])\]\]{GAP}</answer>",
    most_lines=3, lead=TAGS_WITHOUT_BRACKETS, spell=spell_brackets, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
ANSWER_SCORES = Form(  # <answer>3</answer><answer>5</answer>, one answer for each score
    line=lambda number, scale, num_scores: GAP.join([rf"<answer>{GAP}{number}{GAP}</answer>"] * num_scores),
    most_lines=MANY_LINES, lead=THOUGHT_AND_ITS_END, lead_ends_thought=True, decimals=True, scores_of=numbers,
)  # fmt: skip
RESULT = Form(  # [RESULT] 4 or [RESULT] (4)
    line=lambda number, scale, num_scores: rf"{RESULT_LABEL}\(?{number}\)?{match_highest(scale)}{CLOSED_TAIL}",
    most_lines=2, lead=PROSE, spell=spell_result, num_scores=1,
)  # fmt: skip
RESULT_LETTER = Form(  # [RESULT] A or [RESULT] (B)
    line=lambda number, scale, num_scores: rf"{RESULT_LABEL}\(?([AB]){CLOSED_TAIL}",
    most_lines=2, lead=PROSE, num_scores=2, words=AB, scores_of=by_letter,
)  # fmt: skip
BOLD_RESULT = Form(  # **Result:** 4
    line=lambda number, scale, num_scores: rf"{BOLD_RESULT_LABEL}\(?{number}\)?{match_highest(scale)}{CLOSED_TAIL}",
    most_lines=2, num_scores=1,
)  # fmt: skip
BOLD_RESULT_LETTER = labelled_letter("result")  # **Result:** A or **Result:** B
WINNER_LETTER = labelled_letter("winner", rf"(?:{any_case('response')} )?")  # Winner: Response A
VERDICT_LETTER = labelled_letter("verdict", r"\[?", r"\]?")  # Verdict: [A]
MARGIN = Form(  # [[A>>B]], [[A>B]], [[A=B]], [[B>A]] or [[B>>A]]
    line=lambda number, scale, num_scores: rf"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]{QUOTED_TAIL}",
    lead=PROSE_WITHOUT_BRACKETS, num_scores=2, words=("A>>B", "A>B", "A=B", "B>A", "B>>A"), scores_of=by_margin,
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
    closings=("[The End of Ranking Score]",), spell=spell_box, num_scores=2, scores_of=by_ranking,
)  # fmt: skip
WHICH_BOX = Form(  # \boxed{1} or \boxed{2}: the better response
    line=lambda number, scale, num_scores: match_boxed_score("([12])"),
    closings=("[The End of Ranking Score]",), spell=spell_box, num_scores=2, words=("1", "2"),
    scores_of=lambda found, scale: by_letter([AB[int(found[0]) - 1]], scale),
)  # fmt: skip
SCORES_FIELD = Form(  # {"scores": {"model-1": 2, "model-2": 4}, "best-to-worst": ["model-2", "model-1"]}
    line=lambda number, scale, num_scores: match_scores_object(number, num_scores), most_lines=MANY_LINES,
)  # fmt: skip
CORRECT = Form(  # Correct or [Incorrect]
    line=lambda number, scale, num_scores: rf"\[?({either('correct', 'incorrect')})\]?{TAIL}",
    alone=True, num_scores=1, words=("Correct", "Incorrect"), scores_of=by_answer,
)  # fmt: skip
GRADE = Form(  # A, B or C: correct, incorrect, invalid
    line=lambda number, scale, num_scores: rf"([ABC]|{either('correct', 'incorrect', 'invalid')}){TAIL}",
    alone=True, num_scores=1, words=(*AB, "C"), scores_of=by_answer,
)  # fmt: skip
GRADE_BOX = Form(  # Final Judgment: \boxed{A} - CORRECT
    line=lambda number, scale, num_scores: (
        rf"{LEAD}{any_case('final')} {any_case('judgment')}{EMPHASIS}:{EMPHASIS}{MATH_OPENS}\\boxed\{{(?:{GRADES})"
    ),
    most_lines=3,  # so that no other word passes for an explanation
    num_scores=1, words=(*AB, "C"), scores_of=by_answer,
)  # fmt: skip
IS_CORRECT = Form(  # Verification: Is the answer correct (Yes/No)? Yes
    line=lambda number, scale, num_scores: (
        rf"{LEAD}{any_case('verification')}{EMPHASIS}:{EMPHASIS}Is the (?:answer|solution) correct"
        rf"(?: ?\(Yes/No\))?\?{EMPHASIS}({either('yes', 'no')}){TAIL}"
    ),
    num_scores=1, words=("Yes", "No"), scores_of=by_answer,
)  # fmt: skip
OVERALL_BOXED = Form(  # Overall score: $\boxed{7.5}$, in any words: boxes of single criteria stand before it
    line=lambda number, scale, num_scores: (
        rf"{BEFORE_OVERALL}{any_case('overall')}{AFTER_OVERALL}{match_boxed_score(number)}"
    ),
    spell=spell_box, num_scores=1, halves=True, scores_of=numbers,
)  # fmt: skip
SCORE_FIELD = Form(  # a JSON object with the field "score": 7
    line=lambda number, scale, num_scores: rf"(?=\{{){json_field('score', quotable(number, scale))}",
    most_lines=MANY_LINES, num_scores=1,
)  # fmt: skip
SCORE_LINE = Form(line=score_line, most_lines=2, num_scores=1, spell=spell_score_line, also=(SCORE_FIELD,))
NUMBER_ALONE = Form(  # 7
    line=lambda number, scale, num_scores: rf"{number}{match_highest(scale)}{TAIL}", alone=True, num_scores=1
)
SCORE = replace(SCORE_LINE, also=(NUMBER_ALONE, SCORE_FIELD))  # for a prompt that ends with "Score:"


Scores = tuple[float, ...]
Unparseable = Literal["unparseable"]
Parser = Callable[[str, int, Scale], Scores | Unparseable]

NUMBER = r"(0|-?[1-9][0-9]{0,5})"  # short: int() refuses thousands of digits
HALVES = r"((?:0|-?[1-9][0-9]{0,5})(?:\.[05])?)"
DECIMALS = r"((?:0|-?[1-9][0-9]{0,5})(?:\.[0-9]{1,4})?)"
MOST_SHOWN = 160  # characters of a line in the words of a failure
MOST_SPELT = 4000  # characters of a verdict's lines, with its lead and explanation; longer ones are read as they stand
MOST_FOR_A_PATTERN = 300  # characters; a user's regular expression may take their third power
MOST_WITH_EXPLANATION = 2  # lines of a verdict that an explanation may follow


def parser_named(name: str, pattern: str = "") -> Parser:
    """Reads the end of a judgement, which must be of the form that `judge.parser` or `judge.pattern` names, with
    exactly `num_scores` scores.
    """
    return functools.partial(scores_in, form_named(name, pattern))


def form_named(name: str, pattern: str = "") -> Form:
    """The form of verdicts that `judge.parser` names, or the one of `judge.pattern` if there is any. Raises ValueError
    if it can't be imported, or isn't a Form.
    """
    if not pattern:
        return PARSERS.find_object(name, Form)
    return Form(
        line=lambda number, scale, num_scores: pattern,
        num_scores=1,
        most_chars=MOST_FOR_A_PATTERN,
        scores_of=find_number,
    )


def find_number(found: Sequence[str], scale: Scale) -> tuple[float, ...]:
    """The score in the group of a user's pattern; one below the scale for what is no score of it."""
    with contextlib.suppress(TypeError, ValueError):
        if ((score := float(found[0])) / scale.step).is_integer():
            return (score,)
    return (scale.low - 1,)


def parse_scores(
    completion: Completion, parser: Parser, num_scores: int, scale: Scale, begun: str = ""
) -> Scores | DataCause:
    """The scores of a judgement, read after its thought, or why there are none. A truncated one is `truncated`, even
    with a verdict in it, which may have been a draft.

    begun: what its prompt already had of it (`judge.prefill`).
    """
    if completion.finish_reason == "length":
        return "truncated"
    return parser(in_usual_markers(completion, begun), num_scores, scale)


def in_usual_markers(completion: Completion, begun: str = "") -> str:
    """The text with a short thought between the usual markers in place of its own, whatever markers that had. A verdict
    that was asked for, and the last turn after calls, is read alone, any other after `begun`, unless that began the
    thought.
    """
    if completion.asked is not None:
        return completion.text[completion.asked.text_start :]
    text, num_thought = completion.text, completion.thought_chars
    if completion.tool_results:  # what tools or earlier turns say is no verdict
        since = completion.tool_results[-1].text_end
        text, num_thought = text[since:], max(0, num_thought - since)
    if not num_thought:
        return begun + text
    *_, last = text[:num_thought].rsplit("\n", 1)
    is_apart = last == text[:num_thought] or len(last.split()) == 1  # see cut_thought
    begun = f"{THOUGHT_BEGINS}\n...\n" if is_apart else f"{THOUGHT_BEGINS}\n... "
    return f"{begun}{THOUGHT_ENDS}{text[num_thought:]}"


def last_line(completion: Completion) -> str:
    """The end of the line in which a judgement has no verdict, or of its thought if no answer follows."""
    return (split_lines(completion.answer) or split_lines(completion.text) or [""])[-1][-MOST_SHOWN:]


def scores_in(form: Form, text: str, num_scores: int, scale: Scale) -> Scores | Unparseable:
    answer = cut_thought(text, within_lines=form.lead_ends_thought)
    if form.num_scores not in (None, num_scores) or answer is None:
        return "unparseable"
    for one in (form, *form.also):
        pattern = compile_pattern(one, scale, num_scores)
        if (found := find_verdict(one, pattern, answer, scale)) is None:
            continue
        with blame(one.scores_of):
            made = one.scores_of(found, scale)
        scores = check_scores(made, num_scores, one)
        return scores if all(scale.low <= score <= scale.high for score in scores) else "unparseable"
    return "unparseable"


def find_verdict(form: Form, pattern: re.Pattern[str], answer: str, scale: Scale) -> tuple[str, ...] | None:
    """The groups of the pattern in the verdict. None: there is none, or it isn't clear."""

    def spell(text: str) -> str:
        return form.spell(clean(text, scale), scale)

    lines = split_lines(answer)
    if form.alone and len(lines) != 1:
        return None
    endings = list(find_endings(lines, form.most_lines, form.closings))
    most_chars = form.most_chars or MOST_SPELT
    for end in endings:
        is_short = len(end.text) <= most_chars
        match = pattern.fullmatch(end.text) if is_short or form.most_chars is None else None
        if match is None and is_short:
            match = pattern.fullmatch(spell(end.text))
        if match is not None:
            return None if end.is_quoted_in(answer) else match.groups()
    if form.most_lines > MOST_WITH_EXPLANATION:
        return None
    if explained := find_explained(lines):
        endings += [
            Ending([*end.lines, *lines[explained:]], end.before)
            for end in find_endings(lines[:explained], form.most_lines, form.closings)
        ]
    for end in endings:
        text = spell(end.text) if len(end.text) <= most_chars else ""
        if (
            (match := pattern.match(text))
            and is_explanation(match[0], text[match.end() :])
            and not end.is_quoted_in(answer)
        ):
            others = filter(None, (pattern.match(spell(line[:most_chars])) for line in end.before))
            return match.groups() if all(other.groups() == match.groups() for other in others) else None
    return None


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
    number = DECIMALS if form.decimals else HALVES if form.halves or scale.has_halves else NUMBER
    with blame(form.line):
        pattern = re.compile(form.whole_line(number, scale, num_scores))
    if not pattern.groups:
        raise FormError(
            f"judge.parser: the pattern of {describe_code(form.line)} has no group to read a score from; use `number`, "
            "which it is given"
        )
    return pattern


# -- patterns ---------------------------------------------------------------------------------------------------------

MAX_SCORES = 1001  # alternatives in one pattern
USUAL = ThinkingMarkers(open=THOUGHT_BEGINS, close=THOUGHT_ENDS)

BLANKS = r"[ \t\r]*"
BLANK_LINES = r"[ \t\r\n]*"
LINES = r"(?:[^\n]*\n)*"
OWN = rf"{BLANKS}(?:[^ \t\r\n>|][^\n]*)?"  # the beginning of a line that isn't a quotation


def judgement_pattern(form: Form, scale: Scale, num_scores: int = 1, markers: ThinkingMarkers | None = None) -> str:
    """Any text, or a thought and any text, then the verdict's line as the form has it; a thought at most, if the form
    stands alone. A thought that the prompt has opened must end.
    """
    markers = markers or USUAL
    verdict = verdict_pattern(form, scale, num_scores)
    if markers.in_prompt:
        markers, begun = replace(markers, open=""), ""
        whole = rf"{match_thought(markers, form.alone)}{verdict}"
    elif form.alone:
        begun, whole = "", rf"(?:{match_thought(markers, alone=True)})?{verdict}"
    else:
        begun = rf"{literal(markers.open)}[^\n]*\n"
        whole = rf"(?:{match_thought(markers)}|{no_thought(markers.open)})?{verdict}"
    if form.lead_ends_thought:
        line = form.line(match_scores(form, scale), scale, num_scores)
        whole = rf"(?:{whole}|{begun}{LINES}{BLANKS}{form.lead}{line}{match_closing(form)}{BLANK_LINES})"
    return whole if markers.in_prompt else rf"{BLANK_LINES}{whole}"


def answer_pattern(form: Form, scale: Scale, num_scores: int = 1) -> str:
    """What may come after a thought: any text, then the verdict's line."""
    return rf"{BLANK_LINES if form.alone else LINES}{verdict_pattern(form, scale, num_scores)}"


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


def match_thought(markers: ThinkingMarkers, alone: bool = False) -> str:
    """The pattern of lines that begin with thinking, which ends in one of them that isn't a quotation. alone: no other
    lines follow.
    """
    opening, closing = literal(markers.open), literal(markers.close)
    first = r"[^\n]*" if opening else OWN
    after = rf"{BLANKS}\n{BLANK_LINES}" if alone else rf"[^\n]*\n{LINES}"
    return rf"{opening}(?:[^\n]*\n{LINES}{OWN}|{first}){closing}{after}"


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
    return "" if not (form.halves or scale.has_halves) else r"(?:\.0)?" if leaves else r"(?:\.[05])?"
