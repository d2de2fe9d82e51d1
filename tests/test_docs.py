"""Python, links, tasks and tests that README and docs name: the Python runs, the others exist."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe
import grmpipe.cli
from grmpipe.cli import compose as compose_run
from grmpipe.config.run_config import RunConfig
from grmpipe.config.run_sections import TASKS
from grmpipe.help import write_help
from grmpipe.judge.kinds.function_judge import FunctionJudge, load_custom_judge
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.models.types import Message
from grmpipe.observe.summary import Summary
from grmpipe.types import Prompt, Verdict

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROMPT = Prompt(prompt_id="p1", messages=(Message(role="user", content="6 x 7?"),), columns={"reference": "42"})


def test_the_help_names_every_task_and_commands_that_compose() -> None:
    text = write_help()
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


def test_python_of_the_pages_that_starts_runs_compiles_and_names_what_there_is() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        compile(block, "python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = set(re.findall(r"\bgrmpipe\.(\w+)", "".join(blocks)))
    assert names == {"compose", "launch", "start", "start_judge", "read_run"}
    assert all(hasattr(grmpipe, name) for name in names)


YAML = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]


def in_project(folder: Path, monkeypatch: pytest.MonkeyPatch, block: str, code: Mapping[str, str]) -> RunConfig:
    """The quickstart with a page's block of YAML, as an experiment of a project with the code of these files."""
    for name, text in {
        "grmpipe.yaml": "conf: conf",
        "conf/experiment/page.yaml": f"# @package _global_\ndefaults: [quickstart, _self_]\n{block}",
        **code,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return compose_run("page")


@pytest.mark.parametrize(("page", "block"), YAML, ids=[page for page, _ in YAML])
def test_yaml_of_the_pages_composes(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "of a server")
    in_project(tmp_path, monkeypatch, block, {})


def block_below(page: str, heading: str, language: str) -> str:
    """The first block of a section of a page."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def test_a_judge_of_the_page_judges_when_it_is_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, keys = (block_below("custom_judges.md", "Custom judges", language) for language in ("python", "yaml"))
    assert len(code.splitlines()) <= 20
    config = in_project(tmp_path, monkeypatch, keys, {"my_package/my_module.py": code})
    judge = load_custom_judge(config.main_judge)
    reports = asyncio.run(judge_together(judge, PROMPT, "g1", ("a long enough answer", "short", "")))
    scores = [one.verdict.score if isinstance(one.verdict, Verdict) else one.verdict.cause for one in reports]
    assert scores == [10, 1, "undecided"]


def test_a_reward_function_of_the_page_rewards_when_it_is_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = block_below("reward_functions.md", "Reward functions", "python")
    assert len(code.splitlines()) <= 10
    keys = "judge: {kind: function, function: mylab.brief}"
    config = in_project(tmp_path, monkeypatch, keys, {"mylab.py": code})
    judge = FunctionJudge(config.main_judge)
    reports = asyncio.run(judge_together(judge, PROMPT, "g1", ("42", "it is 42", "43")))
    assert [one.verdict.outcome for one in reports if isinstance(one.verdict, Verdict)] == [1 / 2, 1 / 4, 0]


def test_the_page_of_a_runs_files_explains_every_key_of_its_summary() -> None:
    text = (ROOT / "docs" / "reading_a_run.md").read_text(encoding="utf-8").partition("**`summary.json`**")[2]
    table = text.partition("\n\n")[2].partition("\n\n")[0]
    explained = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert explained == {field.name for field in dataclasses.fields(Summary)}


OF_OURS = re.compile(r"^\s*from ((?:grmpipe|scheduler|models)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def test_code_of_the_pages_imports_what_there_is() -> None:
    shown = [found for page in PAGES for found in OF_OURS.findall(page.read_text(encoding="utf-8"))]
    shown.remove(("grmpipe.clients.verifiers", "GrmpipeJudge"))  # it needs verifiers: test_judge_client_in_trainers.py
    missing = [
        f"{module}.{name}"
        for module, names in shown
        for name in names.split(", ")
        if not hasattr(importlib.import_module(module), name)
    ]
    assert shown
    assert not missing


def anchors_in(page: Path) -> set[str]:
    """The headings of a page, as GitHub's links spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors_in(file), f"{page.name} links to {target}#{anchor}"


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


# -- metrics -----------------------------------------------------------------------------------------------------------


def find_emitted_metrics() -> set[str]:
    """Names of metrics that the code writes as keys of mappings; `*` stands for what it fills in."""
    found: set[str] = set()
    for path in (ROOT / "grmpipe").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if re.search(r"[a-z}]/[a-z_{]\S*\"[:\]]", source) else ():
            keys = node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
            keys = [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else keys
            for key in keys:
                parts = key.values if isinstance(key, ast.JoinedStr) else [key]
                found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts))
    return {name for name in found if re.fullmatch(r"[a-z_*]+(/[a-z_0-9*]+)+", name)}


def find_documented_names() -> set[str]:
    """Names in the pages that may be those of metrics; `x` stands where they say `<name>`."""
    found = (
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`([a-z_<>]+/[a-z_0-9<>/]+)`", page.read_text("utf-8"))
    )
    return {re.sub(r"<\w+>", "x", name) for name in found}


def test_every_metric_of_the_code_is_in_the_pages_and_every_one_of_theirs_in_the_code() -> None:
    emitted = find_emitted_metrics()
    fixed = {name for name in emitted if not re.search(r"/\*$|_sum$", name)}  # not families, nor sums on their way
    areas = {name.partition("/")[0] for name in emitted} | {"judge_monitor", "mismatch"}
    areas -= {"reward"}  # its parts have names of a user
    documented = find_documented_names()
    patterns = {name: re.compile(name.replace("*", r"[\w/]+")) for name in emitted}
    missing = {name for name in fixed if not any(patterns[name].fullmatch(known) for known in documented)}
    assert not missing, "metrics that no page explains"
    source = " ".join(path.read_text("utf-8") for top in ("grmpipe", "models") for path in (ROOT / top).rglob("*.py"))
    extra = {
        name
        for name in documented
        if name.partition("/")[0] in areas
        and not any(patterns[one].fullmatch(name) for one in fixed)
        and re.sub(r"(?<![a-z])x_|_x\b|\d+$", "", name.rpartition("/")[2]) not in source
    }
    assert not extra, "metrics of the pages that the code doesn't know"
