"""A tokenizer with a chat template: texts to token ids, in which markup is the template's alone, and ids to texts."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REMEMBERED_RUNS = 512  # siblings share a prompt, and a later turn repeats the earlier ones
# Sampled text that an inserted one follows. Of these at least one doesn't merge with what comes.
ANCHORS = ("a", ")", "0", ".")


class ChatTokenizer:
    """Several threads may use it: nothing here changes a state of the tokenizer's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object]) -> None:
        """template_kwargs: further variables of the template."""
        if tokenizer.is_fast:  # a tokenizer.json may ask for both
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            tokenizer.backend_tokenizer.encode_special_tokens = False
        self.tokenizer = tokenizer
        self._template_kwargs: dict[str, Any] = dict(template_kwargs)
        added = tokenizer.added_tokens_decoder.items()
        # What only a template or the model may write: special and added tokens, except runs of whitespace.
        self.markers = {
            token.content: token_id for token_id, token in added if len(token.content) > 1 and token.content.strip()
        }
        self._contents = {token_id: content for content, token_id in self.markers.items()}
        self._marker = re.compile("|".join(map(re.escape, sorted(self.markers, key=len, reverse=True))) or "(?!)")
        self.encode_run = lru_cache(REMEMBERED_RUNS)(self._encode_run)

    def encode_markup(self, text: str) -> tuple[int, ...]:
        """The token ids of a text of ours, whose markup counts."""
        return tuple(self._encode(text))

    def encode_inserted(self, text: str) -> tuple[int, ...]:
        """The token ids of a text of ours within a turn, after sampled tokens: without the space that some tokenizers
        put before a text that stands alone.
        """
        for anchor in ANCHORS:
            before, both = self._encode(anchor), self._encode(anchor + text)
            if both[: len(before)] == before:
                return tuple(both[len(before) :])
        return self.encode_markup(text)

    def split_markers(self, text: str) -> list[str | int]:
        """The markers in a text of ours, by their token ids, and the texts between them."""
        parts: list[str | int] = []
        end = 0
        for match in self._marker.finditer(text):
            parts += [text[end : match.start()], self.markers[match[0]]]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part != ""]

    def spells_markup(self, text: str) -> bool:
        return not self._contents.keys().isdisjoint(self.encode_markup(text))

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
            rendered = self.tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=asks_next, **self._template_kwargs
            )
        except Exception as error:  # a template is code; TypeError also for arguments in a form that it doesn't take
            raise ValueError(f"chat_template: it can't render a conversation of {roles}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _encode_run(self, left: int | None, text: str, right: int | None) -> tuple[int, ...]:
        """The ids of a text between two markers, as an encoding of the whole has them: whether a space comes before it,
        and which spaces a marker takes to itself, depends on its neighbours. Markup that the text spells stays text.

        left, right: token ids of the markers; None: the conversation begins, or ends, there.
        """
        if not text:
            return ()
        try:
            token_ids = self._within(self._encode, left, text, right, self._contents)
        except TypeError:  # half a character, as the output of a tool may have it
            return self._encode_run(left, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), right)
        if self._contents.keys().isdisjoint(token_ids):
            return tuple(token_ids)
        return tuple(self._encode_as_text(left, text, right))

    def _within(
        self,
        encode: Callable[[str], list[int]],
        left: int | None,
        text: str,
        right: int | None,
        names: Mapping[int, str],
    ) -> list[int]:
        """names: of the markers, as `encode` knows them."""
        before, after = ("" if marker is None else names[marker] for marker in (left, right))
        token_ids = encode(f"{before}{text}{after}")
        for marker in (left, right):
            if marker is not None and marker not in token_ids:
                raise ValueError(
                    f"chat_template: the tokenizer doesn't read its token {self._contents[marker]!r} beside {text!r}; "
                    "set chat_template to a Jinja file with blanks around it"
                )
        start = token_ids.index(left) + 1 if left is not None else 0
        stop = len(token_ids) - (token_ids[::-1].index(right) + 1 if right is not None else 0)
        return token_ids[start:stop]

    def _encode_as_text(self, left: int | None, text: str, right: int | None) -> list[int]:
        """The ids of a text that spells markup."""
        if self._blind is None:
            return self._cut_markup(text)
        blind, names = self._blind
        return self._within(lambda whole: _ids_of(blind, whole), left, text, right, names)

    @cached_property
    def _blind(self) -> tuple[Tokenizer, dict[int, str]] | None:
        """A tokenizer with the same tokens whose markers have names that no text spells, and these names. None for one
        in Python, and for one whose own parts name a marker.
        """
        if not self.tokenizer.is_fast:
            return None
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        names = {content: secrets.token_hex(16) for content in self.markers}
        for token in state["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "single_word": False}
        model = state["model"]
        if isinstance(words := model["vocab"], dict):
            model["vocab"] = {names.get(word, word): token_id for word, token_id in words.items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in words]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        state["post_processor"] = None
        from tokenizers import Tokenizer  # late: few texts spell markup

        try:
            blind = Tokenizer.from_str(json.dumps(state))
        except Exception:  # the library has no class of its own for it
            return None
        return blind, {token_id: names[content] for content, token_id in self.markers.items()}

    def _cut_markup(self, text: str) -> list[int]:
        """The ids of a text in pieces, each without markup: cutting it within a marker keeps the marker from
        matching. The library's own option for it would change what other threads see.
        """
        token_ids = self._encode(text)
        if self._contents.keys().isdisjoint(token_ids):
            return token_ids
        middle = len(text) // 2
        return self._cut_markup(text[:middle]) + self._cut_markup(text[middle:])

    def _encode(self, text: str) -> list[int]:
        """The ids alone: transformers' own call takes twice as long for a short text."""
        if self.tokenizer.is_fast:
            return _ids_of(self.tokenizer.backend_tokenizer, text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _ids_of(backend: Tokenizer, text: str) -> list[int]:
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)
