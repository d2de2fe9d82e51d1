"""changes.jsonl: the keys that resumes of a run changed, and from which step."""

import time
from collections.abc import Sequence
from pathlib import Path

from grmpipe.config.io.resume_rules import ConfigChange
from grmpipe.observe.journal import Journal, read_what_can_be

CHANGES_FILE = "changes.jsonl"


def record_changes(run_dir: Path, run_id: str, step: int, changes: Sequence[ConfigChange]) -> None:
    """Append the changes of a resume. Raises OSError."""
    journal = Journal(run_dir / CHANGES_FILE, run_id=run_id)
    try:
        for change in changes:
            values = {"key": change.key, "old": change.old, "new": change.new}
            journal.append({"step": step, "time": round(time.time(), 3), **values})
    finally:
        journal.close()


def read_changes(run_dir: Path) -> tuple[str, ...]:
    """The changes in words, in the order of time."""
    lines = read_what_can_be(run_dir / CHANGES_FILE)
    return tuple(f"after step {x.get('step')}: {x.get('key')}: {x.get('old')} -> {x.get('new')}" for x in lines)
