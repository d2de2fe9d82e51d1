"""A worker process of workflows: runs one after another, as it is asked over a socket. Loads no model.

python -m grmpipe.workflows.worker_process <number of the inherited socket>
"""

from __future__ import annotations

import socket
import sys
import traceback

from grmpipe.config.dotted_path import found_at
from grmpipe.config.user_code import described, plain_text, words_of
from grmpipe.envs.blame import types_of
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.workflows.chat import ChatRefused
from grmpipe.workflows.chat_json import messages_of
from grmpipe.workflows.http_chat import HttpChat
from grmpipe.workflows.in_process import workflow_at
from grmpipe.workflows.outcome import plain_rewards
from grmpipe.workflows.policy import Endpoint, Policy, Task
from grmpipe.workflows.worker_messages import Answer, Order, Raised, Returned, TaskJson, line_of, read_order
from scheduler.event_loop import run_to_end


def serve(line: socket.socket) -> None:
    """Answer every order until the run closes the socket."""
    with line.makefile("rb") as orders:
        for order in orders:
            line.sendall(line_of(run_to_end(answer(read_order(order)))))


async def answer(order: Order) -> Answer:
    endpoint = Endpoint(base_url=order.base_url, api_key=order.api_key)
    chat = HttpChat(endpoint)
    policy = Policy(chat, lambda: endpoint)
    try:
        workflow = workflow_at(order.target, order.options)
        return Returned(
            value=plain_rewards(
                await workflow(task_of(order.task), policy), described(found_at(order.target, "target"))
            )
        )
    except PolicyFault as fault:
        return Raised(error="PolicyFault", text=str(fault), word=fault.kind)
    except EnvFault as fault:
        return Raised(error="EnvFault", text=str(fault), word=fault.cause)
    except ChatRefused as refused:
        return Raised(error="ChatRefused", text=str(refused), word=refused.code)
    except BaseException as error:  # the user's code may raise anything
        words = f"{described(found_at(order.target, 'target'))} raised {words_of(error)}"
        return Raised(error="other", text=words, types=types_of(error), traceback=plain_text(traceback.format_exc()))
    finally:
        await policy.close()
        await chat.close()


def task_of(task: TaskJson) -> Task:
    return Task(messages=messages_of(task.messages), info=task.info, prompt_id=task.prompt_id, seed=task.seed)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
