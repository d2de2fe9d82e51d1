"""Names of public functions are verbs: how many begin with a participle or end in `_of`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "scheduler", "grmpipe")
ALLOWED = 12  # it may only fall
IRREGULAR = """
begun bent bought bound broken brought built called caught chosen done drawn driven eaten fallen fed felt
forgotten found frozen given gone got grown heard held hidden known laid learnt led lent lost made meant met
paid proven said seen sent shown slept sold sought spelt spent spoken stolen stood stuck sung sunk swept sworn
taken taught thought thrown told torn understood woken won worn written
"""
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"})
VERBS_IN_ING = frozenset({"bring", "ping", "ring", "string"})


def begins_with_participle(name: str) -> bool:
    first = name.split("_")[0]
    past = first in IRREGULAR.split() or (first.endswith("ed") and first not in VERBS_IN_ED)
    return past or (first.endswith("ing") and first not in VERBS_IN_ING)


def is_plain_call(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Neither a property nor a claim: those read as nouns and as sentences."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    returns = ast.unparse(function.returns) if function.returns else ""
    return not re.search(r"property|setter|overload", decorators) and not re.search(r"\bbool\]?$", returns)


def public_functions(path: Path) -> list[str]:
    """Functions of a module and methods of its classes, without those that begin with an underscore."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        found += [
            member.name
            for member in members
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            and not member.name.startswith("_")
            and is_plain_call(member)
        ]
    return found


def riddles() -> list[tuple[str, str]]:
    """(file, name) of every public function whose name is no verb."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        (path.relative_to(ROOT).as_posix(), name)
        for path in paths
        for name in public_functions(path)
        if begins_with_participle(name) or name.endswith("_of")
    ]


def test_public_functions_are_verbs() -> None:
    found = riddles()
    assert len(found) <= ALLOWED, "\n".join(f"{path}: {name}" for path, name in found)


if __name__ == "__main__":
    for place, name in riddles():
        print(place, name)
