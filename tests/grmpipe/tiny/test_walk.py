"""The walk through a key-value store as an environment, and the calculator's functions."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.data.prompts import load_prompts
from grmpipe.envs.env import Action, Env, Episode, Observation, PolicyFault
from grmpipe.models.types import Message
from grmpipe.tiny import tools as tiny_tools
from grmpipe.tiny.calculator import CalculatorCall, display
from grmpipe.tiny.walk import Walk
from grmpipe.tiny.walks import make_walks, right_turns
from grmpipe.types import Prompt

STORE = {"Max": "Max: Tom; Ida.", "Ida": "Ida: Zoe; Tom.", "Zoe": "Zoe: 17.", "Tom": "Tom: 20."}
PROMPT = Prompt(
    prompt_id="0",
    messages=(Message(role="user", content="Max: Tom; Ida. She?"),),
    reference="17",
    info={"store": STORE, "path": ["Max", "Ida", "Zoe"]},
)


def walked(*turns: str, prompt: Prompt = PROMPT) -> list[Observation]:
    """The observations after these turns."""

    async def played() -> list[Observation]:
        env = Walk()
        await env.open(Episode(prompt=prompt))
        seen = [await env.step(Action(text=turn, turn=number)) for number, turn in enumerate(turns)]
        await env.close()
        return seen

    return asyncio.run(played())


def test_a_walk_is_an_env() -> None:
    assert issubclass(Walk, Env)


def test_each_name_shows_its_text_and_is_the_state() -> None:
    first, second = walked(" Ida", " Tom")
    assert [message.content for message in (*first.messages, *second.messages)] == [STORE["Ida"], STORE["Tom"]]
    assert (first.state_key, second.state_key) == ("Ida", "Tom")


def test_hops_of_the_right_walk_are_rewarded_once_and_in_order() -> None:
    seen = walked(" Ida", " Ida", " Tom", " Zoe", " 17")
    assert [one.rewards["hop"] for one in seen] == [0.5, 0, 0, 0.5, 0]
    assert [one.rewards["hop"] for one in walked(" Zoe", " 71")] == [0, 0]


def test_the_last_turn_is_rewarded_for_the_right_answer_and_all_others_are_worth_0() -> None:
    assert [one.rewards["answer"] for one in walked(" Ida", " Zoe", " 17")] == [0, 0, 1]
    assert [one.rewards["answer"] for one in walked(" Tom", " 20")] == [0, 0]


def test_only_an_answer_ends_a_walk() -> None:
    assert [one.done for one in walked(" Ida", " 20")] == [False, True]


@pytest.mark.parametrize(("turn", "kind"), [(" Bob", "unknown_name"), ("17 coins", "malformed"), ("", "malformed")])
def test_what_is_no_visit_and_no_answer_is_the_policys_fault(turn: str, kind: str) -> None:
    with pytest.raises(PolicyFault) as caught:
        walked(turn)
    assert caught.value.kind == kind


def test_data_of_another_environment_are_refused_by_the_key() -> None:
    with pytest.raises(ValueError, match=r"data\.path=tiny://walk/train"):
        walked(prompt=Prompt(prompt_id="0", messages=PROMPT.messages, reference="17"))


def test_right_turns_of_the_problem_set_earn_all_rewards() -> None:
    walks, prompts = make_walks("train", 50, 0), load_prompts("tiny://walk/train", num_tiny_prompts=50)
    for walk, prompt in zip(walks, prompts, strict=True):
        seen = walked(*right_turns(walk), prompt=prompt)
        assert sum(sum(one.rewards.values()) for one in seen) == pytest.approx(2) and seen[-1].done


def test_the_calculator_shows_what_the_tiny_models_were_trained_on() -> None:
    for left, right in ((32, 9), (9, 32), (59, 12)):
        assert tiny_tools.add(left, right) == display(CalculatorCall(name="add", left=left, right=right).result)
        assert tiny_tools.sub(left, right) == display(CalculatorCall(name="sub", left=left, right=right).result)
