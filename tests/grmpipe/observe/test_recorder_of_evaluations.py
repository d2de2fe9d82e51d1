"""The journals of evaluations: what is written is read back, and their marks end with the last complete evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.journal import Mark
from grmpipe.observe.recorder import (
    EVAL_JUDGEMENTS,
    EVAL_ROLLOUTS,
    EvalJudgement,
    EvalRecorder,
    EvalRollout,
    load_eval_judgements,
    load_eval_rollouts,
)
from grmpipe.types import Failed, JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict

PROMPT = Prompt(prompt_id="p0", messages=(Message(role="user", content="1 + 1?"),), reference="2")
VERDICT = Verdict(
    rewards=(RewardSpan(turn=0, start=0, end=2, value=0.5),), score=5.0, breakdown={}, score_std=0.0, num_judgements=1
)
LOST = Failed(stage="judge", cause="timeout", attempts=2)


def answer(group_id: str) -> Rollout:
    spans = (VersionSpan(model="policy", version=4, start=0, end=2),)
    completion = Completion(
        token_ids=(3, 4), logprobs=(-0.5, -1.0), text="Answer: 2", finish_reason="stop", versions=spans
    )
    return Rollout(
        group_id=group_id, sibling=0, turns=(Turn(new_ids=(1, 2), completion=completion),), status="finished"
    )


def evaluate(recorder: EvalRecorder, step: int | None, *names: str) -> None:
    answers = recorder.of_evaluation("held_out", step)
    for name in names:
        answers.rollout(PROMPT, answer(name), 0, 1.0)
        answers.record_verdict(answer(name), JudgeReport(verdict=VERDICT))


@pytest.mark.parametrize("step", [None, 0, 30])
@pytest.mark.parametrize("verdict", [VERDICT, LOST])
def test_an_answer_and_its_verdict_come_back_equal(tmp_path: Path, step: int | None, verdict: Verdict | Failed) -> None:
    recorder, report = EvalRecorder(tmp_path, "ours"), JudgeReport(verdict=verdict)
    evaluation = recorder.of_evaluation("held_out", step)
    evaluation.rollout(PROMPT, answer("g"), None, None)
    evaluation.record_verdict(answer("g"), report)
    assert list(load_eval_rollouts(tmp_path / EVAL_ROLLOUTS, run_id="ours")) == [
        EvalRollout(prompts="held_out", step=step, sample=None, right=None, prompt=PROMPT, rollout=answer("g"))
    ]
    assert list(load_eval_judgements(tmp_path / EVAL_JUDGEMENTS, run_id="ours")) == [
        EvalJudgement(prompts="held_out", step=step, group_id="g", sibling=0, report=report)
    ]


def test_the_marks_end_with_the_last_complete_evaluation(tmp_path: Path) -> None:
    recorder = EvalRecorder(tmp_path)
    evaluate(recorder, 0, "cut off")
    assert recorder.marks == {EVAL_ROLLOUTS: Mark(), EVAL_JUDGEMENTS: Mark()}
    recorder.evaluation_ended()
    sizes = {name: (tmp_path / name).stat().st_size for name in recorder.marks}
    evaluate(recorder, 3, "goes on")
    assert {name: mark.offset for name, mark in recorder.marks.items()} == sizes
    resumed = EvalRecorder(tmp_path)
    resumed.go_on(recorder.marks)
    assert resumed.marks == recorder.marks, "interrupted before its next evaluation"


def test_a_full_disk_raises_nothing_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / EVAL_JUDGEMENTS).symlink_to("/dev/full")
    recorder = EvalRecorder(tmp_path)
    evaluate(recorder, 0, "a", "b")
    recorder.evaluation_ended()
    recorder.close()
    assert recorder.failures[EVAL_JUDGEMENTS] >= 2 and EVAL_ROLLOUTS not in recorder.failures
    assert len(list(load_eval_rollouts(tmp_path / EVAL_ROLLOUTS))) == 2
