"""The judging tasks of a GRM in training: balanced by class, with the configured share of the run's own rollouts."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.data.stream import PromptStream
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.judge.kinds.rule import rule_named
from grmpipe.models.types import Completion, Message
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream
from grmpipe.types import Criterion, Prompt, Rollout, Turn

QUESTION = Prompt(prompt_id="q", messages=(Message(role="user", content="6 x 7?"),), reference="42")
STORED = Prompt(prompt_id="stored", messages=(Message(role="user", content="judge!"),), reference="below 8")


def rollout(text: str, sibling: int = 0) -> Rollout:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", versions=())
    turn = Turn(new_ids=(5,), completion=completion)
    return Rollout(group_id="g", sibling=sibling, turns=(turn,), status="finished")


def stream(*, rollout_share: float = 0.5, stored: bool = True, window: int = 8) -> JudgingTaskStream:
    judging_tasks = JudgingTasks.under(JudgeConfig(), LabelConfig())
    kept = PromptStream([STORED]) if stored else None
    return JudgingTaskStream(
        judging_tasks, rule_named("exact_answer"), kept, rollout_share=rollout_share, window=window, seed=0
    )


async def usable(judging_tasks: JudgingTaskStream, *, may_come: bool, warm: bool = False) -> None:
    await judging_tasks.until_usable(may_come=lambda: may_come, warm=lambda: warm)


def labels(judging_tasks: JudgingTaskStream, prompt_indices: int) -> list[str | None]:
    return [judging_tasks.at(prompt_index).reference for prompt_index in range(prompt_indices)]


def test_right_and_wrong_rollouts_alternate_even_if_one_of_them_is_rare() -> None:
    judging_tasks = stream(stored=False)
    judging_tasks.add(QUESTION, rollout("42"))
    for sibling in range(1, 50):
        judging_tasks.add(QUESTION, rollout("41", sibling))
    assert labels(judging_tasks, 6) == ["at least 8", "below 8"] * 3


def test_tasks_on_one_criterion_alternate_within_each_criterion() -> None:
    judging_tasks = stream(stored=False)
    known = [("right", True), ("right", True), ("right", False), ("short", False), ("short", True), ("funny", False)]
    for number, (text, met) in enumerate(known):
        task = dataclasses.replace(STORED, prompt_id=f"{number}", rubric=(Criterion(text=text),), reference=str(met))
        judging_tasks.add_task(met, task)
    drawn = [judging_tasks.at(index) for index in range(8)]
    asked = [(task.rubric[0].text, task.reference) for task in drawn]
    assert asked == [(text, met) for text in ("right", "short") for met in ("True", "False")] * 2, "funny is never met"


def test_own_rollouts_have_the_share_that_was_asked_for() -> None:
    judging_tasks = stream(rollout_share=0.25)
    judging_tasks.add(QUESTION, rollout("42"))
    judging_tasks.add(QUESTION, rollout("41"))
    drawn = [judging_tasks.at(prompt_index).prompt_id for prompt_index in range(40)]
    assert sum(name != "stored" for name in drawn) == 10


def test_stored_judging_tasks_are_used_until_both_kinds_of_rollouts_exist() -> None:
    judging_tasks = stream(rollout_share=1.0)
    judging_tasks.add(QUESTION, rollout("41"))
    assert [judging_tasks.at(prompt_index).prompt_id for prompt_index in range(3)] == ["stored"] * 3


def test_without_stored_judging_tasks_one_waits_for_rollouts_of_both_kinds() -> None:
    asyncio.run(wait_for_both_kinds())


async def wait_for_both_kinds() -> None:
    judging_tasks = stream(stored=False)
    waiting = asyncio.ensure_future(usable(judging_tasks, may_come=True))
    judging_tasks.add(QUESTION, rollout("41"))
    await asyncio.sleep(0)
    assert not waiting.done()
    judging_tasks.add(QUESTION, rollout("42"))
    await waiting


def test_a_warm_up_on_rollouts_of_one_kind_is_refused_once_no_others_can_come() -> None:
    judging_tasks = stream(stored=False)
    judging_tasks.add(QUESTION, rollout("41"))
    with pytest.raises(
        ValueError, match=r"grm\.train\.data_path: is null, .* 0 of the first responses are right and 1 wrong"
    ):
        asyncio.run(usable(judging_tasks, may_come=False))


def test_after_the_warm_up_one_kind_is_used_if_no_others_can_come() -> None:
    judging_tasks = stream(stored=False)
    judging_tasks.add(QUESTION, rollout("42"))
    asyncio.run(usable(judging_tasks, may_come=False, warm=True))
    assert labels(judging_tasks, 3) == ["at least 8"] * 3
    judging_tasks.add(QUESTION, rollout("41"))
    assert labels(judging_tasks, 2) == ["at least 8", "below 8"]


def test_old_rollouts_make_room_for_new_ones_and_unruled_ones_are_left_out() -> None:
    judging_tasks = stream(stored=False, window=1)
    judging_tasks.add(Prompt(prompt_id="x", messages=QUESTION.messages, reference="no number"), rollout("7"))
    judging_tasks.add(Prompt(prompt_id="y", messages=QUESTION.messages), rollout("7"))
    for sibling in range(4):
        judging_tasks.add(QUESTION, rollout("42", sibling))
    judging_tasks.add(QUESTION, rollout("41", 9))
    assert {judging_tasks.at(prompt_index).prompt_id for prompt_index in range(8)} == {"g/3", "g/9"}


def test_a_rollout_that_another_judge_judged_has_its_score_as_label_and_both_sides_alternate() -> None:
    graded = JudgingTasks.under(JudgeConfig(), LabelConfig(rule="graded"))
    tasks = JudgingTaskStream(graded, None, None, rollout_share=1, window=8, seed=0, pass_reward=0.7)
    tasks.add(QUESTION, rollout("42"))
    tasks.add_judged(QUESTION, rollout("41", 1), 0.5, 5.5)
    assert not tasks.is_usable
    tasks.add_judged(QUESTION, rollout("42", 2), 0.9, 9.1)
    assert tasks.is_usable and labels(tasks, 4) == ["graded 9.1", "graded 5.5"] * 2


def test_what_people_have_labelled_so_far_takes_the_place_of_own_rollouts() -> None:
    judging_tasks = stream(stored=True)
    for name in ("first", "second"):
        judging_tasks.replace_annotated([Prompt(prompt_id=name, messages=STORED.messages, reference="below 8")])
        assert [judging_tasks.at(index).prompt_id for index in range(4)] == ["stored", name] * 2
