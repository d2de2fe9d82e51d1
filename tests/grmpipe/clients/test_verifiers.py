"""The judge for verifiers, on base classes in the form of verifiers 0.4.0: verifiers/v1/judge.py and
verifiers/v1/configs/judge.py. `make test-long` runs it in a task of verifiers (test_judge_client_in_trainers.py).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from scripted_judge import scripted_judge

from grmpipe.clients.judge_client import NotJudgedError

ParsedT, ConfigT = TypeVar("ParsedT"), TypeVar("ConfigT")


class JudgeConfig:
    """There: a model of pydantic, whose fields are arguments."""

    def __init__(self, **given: object) -> None:
        vars(self).update(given)


class Judge(Generic[ParsedT, ConfigT]):
    reward_name = "grmpipe"

    def __init__(self, config: ConfigT) -> None:
        self.config = config


class Trace:
    def __init__(self, reply: str) -> None:
        self.last_reply, self.transcript, self.calls = reply, f"[assistant]\n{reply}", []

    def record_judge_call(self, **call: Any) -> None:
        self.calls.append(call)


STANDING_IN: dict[str, dict[str, object]] = {
    "verifiers": {}, "verifiers.v1": {}, "verifiers.v1.configs": {},
    "verifiers.v1.configs.judge": {"JudgeConfig": JudgeConfig},
    "verifiers.v1.judge": {
        "Judge": Judge, "JudgeResponse": SimpleNamespace, "JudgeView": str,
        "judge_question": lambda task, field: getattr(task, field) if field else task.prompt_text,
        "judge_response": lambda trace, view: trace.transcript if view == "full_trace" else trace.last_reply,
    },
    "verifiers.v1.task": {"TaskData": SimpleNamespace}, "verifiers.v1.trace": {"Trace": Trace},
}  # fmt: skip


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, names in STANDING_IN.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "grmpipe.clients.verifiers", raising=False)
    yield importlib.import_module("grmpipe.clients.verifiers")
    del sys.modules["grmpipe.clients.verifiers"]


def test_a_reply_is_judged_with_its_reference_and_a_failure_is_an_error(verifiers: ModuleType) -> None:
    async def check() -> None:
        async with scripted_judge() as service:
            task = SimpleNamespace(prompt_text="6 x 7?", answer="42")
            config = verifiers.GrmpipeJudgeConfig(base_url=service.url, answer_field="answer")
            judge, trace = verifiers.GrmpipeJudge(config), Trace("42")
            assert await judge.score(task, trace) == 2.0
            assert service.asked[0].pop("prompt_id")
            assert service.asked == [{"prompt": "6 x 7?", "responses": ["42"], "reference": "42"}]
            (call,) = trace.calls
            assert (call["name"], call["response"].text, call["response"].parsed) == ("grmpipe", "42!", 2.0)
            failed = Trace("no")
            with pytest.raises(NotJudgedError, match="unparseable"):
                await judge.score(task, failed)
            assert not failed.calls
            config.view = "full_trace"
            await judge.score(task, trace)
            assert service.asked[-1]["responses"] == ["[assistant]\n42"]

    asyncio.run(check())
