"""The token ids of conversations, as one encoding of all that the chat template writes would give them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from grmpipe.models.chat.chat_template import ChatTemplate
from grmpipe.models.chat.chat_tokenizer import ChatTokenizer
from grmpipe.models.chat.template_layout import Layout, MessageShape, TextSlot, split_message
from grmpipe.models.types import Message, ToolSpec

REMEMBERED_LAYOUTS = 4096
SAMPLES = (("system", "You are\nbrief."), ("user", "What is 6 x 7?\n\nSay it."), ("assistant", "It is 42."))


@dataclass(frozen=True, slots=True)
class Run:
    """What stands between two markers: texts of the template and of messages. They are encoded together: a tokenizer
    may merge across their borders, and puts a space of its own at the beginning of each text that it is given.
    """

    left: int | None
    parts: tuple[str | TextSlot, ...]
    right: int | None


# A layout, as it is encoded: ids that don't depend on the texts, and runs that do.
Plan = tuple[tuple[int, ...] | Run, ...]


class ConversationIds:
    def __init__(self, tokenizer: ChatTokenizer, template: ChatTemplate, stop_token_ids: Sequence[int]) -> None:
        """stop_token_ids: tokens that end a turn."""
        self._tokenizer = tokenizer
        self._template = template
        self._stop_token_ids = tuple(stop_token_ids)
        self._plan = lru_cache(REMEMBERED_LAYOUTS)(self._make_plan)
        self._reply_plan = lru_cache(REMEMBERED_LAYOUTS)(self._make_reply_plan)

    def whole(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, asks_next: bool) -> tuple[int, ...]:
        """A conversation from its beginning. asks_next: whether the assistant's next turn begins after it."""
        shapes, texts = _shapes_of(messages)
        return self._fill(self._plan(shapes, self._template.render_tools(tools), asks_next), texts)

    def replies(self, replies: Sequence[Message], tools: Sequence[ToolSpec], *, ended: bool) -> tuple[int, ...]:
        """What follows the stop token of an assistant's turn, or the end of a turn without one: then the token is the
        first.
        """
        shapes, texts = _shapes_of(replies)
        return self._fill(self._reply_plan(shapes, self._template.render_tools(tools), ended), texts)

    def check(self) -> None:
        """Check pieces against the whole: that a tokenizer which treats markers in another way than ours assumes gives
        no other prompts than its model knows. Raises ValueError.
        """
        system, user, assistant = (Message(role=role, content=text) for role, text in SAMPLES)
        for messages in ((user,), (system, user), (user, assistant, user), (system, user, assistant, user)):
            shapes, texts = _shapes_of(messages)
            try:
                layout = self._template.layout(shapes, (), asks_next=True)
            except ValueError:
                continue  # the template doesn't take such a conversation
            filled = [slot.fill(texts[slot.message][slot.text]) for slot in layout.slots]
            whole = "".join(text for pair in zip(layout.pieces, [*filled, ""], strict=True) for text in pair)
            ids, expected = self.whole(messages, (), asks_next=True), self._tokenizer.encode_markup(whole)
            if ids != expected:
                raise ValueError(
                    "chat_template: a conversation gets other token ids from this tokenizer in parts than as a whole, "
                    f"so the model wouldn't know its prompts: {list(ids)}, not {list(expected)}, for {whole!r}; set "
                    "chat_template to a Jinja file whose markup consists of special tokens"
                )

    def _fill(self, plan: Plan, texts: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """texts: of each message, in the order of its shape."""
        token_ids: list[int] = []
        for part in plan:
            if isinstance(part, Run):
                filled = [one if isinstance(one, str) else one.fill(texts[one.message][one.text]) for one in part.parts]
                token_ids += self._tokenizer.encode_run(part.left, "".join(filled), part.right)
            else:
                token_ids += part
        return tuple(token_ids)

    def _make_plan(self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], asks_next: bool) -> Plan:
        return self._encode(None, self._parts(self._template.layout(shapes, tools, asks_next=asks_next)))

    def _make_reply_plan(self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], ended: bool) -> Plan:
        """The plan of replies, after the stop token of an assistant's turn, or with it if the turn hasn't ended."""
        for layout in self._template.reply_layouts(shapes, tools):
            parts = self._parts(layout)
            before_text = takewhile(lambda part: not isinstance(part, TextSlot), parts)
            ends = [
                (place, part)
                for place, part in enumerate(before_text)
                if isinstance(part, int) and part in self._stop_token_ids
            ]
            if ends:
                break
        if not ends:  # the template writes none: what follows is encoded as after the one that was sampled
            return self._encode(next(iter(self._stop_token_ids), None), parts)
        place, stop = ends[0]
        return self._encode(stop, parts[place + 1 :]) if ended else self._encode(None, parts[place:])

    def _parts(self, layout: Layout) -> list[str | int | TextSlot]:
        """Texts of the template, markers by their ids, and the places of messages' texts."""
        parts: list[str | int | TextSlot] = [*self._tokenizer.split_markers(layout.pieces[0])]
        for slot, piece in zip(layout.slots, layout.pieces[1:], strict=True):
            parts += [slot, *self._tokenizer.split_markers(piece)]
        return parts

    def _encode(self, left: int | None, parts: Sequence[str | int | TextSlot]) -> Plan:
        """left: the marker before the parts."""
        plan: list[tuple[int, ...] | Run] = []
        run: list[str | TextSlot] = []
        for part in (*parts, None):
            if not (part is None or isinstance(part, int)):
                run.append(part)
                continue
            texts = [one for one in run if isinstance(one, str)]
            if len(texts) < len(run):
                plan.append(Run(left, tuple(run), part))
            else:
                plan.append(self._tokenizer.encode_run(left, "".join(texts), part))
            run = []
            if part is not None:
                plan.append((part,))
            left = part
        return tuple(plan)


def _shapes_of(messages: Sequence[Message]) -> tuple[tuple[MessageShape, ...], list[tuple[str, ...]]]:
    """The shape of each message, and its texts."""
    both = [split_message(message) for message in messages]
    return tuple(shape for shape, _ in both), [texts for _, texts in both]
