"""The gateway, asked by the real openai client and by plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from grmpipe.envs.play import RolloutRequest
from grmpipe.models.types import Message, ToolCall
from grmpipe.types import Prompt, Rollout
from grmpipe.workflows.episode_chat import EpisodeChat, EpisodeChats
from grmpipe.workflows.play_workflow import Ending, make_rollout
from grmpipe.workflows.policy import Policy
from grmpipe.workflows.server import MAX_BODY_BYTES, Gateway

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
USER = {"role": "user", "content": "?"}
NO_JSON = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@asynccontextmanager
async def served(chats: EpisodeChats, request: RolloutRequest) -> AsyncIterator[tuple[EpisodeChat, Policy, Gateway]]:
    gateway, episode = Gateway(), chats.open(request)
    policy = Policy(episode.chat, lambda: gateway.admit(episode))
    try:
        yield episode, policy, gateway
    finally:
        episode.end()
        await policy.close()
        await gateway.close()


@pytest.fixture
def asked(make_chats: Callable, request_of: RolloutRequest) -> Callable[..., Rollout]:
    """`asked(engine, talk, **limits)`: the rollout of what a function asks a policy."""

    def run(engine: object, talk: Callable[[Policy], Awaitable[None]], **limits: float) -> Rollout:
        async def play() -> Rollout:
            async with served(make_chats(engine, **limits), request_of) as (episode, policy, _):
                await talk(policy)
            return make_rollout(request_of, PROMPT, episode, Ending())

        return asyncio.run(play())

    return run


def post(policy: Policy, body: object, **more: object) -> Awaitable[httpx.Response]:
    async def posted() -> httpx.Response:
        key = more.pop("key", policy.api_key)
        async with httpx.AsyncClient(trust_env=False) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
            return await client.post(f"{policy.base_url}/chat/completions", content=content, headers=headers)

    return posted()


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_the_openai_client_calls_tools_and_its_turns_are_one_segment(make_engine: Callable, asked: Callable) -> None:
    engine = make_engine(["add 1 2", "it is 3"])

    async def talk(policy: Policy) -> None:
        messages: list = [USER]
        first = await policy.openai.chat.completions.create(model="any", messages=messages, tools=[ADD], seed=7)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content, first.model) == ("tool_calls", None, "any")
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert first.usage.total_tokens == first.usage.prompt_tokens + len("add 1 2")
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await policy.openai.chat.completions.create(model="any", messages=messages, tools=[ADD])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("it is 3", "stop")
        assert first.id != second.id

    rollout = asked(engine, talk)
    assert [turn.rewritten for turn in rollout.turns] == [False, False]
    assert list(rollout.prompts()) == [prompt for prompt, _ in engine.said]
    assert rollout.turns[0].replies == (Message(role="tool", content="3", name="add", tool_call_id="call_1"),)
    assert rollout.turns[0].tool_calls == (ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="call_1"),)


def test_a_stream_holds_the_same_message(make_engine: Callable, asked: Callable) -> None:
    async def talk(policy: Policy) -> None:
        stream = await policy.openai.chat.completions.create(
            model="m", messages=[USER], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1, "b": 2})
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "tool_calls"]
        assert chunks[-1].usage.completion_tokens == len("add 1 2")

    assert len(asked(make_engine(["add 1 2"]), talk).turns) == 1


def test_parallel_requests_are_each_a_turn(make_engine: Callable, asked: Callable) -> None:
    engine = make_engine()

    async def talk(policy: Policy) -> None:
        replies = await asyncio.gather(
            *(
                policy.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
                for name in "abc"
            )
        )
        assert len({reply.id for reply in replies}) == 3

    rollout = asked(engine, talk)
    assert sorted(rollout.prompts()) == sorted(prompt for prompt, _ in engine.said) and len(rollout.turns) == 3


def test_errors_of_the_openai_client_name_the_limit(make_engine: Callable, asked: Callable) -> None:
    async def talk(policy: Policy) -> None:
        create = policy.openai.chat.completions.create
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="m", messages=[{"role": "user", "content": "x" * 99}])
        assert long.value.code == "context_length_exceeded"
        await create(model="m", messages=[USER], max_completion_tokens=2)
        with pytest.raises(openai.PermissionDeniedError, match=r"rollout\.max_turns = 1") as turns:
            await create(model="m", messages=[USER])
        assert turns.value.code == "turn_limit_exceeded"

    rollout = asked(make_engine(["long text"]), talk, max_turns=1, context_tokens=50)
    assert rollout.turns[0].completion.text == "lo"


BAD = [
    (b"{", (400, "invalid_request")),
    (b'{"messages": "\xff"}', (400, "invalid_request")),
    ({"messages": []}, (400, "invalid_request")),
    ({"messages": [{"role": "wizard", "content": "x"}]}, (400, "invalid_request")),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, (400, "invalid_request")),
    ({"messages": [USER], "n": 2}, (400, "invalid_request")),
    ({"messages": [USER, NO_JSON]}, (400, "invalid_request")),
    (b'{"messages": "' + b"x" * MAX_BODY_BYTES + b'"}', (413, "request_too_large")),
]  # fmt: skip


def test_bad_requests_are_refused_and_are_no_turns(make_engine: Callable, asked: Callable) -> None:
    async def talk(policy: Policy) -> None:
        for body, code in BAD:
            response = await post(policy, body)
            assert code_of(response) == code, response.text[:300]
        async with httpx.AsyncClient(trust_env=False) as client:
            nowhere = await client.get(f"{policy.base_url}/responses", headers={"Authorization": "Bearer x"})
            assert code_of(nowhere) == (404, "not_found")
            models = await client.get(
                f"{policy.base_url}/models", headers={"Authorization": f"Bearer {policy.api_key}"}
            )
            assert [model["id"] for model in models.json()["data"]] == ["policy"]
        text = [{"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]}]
        assert (await post(policy, {"messages": [*text, USER]})).status_code == 200

    rollout = asked(make_engine(), talk)
    assert len(rollout.turns) == 1 and rollout.opening[0] == Message(role="system", content="be brief")


def test_only_the_episodes_own_key_opens_its_chat(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    engine = make_engine()

    async def play() -> None:
        async with served(make_chats(engine), request_of) as (episode, policy, gateway):
            other = gateway.admit(make_chats(make_engine()).open(request_of))
            assert policy.base_url.startswith("http://127.0.0.1:") and policy.base_url == other.base_url
            public = policy.api_key.split("-")[1]
            for key in ("", "x", "grmpipe-1", f"grmpipe-{public}-", f"grmpipe-{public}-x", policy.api_key + "x"):
                assert code_of(await post(policy, {"messages": [USER]}, key=key)) == (401, "invalid_api_key")
            assert not engine.asked
            assert (await post(policy, {"messages": [USER]})).status_code == 200
            episode.end()
            gateway.dismiss(episode)
            assert code_of(await post(policy, {"messages": [USER]})) == (403, "session_ended")
            assert (await post(policy, {"messages": [USER]}, key=other.api_key)).status_code == 200
            assert len(engine.asked) == 1

    asyncio.run(play())


@pytest.mark.parametrize(
    ("sent", "got"),
    [("", b""), ("X-Never: ends", b""), ("Authorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n{{", b" 408 ")],
    ids=["no header", "half a header", "half a body"],
)
def test_a_request_that_never_ends_is_closed_after_its_limit(
    make_engine: Callable, asked: Callable, monkeypatch: pytest.MonkeyPatch, sent: str, got: bytes
) -> None:
    monkeypatch.setattr("grmpipe.workflows.server.REQUEST_S", 0.2)

    async def talk(policy: Policy) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(policy.base_url).port)
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{sent.format(key=policy.api_key)}".encode())
        async with asyncio.timeout(20):
            answer = await reader.read(4096)
        assert got in answer and bool(answer) == bool(got)
        writer.close()
        assert (await post(policy, {"messages": [USER]})).status_code == 200

    assert len(asked(make_engine(), talk).turns) == 1


def test_a_client_that_hangs_up_ends_its_request(make_engine: Callable, asked: Callable) -> None:
    engine = make_engine(["lost", "kept"])

    async def talk(policy: Policy) -> None:
        engine.held = asyncio.Event()
        with pytest.raises(openai.APITimeoutError):
            await policy.openai.with_options(timeout=0.5).chat.completions.create(model="m", messages=[USER])
        async with asyncio.timeout(30):
            while not engine.aborted:
                await asyncio.sleep(0.01)
        engine.held = None
        await policy.openai.chat.completions.create(model="m", messages=[USER])

    assert [turn.completion.text for turn in asked(engine, talk).turns] == ["kept"]


HARMLESS = {
    "user": "me", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "tool_choice": "auto",
    "response_format": {"type": "text"}, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {},
    "logprobs": False, "top_logprobs": 0, "stop": [], "functions": [], "function_call": "none",
}  # fmt: skip


def test_parameters_that_would_change_an_answer_and_arent_supported_are_refused_by_name(
    make_engine: Callable, asked: Callable
) -> None:
    async def talk(policy: Policy) -> None:
        for name, value in (
            ("response_format", {"type": "json_object"}), ("tool_choice", "required"), ("presence_penalty", 0.5),
            ("frequency_penalty", -1), ("logit_bias", {"7": 100}), ("top_logprobs", 3),
            ("functions", [{"name": "add"}]), ("function_call", "auto"),
        ):  # fmt: skip
            response = await post(policy, {"messages": [USER], name: value})
            assert code_of(response) == (400, "invalid_request")
            assert f"{name}: only " in response.text
        deep = b'{"messages": ' + b"[" * 100_000
        assert code_of(await post(policy, deep)) == (400, "invalid_request")
        assert code_of(await post(policy, {"messages": [USER]}, key="grmpipe-\u00e9-\u00e9")) == (
            401,
            "invalid_api_key",
        )
        public = policy.api_key.split("-")[1]
        key = f"grmpipe-{public}-\u00e9"
        assert code_of(await post(policy, {"messages": [USER]}, key=key)) == (401, "invalid_api_key")
        assert (await post(policy, {"messages": [USER]})).status_code == 200

    assert len(asked(make_engine(), talk).turns) == 1


def test_ignored_setting_of_a_request_is_reported_once(
    make_engine: Callable, asked: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()

    async def talk(policy: Policy) -> None:
        for _ in range(2):
            body = {
                "messages": [USER],
                "temperature": 0.1,
                "reasoning_effort": "low",
                "top_p": None,
                "seed": 0,
                **HARMLESS,
            }
            assert (await post(policy, body)).status_code == 200

    asked(engine, talk)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "reasoning_effort, seed, temperature" in said and "top_p" not in said and "user" not in said
    assert {params.temperature for _, params, _ in engine.asked} == {0.7}
