"""What a chat template does with a conversation: where it puts texts, calls and results, and whether it takes tools.

Refuses what would break the rendering of a conversation in pieces: tools that spell markup, lists that move.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile

from grmpipe.models.chat.template_layout import (
    TOOL,
    ApplyTemplate,
    Layout,
    MessageShape,
    find_layout,
    split_message,
    texts_in,
    tool_json,
)
from grmpipe.models.types import Message, ToolCall, ToolSpec

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
