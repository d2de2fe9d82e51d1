"""An agent on the package openai, which only gets another client: what it asks are the policy's turns.

PYTHONPATH=examples python launch.py +experiment=quickstart env=workflow env.target=workflow_openai.solve \
    rollout.max_turns=2 judge.format.truncation=middle
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from grmpipe.workflows.policy import Policy, Task

CHECK = "Check it, and say the answer again."


async def checked_answer(client: AsyncOpenAI, question: list[dict[str, str]]) -> tuple[str, str]:
    """The agent: it knows nothing of training."""
    first = await client.chat.completions.create(model="policy", messages=question)
    draft = first.choices[0].message.content
    again = [*question, {"role": "assistant", "content": draft}, {"role": "user", "content": CHECK}]
    second = await client.chat.completions.create(model="policy", messages=again)
    return draft, second.choices[0].message.content


async def solve(task: Task, policy: Policy) -> dict[str, float]:
    """Rewards by name. None would leave all to the judge; a dictionary by completion id rewards single turns."""
    question = [{"role": message.role, "content": message.content} for message in task.messages]
    draft, final = await checked_answer(policy.openai, question)
    return {"agrees": float(last_number(draft) == last_number(final))}


def last_number(text: str) -> str:
    return next(iter(reversed(re.findall(r"\d+", text))), "")
