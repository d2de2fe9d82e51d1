"""Which critiques are imitated, and what a hint shows."""

from __future__ import annotations

import pytest

from grmpipe.judge.kinds.label_format import describe_label
from grmpipe.judge.kinds.labels import add_hint, keep_critiques, without_hint
from grmpipe.models.types import Completion, Message
from grmpipe.types import Prompt, Rollout, Turn


def critique(sibling: int) -> Rollout:
    completion = Completion(token_ids=(7, 8), logprobs=(0.0, 0.0), text="", finish_reason="stop", versions=())
    turn = Turn(new_ids=(1, 2, 3), completion=completion)
    return Rollout(group_id="g", sibling=sibling, turns=(turn,), status="finished")


@pytest.mark.parametrize(
    ("right", "fate", "kept"),
    [
        ((True, True, True), "too_easy", ()),
        ((True, False, True), "kept", (0, 2)),
        ((False, False, True), "kept", (2,)),
        ((False, False, False), "none_right", ()),
    ],
)
def test_right_critiques_of_judging_tasks_that_arent_too_easy_are_kept(
    right: tuple[bool, ...], fate: str, kept: tuple[int, ...]
) -> None:
    told, rollouts = keep_critiques([critique(0), critique(1), critique(2)], right)
    assert (told, tuple(rollout.sibling for rollout in rollouts)) == (fate, kept)


@pytest.mark.parametrize(
    ("label", "hint"),
    [
        ("best 2 of 4", "The best response is: Response 2"),
        ("exactly 7", "The true score is: 7"),
        ("at least 8", "The true score is: at least 8"),
    ],
)
def test_a_hint_tells_the_label_at_the_end_of_the_judging_task(label: str, hint: str) -> None:
    judging_task = Prompt(prompt_id="p", messages=(Message(role="user", content="Judge this."),), reference=label)
    assert describe_label(label) == hint
    assert add_hint(judging_task).messages[0].content == f"Judge this.\n\n{hint}"


def test_a_hinted_critique_is_trained_as_an_answer_to_the_plain_judging_task() -> None:
    told = critique(3)
    plain = without_hint(told, (1, 2))
    assert plain.turns[0].new_ids == (1, 2)
    assert plain.turns[0].completion is told.turns[0].completion
