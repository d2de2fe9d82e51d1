"""A chat template: what it does with a conversation, rendered around placeholders. Knows no token ids; no text of a
message or of an argument is ever seen by the template.

A template sees the shape of a conversation: roles, names, numbers, the keys of arguments. Each text in it is a
placeholder, and the layout says where the texts belong, and how often the template wrote them as a JSON string. What
would break the rendering of a conversation in pieces is refused: tools that spell markup, lists that move. At the end,
work on long texts in a thread of its own, so that the event loop goes on meanwhile.
"""

import asyncio
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeVar

from grmpipe.models.chat.tool_call_checks import find_problem, is_tool_name
from grmpipe.models.types import Message, ToolCall, ToolSpec

TOOL = "tool"  # the role of a tool's result
# What a template may do to a text shows in these characters: write it as JSON, as Python, or otherwise changed. Only
# with tools: otherwise a text stays as it was given, whatever the template would do to it.
PROBE = "\"'\\\n\u00e9."
MOST_ESCAPES = 2  # a JSON string within a JSON string
ID_CHARS = 9  # Mistral's templates take only ids of this length
NO_ID = "0" * ID_CHARS
MARK = "\x00"  # begins the number that stands for a text in the arguments of a shape

# (conversation, tools or None, asks_next) -> text. Raises ValueError.
ApplyTemplate = Callable[[list[dict[str, Any]], list[Any] | None, bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallShape:
    """A call without its texts. `arguments`: JSON with the number of each text in its place, after a MARK."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """What a template may know of a message. Its texts are, in order: content, texts in arguments, ids of calls."""

    role: str
    name: str = ""
    has_content: bool = True
    calls: tuple[ToolCallShape, ...] = ()
    num_arguments: int = 0
    num_ids: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSlot:
    """The place of a text: the message, the text's number in it, and how often it is escaped as a JSON string."""

    message: int
    text: int
    escapes: int

    def fill(self, text: str) -> str:
        for _ in range(self.escapes):
            text = escape_json(text)
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a template writes around the texts: one piece more than slots."""

    pieces: tuple[str, ...]
    slots: tuple[TextSlot, ...]


def escape_json(text: str) -> str:
    """The text within a JSON string, as transformers' `tojson` writes it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def tool_json(tool: ToolSpec) -> str:
    """The tool as chat templates get it. Raises ValueError if it can't be given to one."""
    if not is_tool_name(tool.name):
        raise ValueError(
            f"tools: {tool.name!r} can't be the name of a tool; take 1 to 64 letters, digits, underscores, hyphens "
            "and dots"
        )
    if problem := find_problem(tool.parameters):
        raise ValueError(f"tools: the parameters of {tool.name} are no JSON schema: {problem}")
    function = {"name": tool.name, "description": tool.description, "parameters": _plain(tool.parameters)}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def texts_in(value: object) -> list[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in texts_in(part)]
    return [text for part in value for text in texts_in(part)] if isinstance(value, list | tuple) else []


def split_message(message: Message) -> tuple[MessageShape, tuple[str, ...]]:
    """The shape of a message, and its texts. Raises ValueError for a call that no template can be given."""
    if message.role == TOOL:
        if message.name and not is_tool_name(message.name):
            raise ValueError(f"name: {message.name!r} is not the name of a tool")
        shape = MessageShape(role=TOOL, name=message.name, num_ids=1)
        return shape, (message.content, message.tool_call_id or NO_ID)
    if not message.tool_calls:
        return _plain_shape(message.role), (message.content,)
    texts: list[str] = []
    shape = MessageShape(
        role=message.role,
        has_content=bool(message.content),
        calls=tuple(_call_shape(call, texts) for call in message.tool_calls),
        num_arguments=len(texts),
        num_ids=len(message.tool_calls),
    )
    ids = [call.call_id or NO_ID for call in message.tool_calls]
    return shape, (*([message.content] if message.content else []), *texts, *ids)


@functools.lru_cache
def _plain_shape(role: str) -> MessageShape:
    return MessageShape(role=role)


def _call_shape(call: ToolCall, texts: list[str]) -> ToolCallShape:
    """texts: gets those in the arguments."""
    if not is_tool_name(call.name):
        raise ValueError(f"tool_calls: {call.name!r} is not the name of a tool")
    if problem := find_problem(call.arguments):
        raise ValueError(f"tool_calls: the arguments of {call.name} can't be written: {problem}")
    return ToolCallShape(name=call.name, arguments=json.dumps(_marked(call.arguments, texts)))


def _marked(value: object, texts: list[str]) -> object:
    """The value with each text replaced by its number. Keys that could be names of parameters stay."""
    if isinstance(value, str):
        texts.append(value)
        return f"{MARK}{len(texts) - 1}"
    if isinstance(value, Mapping):
        return {key if is_tool_name(key) else _marked(key, texts): _marked(part, texts) for key, part in value.items()}
    return [_marked(part, texts) for part in value] if isinstance(value, list | tuple) else value


def find_layout(
    apply: ApplyTemplate,
    shapes: Sequence[MessageShape],
    tools: Sequence[str],
    *,
    asks_next: bool,
    arguments_as_text: bool,
) -> Layout:
    """Where a template puts the texts of messages with these shapes.

    tools:             each as `tool_json` writes it.
    arguments_as_text: whether the template takes arguments as JSON, and not as a dictionary.
    Raises ValueError if it loses, repeats, reorders or, with tools, changes a text. It may leave out the content beside
    calls.
    """
    has_tools = bool(tools) or any(shape.calls or shape.role == TOOL for shape in shapes)
    placeholders = [_placeholders_of(shape, PROBE if has_tools else "") for shape in shapes]
    conversation = [
        _as_template_reads(shape, texts, arguments_as_text) for shape, texts in zip(shapes, placeholders, strict=True)
    ]
    rendered = apply(conversation, [json.loads(tool) for tool in tools] or None, asks_next)
    found: list[tuple[int, int, TextSlot]] = []
    last_content = -1
    for index, (shape, texts) in enumerate(zip(shapes, placeholders, strict=True)):
        for number, placeholder in enumerate(texts):
            is_id = number >= len(texts) - shape.num_ids
            is_content = shape.has_content and number == 0
            places = _places_of(rendered, placeholder, is_id)
            if not is_id and len(places) != 1 and not (is_content and shape.calls and not places):
                what = "message" if is_content else "arguments of a call"
                raise ValueError(f"chat_template: it doesn't write the {shape.role} {what} exactly once, in order")
            for start, end, escapes in places:
                if is_content and start < last_content:
                    raise ValueError(f"chat_template: it doesn't write the {shape.role} message exactly once, in order")
                last_content = start if is_content else last_content
                found.append((start, end, TextSlot(message=index, text=number, escapes=escapes)))
    return _cut(rendered, sorted(found, key=lambda place: place[0]))


def _cut(rendered: str, found: Sequence[tuple[int, int, TextSlot]]) -> Layout:
    starts = [start for start, _, _ in found]
    ends = [end for _, end, _ in found]
    pieces = [rendered[begin:end] for begin, end in zip([0, *ends], [*starts, len(rendered)], strict=True)]
    return Layout(pieces=tuple(pieces), slots=tuple(slot for _, _, slot in found))


def _placeholders_of(shape: MessageShape, probe: str) -> list[str]:
    num_texts = int(shape.has_content) + shape.num_arguments
    return [
        *(secrets.token_hex(16) + probe for _ in range(num_texts)),
        *(secrets.token_hex(ID_CHARS)[:ID_CHARS] for _ in range(shape.num_ids)),
    ]


def _as_template_reads(shape: MessageShape, texts: Sequence[str], arguments_as_text: bool) -> dict[str, Any]:
    """The message with placeholders for its texts. Keys without a value are left out: templates ask for them."""
    message: dict[str, Any] = {"role": shape.role, "content": texts[0] if shape.has_content else ""}
    ids = texts[len(texts) - shape.num_ids :]
    if shape.role == TOOL:
        return message | ({"name": shape.name} if shape.name else {}) | {"tool_call_id": ids[0]}
    if not shape.calls:
        return message
    in_arguments = texts[int(shape.has_content) :]
    calls = []
    for call, call_id in zip(shape.calls, ids, strict=True):
        arguments = _unmarked(json.loads(call.arguments), in_arguments)
        shown = json.dumps(arguments, ensure_ascii=False) if arguments_as_text else arguments
        calls.append({"type": "function", "id": call_id, "function": {"name": call.name, "arguments": shown}})
    return message | {"tool_calls": calls}


def _unmarked(value: object, texts: Sequence[str]) -> object:
    if isinstance(value, str):
        return texts[int(value.removeprefix(MARK))] if value.startswith(MARK) else value
    if isinstance(value, dict):
        return {_unmarked(key, texts): _unmarked(part, texts) for key, part in value.items()}
    return [_unmarked(part, texts) for part in value] if isinstance(value, list) else value


def _places_of(rendered: str, placeholder: str, is_id: bool) -> list[tuple[int, int, int]]:
    """Start, end and number of escapes of each occurrence."""
    if is_id:
        return [(match.start(), match.end(), 0) for match in re.finditer(re.escape(placeholder), rendered)]
    forms = [placeholder]
    for _ in range(MOST_ESCAPES):
        forms.append(escape_json(forms[-1]))
    places = []
    for match in re.finditer(re.escape(placeholder.removesuffix(PROBE)), rendered):
        start = match.start()
        escapes = next((n for n, form in enumerate(forms) if rendered.startswith(form, start)), None)
        if escapes is None:
            raise ValueError("chat_template: it changes the text of a message or of a call's arguments")
        places.append((start, start + len(forms[escapes]), escapes))
    return places


REMEMBERED_TOOLS = 512  # lists of tools
USER, ASSISTANT = MessageShape(role="user"), MessageShape(role="assistant")
FIRST_MESSAGES = ((USER,), (MessageShape(role="system"), USER))  # some want a system message, others take none


class ChatTemplate:
    """A chat template.

    apply:         renders it.
    spells_markup: whether the tokenizer finds special or added tokens in a text.
    """

    def __init__(self, apply: ApplyTemplate, spells_markup: Callable[[str], bool]) -> None:
        self._apply = apply
        self._spells_markup = spells_markup
        self._texts: dict[tuple[int, ...], tuple[tuple[ToolSpec, ...], tuple[str, ...]]] = {}

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools that it is given."""
        name = f"probe_{secrets.token_hex(8)}"
        tool = tool_json(ToolSpec(name=name, description="", parameters={"type": "object", "properties": {}}))
        for shapes in FIRST_MESSAGES:
            try:
                pieces = self._layout(shapes, (tool,), asks_next=True).pieces
            except ValueError:
                continue
            if any(name in piece for piece in pieces):
                return True
        return False

    def render_tools(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Each tool as the template gets it, checked. Remembered by identity: the same ones come with each turn."""
        key = tuple(map(id, tools))
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) >= REMEMBERED_TOOLS:
                self._texts.clear()
            known = tuple(tools), tuple(self._checked(tool) for tool in tools)
            self._texts[key] = known  # with the tools themselves, so that no other gets an id of theirs
        return known[1]

    def _checked(self, tool: ToolSpec) -> str:
        written = tool_json(tool)
        for text in (tool.name, tool.description, *texts_in(tool.parameters)):
            if self._spells_markup(text):
                raise ValueError(
                    f"tools: {tool.name} has a text with markup of the chat template: {text!r}; write it otherwise"
                )
        return written

    def generation_prompt(self) -> str:
        """What it writes before an answer."""
        try:
            return self._layout(FIRST_MESSAGES[0], (), asks_next=True).pieces[-1]
        except ValueError:
            return self._layout(FIRST_MESSAGES[1], (), asks_next=True).pieces[-1]

    def after_answer(self) -> str:
        """What it writes between an assistant's text and the next one; empty if it takes no second turn."""
        for first in FIRST_MESSAGES:
            try:
                return self._layout((*first, ASSISTANT, USER), (), asks_next=False).pieces[len(first) + 1]
            except ValueError:
                continue
        return ""

    def layout(self, shapes: Sequence[MessageShape], tools: Sequence[str], *, asks_next: bool) -> Layout:
        """The layout of a conversation. Raises ValueError if the template can't write it."""
        self._check(shapes, tools)
        return self._layout(shapes, tools, asks_next=asks_next)

    def reply_layouts(self, replies: Sequence[MessageShape], tools: Sequence[str]) -> Iterator[Layout]:
        """The layout of what follows an assistant's turn, for each kind of turn that it may have been, the likelier
        first: results follow calls. The first piece begins within that turn, after its last text.

        Raises ValueError if the template can't write the replies, or if they move the list of tools.
        """
        self._check(replies, tools)
        for turn in _turns_before(replies):
            try:
                whole = self._layout((USER, turn, *replies), tools, asks_next=True)
            except ValueError:
                if turn == ASSISTANT:
                    raise
                continue  # such as a template that takes one call at a time
            self._check_start(whole, tools)
            num_before = 1 + max(number for number, slot in enumerate(whole.slots) if slot.message == 1)
            slots = tuple(replace(slot, message=slot.message - 2) for slot in whole.slots[num_before:])
            yield Layout(pieces=whole.pieces[num_before:], slots=slots)

    def _layout(self, shapes: Sequence[MessageShape], tools: Sequence[str], *, asks_next: bool) -> Layout:
        as_text = any(shape.calls for shape in shapes) and self._takes_arguments_as_text
        return find_layout(self._apply, shapes, tools, asks_next=asks_next, arguments_as_text=as_text)

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template takes the arguments of a call as JSON. Most take a dictionary."""
        for as_text in (False, True):
            try:
                find_layout(self._apply, (USER, _turn_with("probe")), (), asks_next=False, arguments_as_text=as_text)
            except ValueError:
                continue
            return as_text
        return False

    def _check(self, shapes: Sequence[MessageShape], tools: Sequence[str]) -> None:
        if tools and not self.takes_tools:
            raise ValueError(
                "chat_template: it has no place for tools; set policy.path (or grm.path) to a chat model that knows "
                "tools, or policy.chat_template (or grm.chat_template) to a Jinja file that lists them"
            )
        for call in (call for shape in shapes for call in shape.calls):
            if self._spells_markup(call.name) or self._spells_markup(call.arguments):
                raise ValueError(
                    f"tool_calls: a name or a key in the call of {call.name} is markup of the chat template"
                )

    def _check_start(self, whole: Layout, tools: Sequence[str]) -> None:
        """Raises ValueError if replies change what the prompt of the first turn began with."""
        if tools and whole.pieces[0] != self._layout((USER,), tools, asks_next=True).pieces[0]:
            raise ValueError(
                "chat_template: it moves the list of tools to the last message of the user, so a conversation with "
                "tools can't go on with another one; answer with messages of role tool, or set policy.chat_template "
                "to a Jinja file that lists the tools in one place"
            )


def _turns_before(replies: Sequence[MessageShape]) -> list[MessageShape]:
    """What the assistant's turn before the replies may have been."""
    names = [shape.name or TOOL for shape in takewhile(lambda shape: shape.role == TOOL, replies)]
    return [_turn_with(*names), ASSISTANT] if names else [ASSISTANT]


def _turn_with(*names: str) -> MessageShape:
    """A turn with calls, each with one text."""
    calls = tuple(ToolCall(name=name, arguments={"value": "x"}) for name in names)
    return split_message(Message(role="assistant", content="", tool_calls=calls))[0]


T = TypeVar("T")

LONG_CHARS = 32_768  # the tiny models' tokenizer takes 0.05 s for them
# One for all: each thread that renders keeps a copy of the tokenizer.
THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")


async def off_loop_if_long(num_chars: int, work: Callable[[], T]) -> T:
    """Do the work, in the thread if it is about LONG_CHARS or more. Raises what the work raises."""
    if num_chars < LONG_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(THREAD, work)


def count_chars(messages: Iterable[Message]) -> int:
    """The length of the messages' texts, with those that calls of tools have."""
    return sum(
        len(text)
        for one in messages
        for text in (one.content, *(texts_in([call.arguments for call in one.tool_calls])))
    )
