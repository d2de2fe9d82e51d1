"""Tests stand where their source stands: `tests/grmpipe/judge/test_parse.py` tests `grmpipe/judge/parse.py`.

A source with several test files has `test_x_<subject>.py`. `tests/golden/` stands for `grmpipe/algorithm/`. A file of
`tests/flow/` holds whole runs, and is named after what they show.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES_OF = {"golden": "grmpipe/algorithm"}
# How a whole run starts: a fixture of tests/flow/conftest.py, the function of its task, or the command.
STARTS_A_RUN = re.compile(r"\b(small_run|run_once|launched|run_task|grmpipe\.compose|SlurmJob|TwoNodes|launch\.py)\b")
# Tests that no single file is the source of, and what they hold.
OTHERS = {
    "test_deploy.py": "the files in deploy/",
    "test_docs.py": "commands, code and links of README and docs/",
    "test_extension_points.py": "the table of CONTRIBUTING.md: how many files know a loss, an environment, ..",
    "test_layout.py": "folders and imports",
    "test_mirror.py": "this list",
    "test_package.py": "dependencies, the cost of an import, wheels",
    "test_shown_commands.py": "commands that pages, examples, benchmarks and recipes show",
    "test_site.py": "the documentation as a site",
    "test_waits.py": "waits without a limit of their own, and who ends each",
    "test_words.py": "names of functions: verbs",
    "benchmarks/test_benchmarks.py": "what benchmarks share: finished runs, tables, reports",
    "gpu/test_cuda.py": "engine and learner on one GPU",
    "gpu/test_time_share_on_a_gpu.py": "engine and learner share a GPU's memory in time",
    "gpu/test_weights_between_gpus.py": "weights that stay on GPUs",
    "grmpipe/judge/test_attacks.py": "texts that address the judge, through prompt, parser and every protocol",
    "grmpipe/judge/test_injections.py": "texts of policy and environment, in every template and parser",
    "grmpipe/judge/test_public_grms.py": "formats of public GRMs, from the prompt to the verdict",
    "grmpipe/judge/test_thoughts.py": "thoughts of policy and judge, from the prompt to the verdict",
    "grmpipe/judge/monitor/test_monitors.py": "canaries and adversarial replies, alone and with composed judges",
    "grmpipe/judge/protocols/test_comparing.py": "listwise and pairwise judging",
    "grmpipe/judge/protocols/test_protocols.py": "steps, principles, votes and cuts, on one GRM",
    "models/engines/test_http_time_limits.py": "time limits of every HTTP client",
    "models/engines/contract/test_generate.py": "what every engine samples and reports",
    "models/engines/contract/test_weights.py": "how every engine takes new weights",
}


def list_test_files() -> list[str]:
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))


def find_source(file: str, root: Path = TESTS.parent) -> Path | None:
    """The source of a test file: the longest name that its own name begins with."""
    folder, _, name = file.rpartition("/")
    words = name.removeprefix("test_").removesuffix(".py").split("_")
    names = ["_".join(words[:count]) + ".py" for count in range(len(words), 0, -1)]
    places = [root / SOURCES_OF.get(folder, folder) / name for name in names]
    return next((place for place in places if place.is_file()), None) if folder else None


def test_every_test_file_has_its_source_at_the_same_place() -> None:
    without = [file for file in list_test_files() if not file.startswith("flow/") and find_source(file) is None]
    assert sorted(OTHERS) == without


def test_every_file_of_whole_runs_starts_one() -> None:
    assert [path.name for path in (TESTS / "flow").glob("test_*.py") if not STARTS_A_RUN.search(path.read_text())] == []


def test_no_folder_of_tests_has_a_name_that_pytest_passes_by(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    names = {name for folder in folders for name in folder.parts}
    assert [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("judge/test_parse.py", "judge/parse.py"),
        ("judge/test_parse_quotes.py", "judge/parse.py"),
        ("golden/test_losses.py", "grmpipe/algorithm/losses.py"),
        ("judge/test_vote.py", None),
        ("test_parse.py", None),
    ],
)
def test_a_source_is_found_by_place_and_name(file: str, source: str | None, tmp_path: Path) -> None:
    for name in ("judge/parse.py", "grmpipe/algorithm/losses.py", "parse.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_source(file, tmp_path) == (None if source is None else tmp_path / source)
