"""Hosts of environments in the run itself, the report of isolation, frames."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from pathlib import Path

import pytest

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import Action, EnvFault, Episode, Observation
from grmpipe.envs.play import SingleTurn
from grmpipe.envs.sandbox import env_host
from grmpipe.envs.sandbox.confinement import Missing
from grmpipe.envs.sandbox.env_host import open_env_host
from grmpipe.envs.sandbox.isolation_report import IsolationReport, describe_isolation, weaknesses
from grmpipe.envs.sandbox.messages import MAX_FRAME, BadFrame, Observed, fit_observation, frame, next_message, reports
from grmpipe.models.types import Message
from grmpipe.types import Prompt

EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="2 + 2?"),)), group_id="g")


class FailsSometimes(SingleTurn):
    async def step(self, action: Action) -> Observation:
        return Observation(done=1 / int(action.text) > 0)


def test_in_the_run_itself_failing_episodes_are_counted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def plays() -> Counter[str]:
        ends: Counter[str] = Counter()
        config = EnvConfig(kind="custom", target="a.b")
        monkeypatch.setattr(env_host, "env_factory", lambda config, servers: FailsSometimes)
        async with open_env_host(config, run_dir=tmp_path) as host:
            for text in ("1", "0", "2"):
                env = host.env()
                try:
                    await env.open(EPISODE)
                    ends["done"] += (await env.step(Action(text=text))).done
                except EnvFault as fault:
                    ends[fault.cause] += 1
                finally:
                    await env.close()
            assert host.counts.opened == host.counts.closed == 3
        return ends

    assert asyncio.run(plays()) == {"done": 2, "broken": 1}


def test_an_observation_comes_back_as_it_was() -> None:
    messages = [Message(role="tool", content="7", name="add", tool_call_id="c")]
    sent = Observation(messages=messages, rewards={"a": 0.25}, state_key="k", faults=("tool",), done=True)
    assert reports.decode(frame(Observed(fit_observation(sent)))[4:]) == Observed(sent)


def test_a_long_observation_keeps_its_begin_and_end() -> None:
    sent = Observation(messages=[Message(role="tool", content=f"a{'x' * MAX_FRAME}z")])
    back = reports.decode(frame(Observed(fit_observation(sent)))[4:])
    assert isinstance(back, Observed)
    text = back.observation.messages[0].content
    assert text[0] == "a" and text[-1] == "z" and "characters left out" in text and len(text) < 300_000


def test_a_frame_that_is_too_long_is_not_sent_and_not_read() -> None:
    with pytest.raises(BadFrame, match="state_key|bytes"):
        frame(Observed(Observation(state_key="x" * MAX_FRAME)))

    async def read(data: bytes) -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await next_message(reader, reports)

    with pytest.raises(BadFrame, match="bytes"):
        asyncio.run(read(struct.pack("<I", MAX_FRAME + 1)))
    with pytest.raises(BadFrame):
        asyncio.run(read(struct.pack("<I", 3) + b"abc"))
    assert asyncio.run(read(struct.pack("<I", 3) + b"ab")) is None, "the other end died in the midst of a frame"


def test_missing_isolation_is_refused_only_if_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = IsolationReport(level="process", missing=(Missing(part="Landlock", reason="Function not implemented"),))
    monkeypatch.setattr(env_host, "isolation_report", lambda config: lacks)
    env_host.check_isolation(IsolationConfig(kind="process"))
    with pytest.raises(ValueError, match=r"isolation\.require: this machine lacks: Landlock \(Function not"):
        env_host.check_isolation(IsolationConfig(kind="process", require=True))


def test_a_part_whose_work_another_does_is_no_weakness() -> None:
    missing = [Missing(part=part, reason="") for part in ("own /proc", "network namespace")]
    assert [each.part for each in weaknesses(missing)] == ["network namespace"]


def test_the_doctor_says_which_isolation_there_is() -> None:
    line = describe_isolation()
    assert line.startswith(("process", "inprocess")) and "containers: " in line and "processes are " in line
    assert line.startswith("inprocess") or "the memory of an episode is added up every 0.1 s" in line
