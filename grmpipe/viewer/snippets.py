"""Short texts for tables, and queries in the words of a person. Pure."""

import re

SNIPPET_CHARS = 160
PIECE = re.compile(r'(-?)"([^"]*)"|(-?)(\S+)')


def snippet(text: str, *, from_end: bool = False) -> str:
    """The first or the last words of a text, in one line."""
    part = text[-4 * SNIPPET_CHARS :] if from_end else text[: 4 * SNIPPET_CHARS]
    line = " ".join(part.split())
    if len(line) <= SNIPPET_CHARS and len(part) == len(text):
        return line
    return f"… {line[-SNIPPET_CHARS:]}" if from_end else f"{line[:SNIPPET_CHARS]} …"


def match_expression(words: str) -> str:
    """The FTS5 expression of what a person types: all words, "phrases in quotes", -without, begin*. Empty: no word.

    Every piece becomes a quoted string, so that nothing typed is taken for an operator.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    words = words.replace("\0", " ")  # where SQLite takes an expression to end
    for minus, phrase, minus_of_word, word in PIECE.findall(words):
        text = phrase or word.rstrip("*").lstrip('"')
        if not re.search(r"\w", text):
            continue
        quoted = '"{}"{}'.format(text.replace('"', ""), "*" if word.endswith("*") else "")
        (unwanted if minus or minus_of_word else wanted).append(quoted)
    if not wanted:
        return ""
    return " ".join(wanted) + "".join(f" NOT {one}" for one in unwanted)
