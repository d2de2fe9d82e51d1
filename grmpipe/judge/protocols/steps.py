"""Cuts a rollout on token boundaries into steps for a process reward. Pure; scores nothing.

A step is a turn or, if `step_end` isn't empty, ends with the token that completes `step_end`. A step without a word
joins the one before it; after `max_steps` steps the rest belongs to the last one. So each sampled token is in exactly
one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grmpipe.types import Rollout

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStep:
    """Tokens [start, end) of a turn, and their text."""

    turn: int
    start: int
    end: int
    text: str


def steps_of(rollout: Rollout, step_end: str, max_steps: int, decode: Decode) -> tuple[ResponseStep, ...]:
    """The steps of a rollout: at least one per turn that has tokens; `max_steps` counts within a turn."""
    steps: list[ResponseStep] = []
    for index, turn in enumerate(rollout.turns):
        token_ids = turn.completion.token_ids
        if not step_end or not token_ids:  # a text that was not sampled has no tokens to cut at
            steps.append(ResponseStep(turn=index, start=0, end=len(token_ids), text=turn.completion.text))
            continue
        cuts = cuts_of(token_ids, step_end, decode)[: max_steps - 1]
        borders = [0, *cuts, len(token_ids)]
        steps += [
            ResponseStep(turn=index, start=start, end=end, text=decode(token_ids[start:end]))
            for start, end in itertools.pairwise(borders)
        ]
    return tuple(steps)


def cuts_of(token_ids: Sequence[int], step_end: str, decode: Decode) -> list[int]:
    """Indices where one step ends and another begins: never at the end of the tokens, never before a step without a
    word.
    """
    cuts: list[int] = []
    start = 0
    for place, token_id in enumerate(token_ids, start=1):
        if step_end[-1] in decode([token_id]) and step_end in decode(token_ids[start:place]):
            cuts.append(place)
            start = place
    kept: list[int] = []
    for cut, following in itertools.pairwise([*cuts, len(token_ids)]):
        if decode(token_ids[cut:following]).strip():
            kept.append(cut)
    if kept and not decode(token_ids[: kept[0]]).strip():
        del kept[0]
    return kept
