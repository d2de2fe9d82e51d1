"""An episode goes on after its last turn: its actions are repeated, or its environment opens in the state it saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from letters import Letters

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, NotAsBefore, RolloutRequest, play
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import Message, RequestContext, SamplingParams
from grmpipe.types import BegunRollout, Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
NUM_TURNS = 4


class Counter:
    """Answers each action with how many came before it, in this environment or in the saved one."""

    def __init__(self, *, replayable: bool = True, saves: bool = False, opening: str = "?", first: int = 0) -> None:
        self._opening = Opening(messages=(Message(role="user", content=opening),), replayable=replayable)
        self._saves = saves
        self._number = first
        self.steps: list[str] = []

    async def open(self, episode: Episode) -> Opening:
        self._number += int(episode.saved or 0)
        return replace(self._opening, state_key=f"s{self._number}")

    async def step(self, action: Action) -> Observation:
        self.steps.append(action.text)
        self._number += 1
        return Observation(
            messages=(Message(role="user", content=f"{self._number}"),),
            done=self._number == NUM_TURNS,
            rewards={"count": float(self._number)},
            state_key=f"s{self._number}",
            saved=b"%d" % self._number if self._saves else b"",
        )

    async def close(self) -> None:
        return None


def played(env: Counter, begun: BegunRollout | None = None) -> tuple[Rollout, list[BegunRollout], list[int], list[str]]:
    """The rollout; what a resume could go on from, the turns of which the judge was told, the requests."""
    asked, kept, judged = list[str](), list[BegunRollout](), list[int]()

    def author(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        asked.append(context.request_id)
        return Script(token_ids=(len(ids), params.seed), text=context.request_id)

    async def go() -> Rollout:
        request = RolloutRequest(
            group_id="g",
            sibling=1,
            seed=50,
            begun=begun,
            on_turn=lambda so_far: judged.append(len(so_far.turns)),
            on_resumable=kept.append,
        )
        engine, params = SimulatedEngine("policy", author), SamplingParams(max_new_tokens=4)
        return await play(request, PROMPT, env, engine, Letters(), params, EpisodeLimits(max_turns=9))

    return asyncio.run(go()), kept, judged, asked


@pytest.mark.parametrize("num_turns", [1, 2, 3])
@pytest.mark.parametrize("saves", [False, True])
def test_it_goes_on_after_its_last_turn_as_if_it_had_never_stopped(num_turns: int, saves: bool) -> None:
    whole, kept, _, _ = played(Counter(saves=saves, replayable=not saves))
    assert [len(one.so_far.turns) for one in kept] == [1, 2, 3]
    env = Counter(saves=saves, replayable=not saves)
    again, kept_again, judged, asked = played(env, kept[num_turns - 1])
    assert again == whole
    assert asked == [f"g/1/t{number}" for number in range(num_turns, NUM_TURNS)], "no turn is sampled again"
    assert env.steps == [f"g/1/t{number}" for number in range(num_turns if saves else 0, NUM_TURNS)]
    assert kept_again == kept[num_turns:] and judged == [1, 2, 3], "the judge hears of every turn"


def test_an_environment_that_says_nothing_is_not_taken_up() -> None:
    assert played(Counter(replayable=False))[1] == []


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (Counter(opening="!"), "the environment opened otherwise than before"),
        (Counter(first=1), "turn 0 brought another reply than before"),
        (Counter(first=NUM_TURNS - 1), "turn 0 brought another reply than before"),
    ],
)
def test_an_environment_that_is_not_as_before_is_not_gone_on_with(env: Counter, said: str) -> None:
    begun = played(Counter())[1][1]
    with pytest.raises(NotAsBefore, match=said):
        played(env, begun)


def test_an_environment_that_fails_while_actions_are_repeated_is_no_failed_attempt() -> None:
    class Broken(Counter):
        async def step(self, action: Action) -> Observation:
            raise EnvFault("gone", "died")

    with pytest.raises(NotAsBefore, match="it failed: gone"):
        played(Broken(), played(Counter())[1][1])
