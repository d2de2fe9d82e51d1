"""Messages, tools, replies and refusals in the JSON of OpenAI's chat completions, and back. Pure: no server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from grmpipe.models.types import Message, ToolCall, ToolSpec
from grmpipe.workflows.chat import ChatOptions, ChatRefused, ChatReply, RefusalCode, TokenLogprob

Json = Mapping[str, Any]  # an object of the wire; it stays in this file, the server and the client
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Refusals -> HTTP status. Clients repeat requests after 408, 409, 429 and 5xx: none of ours helps to repeat.
STATUS: Mapping[RefusalCode, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "turn_limit_exceeded": 403,
    "time_limit_exceeded": 403,
    "session_ended": 403,
    "policy_unavailable": 424,
}
MODEL = "policy"  # the name of the one model


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class _Described(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Described
    type: str = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The fields of a request that count. Others are in `overridden`, or have no effect."""

    messages: list[_Message]
    model: str = MODEL
    tools: list[_Tool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None

    @property
    def options(self) -> ChatOptions:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return ChatOptions(max_tokens=limit, stop=stop, logprobs=bool(self.logprobs))

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


# Fields that would change the answer in a way that the run can't: name -> the values that ask for nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
}
# Fields that change no answer.
HARMLESS = frozenset(
    {
        "user", "store", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key",
        *ChatRequest.__struct_fields__,
    }
)  # fmt: skip


def read_request(body: bytes) -> tuple[ChatRequest, tuple[str, ...]]:
    """A request, and the names of what it asks in vain: settings that the run makes itself, and unknown fields. Raises
    ChatRefused, also for a field that would change the answer and can't be honoured.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(fields, ChatRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChatRefused("invalid_request", f"the body is no chat completion request: {error}") from error
    if request.n not in (None, 1):
        raise ChatRefused("invalid_request", "n: must be 1; ask several times instead")
    for name, neutral in REFUSED.items():
        if fields.get(name) not in (None, *neutral):
            default = msgspec.json.encode(neutral[0]).decode()
            raise ChatRefused(
                "invalid_request", f"{name}: only {default} can be honoured, because the run samples as it trains"
            )
    asked = fields.keys() - HARMLESS - REFUSED.keys()
    return request, tuple(sorted(name for name in asked if fields[name] is not None and fields[name] is not False))


def parse_messages(entries: Sequence[Message | Json | _Message]) -> tuple[Message, ...]:
    """Messages as they are, or from OpenAI's form. A tool's result gets the name of the tool that its call has. Raises
    ChatRefused.
    """
    if not entries:
        raise ChatRefused("invalid_request", "messages: is empty")
    names: dict[str, str] = {}
    messages = []
    for entry in entries:
        message = entry if isinstance(entry, Message) else _message(_converted(entry, _Message, "messages"))
        names |= {call.call_id: call.name for call in message.tool_calls}
        if message.tool_call_id and not message.name:
            message = replace(message, name=names.get(message.tool_call_id, ""))
        messages.append(message)
    return tuple(messages)


def tools_of_json(entries: Sequence[ToolSpec | Json | _Tool] | None) -> tuple[ToolSpec, ...]:
    """Tools as they are, or from OpenAI's form. Raises ChatRefused."""
    return tuple(
        entry if isinstance(entry, ToolSpec) else _tool(_converted(entry, _Tool, "tools")) for entry in entries or ()
    )


def message_json(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["content"] = message.content or None
        entry["tool_calls"] = [_call_json(call) for call in message.tool_calls]
    return entry | {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key))}


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": described}


def completion_json(reply: ChatReply, model: str, created_s: int) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": message_json(reply),
        "finish_reason": _finish(reply),
        "logprobs": _logprobs(reply),
    }
    return _head(reply, model, created_s, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def chunks_json(reply: ChatReply, model: str, created_s: int, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The same as the chunks of a stream: the message in one, then its end."""
    head = _head(reply, model, created_s, "chat.completion.chunk")
    delta = message_json(reply)
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": _logprobs(reply)}]}
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]}
    if with_usage:
        yield head | {"choices": [], "usage": _usage(reply)}


def parse_reply(completion: Json) -> ChatReply:
    """The reply in a response of ours."""
    choice, usage = completion["choices"][0], completion["usage"]
    (message,) = parse_messages([choice["message"]])
    return ChatReply(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        completion_id=completion["id"],
        finish_reason="length" if choice["finish_reason"] == "length" else "stop",
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        logprobs=tuple(
            TokenLogprob(token=entry["token"], logprob=entry["logprob"])
            for entry in (choice["logprobs"] or {"content": ()})["content"]
        ),
    )


def error_json(text: str, code: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def parse_refusal(error: Json) -> ChatRefused:
    """The refusal in a response of ours."""
    code = error["error"]["code"]
    return ChatRefused(code if code in STATUS else "invalid_request", error["error"]["message"])


def _converted(entry: object, kind: type, key: str) -> Any:
    try:
        return entry if isinstance(entry, kind) else msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        raise ChatRefused("invalid_request", f"{key}: {error}") from error


def _message(entry: _Message) -> Message:
    if entry.role not in ROLES:
        raise ChatRefused("invalid_request", f"messages: unknown role {entry.role!r}; known: {', '.join(ROLES)}")
    return Message(
        role=ROLES[entry.role],
        content=_text(entry.content),
        tool_calls=tuple(_call(call) for call in entry.tool_calls or ()),
        name=(entry.name or "") if entry.role == "tool" else "",
        tool_call_id=entry.tool_call_id or "",
    )


def _text(content: str | list[_ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type != "text":
            raise ChatRefused("invalid_request", f"messages: the policy reads text, and no {part.type}")
    return "".join(part.text for part in content)


def _call(entry: _ToolCall) -> ToolCall:
    arguments = entry.function.arguments
    try:
        decoded = msgspec.json.decode(arguments or "{}", type=dict) if isinstance(arguments, str) else arguments
    except msgspec.DecodeError as error:
        raise ChatRefused(
            "invalid_request", f"messages: the arguments of a call of {entry.function.name} are no JSON object: {error}"
        ) from error
    return ToolCall(name=entry.function.name, arguments=decoded, call_id=entry.id)


def _call_json(call: ToolCall) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(entry: _Tool) -> ToolSpec:
    if entry.type != "function":
        raise ChatRefused("invalid_request", f"tools: only functions are known, and no {entry.type}")
    described = entry.function
    parameters = described.parameters or {"type": "object", "properties": {}}
    return ToolSpec(name=described.name, description=described.description or "", parameters=parameters)


def _finish(reply: ChatReply) -> str:
    return "tool_calls" if reply.tool_calls else reply.finish_reason


def _logprobs(reply: ChatReply) -> dict[str, Any] | None:
    if not reply.logprobs:
        return None
    return {
        "content": [
            {
                "token": one.token,
                "logprob": one.logprob,
                "bytes": list(one.token.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for one in reply.logprobs
        ],
        "refusal": None,
    }


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _head(reply: ChatReply, model: str, created_s: int, kind: str) -> dict[str, Any]:
    return {"id": reply.completion_id, "object": kind, "created": created_s, "model": model}
