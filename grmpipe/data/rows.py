"""Rows of data files as JSON values: JSON Lines, Parquet, CSV, JSON arrays. Knows only fields that its caller reads."""

from __future__ import annotations

import ast
import csv
import difflib
import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
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
Place = tuple[int, str, Row]  # a row with its number, and its place in words
ANNOTATED = frozenset({"time", "id", "rater"})  # of annotations, which are appended line by line
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


MAY_BE_EMPTY = ("response", "completion")  # fields: a model may write nothing


def read_rows(
    file: Path,
    used: Collection[str],
    findings: Findings,
    *,
    arrays: bool = False,
    columns: Mapping[str, str] | None = None,
    values: Collection[str] = (),
) -> Iterator[Place]:
    """The number, place in words, and columns of each row. Blank lines of JSON Lines are skipped, but counted.

    used:    columns that the caller reads: one that holds what JSON can't carry is refused; others are left out.
    arrays:  whether a .json file is taken, one array of rows.
    columns: field -> the file's column that it is read from; `a.b` is b within a.
    values:  fields that aren't texts: in a CSV file their cells are JSON, where they can be read so.
    Raises ValueError that names the file, and line or column.
    """
    kinds = {".jsonl": jsonl_rows, ".jsonl.gz": jsonl_rows, ".parquet": parquet_rows, ".csv": csv_rows}
    kinds |= {".json": array_rows} if arrays else {}
    suffix = "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix
    if suffix not in kinds:
        raise ValueError(f"{file}: unknown kind of file {suffix!r}; give {' or '.join(kinds)}, or tiny://train")
    if not file.is_file():
        raise ValueError(f"{file}: no such file; a relative path starts at {Path.cwd()}")
    if not os.access(file, os.R_OK):
        raise ValueError(f"{file}: may not be read by this user")
    columns = columns or {}
    rows = kinds[suffix](file, {*used, *columns.values(), *(one.split(".")[0] for one in columns.values())}, findings)
    if columns:
        rows = rename_columns(list(rows), file, columns, used, findings)
    if suffix == ".csv":
        return ((number, where, dict(read_cells(row, values))) for number, where, row in rows)
    return rows


def read_cells(row: Row, values: Collection[str]) -> Iterator[tuple[str, object]]:
    """The fields of a row of cells: an empty one is none, but for a response, which may be empty."""
    for name, cell in row.items():
        if not cell and name not in MAY_BE_EMPTY:
            yield name, None
        else:
            yield name, parse_cell(cell) if name in values else cell


def rename_columns(
    rows: list[Place], file: Path, columns: Mapping[str, str], used: Collection[str], findings: Findings
) -> Iterator[Place]:
    """The rows with the columns under the caller's names. A column that no row has is refused if the caller needs it:
    other files of the run may have it.
    """
    known = dict.fromkeys(name for _, _, row in rows for name in list_columns(row))
    for field, column in columns.items():
        if column in known or field in known or not rows:
            continue
        near = difflib.get_close_matches(column, known, n=3, cutoff=0.5)
        words = f"has no column {format_value(column)}, which data.columns.{field} names; " + (
            f"the nearest: {', '.join(near)}" if near else f"it has {', '.join(known)}"
        )
        if field in used:
            raise ValueError(f"{file}: {words}")
        findings.add(f"it {words}")
    for number, where, row in rows:
        found = {field: find_column(row, column) for field, column in columns.items()}
        named = {field: value for field, value in found.items() if value is not None}
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        yield number, where, rest | named


def list_columns(row: Row) -> Iterator[str]:
    """The names of a row's columns, and of what is within them, as `a.b`."""
    for name, value in row.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in list_columns(value))


def find_column(row: Row, column: str) -> object:
    """The value of a column, or of `a.b`; None if there is none."""
    if column in row or "." not in column:
        return row.get(column)
    name, _, rest = column.partition(".")
    inner = row.get(name)
    return find_column(inner, rest) if isinstance(inner, dict) else None


def jsonl_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[Place]:
    is_appended = False
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                where = f"{file}, line {number}"
                if not line.strip():
                    continue
                try:
                    row = require_object(parse_json(line, where, findings), where)
                except ValueError:
                    if is_appended and not line.endswith(b"\n"):
                        findings.add(f"its last line ({number}) is cut, and is left out: whoever wrote it was ended")
                        return
                    raise
                is_appended = row.keys() >= ANNOTATED
                yield number, where, row
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{file}: can't be read as gzip ({error})") from error


def csv_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[Place]:
    """The first line names the columns. Cells are texts. Commas, semicolons or tabs separate them: whichever the first
    line has most of.
    """
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 131,072 characters, is for all readers in the process
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            first = next(lines, "")
            lines.seek(0)
            reader = csv.reader(lines, delimiter=max(",;\t", key=first.count), strict=True)
            names = next(reader, [])
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{file}: has two columns {min(twice)!r}; rename one of them")
            where = f"{file}, line {reader.line_num + 1}"
            for number, cells in enumerate(reader, start=1):
                if len(cells) not in (0, len(names)):
                    raise ValueError(
                        f"{where}: has {len(cells)} cells, and the first line names {len(names)} columns; put texts "
                        'with commas or line breaks in quotes ("...")'
                    )
                if cells:
                    yield number, where, dict(zip(names, cells, strict=True))
                where = f"{file}, line {reader.line_num + 1}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: can't be read as CSV in UTF-8 ({error}); save it as UTF-8") from error


def parse_cell(cell: object) -> object:
    """The value that a text spells, such as a cell of a CSV file: JSON, or a list as Python and pandas write it; other
    text as it is.
    """
    if not isinstance(cell, str):
        return cell
    try:
        return parse_json(cell, "", Findings(CALL))
    except ValueError:
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(cell))) if cell.lstrip()[:1] in ("[", "{") else cell
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return cell


def array_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[Place]:
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


def parquet_rows(file: Path, used: Collection[str], findings: Findings) -> Iterator[Place]:
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
