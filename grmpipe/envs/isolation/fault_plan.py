"""Which episodes lose their process on purpose, and when: drawn by seed. Kills nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grmpipe.envs.env import Episode
from models.seeds import derive_seed

OPENING = -1  # the turn of `open`
LAST_TURN = 2  # no fault waits for a later turn than this


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjection:
    """Faults on purpose, to see that none becomes a reward.

    share: of episodes that lose their process at a random moment.
    seed:  with the episode's own one, decides which and when.
    """

    share: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMoment:
    """The moment of one episode at which its process is killed.

    turn:    from which on; an episode that ends before is hit in its last step, so that the share holds.
    delay_s: after the request of that turn has been sent.
    """

    turn: int
    delay_s: float

    def has_come(self, turn: int, *, is_done: bool = False) -> bool:
        """Whether an episode is hit in this turn."""
        return turn >= self.turn or is_done


def fault_moment(injection: FaultInjection, episode: Episode) -> FaultMoment | None:
    """When an episode is to be hit; None: it is spared. The same for the same seeds, sibling and attempt."""
    name = f"{episode.group_id}/{episode.sibling}/{episode.attempt}/{episode.seed}"
    draw = random.Random(derive_seed(injection.seed, name))
    if draw.random() >= injection.share:
        return None
    return FaultMoment(turn=draw.randint(OPENING, LAST_TURN), delay_s=draw.uniform(0, 0.002))
