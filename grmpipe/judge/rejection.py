"""Which critiques a judge learns to imitate, and the hint that a hard lesson gets. Pure: asks no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from grmpipe.judge.labels import BEST_LABEL
from grmpipe.types import Prompt, Rollout
from models.types import Message

Fate = Literal["kept", "too_easy", "none_right", "hinted", "too_long"]  # of a lesson


def kept_of(rollouts: Sequence[Rollout], right: Sequence[bool]) -> tuple[Fate, tuple[Rollout, ...]]:
    """Right critiques of a lesson that isn't right every time."""
    if all(right):
        return "too_easy", ()
    kept = tuple(rollout for rollout, is_right in zip(rollouts, right, strict=True) if is_right)
    return ("kept", kept) if kept else ("none_right", ())


def hinted(lesson: Prompt) -> Prompt:
    """The lesson with its label told, in SPCT's words."""
    assert lesson.reference is not None, f"{lesson.prompt_id}: lessons have labels"
    (message,) = lesson.messages
    told = Message(role=message.role, content=f"{message.content}\n\n{hint_of(lesson.reference)}")
    return dataclasses.replace(lesson, messages=(told,))


def hint_of(label: str) -> str:
    if match := BEST_LABEL.fullmatch(label):
        return f"The best response is: Response {match[1]}"
    return f"The true score is: {label.removeprefix('exactly ')}"


def without_hint(rollout: Rollout, prompt_ids: tuple[int, ...]) -> Rollout:
    """A critique as if it had been written in answer to the plain lesson."""
    (turn,) = rollout.turns
    return dataclasses.replace(rollout, turns=(dataclasses.replace(turn, prompt_ids=prompt_ids),))
