"""What a workflow gets: its task, and the policy, by calls or by URL.

async def solve(task, policy):
    reply = await policy.chat(task.messages)
    return float("7" in reply.content)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from grmpipe.models.types import Message, ToolSpec
from grmpipe.workflows.chat import ChatOptions, ChatReply
from grmpipe.workflows.chat_json import parse_messages, tools_of_json

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be done: a row of the data, without what only judges see.

    messages: the row's prompt.
    info:     what the row holds for the environment.
    seed:     differs between siblings, and between the attempts of one.
    """

    messages: tuple[Message, ...]
    info: Mapping[str, object] = field(default_factory=dict)
    prompt_id: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """Where an episode's policy is asked over HTTP, as OpenAI's chat completions. The key is the episode's own."""

    base_url: str
    api_key: str


class Chat(Protocol):
    """What answers one request."""

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions
    ) -> ChatReply: ...


class Workflow(Protocol):
    """The user's function."""

    def __call__(self, task: Task, policy: Policy) -> Awaitable[object]: ...


class Policy:
    """The policy in training, for one episode. Calls may run in parallel."""

    def __init__(self, chat: Chat, endpoint: Callable[[], ChatEndpoint]) -> None:
        self._chat = chat
        self._find_endpoint = endpoint

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> ChatReply:
        """The policy's next message. Temperature and top_p are the run's.

        messages, tools: also in the form of OpenAI's chat completions.
        max_tokens, stop, logprobs: as in ChatOptions. Raises ChatRefused.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        options = ChatOptions(max_tokens=max_tokens, stop=stops, logprobs=logprobs)
        return await self._chat(parse_messages(messages), tools_of_json(tools), options)

    @cached_property
    def endpoint(self) -> ChatEndpoint:
        """The first use starts the run's server."""
        return self._find_endpoint()

    @property
    def base_url(self) -> str:
        """The URL of the policy as OpenAI's chat completions; it ends in /v1. The first use starts the run's server."""
        return self.endpoint.base_url

    @property
    def api_key(self) -> str:
        """This episode's key: requests with it are recorded as the episode's turns. It ends with the episode."""
        return self.endpoint.api_key

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """A client of the package openai, which must be installed. It repeats no request: each is a turn."""
        import openai  # late: half a second, and only some workflows need it

        transport = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)  # the URL is on this machine
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0, http_client=transport)

    async def close(self) -> None:
        if (client := self.__dict__.get("openai")) is not None:
            await client.close()
