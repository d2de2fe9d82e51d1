r"""The end of a judgement without what judges write around a verdict: thoughts, code fences, stop markers, emphasis,
spellings of a number or a box, an explanation after it. Pure; reads no score.

Nothing is joined that stood apart: what a template's guard has broken (`[ [A]]`) stays broken. What looks like a
quotation stays one: a line that begins with `>` or `|`, a text in quotation marks, what follows a line that says what
the work writes. All of it takes linear time, however long or hostile a text is.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import Scale
from grmpipe.models.chat.thinking import KNOWN_MARKERS

BLANK = " \t\r"
QUOTES = (">", "|")  # how a line of a quotation begins
THOUGHT_BEGINS, THOUGHT_ENDS = KNOWN_MARKERS[0]  # of a judgement whose thought isn't marked
CODE_FENCE = "```"
RULE = re.compile(r"-{3,}|\*{3,}|_{3,}")  # a line across the page
STOP_MARKER = re.compile(r"(?:<\|[a-z_]{1,24}\|>|</s>|<end_of_turn>|<eos>|<\uff5cend\u2581of\u2581sentence\uff5c>)$")
MOST_STOP_MARKERS = 4  # what ends with more isn't an answer


@dataclass(frozen=True, slots=True)
class Ending:
    """Lines that may be the verdict. before: all lines before them; in_code: whether they stand in a block of code."""

    lines: Sequence[str]
    before: Sequence[str]
    in_code: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def is_quoted_in(self, answer: str) -> bool:
        """Whether the line right before says that the work's own text follows. In code any announcement counts that
        isn't one of a verdict.
        """
        before = next((line for line in reversed(self.before) if not line.startswith(CODE_FENCE)), "")
        end = before[-MOST_ANNOUNCING:]
        if not end.rstrip("*_").endswith((":", "\uff1a")) or OWN_VERDICT.search(end):
            return False
        if self.in_code or self.lines[0].startswith("`"):
            return bool(TELLS.search(end)) or not ANNOUNCES_VERDICT.search(end)
        # After a blank line it may be a quotation within the line before that ends so.
        follows = f"{before}\n{self.lines[0]}" in "\n".join(line.strip(BLANK) for line in answer.split("\n"))
        return follows and bool(TELLS.search(end))


MOST_ANNOUNCING = 300  # characters
TELLS = re.compile(
    r"\b(?:says?|said|saying|stat(?:es|ed)|claim(?:s|ed)|writ(?:es|ing|ten)|wrote|reads|end(?:s|ed)|conclude[sd]|"
    r"contain(?:s|ed)|include[sd]|add(?:s|ed)|append(?:s|ed)|insert(?:s|ed)|inject(?:s|ed|ion)|quot(?:es?|ed|ing|ation)|"
    r"tr(?:ies|ied)|attempt(?:s|ed)|example|"
    r"(?:its|their|his|her) (?:\w+ ){0,2}(?:line|sentence|words?|text|output|answer|score|verdict))\b",
    re.IGNORECASE,
)
OWN_VERDICT = re.compile(
    r"\bmy (?:own )?(?:final |overall )?(?:score|rating|verdict|judge?ment|grade)\b", re.IGNORECASE
)
ANNOUNCES_VERDICT = re.compile(
    r"\b(?:my|final|overall|verdict|scores?|rating|result|judge?ment|evaluation|conclusion|therefore)\b", re.IGNORECASE
)


def cut_thought(text: str, *, within_lines: bool = False) -> str | None:
    """What follows the thinking that begins a judgement: after the marker that ends it if that begins its line, or if
    all of the thought is in one line; otherwise from the next line on, since the work may be quoted there, unless
    within_lines. None: it doesn't end; an end inside a quotation is none.
    """
    if not text.lstrip(BLANK + "\n").startswith(THOUGHT_BEGINS):
        return text
    start = 0
    for line in text.split("\n"):
        if (place := line.find(THOUGHT_ENDS)) >= 0 and not line.lstrip(BLANK).startswith(QUOTES):
            if not within_lines and not line.lstrip(BLANK).startswith((THOUGHT_BEGINS, THOUGHT_ENDS)):
                return text[start + len(line) :]
            return text[start + place + len(THOUGHT_ENDS) :]
        start += len(line) + 1
    return None


def split_lines(text: str) -> list[str]:
    """The lines of an answer that aren't blank, without rules and stop markers at the end."""
    lines = [line for line in (line.strip(BLANK) for line in text.split("\n")) if line]
    for _ in range(MOST_STOP_MARKERS):
        if lines and (found := STOP_MARKER.search(lines[-1], max(0, len(lines[-1]) - 40))):
            lines[-1:] = [line] if (line := lines[-1][: found.start()].rstrip(BLANK)) else []
    while lines and RULE.fullmatch(lines[-1]):
        lines.pop()
    return lines


def find_endings(lines: Sequence[str], most_lines: int, closings: Sequence[str]) -> Iterator[Ending]:
    """Where the verdict may be: the last line, the last two, and so on; a block of code at the end is the verdict's
    alone, or holds the whole judgement. closings: lines that may follow without a meaning.
    """
    first, in_code = 0, False
    if lines and lines[-1] == CODE_FENCE and CODE_FENCE not in closings:
        fences = [place for place, line in enumerate(lines) if line.startswith(CODE_FENCE)]
        if len(fences) % 2 or len(fences) < 2:
            return  # it opens a block
        first, in_code, lines = fences[-2] + 1, True, lines[:-1]
    for closing in closings:
        ends = closing.split("\n")
        if lines[-len(ends) :] == ends:
            lines = lines[: -len(ends)]
            break
    for start in reversed(range(max(first, len(lines) - most_lines), len(lines))):
        if not in_code or start == first or first == 1:
            yield Ending(lines[start:], lines[:start], in_code and first > 1)


# -- spelling ---------------------------------------------------------------------------------------------------------

WIDE = str.maketrans(
    dict(zip("：＝／（），．０１２３４５６７８９", ":=/(),.0123456789", strict=True))
    | dict.fromkeys("\u00a0\u3000", " ")
)
SPACES = re.compile(r"[ \t\r]+")
AROUND_BREAKS = re.compile(r" ?\n ?")
EMPHASIS = re.compile(r"[*_`]+")
OPENS, CLOSES = " \n:(/=,;", " \n:.,)/=;!"  # what may stand beside emphasis, outside of it
LEADING_ZERO = re.compile(r"(?<![0-9.,/-])0(?=[1-9])")
ZERO_DECIMALS = re.compile(r"(?<=[0-9])\.00?(?![0-9]|\.[0-9])")


def clean(text: str, scale: Scale) -> str:
    """The lines of a verdict in one spelling: without emphasis and inline code, ASCII digits and colons, `7` for `07`,
    `7.0` and `7/10`.
    """
    text = AROUND_BREAKS.sub("\n", SPACES.sub(" ", text.translate(WIDE)))
    text = EMPHASIS.sub(strip_emphasis, text).strip(BLANK)
    text = ZERO_DECIMALS.sub("", LEADING_ZERO.sub("", text))
    text = re.sub(rf"(?<=[0-9]) ?{span_in_brackets(scale)}(?![0-9.])", "", text)
    number = r"(?<![0-9/.])([0-9]+(?:\.[0-9]+)?)"
    return re.sub(rf"{number} ?(?:/ ?|out of ){scale.high}(?![0-9/]|\.[0-9])", r"\1", text, flags=re.IGNORECASE)


def span_in_brackets(scale: Scale) -> str:
    """The pattern of `(out of 10)` and `(1-10)`."""
    return rf"\((?:out of |/|{scale.low} ?[-\u2013] ?|{scale.low} to ){scale.high}\)"


def strip_emphasis(found: re.Match[str]) -> str:
    """Nothing, unless it stands between two spaces (a product) or within a word, brackets, or an escape."""
    text, start, end = found.string, found.start(), found.end()
    before, after = text[start - 1 : start] or "\n", text[end : end + 1] or "\n"
    is_within = not (before in OPENS or after in CLOSES) or (after == "." and text[end + 1 : end + 2].isdigit())
    return found[0] if before == after == " " or is_within or before == "\\" else ""


LABELS = (
    r"score|rating|grade|punktzahl|bewertung|puntuación|puntaje|pontuação|punteggio|оценка|Оценка|"
    r"评分|得分|分数|最终得分|最终评分|综合评分|スコア|点数|점수|평점"
)
SCORE_LABEL = re.compile(
    rf"(?:[#+-]+ ?)?(?:[0-9][.)] ?)?(?:(?:therefore|thus|hence|so),? )?(?:(?:the|my) )?(?:(?:final|overall) ){{0,2}}"
    rf"(?:{LABELS})(?: (?:of|for) (?:the|this) (?:response|answer))?(?: ?[:=] ?| is:? ?|:?\n)\n?",
    re.IGNORECASE | re.ASCII,  # ASCII: no other letter counts as one of these in another case
)
# `[[7]]`, `[7]`, `(7)`, `<7>`, `\boxed{7}`, `$7$` for `7`
WRAPPED = re.compile(
    r"\[\[ ?([0-9.]{1,8}) ?\]\]|\[([0-9.]{1,8})\]|\(([0-9.]{1,8})\)|<([0-9.]{1,8})>"
    r"|\$?\\boxed\{ ?([0-9.]{1,8}) ?\}\$?|\$([0-9.]{1,8})\$"
)


def spell_score_line(text: str, scale: Scale) -> str:
    """`Score: 7` for `The rating is [[7]]`, `Score = 7`, `Score` above `7`."""
    if (label := SCORE_LABEL.match(text := re.sub(rf" ?{span_in_brackets(scale)}", "", text, count=1))) is None:
        return text
    value = text[label.end() :]
    if (wrapped := WRAPPED.match(value)) is not None:
        value = next(filter(None, wrapped.groups())) + value[wrapped.end() :]
    return f"Score: {clean(value, scale)}"


RESULT_SCORE = re.compile(
    r"(\[result\]) ?[:=]? ?(?:(?:final |overall )?(?:score|rating) ?[:=] ?)?", re.IGNORECASE | re.ASCII
)


def spell_result(text: str, scale: Scale) -> str:
    """`[RESULT] 4` for `[RESULT]: Score: 4`."""
    return RESULT_SCORE.sub(r"\1 ", text)


DOUBLE_BRACKETS = re.compile(r"\[\[ ?([A-Ca-c]|[0-9.]{1,8}) ?\]\](/[0-9]{1,6})?")


def spell_brackets(text: str, scale: Scale) -> str:
    """`[[A]]` for `[[ a ]]`, `[[7]]` for `[[7]]/10`."""

    def spell(found: re.Match[str]) -> str:
        return f"[[{found[1].upper()}]]" + ("" if found[2] == f"/{scale.high}" else found[2] or "")

    return DOUBLE_BRACKETS.sub(spell, text)


WORDS_IN_BOX = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}\n]{1,100})\}")  # nowhere else: it could join a box
TWO_BOXES = re.compile(r"\}\$? ?(?:, ?(?:and )?|and )?\$?\\boxed\{")
BOX = re.compile(r"\\boxed\{((?:[^{}\n]|\\(?:text|mathrm|textbf|mathbf)\{[^{}\n]{1,100}\}){1,500})\}")
AND = re.compile(r" ?(?:,|\band\b|&|\u3001)+ ?")
IN_BRACKETS = re.compile(r" ?\[([^\[\]]*)\] ?|([^\[\]]*)")


def spell_box(text: str, scale: Scale) -> str:
    r"""`\boxed{7,8}` for `\\boxed{[7, 8]}`, `\boxed{7 and 8}`, `\boxed{\text{7, 8}}` and `\boxed{7}, \boxed{8}`."""
    return BOX.sub(spell_inside, TWO_BOXES.sub(",", text.replace("\\\\boxed", "\\boxed")))


def spell_inside(box: re.Match[str]) -> str:
    inside = WORDS_IN_BOX.sub(r"\1", box[1])
    listed = IN_BRACKETS.fullmatch(inside)
    inside = inside if listed is None else listed[1] or listed[2] or ""
    return f"\\boxed{{{AND.sub(',', inside)}}}"


# -- explanations -----------------------------------------------------------------------------------------------------

EXPLAINS = re.compile(
    r"\([^()\n]+\)[.!]?$|[-\u2013] \S|\u2014 ?\S|[,;] ?(?:because|since|as|due to|given) "
    r"|(?:because|since|due to|given) "
    r"|\n?[#(*_]*(?:because\b|since\b|explanation\b|reason(?:ing)?\b|rationale\b|justification\b)",
    re.IGNORECASE | re.ASCII,
)
SENTENCE = re.compile(r"[A-Z]")
A_WORD = re.compile(r"[A-Za-z]{3}|[\u4e00-\u9fff]{2}")
CRITERION = re.compile(
    r"\W*(?:for |on |in )?(?:clarity|correctness|accuracy|completeness|relevance|helpfulness|style|depth|creativity|"
    r"coherence|conciseness|safety|grammar|honesty|harmlessness|logic|reasoning|factuality|fluency)\W*",
    re.IGNORECASE,
)
# An explanation may change the score, or be the work's own words: figures, figures as words, doubts, reports.
UNSURE = re.compile(
    r"[\d\\\[\]{}<>|\"\u201c\u201d\u00bc-\u00be\u2153-\u215e\u6216\u81f3\u5230]"
    r"|\b(?:or|if|unless|maybe|perhaps|possibly|instead|rather|wait|actually|no|nope|lower|higher|minus|plus|"
    r"points?|half|raise[ds]?|reduce[ds]?|changed?|revised?|reconsider|draft|average|tentative|provisional|final|"
    r"pending|guess|unsure|uncertain|about|around|roughly|approximately|nearly|almost|out of|percent|twenty|hundred|"
    r"criteri(?:on|a)|aspect|category|dimension|part|section|zero|one|two|three|four|"
    r"five|six|seven|eight|nine|ten|says?|said|claim(?:s|ed)|writ(?:es|ten)|wrote|stat(?:es|ed)|quot(?:es|ed|ing)|"
    r"according|itself|example)\b"
    r"|[\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u534a]",
    re.IGNORECASE,
)


def is_explanation(verdict: str, rest: str) -> bool:
    """Whether a text after a verdict can only be its explanation: `(good)`, `- because ..`, `. The proof is right.`"""
    gap = len(rest) - len(rest.lstrip(" "))
    verdict, rest = verdict + rest[:gap], rest[gap:]
    if not A_WORD.search(rest) or UNSURE.search(rest) or CRITERION.fullmatch(rest):
        return False
    if EXPLAINS.match(rest):
        return verdict[-1:].isspace() or rest[:1] in "(,;\n\u2014"
    return verdict.endswith(". ") and SENTENCE.match(rest) is not None


def find_explained(lines: Sequence[str]) -> int | None:
    """The line at which an explanation after the verdict begins, by its first word."""
    return next((place for place in range(len(lines) - 1, 0, -1) if EXPLAINS.match(f"\n{lines[place]}")), None)
