"""The commands that pages, examples, benchmarks and recipes show, split into words as a shell does. Runs none."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "examples", "deploy", "environments")
SHELLS = ("bash", "sh", "console")
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
VARIABLES = r"(?:[A-Z_]+=\S+ )*"
IN_TEXT = re.compile(rf"`({VARIABLES}(?:python|grmpipe)\s+[-+\w.@][^`]*)`")
IN_COMMENT = re.compile(rf"^[# ]*({VARIABLES}(?:python|grmpipe) +[-+\w.@].*)$", re.MULTILINE)
KEYWORDS = ("until", "while", "if", "then", "do", "done", "else", "fi", "!")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShownCommand:
    """file: where it is shown, from the root. words: without variables in front."""

    file: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]


def shown_commands() -> list[ShownCommand]:
    """Each once per file."""
    found = [(page, text) for page in pages() for text in shell_text(page.read_text(encoding="utf-8"))]
    for file in [*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("conf/*/**/*.yaml")]:
        text = re.sub(r"\\\n#? *", "", file.read_text(encoding="utf-8"))
        found += [(file, line) for line in IN_COMMENT.findall(text)]
    shown = {
        ShownCommand(file=str(file.relative_to(ROOT)), words=words) for file, text in found for words in split(text)
    }
    return sorted(shown)


def shell_text(page: str) -> Iterator[str]:
    """The shell blocks of a page, and the commands within its sentences."""
    for language, block in BLOCK.findall(page):
        if language in SHELLS or (not language and re.search(r"^grmpipe ", block, re.MULTILINE)):
            yield block
    for command in IN_TEXT.findall(BLOCK.sub("", page)):
        yield " ".join(command.split())


def split(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a script."""
    text = re.sub(r"\\\n\s*", "", text).replace(".venv/bin/", "")
    text = re.sub(r"<([a-z][\w.' ]*)>", lambda name: re.sub(r"[^\w.]", "_", name[1]), text)  # a placeholder
    text = re.sub(r"(?<= )\[(--[^\]]*|\w+=\w+)\]", r"\1", text)  # an option
    text = re.sub(r"(?<= )\[(overrides|MODEL \.\.\.)\]", "", text)
    for line in text.splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for is_between, words in itertools.groupby(lexer, lambda word: not word.strip("();|&")):
            if not is_between and (command := without_front(list(words))):
                yield tuple(expanded(command))


def without_front(words: list[str]) -> list[str]:
    """Without the shell's keywords, the variables that a command is given, and the file that it writes."""
    while words and (words[0] in KEYWORDS or re.fullmatch(r"\w+=.*", words[0])):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words


def expanded(words: list[str]) -> Iterator[str]:
    """Expanded like a{b,c}d in a shell."""
    for word in words:
        if braces := re.fullmatch(r"([\w.]+)\{([\w,]+)\}(\S*)", word):
            yield from (f"{braces[1]}{one}{braces[3]}" for one in braces[2].split(","))
        else:
            yield word
