"""The house: imports go downwards, wings don't know each other, one door per library."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {
    "models": {"models"},
    "scheduler": {"scheduler", "models.types"},
    "grmpipe": {"grmpipe", "models", "scheduler"},
}
WINGS = {"data", "envs", "rollout", "judge", "train", "observe"}
DOORS = {
    "ray": "scheduler/",
    "vllm": "models/engines/",
    "sglang": "models/engines/",
    "peft": "models/lm/lora.py",
    "math_verify": "grmpipe/judge/math_rule.py",
    "wandb": "grmpipe/observe/",
    "omegaconf": "grmpipe/config/yaml_io.py",
    "hydra": "launch.py",
}


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in the file; `from a import b` gives a.b and counts as a too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def sources() -> list[Path]:
    return [ROOT / "launch.py", *(p for floor in FLOORS for p in (ROOT / floor).rglob("*.py"))]


def test_imports_go_downwards_only() -> None:
    for path in sources():
        floor = path.relative_to(ROOT).parts[0]
        for name in imports_of(path) if floor in FLOORS else ():
            if any(within(name, other) for other in FLOORS):
                assert any(within(name, allowed) for allowed in FLOORS[floor]), f"{path} imports {name}"


def test_wings_do_not_import_each_other() -> None:
    for path in (ROOT / "grmpipe").rglob("*.py"):
        wing = path.relative_to(ROOT / "grmpipe").parts[0]
        for name in imports_of(path) if wing in WINGS else ():
            parts = name.split(".")
            assert parts[0] != "grmpipe" or parts[1] in {wing, "types"}, f"{path} imports {name}"


def test_each_library_has_one_door() -> None:
    for path in sources():
        for name in imports_of(path):
            door = DOORS.get(name.split(".")[0])
            assert door is None or path.relative_to(ROOT).as_posix().startswith(door), f"{path} imports {name}"


def test_tests_are_no_packages_and_every_file_says_what_it_holds() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for path in sources():
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path}: no first sentence"
