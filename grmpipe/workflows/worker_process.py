"""A worker process of workflows: runs one after another, as it is asked over a socket by a line of JSON each.

python -m grmpipe.workflows.worker_process <number of the inherited socket>
"""

import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import msgspec

from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import describe_code, describe_error, plain_text
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import list_types
from grmpipe.models.types import Message, ToolSpec
from grmpipe.scheduler.event_loop import run_to_end
from grmpipe.workflows.chat import ChatOptions, ChatRefused, ChatReply
from grmpipe.workflows.chat_json import message_json, parse_refusal, parse_reply, tool_json
from grmpipe.workflows.in_process import workflow_at
from grmpipe.workflows.outcome import plain_rewards
from grmpipe.workflows.policy import ChatEndpoint, Policy, Task

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


class Order(msgspec.Struct, kw_only=True):
    """An episode: the dotted path of the workflow, its options, its task, and where its policy is."""

    target: str
    options: dict[str, Any]
    task: Task
    endpoint: ChatEndpoint


class Returned(msgspec.Struct, kw_only=True, tag=True):
    """The workflow returned this."""

    value: Any


class Raised(msgspec.Struct, kw_only=True, tag=True):
    """The workflow raised. word: kind of a PolicyFault, cause of an EnvFault, code of a ChatRefused. types: those of
    any other exception, with its bases and causes.
    """

    error: Literal["PolicyFault", "EnvFault", "ChatRefused", "other"]
    text: str
    word: str = ""
    types: list[str] = []
    traceback: str = ""


read_order = msgspec.json.Decoder(Order).decode
ANSWERS: msgspec.json.Decoder[Returned | Raised] = msgspec.json.Decoder(Returned | Raised)


def to_line(message: Order | Returned | Raised) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def serve(line: socket.socket) -> None:
    """Answer every order until the run closes the socket."""
    with line.makefile("rb") as orders:
        for order in orders:
            line.sendall(to_line(run_to_end(answer(read_order(order)))))


async def answer(order: Order) -> Returned | Raised:
    chat = HttpChat(order.endpoint)
    policy = Policy(chat, lambda: order.endpoint)
    try:
        workflow = workflow_at(order.target, order.options)
        return Returned(
            value=plain_rewards(await workflow(order.task, policy), describe_code(find_at(order.target, "target")))
        )
    except PolicyFault as fault:
        return Raised(error="PolicyFault", text=str(fault), word=fault.kind)
    except EnvFault as fault:
        return Raised(error="EnvFault", text=str(fault), word=fault.cause)
    except ChatRefused as refused:
        return Raised(error="ChatRefused", text=str(refused), word=refused.code)
    except BaseException as error:  # the user's code may raise anything
        words = f"{describe_code(find_at(order.target, 'target'))} raised {describe_error(error)}"
        return Raised(error="other", text=words, types=list_types(error), traceback=plain_text(traceback.format_exc()))
    finally:
        await policy.close()
        await chat.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
