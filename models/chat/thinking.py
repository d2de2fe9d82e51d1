r"""Thoughts of reasoning models, apart from their answers, by the model's own markers. Pure: samples nothing.

A completion begins with its thought, or has none: either it begins with the opening marker, or the chat template has
already written that marker into the prompt (DeepSeek-R1, QwQ). A thought ends with the first closing marker that isn't
in a quotation (a line that begins with ">"). One that never ends was truncated: such a completion has no answer.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grmpipe.models.types import Completion

Decode = Callable[[Sequence[int]], str]

BLANK = " \t\r\n"
QUOTES = ">"
# Opening and closing markers of known families: Qwen3, QwQ, DeepSeek-R1 and most others; Magistral; Seed-OSS; EXAONE.
KNOWN_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The beginning of a text that is a thought, with its markers: 0 characters if there is none."""

    num_chars: int = 0
    is_open: bool = False

    @property
    def has_ended(self) -> bool:
        return self.num_chars > 0 and not self.is_open


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """The markers around a model's thoughts.

    in_prompt: whether the prompt ends within a thought, so that completions begin inside it.
    is_off:    whether the prompt ends with an empty thought, so that the model doesn't think (enable_thinking=false).
    close_id:  the token id of the closing marker; None if it is spelled with several tokens, or unknown.
    """

    open: str
    close: str
    in_prompt: bool = False
    is_off: bool = False
    close_id: int | None = None

    def split_thought(self, text: str) -> Thought:
        """The thought that a text begins with."""
        if not self.in_prompt and not text.lstrip(BLANK).startswith(self.open):
            return Thought()
        place = text.find(self.close)
        while place >= 0:
            line = text[text.rfind("\n", 0, place) + 1 : place]
            if not line.lstrip(BLANK).startswith(QUOTES):
                return Thought(num_chars=place + len(self.close))
            next_line = text.find("\n", place)
            place = text.find(self.close, next_line) if next_line >= 0 else -1
        return Thought(num_chars=len(text), is_open=True)

    def end_of_thought(self, answer_start: str = "") -> str:
        """What ends a thought that goes on, and begins the answer. Its first line break ends a quotation."""
        return f"\n{self.close}\n\n{answer_start}"

    def tokens_of_thought(self, token_ids: Sequence[int], decode: Decode) -> int | None:
        """How many of the tokens are the thought: up to the one that completes the closing marker. 0: there is none;
        None: it doesn't end.

        decode: with special tokens, which markers may be.
        """
        if not (thought := self.split_thought(decode(token_ids))).has_ended:
            return None if thought.is_open else 0

        def holds_it(num_tokens: int) -> bool:
            return self.split_thought(decode(token_ids[:num_tokens])).has_ended

        counts = range(1, len(token_ids) + 1)
        closing = [count for count in counts if token_ids[count - 1] == self.close_id]
        if (first := next(filter(holds_it, closing), None)) is not None:
            return first
        return counts[bisect.bisect_left(counts, x=True, key=holds_it)]


def with_thought(
    completion: Completion, markers: ThinkingMarkers, decode: Decode, decode_special: Decode
) -> Completion:
    """The completion with its thought marked: `thought_tokens` and `thought_chars`.

    decode: as the completion's text was. decode_special: with special tokens.
    """
    token_ids, text = completion.token_ids, completion.text
    in_text = markers.split_thought(text)
    if not token_ids:
        return replace(completion, thought_chars=in_text.num_chars)
    num_tokens = markers.tokens_of_thought(token_ids, decode_special)
    if num_tokens is None:
        return replace(completion, thought_tokens=len(token_ids), thought_chars=len(text))
    # Markers that are special tokens don't show in the text.
    num_chars = in_text.num_chars if in_text.has_ended else min(len(text), len(decode(token_ids[:num_tokens])))
    return replace(completion, thought_tokens=num_tokens, thought_chars=num_chars if num_tokens else 0)


def find_markers(
    declared: Sequence[str] | None, vocabulary: Callable[[str], int | None], template: str, generation_prompt: str
) -> ThinkingMarkers | None:
    """A model's markers. None if it has none.

    declared:          the opening and closing marker; empty: there are none; None: they are found among the known ones.
    vocabulary:        an added token's text -> its id.
    template:          the chat template: names the markers, if they aren't added tokens.
    generation_prompt: what the template writes before a completion.
    """
    pairs = KNOWN_MARKERS if declared is None else (tuple(declared),) if declared else ()
    for opening, closing in pairs:
        opened, closed = generation_prompt.rfind(opening), generation_prompt.rfind(closing)
        # A base model's template may begin the thought and never write its end, which the model is asked for in words.
        begins_one = generation_prompt.rstrip().endswith(opening)
        if declared is None and vocabulary(closing) is None and closing not in template and not begins_one:
            continue
        return ThinkingMarkers(
            open=opening,
            close=closing,
            in_prompt=opened > closed,
            is_off=closed >= 0 and closed > opened,
            close_id=vocabulary(closing),
        )
    return None


def thinks(markers: ThinkingMarkers | None) -> bool:
    """Whether a model with these markers may think before an answer."""
    return markers is not None and not markers.is_off
