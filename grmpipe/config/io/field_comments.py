"""The comments of a dataclass's fields: those of the configuration are what its keys mean."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Collection


def read_comments(cls: type) -> dict[str, str]:
    """Field -> its comment, without the #. Raises ValueError for a field with one in both places."""
    inherited = {
        name: text
        for base in cls.__bases__
        if dataclasses.is_dataclass(base)
        for name, text in read_comments(base).items()
    }
    return inherited | read_own_comments(cls)


def read_own_comments(cls: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    beside, alone = comment_lines(source)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            behind = [beside[line] for line in find_lines(field) if line in beside]
            above = [alone[line] for line in block_above(field.lineno, alone)]
            if behind and above:
                raise ValueError(f"{cls.__name__}.{field.target.id}: has a comment behind it and one above; keep one")
            found[field.target.id] = " ".join(behind or above)
    return found


def comment_lines(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Line -> comment: those after code, and those alone in their line."""
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = alone if token.line.lstrip().startswith("#") else beside
            where[token.start[0]] = token.string.removeprefix("#").strip()
    return beside, alone


def find_lines(field: ast.AnnAssign) -> range:
    return range(field.lineno, (field.end_lineno or field.lineno) + 1)


def block_above(line: int, alone: Collection[int]) -> range:
    """The lines of comment that end right above a line."""
    first = line
    while first - 1 in alone:
        first -= 1
    return range(first, line)
