"""Typed functions as tools: what the policy is shown of them, and what it may give them."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from grmpipe.config.env import EnvConfig, ToolCallLimits
from grmpipe.envs.checked_env import CheckedEnv
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, PolicyFault
from grmpipe.envs.fault_owner import fault_rules
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.envs.tools.function_tools import FunctionTool, load_tools, make_tool
from grmpipe.envs.tools.tool_env import ToolEnv
from grmpipe.models.types import Message, ToolCall
from grmpipe.types import Prompt

SOURCE = '''
from pathlib import Path
from types import ModuleType
from typing import Literal
from grmpipe.envs.env import PolicyFault
import asyncio
import time
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

BEGUN = []

def hangs(seconds: float) -> str:
    BEGUN.append(seconds)
    time.sleep(seconds)
    return f"after {seconds}"

async def stubborn() -> str:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if BEGUN:  # the test is over
                raise

async def leaves() -> str:
    raise SystemExit(3)

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
    search, divide, *others = load_tools(module)
    names = ["fails", "hangs", "stubborn", "leaves", "array", "scalars"]
    assert [tool.spec.name for tool in (search, divide, *others)] == ["search", "divide", *names]
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
        make_tool(function)  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "said"), [("nowhere_at_all", "can't be imported"), ("users_empty", "no public")])
def test_a_module_without_tools_is_refused(module: str, path: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^functions: .*{said}"):
        load_tools(path)


def called(tool: FunctionTool, **arguments: object) -> str:
    return asyncio.run(tool.call(ToolCall(name=tool.spec.name, arguments=arguments)))


def test_results_are_texts_or_json(module: str) -> None:
    search, divide, *_, scalars = load_tools(module)
    assert called(scalars) == '{"a":0.5,"b":[2,true]}'
    assert called(search, query="ü", limit=2) == '["ü","ü"]'
    assert called(divide, a=1, b=4) == "0.25"


@pytest.mark.parametrize(
    "arguments",
    [{}, {"query": 3}, {"query": "x", "limit": "many"}, {"query": "x", "more": 1}, {"query": "x", "order": "?"}],
)
def test_wrong_arguments_are_the_policys_fault_and_are_explained(module: str, arguments: dict[str, object]) -> None:
    with pytest.raises(PolicyFault, match="^wrong arguments of search: ") as fault:
        called(load_tools(module)[0], **arguments)
    assert fault.value.kind == "arguments"


def answered(
    module: str, *calls: ToolCall, errors: tuple[str, ...] = (), calls_within: ToolCallLimits | None = None
) -> Observation:
    async def go() -> Observation:
        limits = StageLimits(boot_s=5, step_s=5, close_s=5, max_observation_chars=100)
        env = LimitedEnv(ToolEnv(module, limits=calls_within), limits)
        opening = await env.open(Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))))
        assert len(opening.tools) == 8
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
    known = "there is no tool rm; known: search, divide, fails, hangs, stubborn, leaves, array, scalars"
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


def index(place: int) -> int:
    return [7, 8][place]


def read(path: str) -> str:
    raise FileNotFoundError(f"no {path}")


def lose(host: str) -> str:
    raise ConnectionError(f"{host} is down")


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("raising_tools")
    made.__dict__.update(index=index, read=read, lose=lose, __all__=["index", "read", "lose"])
    monkeypatch.setitem(sys.modules, "raising_tools", made)


def act(*calls: ToolCall, limits: ToolCallLimits | None = None, left_s: float = math.inf) -> Observation:
    env = CheckedEnv(
        lambda: ToolEnv("raising_tools", limits=limits), fault_rules(limits.policy_errors if limits else ())
    )

    async def go() -> Observation:
        await env.open(Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))))
        return await env.step(Action(text="", tool_calls=calls, left_s=left_s))

    return asyncio.run(go())


def test_what_a_tool_raises_about_its_call_is_read_as_its_result_and_the_other_calls_keep_theirs(raising: None) -> None:
    calls = (("index", {"place": 5}), ("index", {"place": 1}), ("read", {"path": "a.txt"}))
    seen = act(*(ToolCall(name=name, arguments=arguments) for name, arguments in calls))
    said = ["index raised IndexError: list index out of range", "8", "read raised FileNotFoundError: no a.txt"]
    assert [one.content for one in seen.messages] == said
    assert seen.faults == ("raised", "raised") and not seen.done


def test_what_a_tool_raises_of_the_machine_or_of_the_runs_own_rules_ends_the_episode(raising: None) -> None:
    with pytest.raises(EnvFault, match=r"the tool .*lose .*ConnectionError: h is down") as broken:
        act(ToolCall(name="lose", arguments={"host": "h"}))
    assert broken.value.cause == "broken"
    ends = ToolCallLimits(policy_errors=("builtins.IndexError",))
    with pytest.raises(PolicyFault) as ended:
        act(ToolCall(name="index", arguments={"place": 5}), limits=ends)
    assert ended.value.ends and ended.value.kind == "IndexError"


def test_calls_get_what_is_left_of_the_episodes_budget(raising: None) -> None:
    seen = act(ToolCall(name="index", arguments={"place": 0}), left_s=0.0)
    assert seen.messages[0].content.startswith("index was not called") and seen.faults == ("timeout",)


def hang(seconds: float) -> ToolCall:
    return ToolCall(name="hangs", arguments={"seconds": seconds}, call_id=str(seconds))


def test_calls_of_a_turn_run_at_once_and_their_results_keep_the_calls_order(module: str) -> None:
    begun_s = time.monotonic()
    observation = answered(module, *(hang(each) for each in (0.9, 0.7, 0.5, 0.3, 0.1)))
    assert [message.content for message in observation.messages] == [f"after 0.{n}" for n in (9, 7, 5, 3, 1)]
    assert time.monotonic() - begun_s < 2.4, "one after the other they take 2.5 s"


def test_calls_of_many_episodes_at_once_wait_for_no_thread(module: str) -> None:
    async def go() -> None:
        limits = StageLimits(boot_s=5, step_s=3, close_s=5, max_observation_chars=100)
        envs = [LimitedEnv(ToolEnv(module), limits) for _ in range(64)]
        steps = await asyncio.gather(*(env.step(Action(text="", tool_calls=(hang(0.5),))) for env in envs))
        assert [step.messages[0].content for step in steps] == ["after 0.5"] * 64

    asyncio.run(go())


def test_calls_of_a_tool_set_that_shares_a_state_run_one_after_the_other(module: str) -> None:
    begun = importlib.import_module(module).BEGUN
    begun.clear()
    order = (0.06, 0.02, 0.04, 0.01)
    answered(module, *map(hang, order), calls_within=ToolCallLimits(max_parallel_calls=1))
    assert tuple(begun) == order


def test_a_call_that_hangs_is_a_result_that_the_policy_reads_and_the_others_keep_theirs(module: str) -> None:
    within = ToolCallLimits(call_s=0.3)
    calls = (hang(2), ToolCall(name="divide", arguments={"a": 1, "b": 2}), ToolCall(name="stubborn", arguments={}))
    observation = answered(module, *calls, calls_within=within)
    late = "hangs did not end within 0.3 s, and was given up"
    assert [message.content for message in observation.messages] == [late, "0.5", late.replace("hangs", "stubborn")]
    assert observation.faults == ("timeout", "timeout")
    importlib.import_module(module).BEGUN.append(0)


def test_many_calls_end_together_within_the_limit_of_a_turn(module: str) -> None:
    within = ToolCallLimits(call_s=0.2, turn_s=0.3, max_parallel_calls=1)
    observation = answered(module, *[hang(2)] * 4, calls_within=within)
    first, *_, last = [message.content for message in observation.messages]
    assert first == "hangs did not end within 0.2 s, and was given up"
    assert last == "hangs was not called: the calls before it took too long"
    assert observation.faults == ("timeout",) * 4


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, ToolCallLimits(call_s=27, turn_s=27)),
        ({"step_s": 10.0, "call_s": 2.0}, ToolCallLimits(call_s=2, turn_s=9)),
        ({"step_s": 10.0, "call_s": 9.5}, ToolCallLimits(call_s=9.5, turn_s=9.5)),
    ],
)
def test_a_call_is_limited_below_the_step_that_it_belongs_to(settings: dict, limits: ToolCallLimits) -> None:
    assert EnvConfig(kind="tools", functions="x", **settings).arguments["limits"] == limits


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"call_s": 30.0}, r"^call_s: must be above 0 and below step_s = 30"),
        ({"max_parallel_calls": 0}, "^max_parallel_calls: must be at least 1"),
        ({"call_s": 1.0, "kind": "custom", "functions": "", "target": "a.B"}, r"^call_s: is for env\.kind=tools"),
    ],
)
def test_limits_of_calls_that_can_not_hold_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvConfig(**{"kind": "tools", "functions": "x"} | settings)
