"""A test of each part of this project. `grmpipe +experiment=mine task=plan` checks a run as a whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jinja2
from my_env import GuessNumber
from my_reward import brief

import grmpipe
from grmpipe.envs.env import Action, Episode
from grmpipe.types import Prompt

PROJECT = Path(__file__).parents[1]


def test_the_experiment_composes_with_the_judge_of_this_project() -> None:
    config = grmpipe.compose("mine")
    assert config.judges["judge"].template == str(PROJECT / "templates" / "mine.jinja")
    assert Path(config.data.path).is_file()
    assert grmpipe.compose("game").env.target == "my_env.GuessNumber"


def test_the_template_shows_question_and_response() -> None:
    template = jinja2.Template((PROJECT / "templates" / "mine.jinja").read_text(), undefined=jinja2.StrictUndefined)
    assert template.render(question="1 + 1?", response="2") == "Q: 1 + 1?\nA:\n2"


def test_shorter_responses_earn_more() -> None:
    assert 1 >= brief("1 + 1?", "2") > brief("1 + 1?", "It is, as anybody can see, 2.") >= 0


def test_every_prompt_has_a_reference() -> None:
    for name in ("prompts.jsonl", "held_out.jsonl"):
        rows = [json.loads(line) for line in (PROJECT / name).read_text().splitlines()]
        assert rows and all(row["prompt"] and row["reference"] for row in rows)


def test_the_environment_rewards_the_right_guess() -> None:
    async def play() -> float:
        env = GuessNumber(highest=20)
        await env.open(Episode(prompt=Prompt(prompt_id="any", messages=())))
        for guess in range(1, 21):
            seen = await env.step(Action(text=f"Is it {guess}?"))
            if seen.done:
                return float(seen.rewards["found"])
        return 0.0

    assert asyncio.run(play()) == 1.0
