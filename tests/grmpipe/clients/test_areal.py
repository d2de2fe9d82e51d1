"""The workflow for AReaL, on a base class in the form of AReaL 1.0.4: RLVRWorkflow in areal/workflow/rlvr.py. `make
test-long` runs it with AReaL's own (test_judge_client_in_trainers.py).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from scripted_judge import scripted_judge

from grmpipe.clients.judge_client import NotJudgedError


class Tokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(one) if one else "" if skip_special_tokens else "<end>" for one in ids)


class RLVRWorkflow:
    def __init__(self, reward_fn: Callable[..., Any], gconfig: object, tokenizer: Tokenizer) -> None:
        self.async_reward_fn: Any = None  # there: a wrapper that gives 0 after four times 15 s
        self.tokenizer = tokenizer
        self.data_extract_prompt_fn = lambda data: data["messages"]

    async def compute_reward(self, response: str, data: dict[str, Any]) -> float:
        ids = [*map(ord, response), 0]
        return await self.async_reward_fn("<user>6 x 7?", self.tokenizer.decode(ids), [1], ids, **data)


@pytest.fixture
def areal(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("areal", "areal.workflow", "areal.workflow.rlvr"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["areal.workflow.rlvr"])["RLVRWorkflow"] = RLVRWorkflow
    monkeypatch.delitem(sys.modules, "grmpipe.clients.areal", raising=False)
    yield importlib.import_module("grmpipe.clients.areal")
    del sys.modules["grmpipe.clients.areal"]


def test_an_episode_is_judged_without_its_end_token_and_fails_where_the_judge_does(areal: ModuleType) -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            data = {"messages": [{"role": "user", "content": "6 x 7?"}], "reference": "42", "prompt": "x", "seed": 1}
            workflow = areal.JudgedRLVRWorkflow(judge.url, gconfig=None, tokenizer=Tokenizer(), columns=["reference"])
            assert await workflow.compute_reward("42", data) == 2.0
            assert judge.asked[0].pop("prompt_id")
            assert judge.asked == [{"prompt": data["messages"], "responses": ["42"], "reference": "42"}]
            with pytest.raises(NotJudgedError, match="unparseable"):
                await workflow.compute_reward("no", data)

    asyncio.run(check())
