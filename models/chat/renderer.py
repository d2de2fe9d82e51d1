"""Renders messages to token ids, as one encoding of all that the chat template writes would give them, and sampled ids
to text. Holds no weights; text inside a message stays text.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from grmpipe.models.chat.chat_template import ChatTemplate, Layout, MessageShape, TextSlot, split_message
from grmpipe.models.chat.chat_tokenizer import ChatTokenizer
from grmpipe.models.chat.thinking import ThinkingMarkers, find_markers
from grmpipe.models.chat.tool_calls import AUTO_PARSER, FORMATS, ToolParser, detect_format, parser_named, read_turn
from grmpipe.models.model_files import PlainConfig, is_plain_tokenizer, read_json
from grmpipe.models.types import Message, ParsedTurn, ToolSpec

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


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
NOTHING: Mapping[str, object] = MappingProxyType({})


class Renderer:
    """A tokenizer with a chat template, and the window and stop tokens of its model.

    The template is rendered around placeholders, which then make room for the contents: no content is ever seen by the
    template. So a template that would edit contents (trim them, drop earlier thoughts) can't. The same holds for the
    texts in the arguments of calls, which are written as JSON where the template writes them so. Whatever a template
    does besides is its own: several leave out what an assistant wrote beside its calls. The ids are those of one
    encoding of the whole text, but that markup in a content stays text.

    Several threads may use it.

    tokenizer:      transformers' own.
    stop_token_ids: tokens that end a turn: of the tokenizer and generation_config.json, and the one that the template
                    writes after an answer, which base models name in neither.
    vocab_size:     rows of the model's embedding; num_token_ids: the tokenizer's highest id plus one.
    context_tokens: the model's window, prompt and new tokens together.
    chat_template_kwargs: further variables of the template, such as enable_thinking.
    thinking_markers: the markers around the model's thoughts; None: found in the tokenizer or the template.
    tool_parser:    format of the model's calls of tools, by its name in tool_calls.py; auto: found in the template.
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
        self.num_token_ids = max(tokenizer.get_vocab().values()) + 1
        self._thinking_markers = thinking_markers
        self._tool_parser = tool_parser
        self._tokenizer = ChatTokenizer(tokenizer, chat_template_kwargs)
        self._template = ChatTemplate(self._tokenizer.apply_template, self._tokenizer.spells_markup)
        ends = self._tokenizer.split_markers(self._template.after_answer().lstrip())[:1]
        self.stop_token_ids = tuple(sorted({*stop_token_ids, *(end for end in ends if isinstance(end, int))}))
        self._conversations = ConversationIds(self._tokenizer, self._template, self.stop_token_ids)
        self.decode = self._tokenizer.decode
        self.decode_special = self._tokenizer.decode_special
        self.encode_markup = self._tokenizer.encode_markup
        self.special = {token.content: one for one, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.encode_inserted = self._tokenizer.encode_inserted

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
        renderer = Renderer(
            tokenizer,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            stop_token_ids=_stop_token_ids(path, tokenizer),
            chat_template_kwargs=chat_template_kwargs,
            thinking_markers=thinking_markers,
            tool_parser=tool_parser,
        )
        renderer._conversations.check()
        return renderer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer.tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The token ids of a conversation, up to the assistant's turn.

        tools: that the model is given. Raises ValueError if the template takes none, or a text of theirs spells markup.
        """
        return self._conversations.whole(messages, tools, asks_next=True)

    def render_whole(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The token ids of a conversation that ends here, as reward models read it: no further turn begins."""
        return self._conversations.whole(messages, tools, asks_next=False)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        """The token ids after the stop token of the assistant's turn: the replies, up to its next turn.

        tools: those that the conversation was rendered with.
        ended: whether the stop token was sampled; otherwise (a stop string ended the turn) it comes first.
        """
        return self._conversations.replies(replies, tools, ended=ended)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools that it is given."""
        return self._template.takes_tools

    @cached_property
    def tool_parser_name(self) -> str | None:
        """The format of the model's calls: a name of tool_calls.py, or a dotted path. None if the template takes
        no tools, or doesn't show which format it asks for.
        """
        if self._tool_parser != AUTO_PARSER:
            return self._tool_parser
        if not self.takes_tools:
            return None
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return detect_format(self.tokenizer.get_chat_template(tools=[{}]), special)

    @cached_property
    def _parse_calls(self) -> ToolParser:
        if self.tool_parser_name is None:
            raise ValueError(
                "tool_parser: the chat template doesn't show in which format the model calls tools; set "
                f"policy.tool_parser to one of {', '.join(FORMATS)}"
            )
        return parser_named(self.tool_parser_name)

    def parse(self, completion_text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """The calls in a completion's answer (`Completion.answer`: calls within a thought are none). Without tools
        there are none.

        Raises ValueError (`tool_parser: ...`) if the format is unknown; never for what the model wrote.
        """
        return read_turn(self._parse_calls, completion_text, tools) if tools else ParsedTurn(content=completion_text)

    @cached_property
    def thinking(self) -> ThinkingMarkers | None:
        """The markers around the model's thoughts. None if it has none."""
        added = {token.content: token_id for token_id, token in self.tokenizer.added_tokens_decoder.items()}
        template = self.tokenizer.get_chat_template()
        return find_markers(self._thinking_markers, added.get, template, self._template.generation_prompt())


def mean_the_same(one: Renderer, other: Renderer) -> bool:
    """Whether every token id has the same text in both."""
    return one.tokenizer.get_vocab() == other.tokenizer.get_vocab()


def _sizes(path: str) -> tuple[int, int]:
    """Context window and vocabulary, by transformers' class of the model's family."""
    from transformers import AutoConfig  # late: seconds, which the usual families do without

    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"path: {path!r} is not a Hugging Face model (a directory with config.json): {_first_line(error)}"
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
        _check_tokenizer_files(path)
        raise ValueError(f"path: no tokenizer could be loaded from {path!r}: {_first_line(error)}") from error
    if len(tokenizer) == len(tokenizer.added_tokens_decoder):  # what transformers makes where there are no files
        _check_tokenizer_files(path)
    tokenizer.model_max_length = sys.maxsize  # callers check the window; a warning to stderr helps no one
    return tokenizer


def _check_tokenizer_files(path: str) -> None:
    """Raises ValueError for a directory without a tokenizer."""
    directory = Path(path)
    if directory.is_dir() and not any(one for pattern in TOKENIZER_FILES for one in directory.glob(pattern)):
        raise ValueError(
            f"path: {path!r} holds no tokenizer (tokenizer.json or tokenizer.model); copy the tokenizer's files of the "
            "model there, tokenizer_config.json too"
        )


def _first_line(error: Exception) -> str:
    """What transformers says is often followed by advice on its installation."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


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
