"""Rows are JSON values, whatever a file holds: it is read, left out with a word, or refused with file and place."""

from __future__ import annotations

import copy
import datetime
import decimal
import gzip
import json
import logging
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grmpipe.data.demonstrations import load_demonstrations
from grmpipe.data.labelled import load_labelled
from grmpipe.data.prompts import load_prompts
from grmpipe.data.rows import Findings, read_rows
from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.records import decode, encode
from grmpipe.types import Labelled, Prompt, RankedResponses, ScoredResponse

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 2?"}]


def rows_of(path: Path, *used: str) -> tuple[list[dict[str, object]], str]:
    """The rows of a file, and what was found."""
    findings = Findings(path)
    return [row for _, _, row in read_rows(path, used, findings)], str(findings)


def write_column(folder: Path, values: list[Any], kind: pa.DataType | None = None, name: str = "x") -> Path:
    path = folder / "some.parquet"
    columns = {"prompt": pa.array(["?"] * len(values)), name: pa.array(values, kind)}
    pq.write_table(pa.table(columns), path)
    return path


DAY = datetime.date(2026, 1, 2)
NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 5)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (DAY, pa.date32(), "2026-01-02"),
        (NOON, pa.timestamp("us"), "2026-01-02T12:00:00.000005"),
        (NOON, pa.timestamp("us", "UTC"), "2026-01-02T12:00:00.000005+00:00"),
        (1767355200_000005_789, pa.timestamp("ns"), "2026-01-02T12:00:00.000005"),
        ([{"at": 1767355200_000005_789}], pa.list_(pa.struct({"at": pa.timestamp("ns")})),
         [{"at": "2026-01-02T12:00:00.000005"}]),
        ([("a", 1_500_000_000)], pa.map_(pa.string(), pa.duration("ns")), [["a", 1.5]]),
        (3_000_000_001, pa.time64("ns"), "00:00:03"),
        (datetime.timedelta(seconds=3), pa.duration("ms"), 3.0),
        (decimal.Decimal("1.10"), pa.decimal128(3, 2), 1.1),
        (decimal.Decimal("12345678901234567890.00"), pa.decimal128(38, 2), 12345678901234567890),
        (.1, pa.float32(), .1),
        ([{"a": .1, "b": "x"}], pa.list_(pa.struct({"a": pa.float32(), "b": pa.string()})), [{"a": .1, "b": "x"}]),
        ("a", pa.dictionary(pa.int8(), pa.string()), "a"),
        ({"a": None, "b": [True]}, pa.struct({"a": pa.null(), "b": pa.list_(pa.bool_())}), {"a": None, "b": [True]}),
        (2**63, pa.uint64(), 2**63),
    ],
)  # fmt: skip
def test_every_type_has_one_form_in_json(tmp_path: Path, value: object, kind: pa.DataType, expected: object) -> None:
    rows, found = rows_of(write_column(tmp_path, [value, None], kind))
    assert [row["x"] for row in rows] == [expected, None] and not found
    assert type(rows[0]["x"]) is type(expected)
    assert json.loads(json_bytes(rows[0])) == rows[0]


IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"\x89PNG", pa.binary()),
        (b"text", pa.large_binary()),
        ([{"bytes": b"\x89PNG", "path": None}], pa.list_(IMAGE)),
        (b"1234", pa.binary(4)),
        (datetime.datetime(9999, 12, 31), pa.timestamp("s")),
    ],
)
def test_a_column_without_a_form_in_json_is_left_out_with_a_word_or_refused_where_it_is_read(
    tmp_path: Path, value: object, kind: pa.DataType
) -> None:
    path = write_column(tmp_path, [value], kind)
    if isinstance(value, datetime.datetime):
        late = pa.array([2**50], pa.timestamp("s"))  # Python has no such year
        pq.write_table(pa.table({"prompt": ["?"], "x": late}), path)
    rows, found = rows_of(path)
    assert rows == [{"prompt": "?"}]
    assert re.match(r"column 'x' holds (binary|large_binary|list<|fixed_size_binary|timestamp)", found)
    assert "is left out" in found
    with pytest.raises(ValueError, match=r"some\.parquet: column 'x' holds .*; save it as text"):
        rows_of(path, "x")


def test_an_image_beside_a_text_prompt_is_left_out_and_a_prompt_of_bytes_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,) = load_prompts(str(write_column(tmp_path, [{"bytes": b"\x89PNG", "path": "a.png"}], IMAGE, "image")))
    assert not prompt.columns
    (said,) = caplog.messages
    assert "some.parquet: column 'image' holds struct<bytes: binary, path: string>, which is neither" in said
    path = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"prompt": pa.array([b"6 x 7?"]), "chosen": ["a"], "rejected": ["b"]}), path)
    for load in (load_prompts, load_labelled, load_demonstrations):
        with pytest.raises(ValueError, match=r"bytes\.parquet: column 'prompt' holds binary"):
            load(str(path))


def write_text(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_of_csv_are_texts_or_values_as_their_column_is_and_empty_ones_are_none(
    tmp_path: Path, separator: str
) -> None:
    lines = [
        "\ufeffprompt~responses~best~reference",
        '"say ""a~b""\nor c"~"[""x"", ""y""]"~1~007',
        "d~\"['x', 'y']\"~~",
    ]
    path = write_text(tmp_path, "some.csv", "\r\n".join(lines).replace("~", separator))
    rows = [row for _, _, row in read_rows(path, (), Findings(path), values=("responses", "best"))]
    assert rows == [
        {"prompt": f'say "a{separator}b"\nor c', "responses": ["x", "y"], "best": 1, "reference": "007"},
        {"prompt": "d", "responses": ["x", "y"], "best": None, "reference": None},
    ]


def test_compressed_lines_are_read_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_text(tmp_path, "some.jsonl.gz", '{"prompt": "a"}\n')
    assert [prompt.messages[0].content for prompt in load_prompts(str(path))] == ["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"some\.jsonl\.gz: can't be read as gzip"):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt,reference\na,b,c\n", "line 2: has 3 cells, and the first line names 2 columns; put texts with commas"),
        ('prompt,reference\n"a\nb",c\nd\n', "line 4: has 1 cells"),
        ("prompt,prompt\na,b\n", "has two columns 'prompt'"),
        ('prompt\n"a', "can't be read as CSV in UTF-8"),
        (b"prompt\n\xff\n", "can't be read as CSV in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_named_by_line(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_prompts(str(write_text(tmp_path, "some.csv", text)))


@pytest.mark.parametrize("name", ["own.jsonl", "own.parquet", "own.csv"])
def test_columns_of_ones_own_are_read_under_our_names(tmp_path: Path, name: str) -> None:
    rows = [{"instruction": "6 x 7?", "good": "42", "bad": "43", "prompt": "unused"}]
    path = tmp_path / name
    if name == "own.csv":
        path.write_text("instruction,good,bad,prompt\n6 x 7?,42,43,unused\n")
    elif name == "own.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows[0]))
    mine = {"prompt": "instruction", "chosen": "good", "rejected": "bad"}
    (item,) = load_labelled(str(path), columns=mine)
    assert isinstance(item, RankedResponses) and item.best is not None
    assert (item.prompt.messages[0].content, item.responses[item.best]) == ("6 x 7?", "42")
    (prompt,) = load_prompts(str(path), columns=mine)
    assert prompt.messages[0].content == "6 x 7?"


def test_a_column_within_another_is_named_with_a_dot_and_two_columns_can_change_places(tmp_path: Path) -> None:
    row = {"q": "6 x 7?", "meta": {"truth": {"answer": 42.0}}, "chosen": "43", "rejected": "42"}
    path = write_text(tmp_path, "some.jsonl", json.dumps(row))
    columns = {"prompt": "q", "reference": "meta.truth.answer", "chosen": "rejected", "rejected": "chosen"}
    (item,) = load_labelled(str(path), columns=columns)
    assert isinstance(item, RankedResponses) and item.best is not None
    assert (item.prompt.reference, item.responses[item.best]) == ("42", "42")


def test_a_column_that_is_not_there_is_refused_with_the_nearest_or_noted_where_nothing_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_text(tmp_path, "some.csv", "instruction,good,bad\n6 x 7?,42,43\n")
    columns = {"prompt": "instruction", "chosen": "godo", "rejected": "bad"}
    with pytest.raises(
        ValueError, match=r"some\.csv: has no column 'godo', which data\.columns\.chosen names; .*: good"
    ):
        load_labelled(str(path), columns=columns)
    assert len(load_prompts(str(path), columns=columns)) == 1
    assert "it has no column 'godo', which data.columns.chosen names" in caplog.text


def test_annotations_that_are_cut_in_their_last_line_are_read_up_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.dumps({"time": "t", "id": "1", "rater": "anna", "prompt": "?", "response": "a\u00e4", "right": True})
    path = write_text(tmp_path, "annotations.jsonl", f"{line}\n{line[:-30]}")
    assert len(load_labelled(str(path))) == 1
    assert "its last line (2) is cut, and is left out" in caplog.text
    for broken in (f"{line}\n{line[:-30]}\n{line}\n", f'{{"prompt": "?", "response": "a", "right": 1}}\n{line[:-30]}'):
        path.write_text(broken)
        with pytest.raises(ValueError, match="line 2: not JSON"):
            load_labelled(str(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "two.parquet")
    with pytest.raises(ValueError, match=r"two\.parquet: can't be read .* two columns 'prompt'; rename one"):
        rows_of(tmp_path / "two.parquet")


def test_a_doubled_key_is_counted_once_for_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"prompt": "a", "reference": "1", "reference": "2"}\n{"prompt": "b"}\n{"prompt": "c", "prompt": "d"}\n'
        '{"prompt": "e", "info": {"reference": 1, "reference": 2}}\n'
    )
    first, *_ = load_prompts(str(path))
    assert first.reference == "2"
    (said,) = caplog.messages
    assert "2 objects have the key 'reference' twice, and its last value counts (first: line 1); 1 objects" in said


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101, "[" * 100_000])
def test_what_no_journal_reads_back_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.jsonl"
    for row, place in (
        (f'{{"prompt": "a", "info": {{"x": {text}}}}}', "line 2: "),
        (json.dumps({"prompt": "a", "info": text}), "line 2: info: "),
    ):
        path.write_text(f'{{"prompt": "fine", "deep": {"[" * 90}{"]" * 90}}}\n{row}\n')
        with pytest.raises(ValueError, match=rf"some\.jsonl, {place}"):
            load_prompts(str(path))


def test_line_separators_of_unicode_and_marks_of_byte_order_are_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n\ufeff{"prompt": "d"}'.encode())
    assert [prompt.messages[0].content for prompt in load_prompts(str(path))] == ["a\u2028b\x85c", "d"]
    path.write_text('{"prompt": "a"}', encoding="utf-16")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 1: not JSON in UTF-8"):
        load_prompts(str(path))


# -- structural fuzz -------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "6 x 7?"}]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "6 x 7?", "reference": 42, "prompt_id": "a", "source": "s", "info": {"a": [1]}, "extra": {"b": 1.5}},
    {"messages": CHAT, "reference": "12", "rubric": ["short", {"text": "right", "weight": 2}], "info": '{"a": 1}'},
    {"prompt": CHAT, "data_source": "gsm", "reward_model": {"ground_truth": 12.0, "style": "rule"}},
]
LABELS: list[dict[str, Any]] = [
    {"prompt": "6 x 7?", "responses": ["42", "43", ""], "best": 0, "subset": "sums", "reference": "42"},
    {"messages": TALK, "response": "43", "score": 2, "item_id": "mine", "source": "x"},
    {"prompt": "6 x 7?", "chosen": ["42", "42.0"], "rejected": ["1", "2"], "subset": "Math"},
    {"prompt": "?", "chosen": ["a", "b", "c"], "rejected": ["d", "e", "f"], "domain": "safety-refuse"},
    {"chosen": [*TALK, {"role": "assistant", "content": "42"}],
     "rejected": [*TALK, {"role": "assistant", "content": "43"}], "prompt": TALK},
    {"prompt": "?", "response_1": "41", "response_2": "42", "response_3": "43",
     "scores": [0.0, [1.0], False], "sampled_conflict_pairs": [[0, 1], [1, 2]]},
    {"prompt": "?", "response_1": "43", "response_2": "42", "winner": "model_b", "language": "English"},
    {"prompt": "?", "response_1": "43", "response_2": "42", "preference_strength": 3},
    {"conversation_input": TALK, "chosen": {"answer": "42"}, "reject": {"answer": "43"}, "category_path": "a/b/c"},
    {"conversation_input": TALK, "bon_best": {"answer": "42"}, "loser_list": [{"answer": "1"}, {"answer": "2"}]},
    {"question": "?", "response_A": "43", "response_B": "42", "label": "B>A", "source": "sums"},
    {"context": TALK, "response1": "42", "response2": "43", "overall_preference": -2, "domain": "stem"},
    {"prompt": "?", "response": "a", "helpfulness": 3},
    {"prompt": "?", "response_a": "a", "response_b": "b", "preference": "tie", "rater": "anna"},
    {"prompt": "?", "responses": ["a", "b", "c"], "ratings": {"anna": [1, 2, 3], "ben": [3, 2, 1]}},
    {"prompt": "?", "responses": ["a", "b"], "ranking": [2, 1], "rater": 3},
    {"prompt": "?", "response": "a", "ratings": [{"rater": "anna", "score": 3}, {"rater": "ben", "score": 4}]},
    {"time": "t", "id": "1", "rater": "anna", "messages": TALK, "response": "a", "right": True, "undoes": None},
]  # fmt: skip
DEMONSTRATIONS: list[dict[str, Any]] = [
    {"prompt": "6 x 7?", "completion": "42"},
    {"messages": [*CHAT, {"role": "assistant", "content": "12"}]},
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 42.0, 1.5, -0.0, 2.0**53, 1e300, math.inf, -math.inf, math.nan, 10**30, -(10**400),
    "", " ", "42", "null", "[]", "{}", '{"a": 1, "a": 2}', "\ud83d", "\u2028", "\x00", "a" * 5000, [], [[]], {}, [None],
    {"": None}, {"role": "user", "content": "x"}, [TALK[0], TALK[0]], ["a", "a"], ["a", 1], {"answer": 3},
    {"text": "x", "weight": math.nan}, [0, 5], [[0, 0]], [[True, 1]], "A=B", "tie", [[[[[[]]]]]],
]  # fmt: skip


OTHERS = ("prompt", "messages", "score", "best", "chosen", "ratings", "rater", "undoes", "x")  # further keys


def mutate(value: Any, draw: random.Random) -> Any:
    """A copy with something odd at a place of it."""
    value = copy.copy(value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw.random() < 0.2:
        return copy.deepcopy(draw.choice(ODD))
    key = draw.choice(keys)
    match draw.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[draw.choice([*keys, "prompt", "messages", "score", "best", "chosen", "ratings", "x"])] = draw.choice(
                ODD
            )
        case 2 if isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        case _:
            value[key] = mutate(value[key], draw)
    return value


def mutate_line(row: Any, draw: random.Random) -> bytes:
    """The row as a line, which is seldom damaged as text too."""
    line = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        place = draw.randrange(len(line) + 1)
        junk = draw.choice([b"", b"\xff", b'"', b"{", b"9" * 5000, b"\\ud83d", b',"prompt":1', b"\xef\xbb\xbf"])
        line = line[:place] + junk + line[place + draw.randrange(3) :]
    return line.replace(b"\n", b" ")


def check_prompt(prompt: Prompt) -> None:
    """It is what its journal's line says."""
    assert repr(decode(json.loads(json_bytes(encode(prompt))), Prompt)) == repr(prompt)
    assert prompt.messages and prompt.prompt_id.strip() and (prompt.reference is None or prompt.reference.strip())


def check_item(item: Labelled) -> None:
    check_prompt(item.prompt)
    assert all(isinstance(text, str) for text in item.responses)
    if isinstance(item, RankedResponses):
        assert len(item.grades) == len(item.responses) >= 2
        assert item.best is None or item.responses.count(item.responses[item.best]) == 1
    if isinstance(item, ScoredResponse):
        assert type(item.score) in (int, float) and 1 <= item.score <= 10


def read_all(kind: str, path: Path) -> int:
    """How many rows were read, checked."""
    if kind == "demonstrations":
        return len(load_demonstrations(str(path)))
    if kind == "prompts":
        return len([check_prompt(prompt) for prompt in load_prompts(str(path))])
    return len([check_item(item) for item in load_labelled(str(path))])


BASES = {"prompts": PROMPTS, "labels": LABELS, "demonstrations": DEMONSTRATIONS}


def fuzz(folder: Path, seed: int, count: int) -> Iterator[bool]:
    """Read files of one mutated row: whether it was read. AssertionError if it was neither read nor refused by its
    place.
    """
    draw = random.Random(seed)
    path = folder / "some.jsonl"
    for _ in range(count):
        kind = draw.choice(list(BASES))
        row = draw.choice(BASES[kind])
        for _ in range(draw.randrange(1, 4)):
            row = mutate(row, draw)
        path.unlink(missing_ok=True)  # a file that is written over waits for the disk
        path.write_bytes(b"\n" + mutate_line(row, draw))
        try:
            yield read_all(kind, path) > 0
        except ValueError as error:
            said = str(error)
            assert re.match(rf"{re.escape(str(path))}(, line 2: |: holds no )", said), (said, path.read_bytes())
            yield False


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.long)])
def test_any_row_is_read_or_refused_by_file_and_line(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("grmpipe"), "disabled", True)
    results = list(fuzz(tmp_path, 7, count))
    assert count / 10 < sum(results) < count * 0.9


LEAVES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [1, -1]), (pa.uint64(), [2**64 - 1]), (pa.float16(), [0.5, math.nan]), (pa.float32(), [0.1, math.inf]),
    (pa.float64(), [42.0, 1e300]), (pa.string(), ["", "a"]), (pa.large_string(), ["a\x00"]), (pa.bool_(), [True]),
    (pa.date32(), [DAY]), (pa.date64(), [DAY]), (pa.time32("s"), [datetime.time(1)]), (pa.time64("ns"), [3]),
    (pa.timestamp("ns"), [2**62]), (pa.timestamp("s", "Europe/Berlin"), [NOON]), (pa.timestamp("ms"), [2**60]),
    (pa.duration("ns"), [5]), (pa.decimal128(9, 2), [decimal.Decimal("1.50")]), (pa.null(), [None]),
    (pa.decimal256(60, 0), [decimal.Decimal(10**50)]), (pa.binary(), [b"\xff", b"a"]), (pa.binary(2), [b"ab"]),
]  # fmt: skip


def draw_column(draw: random.Random, depth: int = 3) -> tuple[pa.DataType, Any]:
    """A type, and a value of it."""
    kind, values = draw.choice(LEAVES)
    value = draw.choice([*values, None])
    for _ in range(draw.randrange(depth)):
        shape = draw.randrange(5)
        if shape == 0:
            kind, value = pa.list_(kind), draw.choice([[value, None], [], None])
        elif shape == 1:
            other, beside = draw_column(draw, 1)
            kind, value = pa.struct({"a": kind, "b": other}), {"a": value, "b": beside}
        elif shape == 2:
            kind, value = pa.map_(pa.string(), kind), [("k", value)]
        elif shape == 3:
            kind, value = pa.large_list(kind), [value]
        else:
            kind, value = pa.list_(kind, 2), [value, value]
    return kind, value


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_column_is_read_as_json_or_left_out(tmp_path: Path, count: int) -> None:
    draw, num_read = random.Random(7), 0
    for _ in range(count):
        kind, value = draw_column(draw)
        rows, found = rows_of(write_column(tmp_path, [value], kind))
        assert repr(json.loads(json_bytes(rows[0]))) == repr(rows[0])
        assert ("x" in rows[0]) is not ("column 'x'" in found), (kind, found)
        num_read += "x" in rows[0]
    assert count / 2 < num_read < count
