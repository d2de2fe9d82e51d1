"""A rollout as a judge reads it: what the policy and its environment said, in order, cut to the judge's window. Pure.

Long observations lose their middle first, then the middle turns, then all texts. What is left out is said in a note, a
line that neither the policy nor its environment can write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grmpipe.judge.grm import GrmPrompt
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

    @property
    def policy_text(self) -> str:
        """What the policy wrote, without other voices."""
        return "\n".join(passage.text for passage in self.passages if passage.voice == "policy")

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


Rendered = Callable[[Sequence[Trajectory]], GrmPrompt]  # responses -> the prompt that shows them

OBSERVATION_CHARS = 200  # what an observation keeps before turns are left out
FEWEST_TURNS = 2  # the first and the last one


def truncate_to_fit(
    render: Rendered, responses: Sequence[Trajectory], room: int | None, truncation: str
) -> GrmPrompt | str:
    """The prompt in at most `room` tokens, or the reason in words why there is none.

    truncation: `error`, or `middle`: the longest texts lose their middle, down to the same length.
    """
    whole = render(responses)
    if room is None or whole.num_tokens <= room:
        return whole
    if truncation == "middle" and (cut := longest_that_fits(render, responses, room)) is not None:
        return cut
    return f"{whole.num_tokens} tokens; the limit is {room}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortening:
    """One way to shorten a response, from `most`, which changes nothing, down to `least`."""

    most: int
    least: int
    to: Callable[[Trajectory, int], Trajectory]


def longest_that_fits(render: Rendered, responses: Sequence[Trajectory], room: int) -> GrmPrompt | None:
    """The longest prompt that fits. Each way to shorten is used up before the next. None if nothing fits."""
    for way in ways_to_shorten(responses):
        shortest = [way.to(response, way.least) for response in responses]
        fits, best = way.least - 1, None
        too_many = way.most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            prompt = render([way.to(response, middle) for response in responses])
            if prompt.num_tokens <= room:
                fits, best = middle, prompt
            else:
                too_many = middle
        if best is not None:
            return best
        responses = shortest
    return None


def ways_to_shorten(responses: Sequence[Trajectory]) -> Iterator[Shortening]:
    """The ways in their order, without those that would change nothing."""
    passages = [passage for response in responses for passage in response.passages]
    observed = max((len(one.text) for one in passages if one.voice == "environment"), default=0)
    if observed > OBSERVATION_CHARS:
        yield Shortening(most=observed, least=OBSERVATION_CHARS, to=with_short_observations)
    num_turns = max(len({one.turn for one in response.passages}) for response in responses)
    if num_turns > FEWEST_TURNS:
        yield Shortening(most=num_turns, least=FEWEST_TURNS, to=without_middle_turns)
    longest = max((len(one.text) for one in passages if one.voice != "note"), default=0)
    yield Shortening(most=longest, least=1, to=with_short_texts)


def with_short_observations(response: Trajectory, num_kept: int) -> Trajectory:
    """Every text of the environment with at most this many characters."""
    return Trajectory(
        passages=tuple(
            part
            for passage in response.passages
            for part in (shorten_passage(passage, num_kept) if passage.voice == "environment" else (passage,))
        )
    )


def without_middle_turns(response: Trajectory, num_kept: int) -> Trajectory:
    """The first and the last turns, and between them a note that says how many are left out."""
    turns = sorted({passage.turn for passage in response.passages})
    if len(turns) <= num_kept:
        return response
    head, tail = turns[: (num_kept + 1) // 2], turns[len(turns) - num_kept // 2 :]
    note = Passage(voice="note", text=f"[... {len(turns) - num_kept} turns left out ...]", turn=head[-1])
    before = (passage for passage in response.passages if passage.turn <= head[-1])
    after = (passage for passage in response.passages if tail and passage.turn >= tail[0])
    return Trajectory(passages=(*before, note, *after))


def with_short_texts(response: Trajectory, num_kept: int) -> Trajectory:
    """Every text with at most this many characters."""
    if len(response.passages) == 1 and response.is_of_policy:
        return response.change_texts(lambda text: without_middle(text, num_kept))
    parts = (part for passage in response.passages for part in shorten_passage(passage, num_kept))
    return Trajectory(passages=tuple(parts))


def shorten_passage(passage: Passage, num_kept: int) -> tuple[Passage, ...]:
    """A passage without its middle, and in its place a note; the passage itself if the note would be longer."""
    text, voice, turn = passage.text, passage.voice, passage.turn
    left_out = f"[... {len(text) - num_kept} characters of the {voice} left out ...]"
    if voice == "note" or len(text) <= num_kept + len(left_out):
        return (passage,)
    tail = num_kept // 2
    return (
        Passage(voice=voice, text=text[: num_kept - tail], turn=turn),
        Passage(voice="note", text=left_out, turn=turn),
        Passage(voice=voice, text=text[len(text) - tail :], turn=turn),
    )


def without_middle(text: str, num_kept: int) -> str:
    """The first and last characters of a text, and between them a line that says how many are left out."""
    if len(text) <= num_kept:
        return text
    head = (num_kept + 1) // 2
    tail = num_kept - head
    return f"{text[:head]}\n[... {len(text) - num_kept} characters cut ...]\n{text[len(text) - tail :]}"
