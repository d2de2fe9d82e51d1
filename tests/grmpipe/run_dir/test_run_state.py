"""What survives a kill: the checkpoint, and finished work in the journals that is valid at it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from grmpipe.data.stream import EndOfData
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.journal import Mark, read_journal
from grmpipe.observe.recorder import EvalRecorder, Recorder, load_group_ends
from grmpipe.pipeline.interfaces import PipelineState, UncountedWork
from grmpipe.run_dir.recovery import BEGINNING, find_kept, void_group_ends, void_steps_after
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import GroupEnd, JudgeReport, Prompt, RewardSpan, Rollout, TrainedRollout, Turn, Verdict

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
VERDICT = Verdict(
    rewards=(RewardSpan(turn=0, start=0, end=2, value=0.5),), score=5.0, breakdown={}, score_std=0.0, num_judgements=1
)


def rollout(group_id: str, sibling: int, *versions: int) -> Rollout:
    spans = tuple(VersionSpan(model="policy", version=v, start=i, end=i + 1) for i, v in enumerate(versions))
    completion = Completion(
        token_ids=(5,) * len(versions), logprobs=(-0.5,) * len(versions), text="x", finish_reason="stop", versions=spans
    )
    return Rollout(
        group_id=group_id, sibling=sibling, turns=(Turn(new_ids=(1,), completion=completion),), status="finished"
    )


class Drawn:
    """A stream of one prompt, which may end."""

    def __init__(self, prompt: Prompt = PROMPT, end: int = 100) -> None:
        self._prompt, self._end = prompt, end

    def at(self, prompt_index: int) -> Prompt:
        if prompt_index >= self._end:
            raise EndOfData("over")
        return self._prompt


def state(version: int = 2) -> RunState:
    pipeline_state = PipelineState(
        version=version, next_prompt_index=3, in_flight={1: "g000001", 2: "g000002"}, dropped={"stale": 1}
    )
    marks = {"rollouts.jsonl": Mark(offset=40, after="}")}
    return RunState(
        journal_marks=marks,
        pipeline_state=pipeline_state,
        wall_s=1.0,
        totals={},
        open_counts={"rollouts": 3},
        counted_marks=marks,
        busy_s={"policy": 1.0},
        alarms=("x",),
        features={"evaluation": {"initial": {"a": 0.5}, "judge_accuracy": {"judge": 0.75}}},
    )


def test_a_run_state_survives_its_file() -> None:
    assert RunState.from_json(state().to_json()) == state()


def test_a_group_whose_requests_killed_engines_is_not_asked_for_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.rollout(2, PROMPT, rollout("g000002", 0, 1))
    recorder.group_ended(
        GroupEnd(group_id="g000000", prompt_index=0, prompt_id="p", outcome="dropped", cause="rollout_killed_engines")
    )  # before the checkpoint
    for prompt_index, cause in ((1, "rollout_refused"), (2, "rollout_killed_engines"), (3, "rollout_killed_engines")):
        recorder.group_ended(
            GroupEnd(
                group_id=f"g00000{prompt_index}",
                prompt_index=prompt_index,
                prompt_id="p",
                outcome="dropped",
                cause=cause,
            )
        )
    recorder.close()
    kept = find_kept(tmp_path, state().pipeline_state, Drawn())
    assert {prompt_index: work.killed_engines for prompt_index, work in kept.items()} == {2: True, 3: True}


def test_a_recorded_verdict_that_is_no_number_is_judged_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for sibling, score in enumerate((math.nan, 5.0)):  # as earlier releases wrote it
        recorder.rollout(2, PROMPT, rollout("g000002", sibling, 1))
        report = JudgeReport(verdict=dataclasses.replace(VERDICT, score=score))
        recorder.record_verdict(rollout("g000002", sibling, 1), report)
    recorder.close()
    (kept,) = find_kept(tmp_path, state().pipeline_state, Drawn()).values()
    assert len(kept.rollouts) == 2
    assert kept.reports.keys() == {1}


def test_rollouts_up_to_the_cut_are_kept_with_their_verdicts(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    for sibling in (0, 1):
        journal.rollout(1, PROMPT, rollout("g000001", sibling, 1, 2))
    journal.record_verdict(rollout("g000001", 1, 1), JudgeReport(verdict=VERDICT))
    journal.close()
    kept = find_kept(tmp_path, state().pipeline_state, Drawn())[1]
    assert (kept.group_id, kept.renamed) == ("g000001", False)
    assert [r.sibling for r in kept.rollouts] == [0, 1]
    assert kept.reports[1].verdict == VERDICT
    assert 0 not in kept.reports


def test_work_after_the_checkpoint_is_void_and_its_group_gets_a_new_name(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(2, PROMPT, rollout("g000002", 0, 2))
    journal.rollout(2, PROMPT, rollout("g000002", 1, 2, 3))
    journal.record_verdict(rollout("g000002", 0, 2), JudgeReport(verdict=VERDICT))
    journal.close()
    kept = find_kept(tmp_path, state().pipeline_state, Drawn())[2]
    assert kept.renamed
    assert kept.group_id != "g000002"
    assert [(r.sibling, r.group_id) for r in kept.rollouts] == [(0, kept.group_id)]
    assert kept.reports[0].verdict == VERDICT


def test_work_after_the_counts_of_a_checkpoint_is_uncounted_once_and_void_work_is_not_kept_work(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(2, PROMPT, rollout("g000002", 0, 1))
    journal.record_verdict(rollout("g000002", 0, 1), JudgeReport(verdict=VERDICT))
    ends = journal.ends()
    late, void, report = rollout("g000002", 1, 2), rollout("g000002", 2, 3), JudgeReport(verdict=VERDICT)
    for one in (late, void):
        journal.rollout(2, PROMPT, one)
        journal.record_verdict(one, report)
    for sibling, version in enumerate((1, 2)):  # a resume wrote the kept ones again under the group's new name
        journal.rollout(2, PROMPT, rollout("g000002~1", sibling, version))
        journal.record_verdict(rollout("g000002~1", sibling, version), report)
    journal.close()
    uncounted = UncountedWork(rollouts=(late,), reports=(report,), void_rollouts=(void,), void_reports=(report,))
    kept = find_kept(tmp_path, state().pipeline_state, Drawn(), counted_marks=ends)[2]
    assert [one.sibling for one in kept.rollouts] == [0, 1] and kept.reports.keys() == {0, 1}
    assert kept.uncounted == uncounted
    assert find_kept(tmp_path, state().pipeline_state, Drawn())[2].uncounted == UncountedWork(), "an older checkpoint"


@pytest.mark.parametrize("counted", [False, True])
def test_verdicts_of_a_judge_that_is_put_back_are_void_and_their_rollouts_are_judged_again(
    tmp_path: Path, counted: bool
) -> None:
    """A judge in training: what it learned after the checkpoint is lost, its warm-up before the first one too."""
    journal = Recorder(tmp_path)
    ends = journal.ends()
    earlier, later = (JudgeReport(verdict=dataclasses.replace(VERDICT, grm_version=version)) for version in (3, 4))
    for sibling, report in enumerate((earlier, later)):
        journal.rollout(2, PROMPT, rollout("g000002", sibling, 2))
        journal.record_verdict(rollout("g000002", sibling, 2), report)
    ends = journal.ends() if counted else ends
    journal.close()
    at = dataclasses.replace(state().pipeline_state, judge_version=3)
    kept = find_kept(tmp_path, at, Drawn(), counted_marks=ends)[2]
    assert len(kept.rollouts) == 2 and not kept.renamed and kept.reports == {0: earlier}
    assert (kept.uncounted.reports, kept.uncounted.void_reports) == (((), ()) if counted else ((earlier,), (later,)))


def test_without_a_checkpoint_all_kept_work_is_uncounted(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(0, PROMPT, rollout("g000000", 0, 0))
    journal.record_verdict(rollout("g000000", 0, 0), JudgeReport(verdict=VERDICT))
    journal.close()
    (kept,) = find_kept(tmp_path, PipelineState(), Drawn(), counted_marks=BEGINNING.counted_marks).values()
    assert len(kept.uncounted.rollouts) == len(kept.uncounted.reports) == 1


def test_what_was_sampled_for_another_prompt_than_the_draws_is_void(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(2, PROMPT, rollout("g000002", 0, 1))
    journal.close()
    other = Prompt(prompt_id="p", messages=(Message(role="user", content="!"),))
    for prompts in (Drawn(other), Drawn(end=2)):
        kept = find_kept(tmp_path, state().pipeline_state, prompts)[2]
        assert kept.rollouts == ()
        assert kept.group_id != "g000002", "no name stands for two things"


def test_work_of_another_run_is_not_found(tmp_path: Path) -> None:
    Recorder(tmp_path, "theirs").rollout(2, PROMPT, rollout("g000002", 0, 1))
    Recorder(tmp_path, "ours").rollout(1, PROMPT, rollout("g000001", 0, 1))
    assert set(find_kept(tmp_path, state().pipeline_state, Drawn(), "ours")) == {1}


def test_a_resume_reads_no_line_from_before_the_groups_in_flight(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(0, PROMPT, rollout("g000000", 0, 1))
    journal.record_verdict(rollout("g000000", 0, 1), JudgeReport(verdict=VERDICT))
    journal.group_ended(GroupEnd(group_id="g000000", prompt_index=0, prompt_id="p", outcome="trained", step=1))
    journal.rollout(1, PROMPT, rollout("g000001", 0, 1))
    journal.record_verdict(rollout("g000001", 0, 1), JudgeReport(verdict=VERDICT))
    marks = journal.marks()
    journal.rollout(2, PROMPT, rollout("g000002", 0, 1))
    journal.group_ended(GroupEnd(group_id="g000002", prompt_index=2, prompt_id="p", outcome="dropped", cause="stale"))
    journal.close()
    whole = find_kept(tmp_path, state().pipeline_state, Drawn())
    for name in ("rollouts.jsonl", "judgements.jsonl"):  # reading these bytes would fail
        held = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"#" * 50 + held[50:])
    assert find_kept(tmp_path, state().pipeline_state, Drawn(), marks=marks) == whole
    assert set(whole) == {1, 2}
    void_group_ends(tmp_path, state().pipeline_state, mark=marks["groups.jsonl"])
    assert [end.group_id for end in load_group_ends(tmp_path / "groups.jsonl")] == ["g000000"]


def test_a_third_life_of_a_group_has_a_third_name(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(2, PROMPT, rollout("g000002", 0, 3))
    journal.rollout(2, PROMPT, rollout("g000002~1", 0, 3))
    journal.close()
    names = {"g000002", "g000002~1", find_kept(tmp_path, state().pipeline_state, Drawn())[2].group_id}
    assert len(names) == 3


def test_groups_that_ended_before_the_cut_are_left_alone_and_drawn_ones_beyond_it_are_kept(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.rollout(0, PROMPT, rollout("g000000", 0, 1))  # ended before the checkpoint
    journal.rollout(7, PROMPT, rollout("g000007", 0, 2))  # opened after it, by a version that still counts
    journal.close()
    assert set(find_kept(tmp_path, state().pipeline_state, Drawn())) == {7}


def test_ends_beyond_the_cut_leave_the_record(tmp_path: Path) -> None:
    journal = Recorder(tmp_path)
    journal.group_ended(
        GroupEnd(group_id="g000000", prompt_index=0, prompt_id="p0", outcome="trained", step=1, version=0)
    )
    journal.group_ended(
        GroupEnd(group_id="g000001", prompt_index=1, prompt_id="p1", outcome="trained", step=3, version=2)
    )
    journal.group_ended(GroupEnd(group_id="g000005", prompt_index=5, prompt_id="p5", outcome="dropped", cause="stale"))
    journal.close()
    void_group_ends(tmp_path, state().pipeline_state)
    assert [end.group_id for end in load_group_ends(tmp_path / "groups.jsonl")] == ["g000000"]


def record_steps(run_dir: Path, *steps: int) -> dict[str, Mark]:
    """Journals of these steps, each with an evaluation; their marks."""
    recorder, evaluations = Recorder(run_dir, "ours"), EvalRecorder(run_dir, "ours")
    for step in steps:
        recorder.record_training([TrainedRollout(group_id=f"g{step}", sibling=0, step=step)])
        answers, answer = evaluations.of_evaluation("held_out", step), rollout(f"held-out-{step}-0", 0, step)
        answers.rollout(PROMPT, answer, 0, None)
        answers.record_verdict(answer, JudgeReport(verdict=VERDICT))
        evaluations.evaluation_ended()
    return recorder.marks() | evaluations.marks


def steps_on_file(run_dir: Path) -> list[list[int]]:
    names = ("trained.jsonl", "eval_rollouts.jsonl", "eval_judgements.jsonl")
    return [[line["step"] for line in read_journal(run_dir / name, run_id="ours")] for name in names]


@pytest.mark.parametrize("has_marks", [True, False])
def test_steps_and_evaluations_after_the_checkpoint_are_removed_with_a_torn_tail(
    tmp_path: Path, has_marks: bool
) -> None:
    marks = record_steps(tmp_path, 1, 2)
    record_steps(tmp_path, 3, 4)
    for name in ("trained.jsonl", "eval_rollouts.jsonl", "eval_judgements.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step":5,"torn')
    void_steps_after(tmp_path, 2, marks if has_marks else {}, "ours")
    assert steps_on_file(tmp_path) == [[1, 2]] * 3
    record_steps(tmp_path, 3)
    assert steps_on_file(tmp_path) == [[1, 2, 3]] * 3


def test_a_run_without_a_checkpoint_begins_with_empty_journals_of_its_steps(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 1)
    void_steps_after(tmp_path, 0, BEGINNING.journal_marks, "ours")
    assert steps_on_file(tmp_path) == [[]] * 3


def test_a_disk_that_refuses_fails_no_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trained.jsonl").mkdir()
    void_steps_after(tmp_path, 2, {})
    assert "trained.jsonl keeps lines from after the checkpoint" in caplog.text
