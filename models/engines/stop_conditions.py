"""When a completion ends, and its text. Pure, except for a cache over the vocabulary."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from grmpipe.models.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
NONE: Mapping[str, int] = MappingProxyType({})


class StopConditions:
    """Stop conditions. Uses only a tokenizer's `decode`.

    special: special tokens by their text, which `decode` leaves out. A request may name them as its stop strings.
    """

    def __init__(self, decode: Decode, stop_token_ids: Collection[int], special: Mapping[str, int] = NONE) -> None:
        self._decode = decode
        self._stop_token_ids = frozenset(stop_token_ids)
        self._special = special
        self.split = functools.lru_cache(self._split)  # asked for at every token
        self._pieces: dict[int, str] = {}

    def finish_reason(self, token_ids: Sequence[int], params: SamplingParams) -> FinishReason | None:
        """Why a completion ends with its last token. None if it continues."""
        if token_ids[-1] in self._stop_token_ids:
            return "stop"
        if params.stop:
            texts, stop_token_ids = self.split(params.stop)
            if token_ids[-1] in stop_token_ids or self._completes_stop(token_ids, texts):
                return "stop"
        return "length" if len(token_ids) >= params.max_new_tokens else None

    def _split(self, stop: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The texts among a request's stop strings, and all tokens that end its answer."""
        texts = tuple(string for string in stop if string not in self._special)
        named = (self._special[string] for string in stop if string in self._special)
        return texts, tuple(sorted({*self._stop_token_ids, *named}))

    def cut_text(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> tuple[str, str]:
        """The text up to the first stop string, and that string if it ended the completion, or an empty one."""
        text = self._decode(token_ids)
        found = [(start, string) for string in stop if (start := text.find(string)) >= 0]
        if not found:
            return text, ""
        start, string = min(found)
        return text[:start], "" if token_ids[-1] in self.split(stop)[1] else string

    def _completes_stop(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        may_end = [string for string in stop if self._may_end_with(token_ids[-1], string)]
        if not may_end:
            return False
        # A token has at least one byte. A few more tokens separate a cut character, or a space that decoding strips,
        # from text.
        window = token_ids[-(max(len(string.encode()) for string in may_end) + 4) :]
        tail = self._decode(window)
        if not any(string in tail for string in may_end):
            return False
        whole = self._decode(token_ids)
        return any(string in whole for string in may_end)

    def _may_end_with(self, token_id: int, string: str) -> bool:
        """Fast, and may return True too often: most tokens lack the string's last character, so their tail isn't
        decoded.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode([token_id])
        return string[-1] in piece or "\ufffd" in piece or string[-1].isspace()
