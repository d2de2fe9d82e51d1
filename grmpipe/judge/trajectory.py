"""A rollout as a judge reads it: what the policy and its environment said, in order. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from grmpipe.models.types import Message
from grmpipe.types import Prompt, Rollout, TruncationReason

Voice = Literal["policy", "environment", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What one voice said at once. A note is ours: it says what was left out.

    turn: to which it belongs; the environment's opening belongs to the first one.
    """

    voice: Voice
    text: str
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The passages of a rollout, or of a part of it."""

    passages: tuple[Passage, ...]

    @property
    def is_of_policy(self) -> bool:
        """Whether the policy's is the only voice."""
        return all(passage.voice == "policy" for passage in self.passages)

    @property
    def has_environment(self) -> bool:
        return any(passage.voice == "environment" for passage in self.passages)

    def change_texts(self, change: Callable[[str], str]) -> Trajectory:
        """The trajectory with every text of the policy and of the environment changed; the notes stay."""
        return Trajectory(
            passages=tuple(
                passage if passage.voice == "note" or text is passage.text else replace(passage, text=text)
                for passage in self.passages
                for text in (change(passage.text),)
            )
        )


def of_text(text: str) -> Trajectory:
    """A text of the policy, without an environment."""
    return Trajectory(passages=(Passage(voice="policy", text=text),))


def make_trajectory(prompt: Prompt, rollout: Rollout, *, thoughts: bool) -> Trajectory:
    """The whole rollout. thoughts: whether the policy's are shown."""
    opening = show_opening(prompt, rollout)
    turns = (passage for turn in range(len(rollout.turns)) for passage in show_turn(rollout, turn, thoughts=thoughts))
    return Trajectory(passages=(*opening, *turns))


CUT_BY: dict[TruncationReason, str] = {
    "": "a limit",
    "tokens": "the limit on its length",
    "turns": "the limit on its turns",
    "context": "the end of the context window",
    "time": "the limit on its time",
}


def note_truncation(shown: Trajectory, rollout: Rollout) -> Trajectory:
    """With a note at the end of a rollout that was truncated."""
    if rollout.status != "truncated":
        return shown
    text = f"[The response was cut off by {CUT_BY[rollout.reason]}.]"
    return Trajectory(passages=(*shown.passages, Passage(voice="note", text=text, turn=len(rollout.turns) - 1)))


def show_opening(prompt: Prompt, rollout: Rollout) -> tuple[Passage, ...]:
    """The messages that the environment began with, without those of the prompt, which are the judge's question."""
    new = (message for message in rollout.opening if message not in prompt.messages)
    return tuple(Passage(voice="environment", text=message.content) for message in new)


EDITED = "[The next message is the assistant's in the history that the agent wrote: the policy did not write it so.]"
BRANCH = "[Here the agent goes on in another conversation: a sub-agent's, or one with a rewritten history.]"


def show_turn(rollout: Rollout, turn: int, *, thoughts: bool) -> Iterator[Passage]:
    """What the policy wrote in a turn, its calls as it wrote them, and the environment's replies. Before it, where the
    turn doesn't continue the one before: a note, and what is new in its history.
    """
    yield from branch_at(rollout, turn)
    completion = rollout.turns[turn].completion
    yield Passage(voice="policy", text=completion.text if thoughts else completion.answer, turn=turn)
    yield from show_replies(rollout, turn)


def branch_at(rollout: Rollout, turn: int) -> Iterator[Passage]:
    """The note in front of a turn that doesn't continue the one before, and what is new in its history; nothing in
    front of others.
    """
    if rollout.turns[turn].rewritten:
        yield Passage(voice="note", text=BRANCH, turn=turn)
        for message in rollout.turns[turn - 1].replies if turn else ():
            yield from show_history(message, turn)


def show_history(message: Message, turn: int) -> Iterator[Passage]:
    """A message of a history that the agent wrote. It is never the policy's voice."""
    if message.role == "assistant":
        yield Passage(voice="note", text=EDITED, turn=turn)
    calls = (f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls)
    yield Passage(voice="environment", text="\n".join(filter(None, (message.content, *calls))), turn=turn)


def show_replies(rollout: Rollout, turn: int) -> Iterator[Passage]:
    """The environment's replies to a turn; none in front of a branch, to which they belong."""
    if turn + 1 < len(rollout.turns) and rollout.turns[turn + 1].rewritten:
        return
    for message in rollout.turns[turn].replies:
        yield Passage(voice="environment", text=message.content, turn=turn)
