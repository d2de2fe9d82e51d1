"""What a GRM that learns is asked: balanced by class, its own run's rollouts as often as one says."""

from __future__ import annotations

import asyncio

from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.data.stream import PromptStream
from grmpipe.judge.labels import Lessons
from grmpipe.judge.rule import RULES
from grmpipe.run.cotrain.judging_tasks import LessonStream
from grmpipe.types import Prompt, Rollout, Turn
from models.types import Completion, Message

QUESTION = Prompt(prompt_id="q", messages=(Message(role="user", content="6 x 7?"),), reference="42")
STORED = Prompt(prompt_id="stored", messages=(Message(role="user", content="judge!"),), reference="below 8")


def rollout(text: str, sibling: int = 0) -> Rollout:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", versions=())
    turn = Turn(prompt_ids=(5,), completion=completion)
    return Rollout(group_id="g", sibling=sibling, turns=(turn,), status="finished")


def stream(*, own_share: float = 0.5, stored: bool = True, window: int = 8) -> LessonStream:
    lessons = Lessons.under(JudgeConfig(), LabelConfig())
    kept = PromptStream([STORED]) if stored else None
    return LessonStream(lessons, RULES["exact_answer"], kept, own_share=own_share, window=window, seed=0)


def labels(lessons: LessonStream, draws: int) -> list[str | None]:
    return [lessons.at(draw).reference for draw in range(draws)]


def test_right_and_wrong_rollouts_come_by_turns_however_rare_one_of_them_is() -> None:
    lessons = stream(stored=False)
    lessons.add(QUESTION, rollout("42"))
    for sibling in range(1, 50):
        lessons.add(QUESTION, rollout("41", sibling))
    assert labels(lessons, 6) == ["at least 8", "below 8"] * 3


def test_own_rollouts_have_the_share_that_was_asked_for() -> None:
    lessons = stream(own_share=0.25)
    lessons.add(QUESTION, rollout("42"))
    lessons.add(QUESTION, rollout("41"))
    drawn = [lessons.at(draw).prompt_id for draw in range(40)]
    assert sum(name != "stored" for name in drawn) == 10


def test_until_there_are_rollouts_of_both_kinds_stored_lessons_stand_in() -> None:
    lessons = stream(own_share=1.0)
    lessons.add(QUESTION, rollout("41"))
    assert [lessons.at(draw).prompt_id for draw in range(3)] == ["stored"] * 3


def test_without_stored_lessons_one_waits_for_rollouts_of_both_kinds() -> None:
    asyncio.run(wait_for_both_kinds())


async def wait_for_both_kinds() -> None:
    lessons = stream(stored=False)
    waiting = asyncio.ensure_future(lessons.until_usable())
    lessons.add(QUESTION, rollout("41"))
    await asyncio.sleep(0)
    assert not waiting.done()
    lessons.add(QUESTION, rollout("42"))
    await waiting


def test_old_rollouts_make_room_for_new_ones_and_unruled_ones_are_left_out() -> None:
    lessons = stream(stored=False, window=1)
    lessons.add(Prompt(prompt_id="x", messages=QUESTION.messages, reference="no number"), rollout("7"))
    lessons.add(Prompt(prompt_id="y", messages=QUESTION.messages), rollout("7"))
    for sibling in range(4):
        lessons.add(QUESTION, rollout("42", sibling))
    lessons.add(QUESTION, rollout("41", 9))
    assert {lessons.at(draw).prompt_id for draw in range(8)} == {"g/3", "g/9"}
