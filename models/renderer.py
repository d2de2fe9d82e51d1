"""Messages to token ids and sampled ids to text. Holds no weights; text inside a message stays text."""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from models.types import Message

log = logging.getLogger(__name__)

NOTHING: Mapping[str, object] = MappingProxyType({})
REMEMBERED_CONTENTS = 256  # siblings are asked the same, and a later turn repeats the earlier ones


class Renderer:
    """A tokenizer with a chat template, and what its model's config says about windows and ends.

    The ids of a conversation are encode(markup) + encode(content) + encode(markup) + ...: the template is rendered
    around placeholders, so that no content is ever seen by the template, or by a tokenizer that knows markup. A
    template that would edit contents (trim them, drop earlier thoughts) leaves them as they are.

    tokenizer:      transformers' own.
    stop_token_ids: what ends a turn, of the tokenizer and of generation_config.json.
    vocab_size:     rows of the model's embedding; num_token_ids: what the tokenizer may give, its highest id plus one.
    context_tokens: the model's window, prompt and new tokens together.
    chat_template_kwargs: what the template branches on beside the messages, as enable_thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_tokens: int,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        chat_template_kwargs: Mapping[str, object] = NOTHING,
    ) -> None:
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.num_token_ids = max(tokenizer.get_vocab().values()) + 1
        self.tokenizer = tokenizer
        self._chat_template_kwargs: dict[str, Any] = dict(chat_template_kwargs)
        self._markup_ids = _markup_ids(tokenizer)
        self._markup: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self._content_ids = lru_cache(REMEMBERED_CONTENTS)(self._encode_content)

    @staticmethod
    def load(
        path: str, chat_template: str | None = None, chat_template_kwargs: Mapping[str, object] = NOTHING
    ) -> Renderer:
        """Of a Hugging Face directory or hub name (HF_HUB_OFFLINE is respected).

        chat_template: a Jinja file, for a tokenizer without a template. Raises ValueError for what can't be read.
        chat_template_kwargs: one that the template never names changes nothing, and is told in the log.
        """
        config, tokenizer = _load_config(path), _load_tokenizer(path)
        if chat_template is not None:
            tokenizer.chat_template = _read_template(chat_template)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"chat_template: the tokenizer in {path!r} has none; set policy.path (or grm.path) to a chat model, "
                "or policy.chat_template (or grm.chat_template) to a Jinja file"
            )
        _tell_unknown_kwargs(path, tokenizer, chat_template_kwargs)
        text_config = config.get_text_config()
        window = getattr(text_config, "max_position_embeddings", None)  # not every architecture has one
        if window is None:
            raise ValueError(f"path: the config in {path!r} gives no context window (max_position_embeddings)")
        return Renderer(
            tokenizer,
            context_tokens=int(window),
            vocab_size=int(text_config.vocab_size),
            stop_token_ids=_stop_token_ids(path, tokenizer),
            chat_template_kwargs=chat_template_kwargs,
        )

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The conversation up to where the assistant speaks."""
        before, *rest = self._markup_of(tuple(message.role for message in messages))
        return before + self._filled(messages, rest)

    def extend(self, replies: Sequence[Message]) -> tuple[int, ...]:
        """What follows the stop token that ended the assistant's turn: the replies, up to where it speaks again."""
        roles = ("user", "assistant", *(message.role for message in replies))
        _, _, after_turn, *rest = self._markup_of(roles)
        ends = [place for place, token_id in enumerate(after_turn) if token_id in self.stop_token_ids]
        return after_turn[ends[0] + 1 if ends else 0 :] + self._filled(replies, rest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens left out."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def means_the_same(self, other: Renderer) -> bool:
        """Does every token id stand for the same text in both?"""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()

    def _filled(self, messages: Sequence[Message], markup: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Each content, and the markup after it."""
        token_ids: list[int] = []
        for message, after in zip(messages, markup, strict=True):
            token_ids += self._content_ids(message.content)
            token_ids += after
        return tuple(token_ids)

    def _markup_of(self, roles: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """What the template writes before, between and after the contents, encoded: len(roles) + 1 pieces."""
        if roles not in self._markup:
            pieces = self._split_template(roles)
            self._markup[roles] = tuple(
                tuple(self.tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces
            )
        return self._markup[roles]

    def _split_template(self, roles: tuple[str, ...]) -> list[str]:
        placeholders = [secrets.token_hex(16) for _ in roles]
        conversation = [{"role": role, "content": text} for role, text in zip(roles, placeholders, strict=True)]
        try:
            rest = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
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

    def _encode_content(self, content: str) -> list[int]:
        """Plain text, whatever it spells. Cutting a marker in two is what keeps an added token from matching."""
        token_ids = self.tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
        if self._markup_ids.isdisjoint(token_ids):
            return token_ids
        middle = len(content) // 2
        return self._encode_content(content[:middle]) + self._encode_content(content[middle:])


def _markup_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that only a template or the model may write: special and added tokens, but for runs of whitespace."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if len(token.content) > 1 and token.content.strip())


def _load_config(path: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"path: {path!r} is not a Hugging Face model (a directory with config.json): {error}"
        ) from error


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"path: no tokenizer could be loaded from {path!r}: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    tokenizer.model_max_length = sys.maxsize  # who renders looks to the window; a warning to stderr helps nobody
    return tokenizer


def _read_template(chat_template: str) -> str:
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"chat_template: {chat_template!r} can't be read ({error}); give a Jinja file") from error


def _tell_unknown_kwargs(path: str, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> None:
    template = tokenizer.get_chat_template()
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            log.warning("chat_template_kwargs: the chat template of %s doesn't use %s, so it has no effect", path, name)


def _stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    token_ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        generation_eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        generation_eos = None  # a model need not have the file
    if generation_eos is not None:
        token_ids |= {generation_eos} if isinstance(generation_eos, int) else set(generation_eos)
    return tuple(sorted(token_ids))
