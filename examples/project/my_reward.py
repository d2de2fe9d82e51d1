"""A reward function: judges.brief.function=my_reward.brief."""

from __future__ import annotations


def brief(prompt: object, response: str, **columns: object) -> float:
    """1 for an empty response, 0 from 200 characters on. `columns` are the further columns of the prompt's row."""
    return max(0.0, 1 - len(response) / 200)
