"""A stop string ends a completion at the token that completes it, however the text is tokenized."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.types import SamplingParams


def of_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


def stripping(token_ids: Sequence[int]) -> str:
    """Like a SentencePiece tokenizer, whose text loses a leading space."""
    return of_bytes(token_ids).removeprefix(" ")


def stopped_at(text: str, stop: tuple[str, ...], decode: object = of_bytes) -> int | None:
    """The number of bytes after which the text stops."""
    endings = StopConditions(decode, stop_token_ids=())  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=1000, stop=stop)
    token_ids = list(text.encode())
    ends = (n for n in range(1, len(token_ids) + 1) if endings.finish_reason(token_ids[:n], params) == "stop")
    return next(ends, None)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), 7),
        ("one two three", ("three", "e t"), 5),
        ("caf\u00e9 noir", ("\u00e9",), 5),  # the character's two bytes are two tokens
        ("a \u2713\u2713 b", ("\u2713\u2713",), 8),
        ("nothing here", ("absent",), None),
        ("line\nline", ("\n",), 5),
    ],
)
def test_the_first_token_that_completes_a_stop_string_ends(text: str, stop: tuple[str, ...], expected: int) -> None:
    assert stopped_at(text, stop) == expected


def test_a_stop_string_of_spaces_is_seen_where_decoding_strips_them() -> None:
    assert stopped_at("one two", (" ",), stripping) == 4
    assert stopped_at("one two three", (" two",), stripping) == 7


def test_the_text_ends_before_the_earliest_stop_string() -> None:
    endings = StopConditions(of_bytes, stop_token_ids=())
    assert endings.cut_text(list(b"ab;cd.ef"), (".", ";")) == ("ab", ";")
    assert endings.cut_text(list(b"ab;cd.ef"), ()) == ("ab;cd.ef", "")
    assert StopConditions(of_bytes, stop_token_ids=(102,)).cut_text(list(b"ab;cd.ef"), (";",)) == ("ab", "")


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    endings = StopConditions(of_bytes, stop_token_ids=(7,))
    assert endings.finish_reason([1, 7], SamplingParams(max_new_tokens=2)) == "stop"
    assert endings.finish_reason([7, 1], SamplingParams(max_new_tokens=2)) == "length"
    assert endings.finish_reason([1], SamplingParams(max_new_tokens=2)) is None


def test_a_special_token_that_a_request_names_ends_its_answer_though_no_text_shows_it() -> None:
    endings = StopConditions(of_bytes, stop_token_ids=(7,), special={"<|end|>": 5})
    params = SamplingParams(max_new_tokens=9, stop=("<|end|>", ";"))
    assert endings.finish_reason([97, 5], params) == "stop" == endings.finish_reason([97, 59], params)
    assert endings.finish_reason([97, 5], SamplingParams(max_new_tokens=9)) is None
    assert endings.split(params.stop) == ((";",), (5, 7))
    assert endings.cut_text([97, 59, 5], params.stop) == ("a", "")
