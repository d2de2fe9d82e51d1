"""An append-only file of JSON lines. Knows bytes and torn lines, never what a line means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grmpipe.observe.append_file import AppendFile


class Journal:
    """A line counts once its newline stands; a line that can't be written whole is not written at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def append(self, record: Mapping[str, object]) -> None:
        """With the operating system when the call returns. Raises OSError."""
        self._file.append(encode_line(record))

    def close(self) -> None:
        self._file.close()


def encode_line(record: Mapping[str, object]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    # Byte-level models do sample lone surrogates; backslashreplace writes them as JSON's own \udXXX.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal. A torn last line is ignored, a missing file is an empty journal.

    Raises ValueError, naming file and line, where a whole line is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield decode_line(line, f"{path}:{number}")


def decode_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not a line of JSON ({error}); remove that line to read the rest") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not a JSON object; remove that line to read the rest")
    return record


def replace_journal(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Rewrite a journal whole: a reader, or a kill, finds the old file or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.writelines(encode_line(record) for record in records)
    draft.replace(path)
