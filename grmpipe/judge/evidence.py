"""What a judge quotes as evidence, and whether the response has it. Pure.

A label begins a line: `Evidence 2:`, `Quote 2:`, `Evidence for criterion 2:`, `Evidence (2) -`; without a number
(`Evidence:`) it is about the criterion of the heading above, `Criterion 2` or `2.`. The words stand behind it, in
quotation marks of any kind or none, in the next line, or over several lines until the marks close.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence

LABEL = r"(?:evidence|quotes?|quotation|citation)"
SPACE = r"[ \t*_]{0,4}"  # bounded, like the numbers: a judge may write anything, and a search must not take long
NUMBERS = rf"\d{{1,3}}(?:{SPACE}(?:,|and|&){SPACE}\d{{1,3}}){{0,9}}"
# Not `>`: with it begins a line of the policy.
START = r"^[ \t*_#•\[(-]*"
NUMBERED = re.compile(
    rf"{START}{LABEL}{SPACE}(?:for|of)?{SPACE}(?:criteri(?:on|a))?{SPACE}[#(\[]?({NUMBERS})[ \t*_)\]]{{0,6}}"
    r"[:：.=–—-][ \t*_]*(.*)$",
    re.IGNORECASE,
)
PLAIN = re.compile(rf"{START}{LABEL}[ \t*_\])]*[:：][ \t*_]*(.*)$", re.IGNORECASE)
HEADING = re.compile(rf"{START}(criterion{SPACE}#?)?(\d{{1,3}})[ \t*_)\]]*(?:[.:：)–—-]|$)", re.IGNORECASE)
MARKS = {
    '"': '"',
    "“": "”",
    "”": "”",
    "„": "“”",
    "«": "»",
    "»": "«",
    "‹": "›",
    "「": "」",
    "『": "』",
    "`": "`",
    "‘": "’",
}
OUTER = "\"'“”„«»‹›「」『』`‘’"
IN_MARKS = re.compile(r'["“„«「『]([^"“”„«»「」『』]+)["”“»」』]')
ELLIPSIS = re.compile(r"[\[(]?(?:\.{3,}|…)[\])]?")
NOTHING = frozenset({"", "none", "n a", "na", "no evidence", "no quote", "not applicable", "not found", "not met"})
MOST_LINES = 32  # of a quote
# What two spellings of the same words differ in: white space, characters that don't show, emphasis, escapes, kinds of
# quotation marks and of dashes.
TYPOGRAPHY = str.maketrans(
    dict.fromkeys("‘’‚`´′‹›", "'") | dict.fromkeys("“”„«»″「」『』", '"') | dict.fromkeys("‐‑‒–—−", "-")
)
IGNORED = re.compile(r"(?:\\n|[\s*_\\\u00ad\u200b-\u200f\u2060\ufeff])+")


def read_quotes(answer: str, num_criteria: int) -> dict[int, list[str]]:
    """What a judgement quotes, by the number of the criterion in its call, from 1."""
    found, lines = dict[int, list[str]](), answer.splitlines()
    under = find_headings(lines, num_criteria)
    for at, line in enumerate(lines):
        if (match := NUMBERED.match(line)) is not None:
            numbers = [int(number) for number in re.findall(r"\d+", match[1])]
        elif (match := PLAIN.match(line)) is not None and under[at]:
            numbers = [under[at]]
        else:
            continue
        quote = take_quote(match[match.lastindex or 1], lines[at + 1 : at + MOST_LINES])
        says_nothing = re.sub(r"[\W_]+", " ", quote).strip().casefold() in NOTHING
        for number in () if says_nothing else numbers:
            found.setdefault(number, []).append(quote)
    return found


def find_headings(lines: Sequence[str], num_criteria: int) -> list[int]:
    """The criterion that each line is about, by the heading above it; 0: unknown. A call's only criterion needs none.

    A bare `2.` is a heading only where such lines number all criteria once and in their order: a judge may number other
    things too.
    """
    if num_criteria == 1:
        return [1] * len(lines)
    matches = [HEADING.match(line) for line in lines]
    bare = [int(match[2]) for match in matches if match is not None and not match[1]]
    about, now = list[int](), 0
    for match in matches:
        if match is not None and (match[1] or bare == [*range(1, num_criteria + 1)]):
            now = int(match[2])
        about.append(now)
    return about


def take_quote(rest: str, after: Sequence[str]) -> str:
    """The quote that begins behind a label: in the next line if nothing stands there, and until its marks close."""
    lines = iter(line.strip().removeprefix("> ") for line in after)
    quote = rest.strip() or next((line for line in lines if line), "")
    if (closing := MARKS.get(quote[:1])) is None or any(mark in quote[1:] for mark in closing):
        return quote
    for number, line in enumerate(lines):
        quote += f"\n{line}"
        if any(mark in line for mark in closing):
            return quote
        if number == MOST_LINES or NUMBERED.match(line) or "\\boxed" in line:
            break
    return quote.partition("\n")[0]  # marks that never close: the line


def find_fault(quotes: Sequence[str], work: str) -> str:
    """What is wrong with the evidence for a criterion; empty: nothing."""
    if not quotes:
        return "no line quotes the response"
    plain = normalise(work)
    missing = next((quote for quote in quotes if not is_quoted(quote, plain)), None)
    return "" if missing is None else f"the response doesn't have the quote {missing.strip()[:80]!r}"


def is_quoted(quote: str, work: str) -> bool:
    """Whether the work, normalised, has the quote, or each of several in quotation marks; with an ellipsis its pieces,
    in their order.
    """
    ways = [[quote.strip().strip(OUTER)], [quote.strip()], IN_MARKS.findall(quote)]
    return any(way and all(has_pieces(one, work) for one in way) for way in ways)


def has_pieces(quote: str, work: str) -> bool:
    at = 0
    pieces = list(split_pieces(quote))
    for piece in pieces:
        if (found := work.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return bool(pieces)


def split_pieces(quote: str) -> Iterator[str]:
    """The pieces of a quote between ellipses, normalised; each may have marks of its own."""
    for one in ELLIPSIS.split(quote):
        if any(map(str.isalnum, piece := normalise(one))):
            yield piece


def normalise(text: str) -> str:
    return IGNORED.sub("", unicodedata.normalize("NFKC", text).translate(TYPOGRAPHY)).casefold()
