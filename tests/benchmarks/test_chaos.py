"""A run that is killed at random, as the benchmark does it; the ledger that checks runs finds what is planted."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import grmpipe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from chaos import RUN, TEMPORARY, ChaoticRun, Outcome, count_faults, report  # noqa: E402
from faults.endpoint import NAME, WELL, find_made_up  # noqa: E402
from faults.ledger import Ledger  # noqa: E402
from faults.process_faults import LIVE, ON_AGENTS, Target  # noqa: E402
from faults.scenarios import SCENARIOS, prepare  # noqa: E402

Lines = list[dict[str, Any]]
KILL = "kill -9 of the driver"


@pytest.fixture(scope="module")
def completed(
    tmp_path_factory: pytest.TempPathFactory, keep_logging: Callable[[], AbstractContextManager[None]]
) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("chaos")
    with prepare(SCENARIOS[0], 3) as (overrides, _), keep_logging():
        config = grmpipe.compose(overrides=[*overrides, "tracking.console=false", f"run_dir={folder / RUN}"])
        return grmpipe.launch(config).run_dir


@pytest.mark.long  # tests/flow/test_resume.py kills runs in the gate
def test_a_run_that_is_killed_at_random_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    for name in (RUN, TEMPORARY):
        (tmp_path / name).mkdir()
    with prepare(SCENARIOS[0], 3) as (overrides, _):
        run = ChaoticRun(SCENARIOS[0], tmp_path, "3", overrides, {KILL: LIVE[KILL]}, Counter())
        run.play()
    assert run.outcome.lost == []
    assert KILL in {kind for kind, _ in run.outcome.faults}
    assert run.outcome.ends[-1] == "0" and "-9" in run.outcome.ends


@pytest.mark.long
def test_agents_that_are_killed_and_turn_against_the_run_lose_nothing(tmp_path: Path) -> None:
    for name in (RUN, TEMPORARY):
        (tmp_path / name).mkdir()
    scenario = next(one for one in SCENARIOS if one.has_agents)
    with prepare(scenario, 3) as (overrides, _):
        run = ChaoticRun(scenario, tmp_path, "3", overrides, ON_AGENTS, Counter())
        run.play()
    assert run.outcome.lost == [] and run.outcome.ends == ["0"]
    assert {kind for kind, _ in run.outcome.faults} <= ON_AGENTS.keys() and run.outcome.faults
    assert json.loads((run.run_dir / "summary.json").read_text())["envs"]["faults"]


def test_what_struck_is_read_from_the_rows_of_earlier_runs() -> None:
    first = Outcome("quickstart", "1/0", faults=[(KILL, "driver"), (KILL, "driver"), ("SIGSTOP of grm-0", "grm-0")])
    second = Outcome("jury", "2/0", faults=[(KILL, "driver"), ("the endpoint: 5 MB", "judge")])
    text = "| seed | faults by kind |\n|---|---|\n" + report([first], 1, 2.0) + report([second], 2, 2.0)
    assert count_faults(text) == {KILL: 3, "SIGSTOP of grm-0": 1, "the endpoint: 5 MB": 1}


@pytest.mark.parametrize(
    ("said", "ready"),
    [
        ("starting policy\n", False),
        ("starting policy\nready after 5 s\n", True),
        ("starting policy\nready after 5 s\nstarting policy\nstarting: policy  60 s\n", False),
    ],
)
def test_what_a_start_says_tells_whether_the_run_is_ready(tmp_path: Path, said: str, ready: bool) -> None:
    (tmp_path / "output.txt").write_text(said)
    own: dict[str, Any] = {"process": None, "command": [], "environment": {}}
    target = Target(run_dir=tmp_path, output=tmp_path / "output.txt", **own)
    assert target.is_ready is ready


def change_first(**changes: object) -> Callable[[Lines], Lines]:
    return lambda lines: [lines[0] | changes, *lines[1:]]


def double_last(lines: Lines) -> Lines:
    return [*lines, lines[-1]]


def drop_last(lines: Lines) -> Lines:
    return lines[:-1]


PLANTED = [
    ("trained", double_last, "trained twice"),
    ("trained", drop_last, "on file, but not as trained"),
    ("trained", change_first(reward=0.123), "has the reward 0.123"),
    ("trained", change_first(step=6), "trained at another step"),
    ("trained", change_first(advantage=float("nan")), "numbers that aren't finite"),
    ("judgements", drop_last, "its verdict None"),
    ("judgements", double_last, "judged twice"),
    ("rollouts", double_last, "two rollouts under one name"),
    ("groups", double_last, "draws that ended twice"),
    ("groups", drop_last, "groups.jsonl has"),
    ("groups", change_first(prompt_index=999), "are in flight, and these didn't end"),
    ("metrics", drop_last, "steps of metrics.jsonl"),
]


@pytest.mark.parametrize(("journal", "change", "found"), PLANTED, ids=[found for _, _, found in PLANTED])
def test_what_is_lost_doubled_or_made_up_is_found(
    completed: Path, tmp_path: Path, journal: str, change: Callable[[Lines], Lines], found: str
) -> None:
    shutil.copytree(completed, tmp_path / "run")
    path = tmp_path / "run" / f"{journal}.jsonl"
    lines = path.read_text().splitlines()
    if change in (double_last, drop_last):  # as they are, with their checksums
        path.write_text("".join(f"{line}\n" for line in change(lines)))  # type: ignore[arg-type]
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in change([json.loads(line) for line in lines])))
    assert any(found in loss for loss in Ledger(tmp_path / "run").find_losses())
    is_gap = change is drop_last
    assert (Ledger(tmp_path / "run", has_gaps=True).find_losses() == []) == is_gap, (
        "after a full disk lines may be missing"
    )


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("status", "interrupted", "interrupted after 6 of 6 steps"),
        ("max_staleness_trained", 9, "staleness 9 was trained"),
        ("groups", {"submitted": 9, "trained": 9, "dropped": {}, "in_flight": 1}, "the ledger doesn't hold"),
        ("envs", {"opened": 3, "closed": 1, "killed": 1}, "environments left open: 1"),
        ("journal_failures", {"groups.jsonl": 1}, "lines that were not written"),
    ],
)
def test_a_summary_that_is_untrue_is_found(
    completed: Path, tmp_path: Path, name: str, value: object, found: str
) -> None:
    shutil.copytree(completed, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert any(found in loss for loss in Ledger(tmp_path / "run").find_losses())


@pytest.mark.parametrize(
    ("text", "reason", "score", "is_made_up"),
    [
        (WELL.format(score=7), "stop", 7.0, False),
        (WELL.format(score=7), "length", 7.0, True),
        (WELL.format(score=7), "stop", 8.0, True),
        ("Well.", "stop", 7.0, True),
    ],
)
def test_a_number_that_the_endpoint_never_gave_is_found(
    tmp_path: Path, text: str, reason: str, score: float, is_made_up: bool
) -> None:
    judgement = {"grm": NAME, "scores": [score], "completion": {"text": text, "finish_reason": reason}}
    (tmp_path / "judgements.jsonl").write_text(json.dumps({"judgements": [judgement, {"grm": "grm"}]}) + "\n")
    assert len(find_made_up(tmp_path)) == is_made_up
