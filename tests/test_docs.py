"""Python, links, tasks and tests that README and docs name: the Python runs, the others exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.config.cross_checks import TASKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_help_names_every_task_and_commands_that_compose() -> None:
    text = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    assert all(re.search(rf"\b{task}\b", text) for task in TASKS)
    commands = re.findall(r"^ +grmpipe (.*?)(?: {2,}.*)?$", text, re.MULTILINE)
    assert len(commands) == 6
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for words in commands:
            compose("config", [word.split(",")[0] for word in shlex.split(words) if word != "-m"])


BLOCKS = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_python_of_the_pages_runs(page: str, block: str) -> None:
    exec(compile(block, page, "exec"), {"__name__": "my_module"})


OF_OURS = re.compile(r"^\s*from ((?:grmpipe|scheduler|models)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def test_code_of_the_pages_imports_what_there_is() -> None:
    shown = [found for page in PAGES for found in OF_OURS.findall(page.read_text(encoding="utf-8"))]
    missing = [
        f"{module}.{name}"
        for module, names in shown
        for name in names.split(", ")
        if not hasattr(importlib.import_module(module), name)
    ]
    assert shown
    assert not missing


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def is_long(file: Path, test: str) -> bool:
    """Whether `make test` leaves all of it out."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    marks = [
        ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == test]
    marks += [mark for mark in map(ast.unparse, function.decorator_list) if "parametrize" not in mark]
    return any("mark.long" in mark for mark in marks)


def test_every_guarantee_names_tests_that_there_are_and_some_that_the_gate_runs() -> None:
    sections = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)
        assert named, f"no test holds: {section.splitlines()[0]}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
        assert not all(is_long(ROOT / file, test) for file, test in named), section.splitlines()[0]
