"""Dialogues to imitate: with a calculator, and in a key-value store; and judgements of calls. Pure: text only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from models.tiny.calculator import (
    TOOLS,
    Carelessness,
    CheckedCall,
    Episode,
    careless_episode,
    corrupted_episode,
    display,
    final,
    judge_prompt_of_view,
    judgement_of_calls,
    near_call,
    right_episode,
)
from models.tiny.malformed_views import malformed_view
from models.tiny.problems import Problem
from models.tiny.sft_examples import SftExample
from models.tiny.walks import Haste, Walk, hasty_turns, name_visited, right_turns, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message. With the role `tools` it is the list that the chat template makes of them."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation, of which each message of the assistant is imitated."""

    messages: tuple[Said, ...]


def messages_of(example: SftExample | Dialogue) -> tuple[Said, ...]:
    if isinstance(example, Dialogue):
        return example.messages
    return Said(role="user", text=example.prompt), Said(role="assistant", text=example.response)


def dialogue(opening: Sequence[Said], turns: Sequence[str], replies: Sequence[Said]) -> Dialogue:
    """The assistant's turns with a reply after each but the last."""
    messages = list(opening)
    for turn, reply in zip(turns, replies, strict=False):
        messages += [Said(role="assistant", text=turn), reply]
    return Dialogue(messages=(*messages, Said(role="assistant", text=turns[-1])))


def opening_with_tools(question: str) -> tuple[Said, ...]:
    return Said(role="tools", text=TOOLS), Said(role="user", text=question)


def with_calculator(problem: Problem, episode: Episode) -> Dialogue:
    replies = [Said(role="tool", text=display(call.result)) for call in episode.calls]
    return dialogue(opening_with_tools(problem.question), [*map(str, episode.calls), final(episode.answer)], replies)


def call_rightly(problem: Problem, rng: random.Random) -> Dialogue:
    return with_calculator(problem, right_episode(problem))


def call_carelessly(problem: Problem, rng: random.Random) -> Dialogue:
    return with_calculator(problem, careless_episode(problem, Carelessness(), rng))


def in_store(walk: Walk, turns: Sequence[str]) -> Dialogue:
    names = [name for name in map(name_visited, turns) if name]
    replies = [Said(role="user", text=shown(name, walk.graph[name])) for name in names]
    return dialogue([Said(role="user", text=walk.question)], turns, replies)


def walk_rightly(walk: Walk, rng: random.Random) -> Dialogue:
    return in_store(walk, right_turns(walk))


def walk_hastily(walk: Walk, rng: random.Random) -> Dialogue:
    return in_store(walk, hasty_turns(walk, Haste(), rng))


def right_view(problem: Problem, rng: random.Random) -> str:
    return right_episode(problem).view


def careless_view(problem: Problem, rng: random.Random) -> str:
    """A view from careful to careless, as of a policy in training."""
    carelessness = Carelessness(
        read_minus_as_plus=rng.choice((0.1, 0.3, 0.6)),
        miscopy=rng.choice((0.02, 0.1)),
        skip=rng.choice((0.02, 0.1)),
        twice=rng.choice((0.02, 0.1)),
        old_result=rng.choice((0.02, 0.1)),
    )
    return careless_episode(problem, carelessness, rng).view


def corrupted_view(problem: Problem, rng: random.Random) -> str:
    return corrupted_episode(problem, rng).view


def judge_calls(write: Callable[[Problem, random.Random], str], problem: Problem, rng: random.Random) -> SftExample:
    view = write(problem, rng)
    return SftExample(prompt=judge_prompt_of_view(problem.question, view), response=judgement_of_calls(problem, view))


def drill_calls(problem: Problem, rng: random.Random) -> SftExample:
    """An example that only reads and compares calls: short, so that a judge sees many of them."""
    asked, checked = [], []
    for call in careless_episode(problem, Carelessness(), rng).calls:
        right = call if rng.random() < 0.5 else near_call(call, rng)
        asked.append(f"{right.sum} / {call}")
        checked.append(str(CheckedCall(right=right.sum, called=call.sum)))
    return SftExample(prompt=f"Check: {'; '.join(asked)}", response=f"Check: {'; '.join(checked)}")


CALCULATOR_TASKS: dict[str, Callable[[Problem, random.Random], SftExample | Dialogue]] = {
    "call_rightly": call_rightly,
    "call_carelessly": call_carelessly,
    "drill_calls": drill_calls,
    "judge_right_calls": partial(judge_calls, right_view),
    "judge_careless_calls": partial(judge_calls, careless_view),
    "judge_corrupted_calls": partial(judge_calls, corrupted_view),
    "judge_malformed_calls": partial(judge_calls, malformed_view),
}
WALK_TASKS: dict[str, Callable[[Walk, random.Random], Dialogue]] = {
    "walk_rightly": walk_rightly,
    "walk_hastily": walk_hastily,
}
