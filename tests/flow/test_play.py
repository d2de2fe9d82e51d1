"""task=play: a script, a person and the policy act in an environment, and the judge says what it makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.envs.env import Action, Episode, Observation, Opening, PolicyFault
from grmpipe.models.types import Message
from grmpipe.run.errors import RunFailed
from grmpipe.workflows.policy import Policy, Task

PLAY = ("task=play", "judge=env", "env=custom", f"env.target={__name__}.Adder", "rollout.max_turns=4")


class Adder:
    """Asks for a number, then for another one; the second ends the episode."""

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=[Message(role="user", content="Say a number.")])

    async def step(self, action: Action) -> Observation:
        if action.text == "crash":
            raise KeyError("shelf")
        if not action.text.strip().isdigit():
            raise PolicyFault("That is no number.", "no_number")
        if action.turn == 0:
            return Observation(messages=[Message(role="user", content="Another one.")], rewards={"said": 0.25})
        return Observation(messages=[Message(role="user", content="Thanks.")], done=True, rewards={"said": 0.5})

    async def close(self) -> None: ...


def write_script(path: Path, *turns: object) -> str:
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")
    return f"play.by={path}"


def test_a_script_plays_an_episode_whose_every_token_reward_and_verdict_is_shown(
    small_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run(*PLAY, write_script(tmp_path / "turns.jsonl", "4", "5"))
    shown = capsys.readouterr().out
    for text in (
        "<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant",
        "-- turn 1 of 4: at most ",
        "4<|im_end|>",
        "-- rewards: said 0.25",
        "Another one.",
        "user: Thanks.",
        "-- the episode ended after 2 turns",
        "judge: score 0.75, reward 0.75",
    ):
        assert text in shown, text
    (rollout,) = files.lines("rollouts")
    assert [turn["text"] for turn in rollout["turns"]] == ["4", "5"]
    assert files.summary["eval"]["final"]["reward"] == 0.75
    assert files.summary["envs"]["turns"] == 2


def test_what_a_script_lacks_cuts_the_episode_as_a_limit_of_the_policy_does(
    small_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run(*PLAY, write_script(tmp_path / "short.jsonl", "four"), run_dir="short")
    shown = capsys.readouterr().out
    assert "-- faults of the policy: no_number" in shown
    assert "-- the episode was cut after 1 turn: nothing more was written" in shown
    assert files.lines("rollouts")[0]["reason"] == "tokens"
    small_run(*PLAY, write_script(tmp_path / "long.jsonl", "4 " * 40), "rollout.max_new_tokens=8", run_dir="long")
    assert "cut after 1 turn, by the tokens of a turn (rollout.max_new_tokens)\n" in capsys.readouterr().out


async def greet_twice(task: Task, policy: Policy) -> dict[str, float]:
    first = await policy.chat(task.messages)
    second = await policy.chat([*task.messages, first, {"role": "user", "content": "And now?"}])
    return {"length": float(len(second.content))}


def test_a_script_plays_a_workflow_under_a_thinking_budget_with_a_turn_for_each_request(
    small_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run(
        "task=play", "env=workflow", f"env.target={__name__}.greet_twice", "judge=env",
        "rollout.max_turns=3", "rollout.thinking_budget_tokens=2",
        write_script(tmp_path / "turns.jsonl", "1 2 3 4 5 6", "seven"),
    )  # fmt: skip
    (rollout,) = files.lines("rollouts")
    assert [turn["text"] for turn in rollout["turns"]] == ["1 2 3 4 5 6", "seven"]
    shown = capsys.readouterr().out
    assert "And now?" in shown and "-- the episode ended after 2 turns" in shown
    assert files.summary["eval"]["final"]["reward"] == 5.0


def test_a_person_types_turns_and_the_end_of_the_input_ends_the_episode(
    small_run: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"fo\\\nur\n4\n")
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        files = small_run(*PLAY, "play.by=person", run_dir="typed")
    texts = [turn["text"] for turn in files.lines("rollouts")[0]["turns"]]
    assert texts == ["fo\nur", "4"]
    assert "You act as the policy" in capsys.readouterr().out


def test_the_policy_plays_with_its_engines_and_the_judge_of_a_run(
    small_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run("task=play", "play.by=policy", run_dir="played")
    shown = capsys.readouterr().out
    assert "judge: " in shown and ", reward " in shown and "the rule that sees the reference: " in shown
    assert files.lines("rollouts")[0]["turns"][0]["token_ids"]
    assert files.summary["eval"]["final"].keys() == {"reward", "true_accuracy"}


def test_a_fault_of_the_environment_is_shown_at_once(small_run: Callable, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"Adder\.step .* raised KeyError: 'shelf'"):
        small_run(*PLAY, write_script(tmp_path / "turns.jsonl", "crash"), "env.attempts=3", run_dir="crashed")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["play.by=nowhere.jsonl"], r"^play\.by: nowhere\.jsonl can't be read .*; type play\.by=person, policy, or"),
        (["play.prompt=9999"], r"^play\.prompt: there are \d+ prompts; type play\.prompt=\d+ or less$"),
        (["judge=listwise"], r"^judge\.protocol: listwise compares episodes, and one is played; type judge=pointwise$"),
        (["play.by=objects.jsonl"], r"^play\.by: objects\.jsonl:2: expected a turn of the policy as a JSON text"),
    ],
)
def test_bad_settings_name_the_key_and_the_way_out(
    small_run: Callable, tmp_path: Path, overrides: list[str], says: str
) -> None:
    write_script(tmp_path / "objects.jsonl", "4", {"role": "assistant"})
    with pytest.raises(ConfigError, match=says):
        small_run("task=play", *overrides)
