"""The answer of an OpenAI-compatible endpoint, read field by field with its types. Pure: bytes in; sends nothing."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.types import Usage

MOST_TOKENS = 2**53  # of a count; a larger one is an error of the endpoint
OUT_OF_QUOTA = re.compile(
    r"insufficient[ _](user[ _])?(quota|balance|credits?|funds)|exceeded_current_quota|billing|arrear|no_credits",
    re.IGNORECASE,
)
USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_cache_hit_tokens")  # the last: DeepSeek's
TEXT_PARTS = frozenset({"text", "output_text"})


class NoChatCompletion(Exception):
    """The answer has another shape; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The first choice of an answer. Fields that the endpoint left out are empty."""

    model: str
    text: str
    refusal: str
    finish_reason: str


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; empty if the body is anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: nested a thousand deep
        return {}
    return value if isinstance(value, dict) else {}


def read_answer(body: Mapping[str, Any]) -> ChatAnswer:
    """The answer in a body. Raises NoChatCompletion."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise NoChatCompletion(f"choices is {_kind(choices)}")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise NoChatCompletion(f"message is {_kind(message)}")
    return ChatAnswer(
        model=_text("model", body.get("model")),
        text=whole_characters(_content(message.get("content"))),
        refusal=whole_characters(_text("refusal", message.get("refusal"))),
        finish_reason=_text("finish_reason", choices[0].get("finish_reason")),
    )


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
    """The endpoint's error on one line: its message, or the whole text."""
    error = body.get("error") or body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    words = error if isinstance(error, str) else text
    return whole_characters(" ".join(words.split())[:500]) or "(no words)"


def whole_characters(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can spell but no file or tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _content(content: object) -> str:
    """A text, or the text of its parts, without thoughts and the like."""
    if not isinstance(content, list):
        return _text("content", content)
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise NoChatCompletion(f"a part of content is {_kind(part)}")
    return _text("text of a part of content", part.get("text")) if part.get("type", "text") in TEXT_PARTS else ""


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NoChatCompletion(f"{name} is {_kind(value)}")
    return value


def _usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    usage = body.get("usage")
    return usage if isinstance(usage, dict) else {}


def _count(value: object) -> int:
    """A whole number of 0 or more; 0 for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null or missing"}
    return kinds.get(type(value), "a number")
