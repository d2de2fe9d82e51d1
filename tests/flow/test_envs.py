"""Whole runs in environments: tools, faults, seats, and what a run says of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grmpipe.config.run_config import ConfigError
from grmpipe.models.chat.renderer import Renderer
from grmpipe.observe.recorder import load_rollouts
from grmpipe.tiny.resolve import SHIPPED

SOURCE = '''
"""A user's environment: asks once more, and breaks down as often as it is asked to."""

import os
import random

import numpy as np

from grmpipe.envs.env import EnvFault, Observation, Opening, PolicyFault
from grmpipe.models.types import Message

OPENED, CLOSED = [], []


class Twice:
    def __init__(self, fault_share=0.0, broken=False, exit_share=0.0):
        self.fault_share, self.broken, self.exit_share = fault_share, broken, exit_share

    async def open(self, episode):
        OPENED.append(episode)
        self.random = random.Random(episode.seed)
        return Opening(messages=episode.prompt.messages, state_key="first")

    async def step(self, action):
        if self.broken:
            raise KeyError("SECRET-FAULT")
        if self.random.random() < self.fault_share:
            raise EnvFault("SECRET-FAULT", "died")
        if self.random.random() < self.exit_share:
            os._exit(1)
        if action.turn == 0:
            if self.random.random() < 0.2:
                raise PolicyFault("say it again", "arguments")
            return Observation(messages=[Message(role="user", content="Again?")], rewards={"first": np.float32(0.25)})
        return Observation(done=True, rewards={"second": 1.0})

    async def close(self):
        CLOSED.append(self)
'''
TWICE = ("env=custom", "env.target=users_env.Twice", "rollout.max_turns=3")


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("users")
    (folder / "users_env.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def plain_run(run_once: Callable) -> Any:
    return run_once(*TWICE, "train.num_steps=1", "judge=rule", run_dir="whole")


def test_run_survives_a_failing_environment_whose_faults_become_no_number_and_no_text(run_once: Callable) -> None:
    files = run_once(*TWICE, "+env.options.fault_share=0.2", "env.attempts=2", "env.max_failure_rate=1", "judge=rule")
    summary = files.summary
    assert summary["status"] == "completed", summary["failure"]
    rollouts = [line.rollout for line in load_rollouts(files.run_dir / "rollouts.jsonl")]
    faults = Counter(failure.cause for rollout in rollouts for failure in rollout.env_failures)
    assert summary["envs"]["faults"]["died"] >= faults["died"] > 0
    dropped = summary["groups"]["dropped"]
    assert set(dropped) == {"env_died"} and 0 < dropped["env_died"] <= summary["envs"]["failed_episodes"]
    ended = {line["group_id"]: line for line in files.lines("groups")}
    judged = {line["group_id"] for line in files.lines("judgements")}
    trained = {group_id for group_id, line in ended.items() if line["outcome"] == "trained"}
    assert trained <= judged
    for rollout in rollouts:
        assert "SECRET-FAULT" not in str([(turn.completion.text, turn.replies) for turn in rollout.turns])
    size = max(rollout.sibling for rollout in rollouts) + 1
    whole = Counter(rollout.group_id for rollout in rollouts if rollout.group_id in trained)
    assert set(whole.values()) == {size}, "a group is trained whole or not at all"
    assert "SECRET-FAULT" not in (files.run_dir / "judgements.jsonl").read_text()


def test_every_opened_environment_is_closed_and_turns_keep_rewards_states_and_faults(plain_run: Any) -> None:
    import users_env  # type: ignore[import-not-found]

    files = plain_run
    assert len(users_env.OPENED) == len(users_env.CLOSED) > 0
    envs = files.summary["envs"]
    assert (envs["opened"], envs["killed"]) == (envs["closed"], 0) and envs["episodes"] > 0
    assert envs["held_out"]["episodes"] > 0 and envs["held_out"]["faults"] == {}
    assert envs["opened"] == envs["episodes"] + envs["held_out"]["episodes"]
    timeline = json.loads((files.run_dir / "timeline.json").read_text())
    spans = [event for event in timeline if event["name"] == "step"]
    assert len(spans) >= envs["turns"]
    rollouts = [line.rollout for line in load_rollouts(files.run_dir / "rollouts.jsonl")]
    assert {turn.state_key for rollout in rollouts for turn in rollout.turns[:1]} == {"first"}
    finished = [rollout for rollout in rollouts if rollout.status == "finished"]
    assert finished and all(rollout.env_rewards["second"] == 1 for rollout in finished)
    (step,) = files.steps()
    faults = Counter(kind for rollout in rollouts for turn in rollout.turns for kind in turn.faults)
    assert step["env/turns_mean"] > 1
    assert files.summary["envs"]["policy_faults"] == dict(faults)
    assert files.summary["envs"]["episodes"] == len(rollouts)


def test_an_environment_in_processes_of_its_own_some_of_which_end(run_once: Callable) -> None:
    files = run_once(
        *TWICE, "env.isolation.kind=process", "+env.options.exit_share=0.2", "env.max_failure_rate=1", "judge=rule",
        "train.num_steps=1", run_dir="processes",
    )  # fmt: skip
    envs = files.summary["envs"]
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert envs["opened"] == envs["closed"] + envs["killed"]
    assert envs["faults"]["died"] > 0 and set(envs["faults"]) == {"died"}
    assert 0.1 < envs["killed"] / envs["opened"] < 0.6, "evaluations too"


def test_an_environment_that_never_works_is_refused_with_its_own_error(small_run: Callable) -> None:
    with pytest.raises(
        ConfigError, match=r"^env: the first 8 episodes all failed .*Twice\.step \(.*\) raised KeyError"
    ):
        small_run(*TWICE, "+env.options.broken=true", "env.attempts=1", "judge=rule")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("env=tools",), r"^env\.functions: is empty; .*type env\.functions="),
        (("env=tools", "env.functions=grmpipe.tiny.tools"), r"^rollout\.max_turns: 1 ends .*type rollout\.max"),
        (("env=tools", "env.functions=os.nothing"), r"^env\.functions: os\.nothing can't be imported"),
        ((*TWICE, "env.capacity=1"), r"^env\.capacity: 1 episodes .* type env\.capacity=\d+ or more"),
        ((*TWICE, "env.episode_s=1e6"), r"^env\.episode_s: .* isn't below rollout\.group_deadline_s"),
        (("env.step_s=inf",), r"^env\.step_s: must be above 0 and finite"),
        (("env.kind=gym",), r"^env\.kind: unknown env 'gym'; known: single_turn, tools"),
    ],
)
def test_an_environment_that_cant_work_is_refused_before_the_start(
    small_run: Callable, overrides: tuple[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        small_run(*overrides)


def test_a_judge_reads_what_the_environment_said_and_its_rewards_are_a_component(run_once: Callable) -> None:
    files = run_once(
        *TWICE, "train.num_steps=1", "judge.format.truncation=middle", "+judge@judges.task=env", "reward=mix",
        "reward.mix={judge: 0.5, task: 0.5}", run_dir="judged",
    )  # fmt: skip
    assert files.summary["status"] == "completed", files.summary["failure"]
    rollouts = {
        (line.rollout.group_id, line.rollout.sibling): line.rollout
        for line in load_rollouts(files.run_dir / "rollouts.jsonl")
    }
    renderer, num_judged = Renderer.load(str(SHIPPED / "grm")), 0
    for line in files.lines("judgements"):
        rollout = rollouts[line["group_id"], line["sibling"]]
        if (task := line["by_judge"].get("task")) and "verdict" in task:
            assert task["verdict"]["score"] == sum(rollout.env_rewards.values()) > 0
        for judgement in line["judgements"]:
            text, num_judged = renderer.decode(judgement["prompt_ids"]), num_judged + 1
            asked = sum(reply.content == "Again?" for turn in rollout.turns for reply in turn.replies)
            assert text.count("\n| Again?") == asked
    assert num_judged >= 16
    page = (files.run_dir / "report.html").read_text()
    assert "turn 2: the policy" in page and "first 0.25" in page


def test_a_replay_of_episodes_makes_the_same_weights(plain_run: Any, run_once: Callable) -> None:
    rollouts = plain_run.run_dir / "rollouts.jsonl"
    replayed = run_once(f"data.retrain_from={rollouts}", "judge=rule", "train.num_steps=1", run_dir="replayed")
    weights, again = (load_file(run.run_dir / "policy" / "model.safetensors") for run in (plain_run, replayed))
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
