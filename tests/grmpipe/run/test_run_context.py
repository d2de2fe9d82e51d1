"""Any end of a task is in its summary, and its processes end with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from configs import run_config

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_sections import SlotsConfig
from grmpipe.config.tracking import TrackingConfig
from grmpipe.judge.verdict import make_failure
from grmpipe.models.types import Message
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.run.run_context import Run, RunContext, run_in_directory
from grmpipe.run.signals import stop_by_signals
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.recovery import BEGINNING
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.slots.engine_replacement import HealthConfig
from grmpipe.types import JudgeReport, Prompt, Rollout


@dataclass
class Prepared:
    config: RunConfig
    work: Callable[[], Any]
    closed: list[str] = field(default_factory=list)


class Task(Run[Prepared]):
    """Two steps, then what the test sets."""

    async def run(self) -> Status:
        self._steps = 2
        return await self._prepared.work() or "completed"

    def results(self) -> Summary:
        evaluated = EvalSummary(final={"true_accuracy": 0.5})
        return Summary(steps=self._steps, versions={}, eval=evaluated)

    async def after_failure(self, error: Exception) -> str:
        return f"\nsaved after {type(error).__name__}"

    async def close(self) -> None:
        self._prepared.closed.append("closed")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("kept: 1\n")
    (tmp_path / "summary.json").write_text('{"status": "interrupted"}')
    return tmp_path


def end_of(work: Callable[[], Any], run_dir: Path, task: type[Task] = Task, **changes: Any) -> tuple[Summary, Prepared]:
    config = run_config(tracking=TrackingConfig(trackers=[], console=False))
    prepared = Prepared(replace(config, **changes), work)
    return asyncio.run(run_in_directory(task, prepared, run_dir)), prepared


def written(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return record


async def nothing() -> None:
    return None


async def broken() -> None:
    raise ValueError("no such thing")


async def wrongly_configured() -> None:
    raise ConfigError("judge.template: can't be read")


async def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(5)


async def loses_an_engine_by_the_same_signal() -> None:
    with stop_by_signals(lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        raise ActorDied("learner-0", "it got a SIGTERM too")


def test_an_end_is_written_with_its_objective(run_dir: Path) -> None:
    summary, prepared = end_of(nothing, run_dir, objective="eval.final.true_accuracy")
    assert (summary.status, summary.objective, prepared.closed) == ("completed", 0.5, ["closed"])
    assert written(run_dir)["objective"] == 0.5


def test_an_objective_that_the_run_has_not_is_null(run_dir: Path) -> None:
    assert end_of(nothing, run_dir, objective="eval.initial.true_accuracy")[0].objective is None


def test_a_failure_is_written_with_what_was_saved(run_dir: Path) -> None:
    summary, prepared = end_of(broken, run_dir)
    assert summary.failure == "no such thing\nsaved after ValueError"
    assert written(run_dir)["status"] == "failed"
    assert prepared.closed == ["closed"]


def test_sigterm_is_an_interruption_of_every_task(run_dir: Path) -> None:
    summary, prepared = end_of(signalled, run_dir)
    assert (summary.status, written(run_dir)["steps"], prepared.closed) == ("interrupted", 2, ["closed"])


def test_what_fails_after_a_signal_is_an_interruption_with_its_cause_and_begins_nothing_again(run_dir: Path) -> None:
    summary, prepared = end_of(loses_an_engine_by_the_same_signal, run_dir)
    assert (summary.status, prepared.closed) == ("interrupted", ["closed"])
    assert written(run_dir)["failure"] == "ActorDied: learner-0 died: it got a SIGTERM too\nsaved after ActorDied"


def test_a_signal_while_a_run_closes_ends_nothing_early(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Closes(Task):
        async def close(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            await super().close()

    config = run_config(tracking=TrackingConfig(trackers=[], console=False))
    prepared = Prepared(config, nothing)
    assert asyncio.run(run_in_directory(Closes, prepared, run_dir)).status == "completed"
    assert prepared.closed == ["closed"] and written(run_dir)["status"] == "completed"
    assert "SIGTERM: the run has ended, and ends its processes" in capfd.readouterr().err


def test_a_refusal_is_raised_and_leaves_the_directory_free(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge\.template"):
        end_of(wrongly_configured, run_dir)
    assert not (run_dir / "config.yaml").exists()
    assert not (run_dir / "summary.json").exists()


class LosingTask(Task):
    """Records a rollout whose line no journal can hold."""

    async def run(self) -> Status:
        message = Message(role="user", content="?")
        prompt = Prompt(prompt_id="p", messages=(message,), info={"image": b"\xff"})
        rollout = Rollout(group_id="g", sibling=0, turns=(), status="finished")
        self._observers.recorder.rollout(0, prompt, rollout)
        self._observers.recorder.record_verdict(rollout, JudgeReport(verdict=make_failure("died", "", attempts=1)))
        return await super().run()


def test_lines_that_journals_lost_are_alarms_with_their_cause(run_dir: Path) -> None:
    summary, _ = end_of(nothing, run_dir, LosingTask)
    assert summary.status == "completed", "no failure of a journal fails a run"
    assert written(run_dir)["journal_failures"] == {"rollouts.jsonl": 1, "judgements.jsonl": 1}
    assert written(run_dir)["alarms"] == [
        "1 lines of rollouts.jsonl could not be written: a resume or a replay will miss them. The first one: "
        "TypeError: prompt.info.image: a value of type bytes, which JSON has nothing for",
        "1 lines of judgements.jsonl could not be written: a resume or a replay will miss them. The first one: its "
        "rollout could not be written to rollouts.jsonl",
    ]


def test_a_task_knows_where_it_writes(run_dir: Path) -> None:
    found: list[RunContext] = []

    class Looks(Task):
        async def run(self) -> Status:
            found.append(self._context)
            return await super().run()

    config = run_config(tracking=TrackingConfig(trackers=[], console=False))
    asyncio.run(run_in_directory(Looks, Prepared(config, nothing), run_dir))
    assert (found[0].run_dir, found[0].resumed, found[0].state) == (run_dir, None, BEGINNING)


class Dies(Task):
    """Its learner dies where the test says; a checkpoint is whatever `Checkpoints` finds."""

    deaths: ClassVar[list[tuple[int, str]]]  # (step, process), of each attempt
    attempts: ClassVar[list[RunContext]]

    async def run(self) -> Status:
        self.attempts.append(self._context)
        self._steps = 0
        await asyncio.sleep(0.01)  # the time of an attempt is seen
        if not self.deaths:
            return "completed"
        self._steps, died = self.deaths.pop(0)
        try:
            raise ActorDied(died, "process 7 is gone\n  | its last line")
        except ActorDied as error:
            raise RuntimeError("the step was given up") from error

    @property
    def restartable_step(self) -> int | None:
        return self._steps


@pytest.fixture
def dies(run_dir: Path) -> Callable[..., Summary]:
    """The summary of a run whose processes die so."""

    def run(*deaths: tuple[int, str], most: int = 3) -> Summary:
        config = run_config(
            tracking=TrackingConfig(trackers=[], console=False),
            slots=SlotsConfig(health=HealthConfig(max_replacements=most)),
        )
        Dies.deaths, Dies.attempts = list(deaths), []
        return asyncio.run(run_in_directory(Dies, Prepared(config, nothing), run_dir))

    return run


def test_a_death_begins_the_run_again_and_its_first_cause_is_counted(dies: Callable[..., Summary]) -> None:
    summary = dies((3, "learner-0"), (5, "critic-0"))
    assert summary.status == "completed"
    assert summary.restarts == (
        "step 3: learner-0 died: process 7 is gone",
        "step 5: critic-0 died: process 7 is gone",
    )
    first, second, third = (context.state for context in Dies.attempts)
    assert first.wall_s < second.wall_s < third.wall_s, "the time of an attempt is the run's"


def test_the_same_death_at_the_same_step_ends_the_run(dies: Callable[..., Summary]) -> None:
    summary = dies((3, "learner-0"), (3, "learner-1"), (3, "learner-0"))
    assert summary.status == "failed"
    assert summary.failure is not None and "learner-0 died: process 7 is gone" in summary.failure
    assert len(summary.restarts) == 2


@pytest.mark.parametrize("most", [0, 2])
def test_a_run_begins_again_as_often_as_an_engine_is_replaced(dies: Callable[..., Summary], most: int) -> None:
    summary = dies(*[(step, "learner-0") for step in range(5)], most=most)
    assert (summary.status, len(summary.restarts), len(Dies.attempts)) == ("failed", most, most + 1)


def test_a_restart_continues_from_the_newest_whole_checkpoint(dies: Callable[..., Summary], run_dir: Path) -> None:
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=2)
    state = replace(BEGINNING, alarms=("as it was",), wall_s=0.0)
    for step in (2, 4):
        newest = checkpoints.publish(checkpoints.draft(step), state, [])
    (newest / "run_state.json").write_text("{")  # damaged
    dies((5, "learner-0"))
    again = Dies.attempts[1]
    assert again.resumed == run_dir / "checkpoints" / "step_2"
    assert (again.state.alarms, again.state.restarts) == (
        ("as it was",),
        ("step 5: learner-0 died: process 7 is gone",),
    )


def test_where_no_checkpoint_is_whole_a_death_ends_the_run(dies: Callable[..., Summary], run_dir: Path) -> None:
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=2)
    whole = checkpoints.publish(checkpoints.draft(4), BEGINNING, [])
    (whole / "run_state.json").write_text("{")
    assert dies((5, "learner-0")).status == "failed"
    assert len(Dies.attempts) == 1
