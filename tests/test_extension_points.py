"""How many files know a loss, an estimator, an env, a judge protocol, an engine, a transport, a training backend, a
tool parser, a tracker or a wire by its name.

CONTRIBUTING.md has the numbers; this test notices a file that begins to compare names.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "scheduler", "grmpipe")
CHANGES = (
    "loss", "estimator", "env", "judge protocol", "engine", "transport", "training backend", "tool parser", "tracker",
    "wire",
)  # fmt: skip
ROW = re.compile(r"^\| ([a-z ]+) \| ((?:`\w+`(?:, )?)+) \| (\d+) \|", re.MULTILINE)


@functools.cache
def told() -> dict[str, tuple[tuple[str, ...], int]]:
    """The table of CONTRIBUTING.md: change -> the names to search for, and the number of files that have one of
    them.
    """
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return {change: (tuple(re.findall(r"\w+", names)), int(count)) for change, names, count in rows}


@functools.cache
def strings() -> dict[Path, frozenset[str]]:
    """The string literals of each file of the source."""
    files = [
        ROOT / "launch.py",
        *(path for top in ("models", "scheduler", "grmpipe") for path in (ROOT / top).rglob("*.py")),
    ]
    trees = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    return {
        path: frozenset(
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        for path, tree in trees.items()
    }


def files_that_know(name: str) -> list[str]:
    """The files outside the kind's own folder."""
    return sorted(
        path.as_posix() for path, literals in strings().items() if name in literals and name not in path.parts
    )


def test_the_table_tells_of_every_change() -> None:
    assert sorted(told()) == sorted(CHANGES)


@pytest.mark.parametrize("change", CHANGES)
def test_contributing_counts_the_files_that_know_a_kind_by_name(change: str) -> None:
    names, count = told()[change]
    known = max((files_that_know(name) for name in names), key=len)
    assert len(known) == count, f"{', '.join(names)}: CONTRIBUTING.md tells {count}, and there are {known}"
