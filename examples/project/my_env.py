"""An environment: guess a number, with a hint after each guess."""

from __future__ import annotations

import random
import re

from grmpipe.envs.env import Action, Episode, Observation, Opening, PolicyFault
from grmpipe.models.types import Message


class GuessNumber:
    """One instance plays one episode."""

    def __init__(self, highest: int = 20) -> None:
        self._highest = highest  # env.options.highest
        self._secret = 0

    async def open(self, episode: Episode) -> Opening:
        # The prompt's seed is not the episode's: all siblings of a group should face the same number.
        self._secret = random.Random(episode.prompt.prompt_id).randint(1, self._highest)
        question = f"Guess a number from 1 to {self._highest}."
        return Opening(messages=[Message(role="user", content=question)], state_key="nothing guessed")

    async def step(self, action: Action) -> Observation:
        found = re.search(r"\d+", action.text)
        if found is None:
            raise PolicyFault("Write a number.", "no_number")  # shown to the policy, and counted
        guess = int(found[0])
        if guess == self._secret:
            return Observation(done=True, rewards={"found": 1.0})
        hint = "More." if guess < self._secret else "Less."
        closeness = 1 - min(1.0, abs(guess - self._secret) / self._highest)
        return Observation(
            messages=[Message(role="user", content=hint)],
            rewards={"closer": 0.1 * closeness},
            state_key=f"{guess} {hint}",
        )

    async def close(self) -> None:
        """Free what `open` took; called once, at any end."""
