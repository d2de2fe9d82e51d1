"""Every example runs as its first lines say, and is short."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 60
SMALLER = (
    "train.num_steps=1", "train.groups_per_batch=2", "train.group_size=2", "data.num_eval_prompts=4",
    "judge_monitor.anchors=4",
    "judge=rule",
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_is_short_and_says_how_it_is_run(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert "python launch.py +experiment=" in text.split('"""')[1]


def overrides_of(name: str) -> list[str]:
    """What the first lines of an example type after `launch.py`, without the experiment."""
    command = (EXAMPLES / name).read_text().split('"""')[1].split("launch.py ", 1)[1].replace("\\\n", " ")
    here = command.replace("examples/", f"{EXAMPLES}/").replace("[python,", f"[{sys.executable},")
    return [word for word in shlex.split(here) if not word.startswith("+experiment")]


@pytest.mark.parametrize("name", ["unit_tools.py", "workflow_openai.py", "mcp_server.py"])
def test_an_example_runs_as_its_first_lines_say(small_run: Callable, name: str) -> None:
    files = small_run(*overrides_of(name), *SMALLER)
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert files.summary["envs"]["episodes"] > 0 and files.summary["envs"]["faults"] == {}
