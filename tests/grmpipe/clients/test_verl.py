"""The reward manager for verl, on a base class and data in the form of verl 0.9.1: RewardManagerBase in
verl/experimental/reward_loop/reward_manager/base.py, the batch of `_compute_score` in
verl/experimental/agent_loop/agent_loop.py. `make test-long` runs it in verl's own loop
(test_judge_client_in_trainers.py).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted_judge import scripted_judge

from grmpipe.clients.judge_client import NotJudgedError

BASE = "verl.experimental.reward_loop.reward_manager.base"


class RewardManagerBase:
    def __init__(self, config: Any, tokenizer: Any, compute_score: object) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score


class Tokenizer:
    """A token per letter; 0 is the end token."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(one) for one in ids.tolist() if one)


class Batch(list):
    """Slices of a DataProto are DataProtos."""

    def __getitem__(self, key: Any) -> Any:
        return Batch(list(self)[key]) if isinstance(key, slice) else list(self)[key]


def batch_of(response: str, prompt_length: int = 2, padding: int = 3) -> Batch:
    ids = [*map(ord, response), 0]
    item = SimpleNamespace(
        batch={
            "responses": torch.tensor([*ids, *[ord("?")] * padding]),
            "attention_mask": torch.tensor([1] * (prompt_length + len(ids)) + [0] * padding),
        },
        non_tensor_batch={
            "raw_prompt": np.array([{"role": "user", "content": "6 x 7?"}], dtype=object),
            "uid": "u1", "data_source": "gsm8k", "reward_model": {"ground_truth": "42", "style": "rule"},
            "extra_info": {"level": np.int64(2)}, "agent_name": "single_turn_agent", "global_steps": 5,
        },
    )  # fmt: skip
    return Batch([SimpleNamespace(), item])  # of several sequences the last counts


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for end in range(1, BASE.count(".") + 2):
        name = ".".join(BASE.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[BASE])["RewardManagerBase"] = RewardManagerBase
    monkeypatch.delitem(sys.modules, "grmpipe.clients.verl", raising=False)
    yield importlib.import_module("grmpipe.clients.verl")
    del sys.modules["grmpipe.clients.verl"]


def make_manager(verl: ModuleType, **settings: object) -> Any:
    config = SimpleNamespace(reward={"reward_kwargs": settings})
    return verl.JudgeRewardManager(config=config, tokenizer=Tokenizer(), compute_score=None, reward_router_address=None)


def test_a_response_is_judged_with_the_prompt_s_messages(verl: ModuleType) -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            manager = make_manager(verl, judge_url=judge.url)
            assert await manager.run_single(batch_of("42")) == {
                "reward_score": 2.0,
                "reward_extra_info": {"judge_score": 20.0, "judge_version": 3, "critique": "42!"},
            }
            assert judge.asked[0].pop("prompt_id").startswith("u1/")
            assert judge.asked == [
                {
                    "prompt": [{"role": "user", "content": "6 x 7?"}], "responses": ["42"], "data_source": "gsm8k",
                    "reward_model": {"ground_truth": "42", "style": "rule"}, "extra_info": {"level": 2}, "step": 5,
                }
            ]  # fmt: skip
            with pytest.raises(NotJudgedError, match="unparseable"):
                await manager.run_single(batch_of("no"))

    asyncio.run(check())


def test_a_missing_address_is_named(verl: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"type \+reward\.reward_kwargs\.judge_url="):
        make_manager(verl)
