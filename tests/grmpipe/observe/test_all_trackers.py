"""Trackers: each gets every step, none can fail one; metrics.jsonl is plain JSON and follows a resume."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.all_trackers import AllTrackers, JsonlSink
from grmpipe.observe.logs import setup_logging
from grmpipe.observe.sample_rows import sample_row
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Failed, Judgement, JudgeReport, Metrics, Prompt, RewardSpan, Rollout, Turn, Verdict


class Listener(Tracker):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows: list[SampleRow] = []

    def log(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.steps.append(step)
        self.rows += rows

    def resume_state(self) -> dict[str, str]:
        return {"id": "a"}

    def close(self) -> None:
        self.steps.append(-1)


class Broken(Tracker):
    def log(self, step: int, metrics: Metrics) -> None:
        raise OSError(28, f"No space left at step {step}")

    table = resume_state = close = lambda self, *_: 1 / 0  # type: ignore[assignment]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Hostile(Tracker):
    def log(self, step: int, metrics: Metrics) -> None:
        raise Unspeakable


@pytest.mark.usefixtures("restored_logging")
def test_an_exception_without_a_text_fails_nothing(tmp_path: Path) -> None:
    setup_logging(tmp_path, Console())  # whose handler would pass on what the text raises
    trackers = AllTrackers({"hostile": Hostile()})
    trackers.log(0, {})
    assert trackers.causes["hostile"].startswith("Unspeakable: it has no text that could be shown (")
    assert "hostile failed, the run continues without it: Unspeakable" in (tmp_path / "run.log").read_text()


def test_a_tracker_that_raises_fails_nothing_is_counted_and_stays_on(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    trackers = AllTrackers({"broken": Broken(), "listener": listener}, {"broken": {"id": "b"}})
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trackers.log(step, {"train/loss": 1.0})
        trackers.table(3, [])
        assert trackers.resume_states() == {"broken": {"id": "b"}, "listener": {"id": "a"}}
        trackers.close()
    assert listener.steps == [0, 1, 2, 3, -1]
    assert trackers.failures == {"broken": 6}
    assert len(caplog.records) == 2  # the full disk and the division, once each
    assert all("broken failed" in record.getMessage() for record in caplog.records)


def test_alarms_and_the_end_reach_each_tracker_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "planted0123")
    heard: list[tuple[str | None, ...]] = []

    class Hears(Listener):
        def alarm(self, text: str) -> None:
            heard.append((text,))

        def end(self, status: str, failure: str | None) -> None:
            heard.append((status, failure))

    trackers = AllTrackers({"plain": Tracker(), "hears": Hears()})
    trackers.alarm("the endpoint refused planted0123")
    trackers.end("completed", None)
    trackers.end("failed", "refused planted0123")
    assert heard == [
        ("the endpoint refused <redacted>",), ("completed", None), ("failed", "refused <redacted>")
    ]  # fmt: skip
    assert not trackers.failures


def test_a_tracker_that_cannot_be_opened_is_left_out_and_keeps_its_state(caplog: pytest.LogCaptureFixture) -> None:
    trackers = AllTrackers({}, {"mine": {"id": "m"}})
    trackers.open("mine", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    trackers.log(0, {})
    assert trackers.resume_states() == {"mine": {"id": "m"}}
    assert trackers.failures == {"mine": 1}
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["mine failed"]


def test_a_state_that_is_no_json_fails_no_checkpoint() -> None:
    class Odd(Tracker):
        def resume_state(self) -> dict[str, str]:
            return {"id": Path()}  # type: ignore[dict-item]

    trackers = AllTrackers({"odd": Odd(), "listener": Listener()})
    assert trackers.resume_states() == {"listener": {"id": "a"}}
    assert trackers.failures == {"odd": 1}


@pytest.mark.parametrize(("every", "steps"), [(10, [10, 20]), (0, [])])
def test_tables_come_every_so_many_steps_with_so_many_rows(every: int, steps: list[int]) -> None:
    listener = Listener()
    trackers = AllTrackers({"listener": listener}, table_every=every, table_rows=2)
    row = judged_sibling(Failed(stage="judge", cause="timeout", attempts=1))
    for step in range(5, 21, 5):
        trackers.table(step, [row] * 3)
    assert listener.steps == steps
    assert len(listener.rows) == 2 * len(steps)


def test_an_interrupt_is_no_failure_of_a_tracker() -> None:
    class Interrupted(Listener):
        def log(self, step: int, metrics: Metrics) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AllTrackers({"mine": Interrupted()}).log(0, {})


def test_metrics_are_one_json_object_a_step_at_once_on_disk(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", now=lambda: 12.0)
    sink.log(7, {"a/x": 0.5, "a/nan": math.nan, "a/inf": -math.inf, "a/numpy": np.float32(0.25)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 7, "time": 12.0, "a/x": 0.5, "a/nan": None, "a/inf": None, "a/numpy": 0.25}


def test_metrics_beyond_the_cut_are_void_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = JsonlSink(path)
    for step in range(6):
        before.log(step, {"lineage": 1.0})
    path.write_bytes(path.read_bytes() + b'{"step": 6, "li')
    after = JsonlSink(path)
    after.truncate_after(3)
    after.log(4, {"lineage": 2.0})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["lineage"]) for r in records] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_metrics_that_were_never_written_is_fine(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl").truncate_after(3)
    assert not list(tmp_path.iterdir())


def judged_sibling(verdict: Verdict | Failed, turn: int | None = None) -> SampleRow:
    span = VersionSpan(model="policy", version=0, start=0, end=1)
    answer = Completion(token_ids=(5,), logprobs=(-0.1,), text="Answer: 2", finish_reason="stop", versions=(span,))
    critique = Completion(token_ids=(6,), logprobs=(-0.1,), text="Score: 10", finish_reason="stop", versions=(span,))
    judgement = Judgement(
        group_id="g", siblings=(3,), scores=(10.0,), prompt_ids=(), completion=critique, grm="grm", version=0, turn=turn
    )
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="1 + 1?"))
    return sample_row(
        Prompt(prompt_id="p", messages=messages, reference="2"),
        Rollout(group_id="g", sibling=3, turns=(Turn(new_ids=(1,), completion=answer),), status="finished"),
        JudgeReport(verdict=verdict, judgements=(judgement,)),
        truth=1.0,
    )


def test_a_row_shows_question_answer_critique_and_score() -> None:
    rewards = (RewardSpan(turn=0, start=0, end=1, value=1.0),)
    row = judged_sibling(Verdict(rewards=rewards, score=10.0, breakdown={}, score_std=0.0, num_judgements=1))
    assert (row.question, row.answer, row.critique, row.score) == ("1 + 1?", "Answer: 2", "Score: 10", 10.0)


def test_a_row_says_which_turn_a_judgement_is_about() -> None:
    failed = Failed(stage="judge", cause="timeout", attempts=1)
    assert judged_sibling(failed, turn=1).critique.endswith("\n\n[turn 2] Score: 10")


def test_a_row_of_an_episode_shows_both_voices() -> None:
    span = VersionSpan(model="policy", version=0, start=0, end=1)
    said = [
        Completion(token_ids=(5,), logprobs=(-0.1,), text=text, finish_reason="stop", versions=(span,))
        for text in ("add(1, 1)", "Answer: 2")
    ]
    turns = (
        Turn(new_ids=(1,), completion=said[0], replies=(Message(role="tool", content="2"),)),
        Turn(new_ids=(1,), completion=said[1]),
    )
    row = sample_row(
        Prompt(prompt_id="p", messages=(Message(role="user", content="1 + 1?"),)),
        Rollout(group_id="g", sibling=3, turns=turns, status="finished"),
        JudgeReport(verdict=Failed(stage="judge", cause="timeout", attempts=1)),
    )
    assert row.answer == "> add(1, 1)\n| 2\n> Answer: 2"


def test_a_row_whose_judge_failed_has_no_score_and_says_why() -> None:
    row = judged_sibling(Failed(stage="judge", cause="truncated", attempts=2, detail="no verdict in 64 tokens"))
    assert row.score is None
    assert row.critique.startswith("[judge failed: truncated] no verdict in 64 tokens")
