"""Rows of data files as JSON values: JSON Lines, Parquet, JSON arrays. Knows no field but those its caller reads."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grmpipe.config.keys.user_code import MAX_SHOWN, format_value

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

Row = dict[str, object]
MAX_KINDS = 12  # kinds of findings in a line: every doubled key is one of its own
CALL = Path("judge")  # the place of a call's row: what is odd in it is put right without a word
MAX_DEPTH = 100  # nested lists and objects: journals, Ray and the user's code walk through them recursively


class Findings:
    """What is odd in a file, and was put right, left out, or taken as it is: one line on all of it for the console."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, words: str, where: str = "") -> None:
        """Count what goes on after its number, as in "rows have no winner and are left out".

        where: its place; empty: words on the whole file, without a number.
        """
        self._counts[words] += 1
        self._first.setdefault(words, where.removeprefix(f"{self._file}, "))

    def __str__(self) -> str:
        parts = [
            f"{count} {words} (first: {self._first[words]})" if self._first[words] else words
            for words, count in self._counts.items()
        ]
        more = [f"and {len(parts) - MAX_KINDS} more kinds"] if len(parts) > MAX_KINDS else []
        return "; ".join(parts[:MAX_KINDS] + more)

    def report(self) -> None:
        if self._counts:
            log.warning("%s: %s", self._file, self)


def read_rows(
    file: Path, used: Collection[str], findings: Findings, *, arrays: bool = False
) -> Iterator[tuple[int, str, Row]]:
    """The number, place in words, and columns of each row. Blank lines of JSON Lines are skipped, but counted.

    used:   columns that the caller reads: one that holds what JSON can't carry is refused; others are left out.
    arrays: whether a .json file is taken, one array of rows.
    Raises ValueError that names the file, and line or column.
    """
    kinds = {".jsonl": jsonl_rows, ".parquet": parquet_rows} | ({".json": array_rows} if arrays else {})
    if file.suffix not in kinds:
        raise ValueError(f"{file}: unknown kind of file {file.suffix!r}; give {' or '.join(kinds)}, or tiny://train")
    if not file.is_file():
        raise ValueError(f"{file}: no such file; a relative path starts at {Path.cwd()}")
    if not os.access(file, os.R_OK):
        raise ValueError(f"{file}: may not be read by this user")
    return kinds[file.suffix](file, used, findings)


def jsonl_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[tuple[int, str, Row]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if line.strip():
                yield number, where, require_object(parse_json(line, where, findings), where)


def array_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[tuple[int, str, Row]]:
    rows = parse_json(file.read_bytes(), str(file), findings)
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected an array of objects, got {format_value(rows)}; JSON Lines are named .jsonl")
    for number, row in enumerate(rows, start=1):
        where = f"{file}, item {number}"
        yield number, where, require_object(row, where)


def require_object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {format_value(row)}")
    return row


def parse_call(body: bytes, expected: str) -> Row:
    """The JSON object of a request. Raises ValueError; expected: its fields, for the error."""
    row = parse_json(body, str(CALL), Findings(CALL))
    if not isinstance(row, dict):
        raise ValueError(f"{CALL}: expected a JSON object with {expected}")
    return row


def parse_json(text: bytes | str, where: str, findings: Findings) -> object:
    """The value of a text. Of a key that an object has twice the last value counts, as Python's json has it. Raises
    ValueError that begins with `where`.
    """

    def to_object(pairs: list[tuple[str, object]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            findings.add(f"objects have the key {format_value(twice)} twice, and its last value counts", where)
        return row

    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=to_object)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with more digits than Python reads
        raise ValueError(f"{where}: not JSON{' in UTF-8' if isinstance(text, bytes) else ''} ({error})") from error
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH and measure_depth(value) > MAX_DEPTH:
        raise ValueError(f"{where}: lists and objects are nested in each other more than {MAX_DEPTH} times")
    return value


def measure_depth(value: object) -> int:
    """How many lists and objects are nested in each other. Without recursion: json reads a depth of thousands."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


# -- Parquet -----------------------------------------------------------------------------------------------------------


def parquet_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[tuple[int, str, Row]]:
    """Values become JSON in one way: dates and times their ISO text, to the microsecond, durations seconds, decimals
    numbers. A column of anything else, such as the bytes of images, isn't read at all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        if twice := {name for name in schema.names if schema.names.count(name) > 1}:
            raise ValueError(f"it has two columns {min(twice)!r}; rename one of them")
        table = pq.read_table(file, columns=[one.name for one in schema if is_carried(one.type)])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file}: can't be read as Parquet ({error})") from error
    columns: dict[str, list[object]] = {}
    for one in schema:
        problem = "which is neither text nor numbers"
        try:
            if is_carried(one.type):
                columns[one.name] = json_column(table.column(one.name))
                continue
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a date of the year 10,000
            problem = f"which can't be read ({error})"
        what = f"column {one.name!r} holds {str(one.type)[:MAX_SHOWN]}, {problem}"
        if one.name in used:
            raise ValueError(f"{file}: {what}; save it as text, numbers, or lists or objects of these")
        findings.add(f"{what}; it is left out: all that is trained and judged is text")
    for place in range(table.num_rows):
        yield place + 1, f"{file}, row {place + 1}", {name: values[place] for name, values in columns.items()}


def list_leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The types within lists, objects, maps and dictionaries; of another type itself."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        yield from list_leaves(kind.value_type)
    elif types.is_nested(kind) and not types.is_union(kind):
        for place in range(kind.num_fields):
            yield from list_leaves(kind.field(place).type)
    else:
        yield kind


def is_carried(kind: pa.DataType) -> bool:
    """Whether JSON has something for every value of a type."""
    import pyarrow.types as types

    known = (
        types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_date,
        types.is_time, types.is_timestamp, types.is_duration, types.is_string, types.is_large_string,
        types.is_string_view,
    )  # fmt: skip
    return all(any(is_known(leaf) for is_known in known) for leaf in list_leaves(kind))


def json_column(column: pa.ChunkedArray) -> list[object]:
    """The values of a column that is carried. Raises ValueError, OverflowError or ArrowException for one that Python
    has nothing for.
    """
    import pyarrow.types as types

    leaves = list(list_leaves(column.type))
    is_plain = all(types.is_string(leaf) or types.is_integer(leaf) or types.is_float64(leaf) for leaf in leaves)
    if is_plain and "map<" not in str(column.type):  # its pairs are tuples
        values: list[object] = column.to_pylist()
        return values
    if any(types.is_temporal(leaf) and "[ns" in str(leaf) for leaf in leaves):  # Python has nothing for nanoseconds
        column = column.cast(in_microseconds(column.type), safe=False)
    # The shortest number that means the same in few bits: .1 in 32 bits is .10000000149011612 in 64.
    floats = {str(leaf) for leaf in leaves if types.is_floating(leaf)}
    narrow: Callable[[Any], object] = float
    if floats in ({"float"}, {"halffloat"}):
        narrow = np.float32 if floats == {"float"} else np.float16

    def to_json(value: Any) -> object:
        match value:
            case float() | np.floating():
                return float(str(narrow(value)))
            case Decimal():
                return int(value) if value == value.to_integral_value() else float(value)
            case date() | time():
                return value.isoformat()
            case timedelta():
                return value.total_seconds()
            case dict():
                return {name: to_json(one) for name, one in value.items()}
            case list() | tuple():
                return [to_json(one) for one in value]
        return value

    return [to_json(value) for value in column.to_pylist()]


def in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The type with microseconds in the place of nanoseconds."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_struct(kind):
        return pa.struct([one.with_type(in_microseconds(one.type)) for one in kind])
    if types.is_map(kind):
        return pa.map_(in_microseconds(kind.key_type), in_microseconds(kind.item_type))
    if types.is_nested(kind):
        return pa.list_(in_microseconds(kind.value_type))
    if types.is_dictionary(kind):
        return in_microseconds(kind.value_type)
    if "[ns" not in str(kind):
        return kind
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if types.is_duration(kind) else pa.time64("us")
