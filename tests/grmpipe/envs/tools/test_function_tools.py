"""Typed functions as tools: what the policy is shown of them, and what it may give them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, PolicyFault
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.envs.tools.function_tools import FunctionTool, tool_of, tools_of
from grmpipe.envs.tools.tool_env import ToolEnv
from grmpipe.types import Prompt
from models.types import Message, ToolCall

SOURCE = '''
from pathlib import Path
from typing import Literal
from grmpipe.envs.env import PolicyFault
import asyncio
import sys

import numpy as np

async def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the archive.
    All of it.

    More that no model needs.

    Args:
        query: what to look for
        limit (int): how many results
    """
    await asyncio.sleep(0)
    return [query] * limit

def divide(a: float, b: float) -> float:
    """Divide."""
    if b == 0:
        raise PolicyFault("b is 0")
    return a / b

def fails() -> str:
    raise OSError("disk")

def leaves() -> str:
    sys.exit(3)

def array() -> object:
    return np.zeros(2)

def scalars() -> object:
    return {"a": np.float32(0.5), "b": [np.int64(2), np.bool_(True)]}

def _private(x: int) -> int:
    return x
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "users_tools.py").write_text(SOURCE)
    (folder / "users_empty.py").write_text("x = 1\n")
    sys.path.insert(0, str(folder))
    return "users_tools"


def test_public_functions_become_specifications(module: str) -> None:
    search, divide, fails, *_ = tools_of(module)
    assert [tool.spec.name for tool in (search, divide, fails)] == ["search", "divide", "fails"]
    assert search.spec.description == "Search the archive. All of it."
    assert search.spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "default": 3, "description": "how many results"},
            "order": {"enum": ["new", "old"], "default": "new"},
        },
        "required": ["query"],
    }


def untyped(a: int, b) -> int:  # type: ignore[no-untyped-def]
    return a


def starred(*numbers: int) -> int:
    return 0


def of_no_json(path: Path) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "said"),
    [(untyped, "parameter b has no type"), (starred, "numbers has no name to give it by"), (of_no_json, "JSON")],
)
def test_a_function_that_no_model_could_call_is_refused(function: object, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^functions: .*{said}"):
        tool_of(function)  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "said"), [("nowhere_at_all", "can't be imported"), ("users_empty", "no public")])
def test_a_module_without_tools_is_refused(module: str, path: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^functions: .*{said}"):
        tools_of(path)


def called(tool: FunctionTool, **arguments: object) -> str:
    return asyncio.run(tool.call(ToolCall(name=tool.spec.name, arguments=arguments)))


def test_results_are_texts_or_json(module: str) -> None:
    search, divide, *_, scalars = tools_of(module)
    assert called(scalars) == '{"a":0.5,"b":[2,true]}'
    assert called(search, query="ü", limit=2) == '["ü","ü"]'
    assert called(divide, a=1, b=4) == "0.25"


@pytest.mark.parametrize(
    "arguments",
    [{}, {"query": 3}, {"query": "x", "limit": "many"}, {"query": "x", "more": 1}, {"query": "x", "order": "?"}],
)
def test_wrong_arguments_are_the_policys_fault_and_are_explained(module: str, arguments: dict[str, object]) -> None:
    with pytest.raises(PolicyFault, match="^wrong arguments of search: ") as fault:
        called(tools_of(module)[0], **arguments)
    assert fault.value.kind == "arguments"


def answered(module: str, *calls: ToolCall, errors: tuple[str, ...] = ()) -> Observation:
    async def go() -> Observation:
        limits = StageLimits(boot_s=5, step_s=5, close_s=5, max_observation_chars=100)
        env = LimitedEnv(ToolEnv(module), limits)
        opening = await env.open(Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))))
        assert len(opening.tools) == 6
        return await env.step(Action(text="", tool_calls=calls, errors=errors))

    return asyncio.run(go())


def test_each_call_gets_its_result_and_each_fault_its_explanation(module: str) -> None:
    observation = answered(
        module,
        ToolCall(name="divide", arguments={"a": 1, "b": 2}, call_id="1"),
        ToolCall(name="divide", arguments={"a": 1, "b": 0}, call_id="2"),
        ToolCall(name="rm", arguments={}, call_id="3"),
        errors=("no JSON",),
    )
    contents = [(message.tool_call_id, message.content) for message in observation.messages]
    known = "there is no tool rm; known: search, divide, fails, leaves, array, scalars"
    assert contents == [("1", "0.5"), ("2", "b is 0"), ("3", known), ("", "no JSON")]
    assert observation.faults == ("tool", "unknown_tool", "malformed")
    assert not observation.done


def test_a_turn_without_a_call_ends_the_episode(module: str) -> None:
    assert answered(module).done


@pytest.mark.parametrize(
    ("name", "said", "cause"),
    [
        ("fails", r"raised OSError: disk \(.*users_tools\.py:\d+\)", "broken"),
        ("leaves", r"raised .*SystemExit: 3", "broken"),
        ("array", r"returned array\(\[0\., 0\.\]\), which is no JSON .*: return a text, numbers", "protocol"),
    ],
)
def test_an_error_of_the_functions_own_code_names_it_and_is_never_shown_to_the_policy(
    module: str, name: str, said: str, cause: str
) -> None:
    with pytest.raises(EnvFault, match=rf"^the tool users_tools\.{name} \(.*users_tools\.py:\d+\) {said}") as fault:
        answered(module, ToolCall(name=name, arguments={}))
    assert fault.value.cause == cause
