"""Writes a benchmark's page, of which a part may be written by hand."""

from pathlib import Path

BY_HAND = "<!-- From here on by hand: the command keeps it. -->"


def write_page(page: Path, text: str) -> None:
    """Write what a command measured. What stands on the page from BY_HAND on stays."""
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    _, mark, kept = before.partition(BY_HAND)
    page.write_text(text.rstrip("\n") + "\n" + (f"\n{mark}{kept}" if mark else ""), encoding="utf-8")
