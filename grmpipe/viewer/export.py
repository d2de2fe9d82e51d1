"""The rollouts that a filter finds, with their texts and annotations, as JSON Lines or CSV."""

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from grmpipe.observe.plain_json import json_bytes
from grmpipe.viewer.annotations import Annotation
from grmpipe.viewer.details import Sibling, read_siblings
from grmpipe.viewer.queries import Filter, RolloutRow, read_rows, select_all
from grmpipe.viewer.runs import ViewedRun

FORMS = {"jsonl": "application/x-ndjson", "csv": "text/csv"}
ROWS_AT_ONCE = 100
NOT_SHOWN = ("line", "report", "question", "answer")  # columns of the index: the texts are whole here
COLUMNS = [one.name for one in fields(RolloutRow) if one.name not in NOT_SHOWN]
TEXTS = ("prompt", "response", "reference", "critiques", "annotations")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # with which a spreadsheet's formula begins (OWASP, CSV injection)


def export_rollouts(run: ViewedRun, wanted: Filter, form: str, annotations: Sequence[Annotation]) -> Iterator[bytes]:
    """Pieces of the file. Raises sqlite3.Error."""
    said: dict[tuple[object, ...], list[Annotation]] = {}
    for one in annotations:
        said.setdefault(one.place, []).append(one)
    with contextlib.closing(run.index.read()) as connection:
        ids = select_all(connection, wanted)
    if form == "csv":
        yield write_cells([*COLUMNS, *TEXTS])
    for start in range(0, len(ids), ROWS_AT_ONCE):
        with contextlib.closing(run.index.read()) as connection:  # a piece may be asked for by another thread
            rows = read_rows(connection, wanted.judge, ids[start : start + ROWS_AT_ONCE])
        records = (describe(one, said) for row in rows for one in read_siblings(run.run_dir, [row]))
        yield b"".join(
            write_cells(to_cells(record)) if form == "csv" else json_bytes(record, strict=True) + b"\n"
            for record in records
        )


def describe(one: Sibling, said: Mapping[tuple[object, ...], Sequence[Annotation]]) -> dict[str, object]:
    row, prompt = one.row, one.recorded.prompt if one.recorded is not None else None
    return {
        **{name: getattr(row, name) for name in COLUMNS},
        "prompt": prompt and "\n\n".join(message.content for message in prompt.messages),
        "response": one.rollout and one.rollout.text,
        "reference": prompt and prompt.reference,
        "critiques": [{"judge": each.judge, "score": each.score, "text": each.text} for each in one.critiques],
        "annotations": [
            {"rater": each.rater, "says": each.words, "share": each.share}
            for sibling in (row.sibling, None)  # None: on all siblings
            for each in said.get((*row.place[:3], sibling), ())
        ],
    }


def to_cells(record: Mapping[str, object]) -> list[object]:
    """The cells of a record. Lists become their texts, one below the other."""
    return ["\n\n".join(" ".join(str(part) for part in one.values() if part is not None) for one in value)
            if isinstance(value, list) else value for value in record.values()]  # fmt: skip


def write_cells(cells: Sequence[object]) -> bytes:
    """A line of CSV (RFC 4180). A text that a spreadsheet would run as a formula gets an apostrophe in front."""
    line = io.StringIO()
    csv.writer(line).writerow(
        [f"'{cell}" if isinstance(cell, str) and cell.lstrip(" ").startswith(FORMULA) else cell for cell in cells]
    )
    return line.getvalue().encode("utf-8", "replace")
