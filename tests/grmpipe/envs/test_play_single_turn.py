"""One question, one answer."""

from __future__ import annotations

import asyncio

from grmpipe.envs.env import Action, Env, Episode
from grmpipe.envs.play import SingleTurn
from grmpipe.models.types import Message
from grmpipe.types import Prompt


def test_the_prompt_is_shown_and_any_answer_ends_the_episode() -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="6 x 2?"))
    env: Env = SingleTurn()
    opening = asyncio.run(env.open(Episode(prompt=Prompt(prompt_id="p", messages=messages))))
    assert opening.messages == messages
    assert asyncio.run(env.step(Action(text="12"))).done
