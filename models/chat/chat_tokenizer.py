"""A tokenizer with a chat template: texts to token ids, markup apart from contents, and sampled ids to texts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED_CONTENTS = 256  # siblings share a prompt, and a later turn repeats the earlier ones


class _OfThread(threading.local):
    tokenizer: PreTrainedTokenizerBase | None = None


class ChatTokenizer:
    """Several threads may use it: each gets a copy of transformers' tokenizer, which keeps as its state whether it sees
    markup.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object]) -> None:
        """template_kwargs: further variables of the template."""
        if tokenizer.is_fast:  # a tokenizer.json may ask for both
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        self._first = tokenizer
        self._of_thread = _OfThread()
        self._of_thread.tokenizer = tokenizer
        self._template_kwargs: dict[str, Any] = dict(template_kwargs)
        self._markup_ids = _markup_ids(tokenizer)
        self.encode_content = lru_cache(REMEMBERED_CONTENTS)(self._encode_content)

    @property
    def own(self) -> PreTrainedTokenizerBase:
        """The thread's own tokenizer."""
        if (own := self._of_thread.tokenizer) is None:
            own = self._of_thread.tokenizer = copy.deepcopy(self._first)
        return own

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """The token ids of a text of ours, whose markup counts."""
        return tuple(self._encode(text, split_special_tokens=False))

    def spells_markup(self, text: str) -> bool:
        return not self._markup_ids.isdisjoint(self.encode_markup(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return self._decode(token_ids, skip_special_tokens=True)

    def decode_special(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, with special tokens."""
        return self._decode(token_ids, skip_special_tokens=False)

    def apply_template(self, conversation: list[dict[str, Any]], tools: list[Any] | None, asks_next: bool) -> str:
        """The template's text. asks_next: whether the assistant's next turn begins after the messages.

        Raises ValueError for a conversation that the template can't write.
        """
        roles = ", ".join(message["role"] for message in conversation)
        try:
            rendered = self.own.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=asks_next, **self._template_kwargs
            )
        except (TemplateError, TypeError) as error:  # TypeError: of arguments in a form that the template doesn't take
            raise ValueError(f"chat_template: it can't render a conversation of {roles}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self.own.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        """The ids alone: transformers' own call takes twice as long for a short text."""
        own = self.own
        if not own.is_fast:
            return list(own.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens))
        own.backend_tokenizer.encode_special_tokens = split_special_tokens
        (encoding,) = own.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _encode_content(self, content: str) -> list[int]:
        """Encode content as plain text. Cutting it within a marker keeps an added token from matching."""
        try:
            token_ids = self._encode(content, split_special_tokens=True)
        except TypeError:  # half a character, as the output of a tool may have it
            return self._encode_content(content.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        if self._markup_ids.isdisjoint(token_ids):
            return token_ids
        middle = len(content) // 2
        return self._encode_content(content[:middle]) + self._encode_content(content[middle:])


def _markup_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that only a template or the model may write: special and added tokens, except runs of whitespace."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if len(token.content) > 1 and token.content.strip())
