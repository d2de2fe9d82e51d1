from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.records import decode_logprobs, encode_logprobs

FLOAT32 = st.floats(width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(st.characters(codec=None)),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


@given(record=st.dictionaries(st.text(), JSON, max_size=4))
def test_a_record_is_read_back_as_pythons_json_reads_it(record: dict[str, object]) -> None:
    line = json_bytes(record)
    assert b"\n" not in line
    assert repr(json.loads(line)) == repr(json.loads(json.dumps(record)))  # by repr: NaN is not equal to itself


def test_what_no_other_reader_knows_becomes_null_or_text() -> None:
    record = {"nan": math.nan, "inf": -math.inf, "path": Path("a"), "half": "\ud800", "nested": {"nan": (math.nan, 1)}}
    expected = {"nan": None, "inf": None, "path": "a", "half": "\ud800", "nested": {"nan": [None, 1]}}
    assert json.loads(json_bytes(record, strict=True)) == expected


def test_a_type_unknown_to_json_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        json_bytes({"z": object()})


@given(logprobs=st.lists(FLOAT32, max_size=8))
def test_logprobs_of_any_size_come_back_exactly(logprobs: list[float]) -> None:
    assert repr(decode_logprobs(encode_logprobs(logprobs))) == repr(tuple(logprobs))
