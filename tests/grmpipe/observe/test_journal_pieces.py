"""A file to append to keeps whole pieces, and says when it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from grmpipe.observe.journal import AppendFile


def test_a_file_that_was_deleted_takes_no_more(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    file.append(b"one\n")
    (tmp_path / "lines").unlink()
    with pytest.raises(FileNotFoundError, match="lines: was deleted since it was opened"):
        file.append(b"two\n")
