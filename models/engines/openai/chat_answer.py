"""What an OpenAI-compatible endpoint answers, with its types. Pure: sends nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from grmpipe.models.engines.typed_json import LogProb, NoAnswer, read_as
from grmpipe.models.terminal_text import replace_controls
from grmpipe.models.types import TopLogprobs, Usage

MOST_TOKENS = 2**53  # in a count; a larger one is an error of the endpoint
OUT_OF_QUOTA = re.compile(
    r"insufficient[ _](user[ _])?(quota|balance|credits?|funds)|exceeded_current_quota|billing|arrear|no_credits",
    re.IGNORECASE,
)
USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_cache_hit_tokens")  # the last: DeepSeek's
TEXT_PARTS = frozenset({"text", "output_text"})


class Part(msgspec.Struct):
    """A part of a content. Thoughts and the like have types of their own, and any fields."""

    type: str | None = "text"
    text: Any = None


class ChatMessage(msgspec.Struct):
    content: str | list[str | Part] | None = None
    refusal: str | None = None


class Entry(msgspec.Struct, kw_only=True):
    """One of the results that an answer lists."""

    index: Any = None  # some gateways leave it out, or write something else


class LikelyToken(msgspec.Struct):
    token: str
    logprob: LogProb | None
    numbers: list[Annotated[int, msgspec.Meta(ge=0, lt=256)]] | None = msgspec.field(default=None, name="bytes")

    @property
    def utf8(self) -> bytes:
        """Its bytes: a token may be a part of a character."""
        return self.token.encode("utf-8", "replace") if self.numbers is None else bytes(self.numbers)


class SampledToken(LikelyToken):
    top_logprobs: list[LikelyToken] = []


class ChoiceLogprobs(msgspec.Struct):
    content: list[SampledToken] | None = None


class Choice(Entry, kw_only=True):
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: Any = None  # ChoiceLogprobs, if they were asked for


class ChatCompletion(msgspec.Struct):
    choices: list[Choice]
    model: str | None = None


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The first choice of an answer. Fields that the endpoint left out are empty."""

    model: str
    text: str
    refusal: str
    finish_reason: str
    top: TopLogprobs | None = None


def pick_first(entries: Sequence[E]) -> E:
    """The result with the lowest index, whatever their order. Raises NoAnswer for none, or two with one index."""
    places = [entry.index if isinstance(entry.index, int) else place for place, entry in enumerate(entries)]
    if not entries or len(set(places)) < len(places):
        raise NoAnswer("it has two results with one index" if entries else "it has no result")
    return entries[places.index(min(places))]


def read_answer(body: Mapping[str, Any]) -> ChatAnswer:
    """The answer in a body. Raises NoAnswer."""
    completion = read_as(ChatCompletion, body)
    choice = pick_first(completion.choices)
    content = choice.message.content
    parts = content if isinstance(content, list) else [content or ""]
    return ChatAnswer(
        model=completion.model or "",
        text="".join(part if isinstance(part, str) else _read_part(part) for part in parts),
        refusal=replace_controls(choice.message.refusal or ""),
        finish_reason=choice.finish_reason or "",
        top=read_top(choice.logprobs),
    )


def read_top(logprobs: Any) -> TopLogprobs | None:
    """The likely tokens for each token of an answer. None if the endpoint returned none, or nothing that is known."""
    try:
        content = msgspec.convert(logprobs or {}, ChoiceLogprobs).content
    except (msgspec.ValidationError, RecursionError):
        return None
    if not content or not any(sampled.top_logprobs for sampled in content):
        return None
    rows = [[sampled, *sampled.top_logprobs] for sampled in content]
    logprobs_TK = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
    for place, row in enumerate(rows):
        logprobs_TK[place, : len(row)] = [-np.inf if one.logprob is None else one.logprob for one in row]
    return TopLogprobs(logprobs_TK=logprobs_TK, bytes_TK=tuple(tuple(one.utf8 for one in row) for row in rows))


def completion_tokens(body: Mapping[str, Any], most: int) -> int:
    """The completion tokens as the endpoint counts them; 0 if it doesn't. Limited to `most`."""
    return min(_count(_usage(body).get("completion_tokens")), most)


def total_tokens(body: Mapping[str, Any], most: int) -> int:
    """The tokens of prompt and completion; 0 if the endpoint doesn't count them. Limited to `most`."""
    usage = _usage(body)
    counted = _count(usage.get("prompt_tokens")) + _count(usage.get("completion_tokens"))
    return min(_count(usage.get("total_tokens")) or counted, most)


def read_usage(body: Mapping[str, Any]) -> Usage | None:
    """The tokens of a request as the endpoint counts them; None if it doesn't."""
    usage = _usage(body)
    counts = {name: min(_count(usage.get(name)), MOST_TOKENS) for name in USAGE_FIELDS}
    prompt, sampled = counts["prompt_tokens"], counts["completion_tokens"]
    if not any(counts.values()):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt=prompt or max(0, counts["total_tokens"] - sampled),
        cached=min(_count(cached) or counts["prompt_cache_hit_tokens"], MOST_TOKENS),
        sampled=sampled,
    )


def is_out_of_quota(body: Mapping[str, Any]) -> bool:
    """Whether an error says that the account is empty: by its code or type, not by its words, which also name limits
    that pass.
    """
    error = body.get("error")
    named = [error.get("code"), error.get("type")] if isinstance(error, dict) else [error]
    return any(isinstance(name, str) and OUT_OF_QUOTA.search(name) is not None for name in named)


def error_words(body: Mapping[str, Any], text: str) -> str:
    """The endpoint's error on one line: its message, or the whole text. It goes to logs and terminals."""
    error = body.get("error") or body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    words = error if isinstance(error, str) else text
    return replace_controls(" ".join(words.split())[:500]) or "(no words)"


def _read_part(part: Part) -> str:
    if part.type not in TEXT_PARTS or part.text is None:
        return ""
    if not isinstance(part.text, str):
        raise NoAnswer(f"Expected `str` as the text of a part, got `{type(part.text).__name__}`")
    return part.text


def _usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    usage = body.get("usage")
    return usage if isinstance(usage, dict) else {}


def _count(value: object) -> int:
    """A whole number of 0 or more; 0 for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
