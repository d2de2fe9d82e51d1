from __future__ import annotations

import datetime
import decimal
import json
import math
import random
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.records import decode_logprobs, encode_logprobs

CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"^prompt\.info\.x\[1\]: a value of type object, which JSON has nothing for"),
        (b"\xff", r"^prompt\.info\.x\[1\]: a value of type bytes, "),
        ({"a": {3: np.float32(1)}}, r"^prompt\.info\.x\[1\]\.a\.3: a value of type float32, "),
        ({(1, 2): object()}, r"^prompt\.info\.x\[1\]\.\(1, 2\): a value of type object, "),
        (CIRCLE, r"^prompt\.info\.x.*: lists or objects that are nested too deeply, or in themselves"),
    ],
)
def test_a_value_that_json_has_nothing_for_is_refused_by_its_place(value: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        json_bytes({"group_id": "g", "prompt": {"info": {"x": ["fine", value]}}})


class Hostile:
    """Raises whatever it is asked."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


ODD = [
    b"a", b"\xff", np.float32(1), np.int64(3), np.array([1.0]), np.bool_(True), {1, "a"}, frozenset(), object(), int,
    datetime.datetime(2026, 1, 2), datetime.timedelta(1), decimal.Decimal("1.1"), Path("a"), Hostile(), CIRCLE, len,
    "\ud800", "\u2028", math.nan, -math.inf, 10**30, None, (), uuid.UUID(int=1), range(3), iter("ab"), 1j, True,
]  # fmt: skip
KEYS = ["a", "", 1, None, True, 1.5, math.nan, (1, "b"), b"k", "\ud800"]


def draw_value(draw: random.Random, depth: int = 4) -> object:
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(ODD)
    inner = [draw_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if draw.random() < 0.5 else {draw.choice(KEYS): one for one in inner}


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.long)])
def test_any_record_is_a_line_that_is_read_back_or_is_refused(count: int) -> None:
    draw, num_lines = random.Random(7), 0
    for _ in range(count):
        record = {"group_id": "g", "value": draw_value(draw)}
        try:
            line = json_bytes(record)
        except TypeError:
            continue
        assert b"\n" not in line and json.loads(line)["group_id"] == "g"
        num_lines += 1
    assert count / 10 < num_lines < count * 0.9


@given(logprobs=st.lists(FLOAT32, max_size=8))
def test_logprobs_of_any_size_come_back_exactly(logprobs: list[float]) -> None:
    assert repr(decode_logprobs(encode_logprobs(logprobs))) == repr(tuple(logprobs))
