"""A walk through a key-value store, as an environment of one's own: `Tom` shows the entries of Tom.

env=custom env.target=grmpipe.tiny.walk.Walk data.path=tiny://walk/train
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grmpipe.envs.env import Action, Episode, Observation, Opening, PolicyFault
from grmpipe.models.types import Message

TURN = re.compile(r"(?P<number>\d+)|(?P<name>\w+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What a row of the data holds: the text of each name, the names of the right walk, and the answer at its end."""

    texts: Mapping[str, str]
    path: Sequence[str]
    answer: str


class Walk:
    """The policy takes one of the entries shown: a name is visited, a number is the answer.

    Rewards: `hop`, an equal share of 1 for each name of the right walk at its first visit in order; `answer`, 1 for
    the right answer. The state is the name where the policy is.
    """

    def __init__(self) -> None:
        self._place = ""
        self._num_hops = 0

    async def open(self, episode: Episode) -> Opening:
        self._store = read_store(episode)
        self._place = self._store.path[0]
        return Opening(messages=episode.prompt.messages, state_key=self._place, replayable=True)

    async def step(self, action: Action) -> Observation:
        turn = TURN.fullmatch(action.text.strip())
        if turn is None:
            raise PolicyFault("malformed", "malformed")
        if turn["name"]:
            return self._visit(turn["name"])
        right = float(turn["number"] == self._store.answer)
        return Observation(done=True, rewards=rewards(answer=right), state_key=self._place)

    async def close(self) -> None:
        pass

    def _visit(self, name: str) -> Observation:
        if name not in self._store.texts:
            raise PolicyFault("no", "unknown_name")
        hops = self._store.path[1:]
        is_hop = self._num_hops < len(hops) and hops[self._num_hops] == name
        self._place, self._num_hops = name, self._num_hops + is_hop
        return Observation(
            messages=[Message(role="user", content=self._store.texts[name])],
            rewards=rewards(hop=is_hop / len(hops)),
            state_key=name,
        )


def rewards(*, hop: float = 0.0, answer: float = 0.0) -> Mapping[str, float]:
    """Both rewards in every turn: a walk without an answer is worth 0, not unknown."""
    return {"hop": hop, "answer": answer}


def read_store(episode: Episode) -> Store:
    """Raises ValueError for a row without a store: the data are those of another environment."""
    info, answer = episode.prompt.info, episode.prompt.reference
    texts, path = info.get("store"), info.get("path")
    if not isinstance(texts, Mapping) or not isinstance(path, Sequence) or answer is None:
        raise ValueError("prompt.info: holds no store; type data.path=tiny://walk/train")
    return Store(texts=texts, path=path, answer=answer)
