"""Plays a tiny policy with a calculator or in a key-value store, in batches. Trains and judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from models.tiny.calculator import MAX_CALLS, display, parse_call
from models.tiny.dialogues import Said, opening_with_tools
from models.tiny.evaluate import BATCH_SIZE, Speaker
from models.tiny.problems import Problem
from models.tiny.tokenizer import encode_opening
from models.tiny.walks import MAX_VISITS, Walk, name_visited, shown

MAX_TURN_TOKENS = 16
Reply = Callable[[str], Said | None]  # to a turn of the policy; None: the episode has ended


def play_with_calculator(
    policy: Speaker, problems: Sequence[Problem], seed: int, greedy: bool = False
) -> list[tuple[Said, ...]]:
    """The messages after each opening, in order. A turn without a call ends an episode."""
    openings = [opening_with_tools(problem.question) for problem in problems]
    return play(policy, openings, [show_result] * len(problems), MAX_CALLS + 1, seed, greedy)


def show_result(turn: str) -> Said | None:
    call = parse_call(turn)
    return Said(role="tool", text=display(call.result)) if call else None


def play_in_store(policy: Speaker, walks: Sequence[Walk], seed: int, greedy: bool = False) -> list[tuple[Said, ...]]:
    """The same in the store of each walk. A turn that asks for no name ends an episode."""
    openings = [(Said(role="user", text=walk.question),) for walk in walks]
    return play(policy, openings, [store_of(walk) for walk in walks], MAX_VISITS + 1, seed, greedy)


def store_of(walk: Walk) -> Reply:
    def show_entries(turn: str) -> Said | None:
        name = name_visited(turn)
        return Said(role="user", text=shown(name, walk.graph[name])) if name else None

    return show_entries


def play(
    policy: Speaker,
    openings: Sequence[Sequence[Said]],
    replies: Sequence[Reply],
    max_turns: int,
    seed: int,
    greedy: bool,
) -> list[tuple[Said, ...]]:
    torch.manual_seed(seed)
    said: list[list[Said]] = [[] for _ in openings]
    open_rows = list(range(len(openings)))
    for _ in range(max_turns):
        prompts = [encode_opening(policy.tokenizer, [*openings[row], *said[row]]) for row in open_rows]
        still_open = []
        for row, text in zip(open_rows, answers(policy, prompts, greedy), strict=True):
            said[row].append(Said(role="assistant", text=text))
            reply = replies[row](text)
            if reply is not None:
                said[row].append(reply)
                still_open.append(row)
        open_rows = still_open
    return [tuple(messages) for messages in said]


def answers(policy: Speaker, prompts: list[list[int]], greedy: bool) -> list[str]:
    """In batches of similar lengths."""
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        found = policy.generate([prompts[row] for row in rows], MAX_TURN_TOKENS, greedy)
        for row, text in zip(rows, found, strict=True):
            texts[row] = text
    return texts


def view_of(messages: Sequence[Said]) -> str:
    """What a judge sees of an episode with the calculator."""
    fences = {"assistant": ">", "tool": "|"}
    return "\n".join(
        f"{fences[message.role]} {line}" for message in messages for line in message.text.split("\n") or [""]
    )
