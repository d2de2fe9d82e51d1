"""OpenRLHF's and verl's own code, from their packages: what it asks, what it takes from the answer, and the advantages
that it computes from a group in which a judgement was lost.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import itertools
import logging
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from trainer_service import ask_natively, serving

pytestmark = pytest.mark.long
FUNCTION = ("judge=function", "judge.function=own.reward")
PROMPTS = {
    "<|im_start|>user\nWhat is {} x 7?<|im_end|>\n<|im_start|>assistant\n": "What is {} x 7?",
    "What is {} x 8?\n": "What is {} x 8?\n",
}
REWARDS = {"mean_of_group": [1.0, 0.0, 0.0, 1 / 3], "as_zero": [1.0, 0.0, 0.0, 0.0]}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheels; they are never imported as a whole, which takes vLLM, DeepSpeed and Ray."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("openrlhf==0.11.2", "verl==0.9.1"):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version",
             "3.11", "--platform", "manylinux1_x86_64", "-d", str(folder), name],
            check=True,
        )  # fmt: skip
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
    return folder


def load_function(file: Path, path: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function of a file, or a method, executed by itself with these names. path: as in Class.method."""
    body: list[Any] = ast.parse(file.read_text(encoding="utf-8")).body
    *outer, name = path.split(".")
    for part in outer:
        (found,) = (one for one in body if isinstance(one, ast.ClassDef) and one.name == part)
        body = found.body
    (function,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == name)
    function.decorator_list, function.returns = [], None
    for argument in (*function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    exec(compile(ast.Module(body=[function], type_ignores=[]), str(file), "exec"), names)
    loaded: Callable[..., Any] = names[name]
    return loaded


@pytest.fixture
def agent(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    logs = SimpleNamespace(init_logger=logging.getLogger)
    monkeypatch.setitem(sys.modules, "openrlhf.utils.logging_utils", logs)  # it takes the whole package
    (file,) = packages.rglob("openrlhf/utils/agent.py")
    spec = importlib.util.spec_from_file_location("openrlhf_agent", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(one) for one in text]])}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, token_ids))


class Engine:
    def __init__(self, text: str) -> None:
        self._ids = [ord(one) for one in text]

    async def generate(self, token_ids: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        output = SimpleNamespace(token_ids=self._ids, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


async def roll_out(agent: Any, url: str, prompt: str, response: str, label: str) -> Any:
    executor = agent.SingleTurnAgentExecutor([url])
    params = SimpleNamespace(max_tokens=64, logprobs=None)
    return await executor.execute(prompt, label, params, 4096, Letters(), Engine(response))


def url_of(session: ClientSession, path: str) -> str:
    return str(session._base_url).rstrip("/") + path


def test_openrlhf_s_client_gets_the_rewards_of_the_native_wire_bit_for_bit(agent: Any) -> None:
    async def check() -> None:
        async with serving(*FUNCTION) as session:
            url = url_of(session, "/openrlhf/reward?group_size=8")
            for templated, plain in PROMPTS.items():
                for number in range(20):
                    output = await roll_out(
                        agent, url, templated.format(number), f"It is {7 * number}.<|im_end|>", str(7 * number)
                    )
                    row = {"prompt": plain.format(number), "response": f"It is {7 * number}."}
                    native = await ask_natively(session, **row, reference=str(7 * number))
                    assert output["reward"] == output["scores"] == [native]

    asyncio.run(check())


def test_openrlhf_s_client_has_no_reward_where_the_judge_fails(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(*FUNCTION) as session:
            output = await roll_out(agent, url_of(session, "/openrlhf/reward?timeout_s=1"), "6 x 7?", "lost", "42")
            assert output["reward"] is None

    asyncio.run(check())


def test_openrlhf_s_dr_grpo_gives_the_judged_siblings_their_advantages(packages: Path) -> None:
    (file,) = packages.rglob("openrlhf/trainer/ppo_utils/experience_maker.py")
    names = {
        "torch": torch, "itertools": itertools, "apply_length_penalties": lambda experiences, args: None,
        "compute_reward": lambda reward, *rest, **options: reward[:, None],
    }  # fmt: skip
    compute = load_function(file, "RemoteExperienceMaker.compute_advantages_and_returns", names)
    accumulate = load_function(file, "RemoteExperienceMaker.get_cumulative_returns", names)
    advantage = SimpleNamespace(estimator="dr_grpo", gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=4),
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator="dr_grpo"
    )
    maker.get_cumulative_returns = lambda *given: accumulate(maker, *given)
    found = {
        kind: [
            one.advantages.item()
            for one in compute(
                maker,
                [
                    SimpleNamespace(
                        rewards=torch.tensor([reward]), index=[place], info={}, kl=None, action_mask=torch.ones(1, 1)
                    )
                    for place, reward in enumerate(rewards)
                ],
            )
        ]
        for kind, rewards in REWARDS.items()
    }  # fmt: skip
    assert found["mean_of_group"] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0], abs=1e-6)
    assert found["as_zero"] == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-6), "what the bar tells apart"


def test_verl_s_grpo_without_division_gives_the_judged_siblings_their_advantages(packages: Path) -> None:
    compute = load_function(
        packages / "verl/trainer/ppo/core_algos.py",
        "compute_grpo_outcome_advantage",
        {"torch": torch, "np": np, "defaultdict": defaultdict},
    )

    def advantages(rewards: list[float], divides: bool) -> list[float]:
        mask, group = torch.ones(len(rewards), 1), np.array(["g"] * len(rewards))
        found, _ = compute(torch.tensor(rewards)[:, None], mask, group, norm_adv_by_std_in_grpo=divides)
        return [float(one) for one in found.flatten()]

    assert advantages(REWARDS["mean_of_group"], False) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0], abs=1e-6)
    without_it, imputed = advantages([1.0, 0.0, 0.0], True), advantages(REWARDS["mean_of_group"], True)
    assert imputed[:3] == pytest.approx([one * (3 / 2) ** 0.5 for one in without_it], abs=1e-5)
