"""The token ids of conversations: the markup of a chat template, encoded once for each shape, around encoded texts."""

from collections.abc import Sequence
from functools import lru_cache

from models.chat.chat_template import ChatTemplate
from models.chat.chat_tokenizer import ChatTokenizer
from models.chat.template_layout import Layout, MessageShape, split_message
from models.types import Message, ToolSpec

REMEMBERED_LAYOUTS = 4096
Pieces = tuple[tuple[int, ...], ...]


class ConversationIds:
    def __init__(self, tokenizer: ChatTokenizer, template: ChatTemplate, stop_token_ids: Sequence[int]) -> None:
        """stop_token_ids: tokens that end a turn."""
        self._tokenizer = tokenizer
        self._template = template
        self._stop_token_ids = frozenset(stop_token_ids)
        self._layout = lru_cache(REMEMBERED_LAYOUTS)(self._lay_out)
        self._reply_layout = lru_cache(REMEMBERED_LAYOUTS)(self._lay_out_replies)

    def whole(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, asks_next: bool) -> tuple[int, ...]:
        """A conversation from its beginning. asks_next: whether the assistant's next turn begins after it."""
        shapes, texts = _shapes_of(messages)
        return self._fill(*self._layout(shapes, self._template.render_tools(tools), asks_next), texts)

    def replies(self, replies: Sequence[Message], tools: Sequence[ToolSpec], *, ended: bool) -> tuple[int, ...]:
        """What follows the stop token of an assistant's turn, or the end of a turn without one: then the token is the
        first.
        """
        shapes, texts = _shapes_of(replies)
        return self._fill(*self._reply_layout(shapes, self._template.render_tools(tools), ended), texts)

    def _fill(self, pieces: Pieces, layout: Layout, texts: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """The pieces with the texts between them, each as the template writes it.

        pieces: of the layout, encoded.
        texts:  of each message, in the order of its shape.
        """
        token_ids = list(pieces[0])
        for slot, after in zip(layout.slots, pieces[1:], strict=True):
            token_ids += self._tokenizer.encode_content(slot.fill(texts[slot.message][slot.text]))
            token_ids += after
        return tuple(token_ids)

    def _lay_out(
        self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], asks_next: bool
    ) -> tuple[Pieces, Layout]:
        """The layout, and its pieces encoded."""
        layout = self._template.layout(shapes, tools, asks_next=asks_next)
        return tuple(self._tokenizer.encode_markup(piece) for piece in layout.pieces), layout

    def _lay_out_replies(
        self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], ended: bool
    ) -> tuple[Pieces, Layout]:
        """The layout of replies, after the stop token of an assistant's turn, or with it if the turn hasn't ended."""
        for layout in self._template.reply_layouts(shapes, tools):
            after_turn, *rest = (self._tokenizer.encode_markup(piece) for piece in layout.pieces)
            if not self._stop_token_ids.isdisjoint(after_turn):
                break
        return (after_turn[self._place_after(after_turn, ended) :], *rest), layout

    def _place_after(self, token_ids: Sequence[int], ended: bool) -> int:
        """The place after the first stop token, or, if the turn hasn't ended, its own; 0 if there is none."""
        ends = [place for place, token_id in enumerate(token_ids) if token_id in self._stop_token_ids]
        return ends[0] + ended if ends else 0


def _shapes_of(messages: Sequence[Message]) -> tuple[tuple[MessageShape, ...], list[tuple[str, ...]]]:
    """The shape of each message, and its texts."""
    both = [split_message(message) for message in messages]
    return tuple(shape for shape, _ in both), [texts for _, texts in both]
