"""A worker process of workflows: runs one after another, as it is asked over a socket by a line of JSON each.

python -m grmpipe.workflows.worker_process <number of the inherited socket>
"""

import socket
import sys
import traceback
from typing import Any, Literal

import msgspec

from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import describe_code, describe_error, plain_text
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import list_types
from grmpipe.scheduler.event_loop import run_to_end
from grmpipe.workflows.chat import ChatRefused
from grmpipe.workflows.http_chat import HttpChat
from grmpipe.workflows.in_process import workflow_at
from grmpipe.workflows.outcome import plain_rewards
from grmpipe.workflows.policy import ChatEndpoint, Policy, Task


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
