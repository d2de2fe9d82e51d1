"""The policy's replies over HTTP, from the gateway of the run. For workflows in processes of their own."""

from collections.abc import Sequence

import httpx

from grmpipe.models.types import Message, ToolSpec
from grmpipe.workflows.chat import ChatOptions, ChatRefused, ChatReply
from grmpipe.workflows.chat_json import message_json, parse_refusal, parse_reply, tool_json
from grmpipe.workflows.policy import ChatEndpoint

LIMIT_S = 86_400.0


class HttpChat:
    """A chat with the policy at an endpoint. Its own limit is long: the run ends the episode by `env.episode_s`."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._client = httpx.AsyncClient(
            base_url=endpoint.base_url,
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
            timeout=LIMIT_S,
            trust_env=False,
        )

    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: ChatOptions) -> ChatReply:
        body: dict[str, object] = {
            "messages": [message_json(message) for message in messages],
            "max_tokens": options.max_tokens,
            "stop": options.stop,
            "logprobs": options.logprobs,
        }
        if tools:
            body["tools"] = [tool_json(tool) for tool in tools]
        try:
            response = await self._client.post("/chat/completions", json=body)
        except httpx.TransportError as error:
            raise ChatRefused("policy_unavailable", f"the gateway doesn't answer: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise parse_refusal(response.json())
        return parse_reply(response.json())

    async def close(self) -> None:
        await self._client.aclose()
