"""Renders messages to token ids, and sampled ids to text. Holds no weights; text inside a message stays text."""

from __future__ import annotations

import copy
import logging
import re
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from models.model_files import PlainConfig, is_plain_tokenizer, read_json
from models.thinking import ThinkingMarkers, markers_of, with_thought
from models.tool_calls import AUTO_PARSER, FORMATS, ToolParser, format_of, parser_named, read_turn
from models.tool_rendering import TOOL, Layout, MessageShape, shape_of
from models.tool_template import ToolTemplate
from models.types import Completion, Message, ParsedTurn, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NOTHING: Mapping[str, object] = MappingProxyType({})
REMEMBERED_CONTENTS = 256  # siblings share a prompt, and a later turn repeats the earlier ones
REMEMBERED_LAYOUTS = 512  # of conversations with tools
Pieces = tuple[tuple[int, ...], ...]


class _OfThread(threading.local):
    tokenizer: PreTrainedTokenizerBase | None = None


class Renderer:
    """A tokenizer with a chat template, and the window and stop tokens of its model.

    The ids of a conversation are encode(markup) + encode(content) + encode(markup) + ...: the template is rendered
    around placeholders, so that no content is ever seen by the template, or by a tokenizer that knows markup. So a
    template that would edit contents (trim them, drop earlier thoughts) can't. The same holds for the texts in the
    arguments of calls, which are written as JSON where the template writes them so. Whatever a template does besides
    is its own: several leave out what an assistant wrote beside its calls.

    Several threads may use it: each gets a copy of the tokenizer, which keeps as its state whether it sees markup.

    tokenizer:      transformers' own.
    stop_token_ids: tokens that end a turn, from the tokenizer and generation_config.json.
    vocab_size:     rows of the model's embedding; num_token_ids: the tokenizer's highest id plus one.
    context_tokens: the model's window, prompt and new tokens together.
    chat_template_kwargs: further variables of the template, such as enable_thinking.
    thinking_markers: the markers around the model's thoughts; None: found in the tokenizer or the template.
    tool_parser:    format of the model's calls of tools, by its name in models.tool_calls; auto: found in the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_tokens: int,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        chat_template_kwargs: Mapping[str, object] = NOTHING,
        thinking_markers: Sequence[str] | None = None,
        tool_parser: str = AUTO_PARSER,
    ) -> None:
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.num_token_ids = max(tokenizer.get_vocab().values()) + 1
        self._tokenizer = tokenizer
        self._of_thread = _OfThread()
        self._of_thread.tokenizer = tokenizer
        self._chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs)
        self._thinking_markers = thinking_markers
        self._markup_ids = _markup_ids(tokenizer)
        self._markup: dict[tuple[bool, tuple[str, ...]], tuple[tuple[int, ...], ...]] = {}
        self._content_ids = lru_cache(REMEMBERED_CONTENTS)(self._encode_content)
        self._tool_parser = tool_parser
        self._tools = ToolTemplate(self._apply_template, self._spells_markup)
        self._layout = lru_cache(REMEMBERED_LAYOUTS)(self._lay_out)
        self._reply_layout = lru_cache(REMEMBERED_LAYOUTS)(self._lay_out_replies)

    @staticmethod
    def load(
        path: str,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] = NOTHING,
        thinking_markers: Sequence[str] | None = None,
        tool_parser: str = AUTO_PARSER,
    ) -> Renderer:
        """Load the renderer of a Hugging Face directory or hub name (HF_HUB_OFFLINE is respected).

        chat_template: a Jinja file, for a tokenizer without a template. Raises ValueError for what can't be read.
        chat_template_kwargs: one that the template never uses has no effect, and is logged.
        """
        config = PlainConfig.read(path)
        context_tokens, vocab_size = _sizes(path) if config is None else (config.context_tokens, config.vocab_size)
        tokenizer = _load_tokenizer(path, plain=config is not None and is_plain_tokenizer(path))
        if chat_template is not None:
            tokenizer.chat_template = _read_template(chat_template)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"chat_template: the tokenizer in {path!r} has none; set policy.path (or grm.path) to a chat model, "
                "or policy.chat_template (or grm.chat_template) to a Jinja file"
            )
        _warn_of_unknown_kwargs(path, tokenizer, chat_template_kwargs)
        return Renderer(
            tokenizer,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            stop_token_ids=_stop_token_ids(path, tokenizer),
            chat_template_kwargs=chat_template_kwargs,
            thinking_markers=thinking_markers,
            tool_parser=tool_parser,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The thread's own."""
        if (own := self._of_thread.tokenizer) is None:
            own = self._of_thread.tokenizer = copy.deepcopy(self._tokenizer)
        return own

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The token ids of a conversation, up to the assistant's turn.

        tools: that the model is given. Raises ValueError if the template takes none, or a text of theirs spells markup.
        """
        if tools or _has_calls(messages):
            return self._render_with_tools(messages, tools, asks_next=True)
        before, *rest = self._markup_of(tuple(message.role for message in messages))
        return before + self._filled(messages, rest)

    def render_whole(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The token ids of a conversation that ends here, as reward models read it: no further turn begins."""
        if tools or _has_calls(messages):
            return self._render_with_tools(messages, tools, asks_next=False)
        before, *rest = self._markup_of(tuple(message.role for message in messages), asks_next=False)
        return before + self._filled(messages, rest)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        """The token ids after the stop token of the assistant's turn: the replies, up to its next turn.

        tools: those that the conversation was rendered with.
        ended: whether the stop token was sampled; otherwise (a stop string ended the turn) it comes first.
        """
        if tools or _has_calls(replies):
            shapes, texts = _shapes_of(replies)
            return self._fill(*self._reply_layout(shapes, self._tools.texts_of(tools), ended), texts)
        roles = ("user", "assistant", *(message.role for message in replies))
        _, _, after_turn, *rest = self._markup_of(roles)
        return after_turn[self._place_after(after_turn, ended) :] + self._filled(replies, rest)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools that it is given."""
        return self._tools.takes_tools

    @cached_property
    def tool_parser_name(self) -> str | None:
        """The format of the model's calls: a name of models.tool_calls, or a dotted path. None if the template takes no
        tools, or doesn't show which format it asks for.
        """
        if self._tool_parser != AUTO_PARSER:
            return self._tool_parser
        if not self.takes_tools:
            return None
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return format_of(self.tokenizer.get_chat_template(tools=[{}]), special)

    @cached_property
    def _parse_calls(self) -> ToolParser:
        if self.tool_parser_name is None:
            raise ValueError(
                "tool_parser: the chat template doesn't show in which format the model calls tools; set "
                f"policy.tool_parser (or grm.tool_parser) to one of {', '.join(FORMATS)}"
            )
        return parser_named(self.tool_parser_name)

    def parse(self, completion_text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """The calls in a completion's answer (`Completion.answer`: calls within a thought are none). Without tools
        there are none.

        Raises ValueError (`tool_parser: ...`) if the format is unknown; never for what the model wrote.
        """
        return read_turn(self._parse_calls, completion_text, tools) if tools else ParsedTurn(content=completion_text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_special(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, with special tokens."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """The token ids of a text of ours, whose markup counts."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def thinking(self) -> ThinkingMarkers | None:
        """The markers around the model's thoughts. None if it has none."""
        added = {token.content: token_id for token_id, token in self.tokenizer.added_tokens_decoder.items()}
        template = self.tokenizer.get_chat_template()
        return markers_of(self._thinking_markers, added.get, template, self._generation_prompt())

    def _generation_prompt(self) -> str:
        """What the template writes before an answer. Some templates want a system message, others take none."""
        try:
            return self._split_template(("user",), asks_next=True)[-1]
        except ValueError:
            return self._split_template(("system", "user"), asks_next=True)[-1]

    def with_thought(self, completion: Completion) -> Completion:
        """The completion with its thought marked."""
        if self.thinking is None:
            return completion
        return with_thought(completion, self.thinking, self.decode, self.decode_special)

    def means_the_same(self, other: Renderer) -> bool:
        """Whether every token id has the same text in both."""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()

    def _filled(self, messages: Sequence[Message], markup: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Each content, and the markup after it."""
        token_ids: list[int] = []
        for message, after in zip(messages, markup, strict=True):
            token_ids += self._content_ids(message.content)
            token_ids += after
        return tuple(token_ids)

    def _markup_of(self, roles: tuple[str, ...], *, asks_next: bool = True) -> tuple[tuple[int, ...], ...]:
        """The template's text before, between and after the contents, encoded: len(roles) + 1 pieces.

        asks_next: whether the assistant's next turn begins after them.
        """
        if (asks_next, roles) not in self._markup:
            pieces = self._split_template(roles, asks_next)
            self._markup[asks_next, roles] = tuple(
                tuple(self.tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces
            )
        return self._markup[asks_next, roles]

    def _split_template(self, roles: tuple[str, ...], asks_next: bool) -> list[str]:
        placeholders = [secrets.token_hex(16) for _ in roles]
        conversation = [{"role": role, "content": text} for role, text in zip(roles, placeholders, strict=True)]
        try:
            rest = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=asks_next, **self._chat_template_kwargs
            )
        except TemplateError as error:
            raise ValueError(f"chat_template: it can't render a conversation of {', '.join(roles)}: {error}") from error
        assert isinstance(rest, str)
        pieces = []
        for role, placeholder in zip(roles, placeholders, strict=True):
            before, found, rest = rest.partition(placeholder)
            if not found or placeholder in rest:
                raise ValueError(f"chat_template: it doesn't write the {role} message exactly once, in order")
            pieces.append(before)
        return [*pieces, rest]

    def _place_after(self, token_ids: Sequence[int], ended: bool) -> int:
        """The place after the first stop token, or, if the turn hasn't ended, its own; 0 if there is none."""
        ends = [place for place, token_id in enumerate(token_ids) if token_id in self.stop_token_ids]
        return ends[0] + ended if ends else 0

    def _render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, asks_next: bool
    ) -> tuple[int, ...]:
        shapes, texts = _shapes_of(messages)
        return self._fill(*self._layout(shapes, self._tools.texts_of(tools), asks_next), texts)

    def _fill(self, pieces: Pieces, layout: Layout, texts: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """The pieces with the texts between them, each as the template writes it.

        pieces: of the layout, encoded.
        texts:  of each message, in the order of its shape.
        """
        token_ids = list(pieces[0])
        for slot, after in zip(layout.slots, pieces[1:], strict=True):
            token_ids += self._content_ids(slot.filled(texts[slot.message][slot.text]))
            token_ids += after
        return tuple(token_ids)

    def _lay_out(
        self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], asks_next: bool
    ) -> tuple[Pieces, Layout]:
        """The layout, and its pieces encoded."""
        layout = self._tools.layout(shapes, tools, asks_next=asks_next)
        return tuple(self.encode_markup(piece) for piece in layout.pieces), layout

    def _lay_out_replies(
        self, shapes: tuple[MessageShape, ...], tools: tuple[str, ...], ended: bool
    ) -> tuple[Pieces, Layout]:
        """The layout of replies, after the stop token of an assistant's turn, or with it if the turn hasn't ended."""
        for layout in self._tools.reply_layouts(shapes, tools):
            after_turn, *rest = (self.encode_markup(piece) for piece in layout.pieces)
            if not set(self.stop_token_ids).isdisjoint(after_turn):
                break
        return (after_turn[self._place_after(after_turn, ended) :], *rest), layout

    def _spells_markup(self, text: str) -> bool:
        return not self._markup_ids.isdisjoint(self.encode_markup(text))

    def _apply_template(self, conversation: list[dict[str, Any]], tools: list[Any] | None, asks_next: bool) -> str:
        roles = ", ".join(message["role"] for message in conversation)
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=asks_next, **self._chat_template_kwargs
            )
        except (TemplateError, TypeError) as error:  # TypeError: of arguments in a form that the template doesn't take
            raise ValueError(f"chat_template: it can't render a conversation of {roles}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _encode_content(self, content: str) -> list[int]:
        """Encode content as plain text. Cutting it within a marker keeps an added token from matching."""
        try:
            token_ids = self.tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
        except TypeError:  # half a character, as the output of a tool may have it
            return self._encode_content(content.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        if self._markup_ids.isdisjoint(token_ids):
            return token_ids
        middle = len(content) // 2
        return self._encode_content(content[:middle]) + self._encode_content(content[middle:])


def _has_calls(messages: Sequence[Message]) -> bool:
    """Whether there are calls of tools, or results."""
    for message in messages:  # noqa: SIM110 (any() takes twice as long, and each turn asks)
        if message.tool_calls or message.role == TOOL:
            return True
    return False


def _shapes_of(messages: Sequence[Message]) -> tuple[tuple[MessageShape, ...], list[tuple[str, ...]]]:
    """The shape of each message, and its texts."""
    both = [shape_of(message) for message in messages]
    return tuple(shape for shape, _ in both), [texts for _, texts in both]


def _markup_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that only a template or the model may write: special and added tokens, except runs of whitespace."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if len(token.content) > 1 and token.content.strip())


def _sizes(path: str) -> tuple[int, int]:
    """Context window and vocabulary, by transformers' class of the model's family."""
    from transformers import AutoConfig  # late: seconds, which the usual families do without

    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"path: {path!r} is not a Hugging Face model (a directory with config.json): {error}"
        ) from error
    window = getattr(config, "max_position_embeddings", None)  # not every architecture has one
    if window is None:
        raise ValueError(f"path: the config in {path!r} gives no context window (max_position_embeddings)")
    return int(window), int(config.vocab_size)


def _load_tokenizer(path: str, *, plain: bool) -> PreTrainedTokenizerBase:
    """plain: it needs no class of the model's family, whose lookup imports all of torch and transformers' models."""
    try:
        tokenizer = _plain_tokenizer(path) if plain else _tokenizer_of_family(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"path: no tokenizer could be loaded from {path!r}: {error}") from error
    tokenizer.model_max_length = sys.maxsize  # callers check the window; a warning to stderr helps no one
    return tokenizer


def _plain_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(path)
    return tokenizer


def _tokenizer_of_family(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


def _read_template(chat_template: str) -> str:
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"chat_template: {chat_template!r} can't be read ({error}); give a Jinja file") from error


def _warn_of_unknown_kwargs(path: str, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> None:
    template = tokenizer.get_chat_template()
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            log.warning("chat_template_kwargs: the chat template of %s doesn't use %s, so it has no effect", path, name)


def _stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    token_ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    generation_eos = _generation_eos(path)
    if generation_eos is not None:
        token_ids |= {generation_eos} if isinstance(generation_eos, int) else set(generation_eos)
    return tuple(sorted(token_ids))


def _generation_eos(path: str) -> int | list[int] | None:
    """A model need not have the file."""
    if Path(path).is_dir():
        return read_json(path, "generation_config.json").get("eos_token_id")
    from transformers import GenerationConfig

    try:
        eos: int | list[int] | None = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return None
    return eos
