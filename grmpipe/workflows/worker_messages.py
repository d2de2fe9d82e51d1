"""What a run and a worker process of workflows say to each other: one line of JSON each way. Moves no bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TaskJson(msgspec.Struct, kw_only=True):
    """A Task, with messages in OpenAI's form."""

    messages: list[dict[str, Any]]
    info: dict[str, Any]
    prompt_id: str
    seed: int


class Order(msgspec.Struct, kw_only=True):
    """An episode: the dotted path of the workflow, its options, its task, and where its policy is."""

    target: str
    options: dict[str, Any]
    task: TaskJson
    base_url: str
    api_key: str


class Returned(msgspec.Struct, kw_only=True, tag=True):
    """The workflow returned this."""

    value: Any


class Raised(msgspec.Struct, kw_only=True, tag=True):
    """The workflow raised. word: kind of a PolicyFault, cause of an EnvFault, code of a ChatRefused. types: of any
    other exception, with its bases and causes.
    """

    error: Literal["PolicyFault", "EnvFault", "ChatRefused", "other"]
    text: str
    word: str = ""
    types: list[str] = []
    traceback: str = ""


Answer = Returned | Raised
read_order = msgspec.json.Decoder(Order).decode
read_answer = msgspec.json.Decoder(Answer).decode


def line_of(message: Order | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"
